"""Adapters beside a checkpoint: merged into its weights, recorded, and described.

The weights themselves are compared with diffusers in tests/parity/test_adapter_merge.py.
"""

import re

import numpy as np
import pytest

from sd_tf.adapters import AdapterError, read_adapter
from sd_tf.cli.arguments import scaled_path
from sd_tf.cli.main import main
from sd_tf.components.describe import origins
from sd_tf.config import FAMILIES
from sd_tf.runtime.manifest import file_hash
from sd_tf.training.origin import of_checkpoint
from sd_tf.weights import CheckpointError, layers_of, open_checkpoint
from sd_tf.weights.merge import merge
from tests.adapter_files import LAYERS, ONE, SPELLED, TO_OUT, TO_Q, keyed, lora
from tests.exports import micro_folder


def test_an_adapter_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"is an adapter, not a checkpoint: .* `lora`"):
        open_checkpoint(lora(tmp_path, "style", SPELLED["kohya"][0]))


def test_merging(tmp_path):
    unet = lora(tmp_path, "unet", SPELLED["kohya"][0])
    text = lora(tmp_path, "text", SPELLED["kohya-text"][0])
    plain = open_checkpoint(micro_folder())
    checkpoint = open_checkpoint(micro_folder(), lora=[(unet, 0.5), (text, -1), (unet, 0.25)])
    before, after = (c.tensors("unet")[f"{TO_Q}.weight"] for c in (plain, checkpoint))
    for _ in range(2):  # reading twice does not merge twice
        np.testing.assert_allclose(after.read(), before.read() + 1.5, rtol=1e-6)
    assert (after.dtype, after.shape, after.file) == ("float32", before.shape, before.file)
    assert checkpoint.tensors("unet").keys() == plain.tensors("unet").keys()
    assert checkpoint.name == plain.name

    found = origins(checkpoint, ("text_encoder", "diffusion_model", "decoder"))
    of_unet = {"name": "unet", "sha256": {"unet.safetensors": file_hash(unet)}}
    assert found["diffusion_model"]["adapters"] == [
        of_unet | {"scale": 0.5},
        of_unet | {"scale": 0.25},
    ]
    assert [one["name"] for one in found["text_encoder"]["adapters"]] == ["text"]
    assert "adapters" not in found["decoder"]
    assert "adapters" not in origins(plain, ("diffusion_model",))["diffusion_model"]
    unhashed = origins(checkpoint, ("text_encoder",), hashed=False)["text_encoder"]["adapters"]
    assert unhashed == [{"name": "text", "scale": -1.0, "sha256": {}}]
    assert "lora" not in of_checkpoint(plain)
    assert list(of_checkpoint(checkpoint)["lora"]) == ["1 unet", "2 text", "3 unet"]


def test_merging_a_bias(tmp_path):
    bias = {"lora_B.bias": np.arange(16, dtype="float32"), "alpha": np.float32(1)}
    file = lora(tmp_path, "bias", keyed(f"unet.{TO_OUT}", ONE | bias))
    plain, checkpoint = (open_checkpoint(micro_folder(), lora=x) for x in ((), [(file, 2.0)]))
    before, after = (c.tensors("unet")[f"{TO_OUT}.bias"].read() for c in (plain, checkpoint))
    np.testing.assert_allclose(after, before + np.arange(16), rtol=1e-6)
    file = lora(tmp_path, "none", keyed(f"unet.{TO_Q}", ONE | bias))
    with pytest.raises(AdapterError, match=f"none changes the bias of unet {TO_Q}, which has none"):
        open_checkpoint(micro_folder(), lora=[(file, 1.0)])


def test_a_scale_is_finite(tmp_path):
    adapter = read_adapter(lora(tmp_path, "a", SPELLED["kohya"][0]), LAYERS)
    with pytest.raises(AdapterError, match=r"a: a scale is a finite number. Received: nan"):
        merge(open_checkpoint(micro_folder()), [(adapter, float("nan"))])


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.safetensors", ("a.safetensors", 1.0)),
        ("a.safetensors@0.5", ("a.safetensors", 0.5)),
        ("a@-1.5e-1", ("a", -0.15)),
        ("me@home/a@1", ("me@home/a", 1.0)),
        ("me@home/a", ("me@home/a", 1.0)),
        ("a@", ("a@", 1.0)),
    ],
)
def test_a_path_with_a_scale(text, parsed):
    assert scaled_path(text) == parsed


def test_a_checkpoint_with_an_adapter_is_described(tmp_path, capsys):
    file = lora(tmp_path, "style", SPELLED["kohya"][0])
    assert main(["weights", str(micro_folder()), "--lora", f"{file}@0.5", "--lora", str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.findall("merged +(.*)", printed) == ["style at 0.5", "style at 1"]
    assert "float32" in printed and "loads: every tensor" in printed
    unknown = lora(tmp_path, "other", {"unet.x.lora_A.weight": np.ones((2, 2))})
    assert main(["weights", str(micro_folder()), "--lora", str(unknown)]) == 1
    assert "would not load: " in capsys.readouterr().err


def of_sd1(*modules):
    shapes = layers_of(FAMILIES["sd1"])["unet"]
    tensors = {}
    for module in modules:
        out, *inner = shapes[module]
        tensors[f"unet.{module}.lora_A.weight"] = np.zeros((4, *inner), "float16")
        tensors[f"unet.{module}.lora_B.weight"] = np.zeros((out, 4), "float16")
    return tensors


def test_an_adapter_is_described(tmp_path, capsys):
    to_k = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
    file = lora(tmp_path, "style", of_sd1(to_k, "conv_in"))
    assert main(["weights", str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+)  +(\S.*)$", printed, re.MULTILINE)[:7] == [
        ("source", str(file)),
        ("tensors", "4, float16, 19.2 kB"),
        ("format", "diffusers"),
        ("kind", "LoRA"),
        ("rank", "4"),
        ("alpha", "none: as the rank"),
        ("component", "layers  kinds of layers"),
    ]
    assert re.search("^unet +2  1 convolution, 1 attention$", printed, re.MULTILINE)
    assert re.search("^fits +sd1$", printed, re.MULTILINE)
    assert re.search(
        rf"^not +sd2-base, sd2-v: 1 of its 2 layers do not fit the model: unet {to_k}: down is "
        r"\[4, 768\], the weight of \[1280, 1024\] wants \[4, 1024\]\.$",
        printed,
        re.MULTILINE,
    )

    bundle = lora(tmp_path, "bundle", {"bundle_emb.cat.string_to_param.*": np.ones(1)})
    assert main(["weights", str(bundle)]) == 1
    printed = capsys.readouterr()
    assert "would not load into tiny, sd1, sd2-base," in printed.err and "bundle_emb" in printed.err
    assert "sd-tf weights CHECKPOINT --lora ADAPTER" in printed.err

    assert main(["weights", str(file), "--variant", "fp16"]) == 1
    assert "is an adapter, and the option variant is for a checkpoint" in capsys.readouterr().err
