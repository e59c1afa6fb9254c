"""Exports whose kernels have fewer bits: what they record and refuse, what they cost and save."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from sd_tf.cli.main import main
from sd_tf.export import ExportOptions, export, verify
from sd_tf.export.replacement import merged
from sd_tf.models.layers import conv, dense
from sd_tf.models.storage import stored_as
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.psnr import psnr
from sd_tf.weights import layout, open_checkpoint
from tests import peer_transformers
from tests.exports import (
    AS_WRITTEN,
    MICRO,
    check_equal,
    micro_export,
    micro_folder,
    micro_net,
    once,
    pipeline_of,
)

CALL = {"num_steps": 2, "seed": 1, "guidance_scale": 4.0}
# Bytes that a float32 kernel of that shape saves; in 8 bits, each output has a scale.
SAVED = {
    "int8": lambda shape: 3 * np.prod(shape) - 4 * shape[-1],
    "float16": lambda shape: 2 * np.prod(shape),
}


def exported(folder, **options):
    return export(open_checkpoint(micro_folder()), folder, ExportOptions(**MICRO, **options))


@once
def int8_export(folder):
    """`micro_export` in 8 bits."""
    exported(folder, storage="int8", verify="fast")


@once
def half_export(folder):
    """With narrower kernels but the text encoder's, from prompts to files, too."""
    exported(folder, storage="float16:unet,vae", text_to_image=True, verify="fast")


def bytes_of(folder, component="diffusion_model"):
    files = (folder / component / "1" / "variables").glob("*.data-*")
    return sum(file.stat().st_size for file in files)


def kernels_of(component):
    """The shapes of the kernels of all layers that have one."""
    found = layout.layers(open_checkpoint(micro_folder()).build(component)).values()
    return [layer.kernel.shape for layer in found if hasattr(layer, "kernel")]


@pytest.mark.parametrize(
    ("stored", "storage", "least"),
    [
        (int8_export, "int8", 30),
        pytest.param(half_export, "float16", 40, marks=pytest.mark.long),
    ],
)
def test_an_export(stored, storage, least):
    """Its files are smaller by what the kernels save, and it draws what the other draws."""
    manifest = Manifest.read(stored())
    assert manifest.storage["unet"] == storage
    figures = manifest.verification["diffusion_model"][f"stored as {storage}"]
    assert verify.STORAGE_FLOORS[storage] <= figures["psnr_db"] < 120
    saved = bytes_of(micro_export()) - bytes_of(stored())
    assert saved == pytest.approx(sum(map(SAVED[storage], kernels_of("unet"))), rel=0.05)
    folders = (stored(), micro_export())
    pictures, expected = (pipeline_of(folder)("a star", **CALL).images for folder in folders)
    assert least <= psnr(expected, pictures, peak=255) < 99


def test_compiled_is_as_plain():
    plain, compiled = (pipeline_of(int8_export(), jit) for jit in (False, True))
    check_equal(compiled("a star", **CALL).images, plain("a star", **CALL).images)


def test_a_replaced_component_brings_its_storage():
    """That of those that stay is kept."""
    new = Manifest.read(micro_export())
    old = replace(new, storage={"text_encoder": "int8", "unet": "int8"})
    kept, replaced = ["text_encoder", "decoder"], ["diffusion_model", "image_encoder"]
    assert merged(new, old, kept, replaced).storage == {"text_encoder": "int8"}
    new = replace(new, storage={"text_encoder": "float16", "unet": "float16"})
    assert merged(new, old, kept, replaced).storage == {"text_encoder": "int8", "unet": "float16"}


def test_of_a_net_beside_places_for_adapters(tmp_path):
    """What is stored so is compared, and kernels with places are read from the checkpoint, too."""
    checkpoint = open_checkpoint(micro_folder(), controlnet=[micro_net()])
    options = ExportOptions(**AS_WRITTEN, storage="int8:controlnet", adapter_slots=1, verify="fast")
    manifest = export(checkpoint, tmp_path / "export", options)
    figures = manifest.verification["diffusion_model"]["stored as int8"]
    assert verify.STORAGE_FLOORS["int8"] <= figures["psnr_db"] < 120


@pytest.mark.parametrize(
    ("storage", "floor", "message"),
    [
        ("int8", 200.0, r"text_encoder with kernels in int8 .* \d\d\.\d dB, the floor is 200 dB"),
        (
            "float16",
            200.0,
            r"store fewer of its parts \(text_encoder\), or leave out `storage`",
        ),
    ],
)
def test_too_little_agreement_publishes_nothing(tmp_path, monkeypatch, storage, floor, message):
    monkeypatch.setitem(verify.STORAGE_FLOORS, storage, floor)
    with pytest.raises(ExportError, match=message):
        exported(tmp_path / "export", storage=storage, verify="fast")
    assert not (tmp_path / "export").exists()


def test_refusals(tmp_path, capsys):
    message = r"The storage is of text_encoder, unet: export a component .*Received: decoder"
    with pytest.raises(ExportError, match=message):
        exported(tmp_path, components=["decoder"], storage="int8")
    assert main(["export", "--out", str(tmp_path / "export"), "--storage=int3"]) == 1
    assert "The storage is int8 or float16, for all parts" in capsys.readouterr().err


@pytest.mark.parametrize("storage", ["int8", "float16"])
@pytest.mark.parametrize(
    ("make", "given", "kernel"),
    [(dense, (8, 96), "96,96"), (conv, (1, 8, 8, 96), "3,3,96,96")],
)
def test_xla_widens_in_the_loop(storage, make, given, kernel):
    """Before it, all kernels would stand in memory as they are computed: see `computed_after`."""
    with stored_as(storage):
        layer = make(96, 96)

    @tf.function(jit_compile=True, autograph=False)
    def run(x, count):
        return tf.while_loop(
            lambda i, _: i < count, lambda i, x: (i + 1, tf.tanh(layer(x))), (0, x)
        )[1]

    code = run.experimental_get_compiler_ir(tf.ones(given), tf.constant(5))("optimized_hlo")
    [loop] = [line for line in code.splitlines() if " while(" in line]
    assert f"f32[{kernel}]" not in loop
    assert f"{({'int8': 's8', 'float16': 'f16'})[storage]}[{kernel}]" in loop


def test_the_graph_widens_one_after_another():
    """Each widening depends on what the layer is given."""
    with stored_as("int8"):
        layer = dense(4, 3)
    function = tf.function(layer).get_concrete_function(tf.TensorSpec((None, 4)))
    operations = function.graph.get_operations()
    [cast] = [op for op in operations if op.type == "Cast" and op.outputs[0].shape == (4, 3)]
    found, waiting = set(), [cast]
    while waiting:
        op = waiting.pop()
        found.add(op.type)
        waiting += [tensor.op for tensor in op.inputs]
    assert "IsNan" in found


# T5 alone


@once
def sd3_folder(folder):
    peer_transformers.random_pipeline("sd3").save_pretrained(folder)


@pytest.mark.long
def test_an_export_of_sd3(tmp_path, capsys):
    arguments = ["--checkpoint", str(sd3_folder()), "--max_sequence_length=32"]
    arguments += ["--height=64", "--width=64", "--max_steps=2"]
    stored = ["--storage=int8:text_encoder_3", "--verify=fast", "--out", str(tmp_path / "int8")]
    assert main(["export", *arguments, *stored]) == 0
    assert "stored as int8" in capsys.readouterr().out
    manifest = Manifest.read(tmp_path / "int8")
    assert manifest.storage == {"text_encoder_3": "int8"}
    assert "stored as int8" not in manifest.verification["diffusion_model"]
    # The file has three bytes less for each number of the kernels.
    assert main(["export", *arguments, "--verify=off", "--out", str(tmp_path / "float32")]) == 0
    t5 = peer_transformers.T5
    inner = t5.num_heads * t5.head_dim
    kernels = t5.num_layers * t5.hidden_size * (4 * inner + 3 * t5.intermediate_size)
    sizes = [bytes_of(tmp_path / name, "text_encoder") for name in ("float32", "int8")]
    assert sizes[0] - sizes[1] == pytest.approx(3 * kernels, rel=0.05)
