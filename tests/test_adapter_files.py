"""Adapter files: every spelling of a layer, what is refused and how, and what `sd-tf` says."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from sd_tf.adapters import AdapterError, open_adapter, read_adapter
from sd_tf.adapters.spellings import spellings
from sd_tf.cli.arguments import scaled_path
from sd_tf.cli.main import main
from sd_tf.components.describe import origins
from sd_tf.config import FAMILIES
from sd_tf.runtime.manifest import file_hash
from sd_tf.training.origin import of_checkpoint
from sd_tf.weights import CheckpointError, layers_of, open_checkpoint
from sd_tf.weights.merge import merge
from tests import micro
from tests.exports import micro_folder

TO_Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
TO_OUT = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0"
CONV = "down_blocks.0.resnets.0.conv1"
Q_PROJ = "text_model.encoder.layers.0.self_attn.q_proj"
OUT_PROJ = "text_model.encoder.layers.0.self_attn.out_proj"
LAYERS = layers_of(micro.CONFIG)
ONE = {"lora_A.weight": np.ones((2, 16), "float32"), "lora_B.weight": np.ones((16, 2), "float32")}
KOHYA = {"lora_down.weight": ONE["lora_A.weight"], "lora_up.weight": ONE["lora_B.weight"]}


def written(folder, tensors, metadata=None, name="one.safetensors"):
    save_file({key: np.asarray(value) for key, value in tensors.items()}, folder / name, metadata)
    return folder / name


def keyed(prefix, tensors, joint="."):
    return {f"{prefix}{joint}{end}": tensor for end, tensor in tensors.items()}


def ends(down, up):
    return {down: ONE["lora_A.weight"], up: ONE["lora_B.weight"]}


PROCESSOR = ends("_lora.down.weight", "_lora.up.weight")
ATTENTION = TO_Q.removesuffix(".to_q")
SPELLED = {  # the file's names → the layer that they mean
    "peft": (keyed(f"unet.{TO_Q}", ONE), ("unet", TO_Q)),
    "lora-down": (
        keyed(f"unet.{TO_Q}", ends("lora.down.weight", "lora.up.weight")),
        ("unet", TO_Q),
    ),
    "processor": (keyed(f"unet.{ATTENTION}.processor.to_q", PROCESSOR, ""), ("unet", TO_Q)),
    "processor-out": (keyed(f"unet.{ATTENTION}.processor.to_out", PROCESSOR, ""), ("unet", TO_OUT)),
    "without-unet": (keyed(f"{ATTENTION}.processor.to_out", PROCESSOR, ""), ("unet", TO_OUT)),
    "text": (keyed(f"text_encoder.{Q_PROJ}", ONE), ("text_encoder", Q_PROJ)),
    "text-transformers-5": (
        keyed(f"text_encoder.{Q_PROJ.removeprefix('text_model.')}", ONE),
        ("text_encoder", Q_PROJ),
    ),
    "text-linear-layer": (
        keyed(
            f"text_encoder.{Q_PROJ}",
            ends("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
        ),
        ("text_encoder", Q_PROJ),
    ),
    "text-oldest": (
        keyed("text_encoder.text_model.encoder.layers.0.self_attn.to_out", PROCESSOR, ""),
        ("text_encoder", OUT_PROJ),
    ),
    "kohya": (keyed(f"lora_unet_{TO_Q.replace('.', '_')}", KOHYA), ("unet", TO_Q)),
    "kohya-original": (
        keyed("lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q", KOHYA),
        ("unet", TO_Q),
    ),
    "kohya-text": (
        keyed(f"lora_te_{Q_PROJ.replace('.', '_')}", KOHYA),
        ("text_encoder", Q_PROJ),
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_spellings(tmp_path, name):
    tensors, place = SPELLED[name]
    adapter = read_adapter(written(tmp_path, tensors), LAYERS)
    assert list(adapter.changes) == [place]
    np.testing.assert_array_equal(adapter.changes[place].delta(), np.full((16, 16), 2.0))
    assert (adapter.name, adapter.kinds, adapter.ranks, adapter.alphas) == (
        *("one", ("LoRA",)),
        *((2,), ()),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_layers_share_a_spelling(family):
    """`spellings` raises where they do; every UNet layer has its original name, too."""
    layers = layers_of(FAMILIES[family])
    found = spellings(layers)
    for component, modules in layers.items():
        for convention in ("diffusers", "kohya"):
            named = {p.module for p in found.values() if p[::2] == (component, convention)}
            assert named == modules.keys()
    original = {place.module for place in found.values() if "original" in place.convention}
    assert original == layers["unet"].keys()


def test_kohya_names_of_two_text_encoders():
    found = spellings(layers_of(FAMILIES["sdxl-base"]))
    first, second = (found[f"lora_te{n}_{Q_PROJ.replace('.', '_')}"] for n in (1, 2))
    assert (first.component, second.component) == ("text_encoder", "text_encoder_2")
    assert f"lora_te_{Q_PROJ.replace('.', '_')}" not in found


def test_folders_of_diffusers_and_peft(tmp_path):
    theirs = tmp_path / "water colour"
    theirs.mkdir()
    file = written(theirs, SPELLED["peft"][0], name="pytorch_lora_weights.safetensors")
    for path in (theirs, file):
        assert read_adapter(path, LAYERS).name == "water colour"
    peft = tmp_path / "peft"
    peft.mkdir()
    written(peft, keyed(f"base_model.model.{Q_PROJ}", ONE), name="adapter_model.safetensors")
    (peft / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 1}')
    adapter = read_adapter(peft, LAYERS)
    assert list(adapter.changes) == [("text_encoder", Q_PROJ)] and adapter.alphas == (1,)
    assert adapter.changes["text_encoder", Q_PROJ].delta()[0, 0] == 1


def metadata(**settings):
    return {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in settings.items()})}


def test_metadata_of_diffusers(tmp_path):
    """Only the component that it names has its alpha; without it, the scale is 1."""
    tensors = SPELLED["peft"][0] | keyed(f"unet.{CONV}", {
        "lora_A.weight": np.ones((4, 8, 3, 3), "float32"),
        "lora_B.weight": np.ones((8, 4, 1, 1), "float32"),
    }) | SPELLED["text"][0]  # fmt: skip
    about = metadata(r=2, lora_alpha=3, rank_pattern={"conv1": 4}, alpha_pattern={CONV: 1})
    adapter = read_adapter(written(tmp_path, tensors, about), LAYERS)
    multipliers = {module: change.multiplier for (_, module), change in adapter.changes.items()}
    assert multipliers == {TO_Q: 1.5, CONV: 0.25, Q_PROJ: 1}
    assert (adapter.alphas, adapter.ranks) == ((1, 3), (2, 4))
    assert set(adapter.components) == {"unet", "text_encoder"}


Q = f"unet.{TO_Q}"
REFUSED_FILES = {
    "unknown": (
        {f"unet.{TO_Q}x.lora_A.weight": ONE["lora_A.weight"], f"{Q}.lora_C": np.ones(1)},
        r"one.safetensors: 2 of its 2 tensors belong to no layer of the model: unet\.down.*lora_C, "
        r"unet\.down.*to_qx\.lora_A\.weight\.",
    ),
    "half": (
        {f"{Q}.lora_A.weight": ONE["lora_A.weight"]},
        rf"1 of its 1 layers do not fit the model: unet {TO_Q}: there is down, but no up\.",
    ),
    "alpha-alone": ({f"{Q}.alpha": np.float32(1)}, "there is a magnitude or an alpha alone"),
    "mixed": (
        keyed(Q, ONE) | {f"{Q}.lokr_w1": np.ones((2, 2))},
        "down, lokr_w1, up do not make one change",
    ),
    "shape": (
        keyed(Q, ONE | {"lora_A.weight": np.ones((2, 8))}),
        r"down is \[2, 8\], the weight of \[16, 16\] wants \[2, 16\]",
    ),
    "rank": (
        keyed(Q, ONE | {"lora_B.weight": np.ones((16, 3))}),
        r"up is \[16, 3\], the weight of \[16, 16\] wants \[16, 2\]",
    ),
    "number": (keyed(Q, ONE | {"lora_A.weight": np.float32(1)}), r"down has the shape \[\]"),
    "kronecker": (
        keyed(Q, {"lokr_w1": np.ones((3, 2)), "lokr_w2": np.ones((4, 8))}),
        r"w1 of shape \[3, 2\] does not divide \[16, 16\]",
    ),
    "dora": (
        keyed(Q, ONE | {"dora_scale": np.ones((8, 1))}),
        r"dora_scale is \[8, 1\], the weight of \[16, 16\] wants \[16, 1\] or \[1, 16\]",
    ),
    "magnitude": (
        keyed(Q, ONE | {"lora_magnitude_vector": np.ones(8)}),
        "the magnitude has 8 values for 16",
    ),
    "two-magnitudes": (
        keyed(Q, ONE | {"lora_magnitude_vector": np.ones(16), "dora_scale": np.ones((16, 1))}),
        "DoRA has one magnitude, and no bias",
    ),
    "twice": (
        keyed(Q, ONE) | keyed(f"lora_unet_{TO_Q.replace('.', '_')}", KOHYA),
        rf"{Q}\.lora_A\.weight and lora_unet.*lora_down\.weight are for the same place|"
        rf"lora_unet.*lora_down\.weight and {Q}\.lora_A\.weight are for the same place",
    ),
    "alpha-shape": (
        keyed(Q, ONE | {"alpha": np.ones(2)}),
        r"alpha is one number. Received: the shape \[2\]",
    ),
    "alpha-nan": (keyed(Q, ONE | {"alpha": np.float32("nan")}), "a finite number. Received: nan"),
    "empty": ({}, "holds no tensors"),
    "diff": ({f"{Q}.diff": np.ones(1)}, r"whole differences of weights or biases \(diff, diff_b\)"),
    "norm": ({f"{Q}.w_norm": np.ones(1)}, r"changes of norms \(w_norm, b_norm\)"),
    "glora": ({f"{Q}.a1.weight": np.ones(1)}, "GLoRA"),
    "oft": ({f"{Q}.oft_blocks": np.ones(1)}, "OFT or BOFT"),
    "peft-oft": ({f"{Q}.oft_R.weight": np.ones(1)}, "OFT or BOFT"),
    "ia3": ({f"{Q}.on_input": np.ones(1)}, "IA3"),
    "vera": ({f"{Q}.vera_lambda_b": np.ones(1)}, "VeRA"),
    "embedding": ({"text_encoder.x.lora_embedding_A": np.ones(1)}, "LoRA of an embedding"),
    "replaced": ({f"{Q}.set_weight": np.ones(1)}, "replaced or reshaped weights"),
    "bundle": (
        keyed(Q, ONE) | {"bundle_emb.cat.string_to_param.*": np.ones(1)},
        r"cannot be used: textual inversion bundled with the adapter \(bundle_emb\) is not "
        r"supported, .* Received: bundle_emb\.cat\.string_to_param\.\*",
    ),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_refused_files(tmp_path, name):
    tensors, reason = REFUSED_FILES[name]
    with pytest.raises(AdapterError, match=reason):
        read_adapter(written(tmp_path, tensors), LAYERS)


REFUSED_SETTINGS = {
    "rank": ({"r": 4, "lora_alpha": 4}, "its rank is 2, but .* unet has 4"),
    "no-alpha": ({"r": 2}, "unet: lora_alpha must be a number. Received: None"),
    "no-kind": ({"r": 2, "peft_type": ["LORA"]}, r"peft_type \['LORA'\] is not supported"),
    "kind": ({"r": 2, "peft_type": "OFT"}, "peft_type 'OFT' is not supported; supported: LORA"),
    "pissa": (
        {"r": 2, "lora_alpha": 2, "init_lora_weights": "pissa"},
        "these settings are not supported: init_lora_weights 'pissa'",
    ),
    "bias": ({"r": 2, "lora_alpha": 2, "bias": "all"}, "not supported: bias 'all'"),
    "saved": ({"r": 2, "lora_alpha": 2, "modules_to_save": ["a"]}, r"modules_to_save \['a'\]"),
    "patterns": ({"r": 2, "lora_alpha": 2, "rank_pattern": [1]}, "rank_pattern must be an object"),
    "pattern": (
        {"r": 2, "lora_alpha": 2, "alpha_pattern": {"(": 1}},
        r"the pattern '\(' cannot be read",
    ),
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_refused_settings(tmp_path, name):
    settings, reason = REFUSED_SETTINGS[name]
    with pytest.raises(AdapterError, match=reason):
        read_adapter(written(tmp_path, keyed(Q, ONE), metadata(**settings)), LAYERS)


def test_refused_metadata(tmp_path):
    for text, reason in (("{", "is not valid JSON"), ("[]", "must be a JSON object.*list")):
        with pytest.raises(AdapterError, match=f"lora_adapter_metadata {reason}"):
            open_adapter(written(tmp_path, keyed(Q, ONE), {"lora_adapter_metadata": text}))
    about = metadata(r=2, lora_alpha=2)
    file = written(tmp_path, keyed(Q, ONE | {"alpha": np.float32(1)}), about)
    with pytest.raises(AdapterError, match=r"there is an alpha, and another in .*metadata, unet"):
        read_adapter(file, LAYERS)


def test_refused_paths(tmp_path):
    with pytest.raises(AdapterError, match=r"No such file: .*none.safetensors"):
        open_adapter(tmp_path / "none.safetensors")
    with pytest.raises(AdapterError, match=r"it has neither pytorch_lora_weights.safetensors nor"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "x.pt"):
        with pytest.raises(AdapterError, match="is a pickle, which can run any code"):
            open_adapter(path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(AdapterError, match=r"an adapter is a .safetensors file. Received: .txt"):
        open_adapter(tmp_path / "a.txt")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(AdapterError, match="is truncated"):
        open_adapter(tmp_path / "short.safetensors")
    written(tmp_path, keyed(f"base_model.model.{TO_Q}", ONE), name="adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"No such file: .*adapter_config.json"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 1}')
    with pytest.raises(AdapterError, match=r"fits 0.*text_encoder: .*unet: .*its rank is 2, but"):
        read_adapter(tmp_path, LAYERS)


def lora(folder, name, tensors):
    return written(folder, tensors, name=f"{name}.safetensors")


def test_an_adapter_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="is an adapter, not a checkpoint: .* `lora`"):
        open_checkpoint(lora(tmp_path, "style", SPELLED["kohya"][0]))


def test_merging(tmp_path):
    """The weights themselves are compared with diffusers in tests/parity/test_adapter_merge.py."""
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
    unknown = lora(tmp_path, "other", REFUSED_FILES["unknown"][0])
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

    bundle = lora(tmp_path, "bundle", REFUSED_FILES["bundle"][0])
    assert main(["weights", str(bundle)]) == 1
    printed = capsys.readouterr()
    assert "would not load into sd1, sd2-base," in printed.err and "bundle_emb" in printed.err
    assert "sd-tf weights CHECKPOINT --lora ADAPTER" in printed.err

    assert main(["weights", str(file), "--variant", "fp16"]) == 1
    assert "is an adapter, and the option variant is for a checkpoint" in capsys.readouterr().err
