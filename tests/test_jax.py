"""What is JAX's alone: meshes, compiling ahead of time, slices that are somewhere else."""

import argparse
import hashlib
import importlib.metadata
import json
import math
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from keras import ops
from PIL import Image

from sd_tf.checkpoints import TINY_FOLDER, make_random
from sd_tf.cli import jax_compile, jax_generate, train_memory
from sd_tf.cli.main import main
from sd_tf.components.conditions import conditioner_of
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES, with_kerascv_numerics
from sd_tf.jax import JaxPipeline, chips, compile_pipeline, components, make_mesh
from sd_tf.jax import compile as compiling
from sd_tf.jax.artifacts import (
    FILE_NAME,
    STABLEHLO_PLATFORMS,
    compiled_config,
    plugin_versions,
)
from sd_tf.jax.chips import CHIPS, chip_of, outlook, row, runs_of
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.parameter import CallError
from sd_tf.training import memory
from sd_tf.weights import Checkpoint, CheckpointError, layers_of, open_checkpoint
from tests import micro
from tests.exports import (
    CONFIG,
    micro_decoder,
    micro_folder,
    micro_net,
    micro_xl_folder,
    small_folder,
)
from tests.fresh import FRESH, run_python
from tests.micro_adapters import lora
from tests.peer_image_prompts import micro_image_adapters
from tests.peer_pipelines import check_pictures, psnr

pytestmark = [pytest.mark.backend, pytest.mark.jax]

HERE = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
PROMPTS = ["a red star", "two cats"]
SMALL = {"batch_size": 2, "height": 64, "width": 64, "max_steps": 8, "adapter_slots": 2}
FIXED = Fixed(**SMALL)


@pytest.fixture
def compilations():
    """Grows with everything that XLA compiles."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def pipe():
    return JaxPipeline.from_checkpoint(small_folder(), None, "float32", **SMALL)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled") / "out"
    compile_pipeline(open_checkpoint(small_folder()), FIXED, make_mesh(), folder)
    return folder


# The same pictures as the SavedModels


@pytest.mark.parametrize(
    "family",
    ["micro", *(pytest.param(name, marks=pytest.mark.long) for name in ("tiny", "sdxl-base"))],
)
def test_equals_the_saved_models(tmp_path, small_pipelines, family):
    """Exported by TensorFlow in a process of its own."""
    embedded = {"micro": micro_folder(), "tiny": TINY_FOLDER}
    checkpoint = embedded[family] if family in embedded else small_pipelines(family)[1]
    options = [f"--checkpoint={checkpoint}", f"--output_dir={tmp_path / 'export'}"]
    options += ["--verify=off", "--max_steps=20", "--batch_size=2", "--height=64", "--width=64"]
    script = Path(__file__).parent.parent / "serialize_savedmodels.py"
    run_python(script, *options, KERAS_BACKEND="tensorflow")
    from sd_tf.runtime.pipeline import Pipeline

    prompts = ["a large red star on a dark blue background", "a small yellow heart"]
    call = {"num_steps": 20, "guidance_scale": 4.0, "seed": 1}
    size = {"batch_size": 2, "height": 64, "width": 64}
    theirs = Pipeline.load(tmp_path / "export", jit_compile=False)(prompts, **call).images
    ours = JaxPipeline.from_checkpoint(checkpoint, None, "float32", **size)
    check_pictures(ours(prompts, **call).images, theirs)
    if family == "tiny":
        half = JaxPipeline.from_checkpoint(checkpoint, **size)
        assert half.manifest.precision == "bfloat16"
        check_pictures(half(prompts, **call).images, theirs, floor=25.0)


def test_nothing_is_compiled_again(pipe, compilations):
    first = pipe(PROMPTS, num_steps=4, seed=1).images
    compilations.clear()
    others = [
        {"num_steps": 7},
        {"guidance_scale": 2.0},
        {"scheduler": "euler_ancestral"},
        {"seed": 5},
        {},
    ]
    pictures = [pipe(PROMPTS, **{"num_steps": 4, "seed": 1, **other}).images for other in others]
    again = pictures.pop()
    assert np.array_equal(first, again)
    assert all(psnr(first, other) < 40 for other in pictures)
    assert psnr(pipe(PROMPTS[::-1], num_steps=4, seed=1).images, first) < 40
    assert compilations == []


def test_adapters_are_switched_without_compiling(pipe, compiled, compilations, tmp_path):
    def in_transformers(part, layer):
        return part != "unet" or ".attentions." in layer

    model = layers_of(CONFIG)
    files = [lora(tmp_path / f"{i}.safetensors", i, 4, 0.5, in_transformers, model) for i in (0, 1)]
    call = {"num_steps": 2, "seed": 1}
    plain = pipe(PROMPTS, **call, adapters={}).images
    loaded = JaxPipeline.load(compiled)
    assert np.array_equal(loaded(PROMPTS, **call).images, plain)
    compilations.clear()
    pictures = []
    for chain in (pipe, loaded):
        for name, file in zip(("one", "two"), files, strict=True):
            chain.load_adapter(name, file)
        pictures.append(chain(PROMPTS, **call, adapters={"one": 0.8, "two": -0.5}).images)
        assert psnr(chain(PROMPTS, **call, adapters={"one": 0.8}).images, pictures[-1]) < 45
        chain.unload_adapter("two")
        chain.unload_adapter("one")
        assert np.array_equal(chain(PROMPTS, **call).images, plain)
    assert psnr(pictures[0], plain) < 40
    assert np.array_equal(*pictures)
    assert compilations == []


# Many devices


def on_many_devices(folder, checkpoint, model, **options):
    """Draw on one device, on eight, and with the weights divided.

    Returns: model → its bytes on a device, whole and divided.
    """
    shutil.copytree(checkpoint, folder / "checkpoint")
    run_python("-m", "tests.jax_many", folder, str(model), json.dumps(options))
    found = np.load(folder / "pictures.npz")
    for name in ("data", "model"):
        difference = np.abs(found[name].astype(int) - found["one"])
        assert difference.max() <= 1, name
    assert psnr(found["one"][0], found["one"][7]) < 40  # one prompt, two seeds
    stored = json.loads((folder / "bytes.json").read_text())
    assert stored["data"] == stored["one"]
    return stored["one"], stored["model"]


def test_the_example_draws_and_refines(tmp_path):
    """In a process of its own, with one small checkpoint as the base and as the refiner."""
    script = Path(__file__).parent.parent / "examples" / "jax_sdxl.py"
    options = ["--checkpoint", micro_xl_folder(), "--refiner", micro_xl_folder(), "--size", "16"]
    printed = run_python(script, *options, "--num_steps", "4", "--out", tmp_path / "grid.png")
    assert len(re.findall(r"^4 pictures in \d", printed, re.MULTILINE)) == 2
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert (pixels < 255).any(axis=-1).sum() > 3 * 16**2, "four pictures on a white page"


def test_many_devices(tmp_path):
    one, divided = on_many_devices(tmp_path, small_folder(), 4, scheduler="euler_ancestral")
    # Four devices to a copy: nearly a quarter of the weights on each.
    assert divided["unet"] < 0.35 * one["unet"]


@pytest.mark.long
def test_nets_and_image_prompts_on_many_devices(tmp_path):
    """Two to a copy: half of the UNet and of each net on each, and all of an adapter."""
    nets, adapter = [str(micro_net())] * 2, micro_image_adapters() / "base.safetensors"
    more = {"controlnet": nets, "ip_adapter": [str(adapter)]}
    one, divided = on_many_devices(tmp_path, micro_folder(), 2, **more)
    assert {"unet", "controlnet", "controlnet_2", "image_attention"} <= one.keys()
    for name, whole in one.items():
        share = 0.6 if name.startswith(("unet", "controlnet")) else 1
        assert divided[name] <= share * whole, name


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "t5", "options"),
    [
        ("sd3", "text_encoder_3", {"storage": "int8"}),
        ("flux-dev", "text_encoder_2", {}),
    ],
)
def test_a_transformer_on_many_devices(tmp_path, small_pipelines, pipeline, t5, options):
    _, folder = small_pipelines(pipeline)
    one, divided = on_many_devices(tmp_path, folder, 2, max_sequence_length=16, **options)
    # Two devices to a copy: nearly half of the transformer and of T5 on each, and all of the rest.
    for name, whole in one.items():
        share = 0.55 if name in ("transformer", t5) else 1
        assert divided[name] <= share * whole, name


@pytest.mark.long
def test_several_hosts(tmp_path):
    shutil.copytree(micro_folder(), tmp_path / "checkpoint")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.jax_many", str(tmp_path), address, "2"]
    hosts = [subprocess.Popen([*command, str(n)], env=FRESH) for n in range(2)]
    try:
        assert [host.wait(timeout=900) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    first, second = (np.load(tmp_path / f"host{n}.npy") for n in range(2))
    assert first.shape == (8, 64, 64, 3)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("count", [0, 2])
def test_a_model_axis_that_does_not_divide(count):
    with pytest.raises(ExportError, match=rf"divides the number of devices, 1\. Received: {count}"):
        make_mesh(model=count)


def test_a_mesh_of_other_axes():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    with pytest.raises(ExportError, match=r"axes data and model; .*make_mesh\. Received: x"):
        JaxPipeline.from_checkpoint(micro_folder(), mesh)


# Ahead of time


def test_what_was_compiled_runs_without_compiling(compiled, pipe, tmp_path):
    code = (
        "import sys, numpy, jax\n"
        "seen = []\n"
        "jax.monitoring.register_event_duration_secs_listener(\n"
        "    lambda event, *_, **__: seen.append(event) if 'compile' in event else None)\n"
        "from sd_tf.jax import JaxPipeline\n"
        "pipe = JaxPipeline.load(sys.argv[1])\n"
        f"numpy.save(sys.argv[2], pipe({PROMPTS!r}, num_steps=4, seed=1).images)\n"
        "absent = [m for m in ('keras', 'tensorflow') if m in sys.modules]\n"
        "print(seen, absent)\n"
    )
    out = run_python("-c", code, compiled, tmp_path / "images.npy")
    assert out.strip() == "[] []"
    expected = pipe(PROMPTS, num_steps=4, seed=1).images
    assert np.array_equal(np.load(tmp_path / "images.npy"), expected)


def changed(compiled, folder, **target):
    """A copy that was compiled for something else."""
    shutil.copytree(compiled, folder)
    path = folder / FILE_NAME
    content = json.loads(path.read_text())
    content["target"] |= target
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "tpu", "device_kind": "TPU v5 lite"}, r"platform 'tpu' \(here 'cpu'\)"),
        ({"versions": {"jax": "0.1", "jaxlib": "0.1"}}, r"versions .*'0\.1'"),
        ({"versions": {**HERE, "jax-cuda12-pjrt": "0.1"}}, r"versions .*jax-cuda12-pjrt': '0\.1'"),
        ({"processor": "0" * 16}, r"processor '0000000000000000' \(here '\w{16}'\)"),
    ],
    ids=["platform", "release", "plugin", "processor"],
)
def test_elsewhere_its_stablehlo_serves(compiled, pipe, tmp_path, caplog, change, reason):
    folder = changed(compiled, tmp_path / "changed", **change)
    with pytest.raises(ExportError, match=rf"was compiled for .*{reason}.* Compile it here"):
        JaxPipeline.load(folder, fallback=False)
    loaded = JaxPipeline.load(folder)
    assert "Its StableHLO is compiled instead" in caplog.text
    if "processor" in change:
        images = loaded(PROMPTS, num_steps=4, seed=1).images
        check_pictures(images, pipe(PROMPTS, num_steps=4, seed=1).images)


def test_code_that_the_runtime_does_not_take(compiled, pipe, tmp_path, caplog):
    """Machine code whose file is whole: its StableHLO serves, as on another release."""
    folder = shutil.copytree(compiled, tmp_path / "foreign")
    manifest = json.loads((folder / "pipeline.json").read_text())
    name = "decoder/serving_default.xla"
    (folder / name).write_bytes(b"of another compiler")
    digest = hashlib.sha256(b"of another compiler").hexdigest()
    manifest["components"]["decoder"]["files"][name] = {"size": 19, "sha256": digest}
    (folder / "pipeline.json").write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match=r"serving_default\.xla does not run here: .* load with"):
        JaxPipeline.load(folder, fallback=False)
    loaded = JaxPipeline.load(folder)
    assert "does not run here" in caplog.text and "Its StableHLO is compiled" in caplog.text
    images = loaded(PROMPTS, num_steps=4, seed=1).images
    check_pictures(images, pipe(PROMPTS, num_steps=4, seed=1).images)


SIZES = ((16, 16), (16, 24))


@pytest.fixture(scope="module")
def shaped():
    return JaxPipeline.from_checkpoint(
        micro_folder(), None, "float32", batch_sizes=(2, 1), sizes=SIZES, max_steps=2
    )


def test_every_shape_draws_what_a_pipeline_of_that_shape_draws(shaped, compilations):
    call = {"num_steps": 2, "seed": 5, "scheduler": "euler_ancestral"}
    prompts = ["a", "b", "c"]
    for (height, width), batch_size, start in ((SIZES[0], 2, 0), (SIZES[1], 1, 2)):
        ours = shaped(prompts, height=height, width=width, **call).images
        assert ours.shape == (3, height, width, 3)
        size = {"batch_size": batch_size, "height": height, "width": width}
        alone = JaxPipeline.from_checkpoint(micro_folder(), None, "float32", max_steps=2, **size)
        theirs = alone(prompts[start:][:batch_size], **{**call, "seed": 5 + start}).images
        check_pictures(ours[start:][:batch_size], theirs)
    compilations.clear()
    shaped(prompts, width=24, **{**call, "seed": 1})
    assert compilations == []


def test_several_shapes_are_compiled_together(shaped, tmp_path, compilations):
    fixed = Fixed(batch_sizes=(1,), sizes=SIZES, max_steps=2)
    compile_pipeline(open_checkpoint(micro_folder()), fixed, make_mesh(), tmp_path / "out")
    compilations.clear()
    loaded = JaxPipeline.load(tmp_path / "out", fallback=False)
    call = {"num_steps": 2, "seed": 3}
    for _, width in SIZES:
        ours = loaded("a", width=width, **call).images
        assert ours.shape == (1, 16, width, 3) and compilations == []
    check_pictures(ours, shaped("a", width=width, **call).images)
    with pytest.raises(CallError, match=r"16x16,16x24 \(HxW\)\. Received: width 32"):
        loaded("a", width=32, **call)


def test_nets_and_image_prompts_are_compiled_in(tmp_path, compilations):
    net, adapter = micro_net(), micro_image_adapters() / "base.safetensors"
    size = {"height": 16, "width": 16, "max_steps": 2, "precision": "float32", "image_prompts": 1}
    flags = [f"--{name}={value}" for name, value in size.items()]
    flags += ["--controlnet", str(net), "--ip_adapter", str(adapter)]
    out, pictures = tmp_path / "out", tmp_path / "pictures"
    made = ["jax", "compile", "--checkpoint", str(micro_folder()), *flags, "--out", str(out)]
    assert main(made) == 0
    given = {}
    for seed, name in enumerate(("control_image", "image_prompt")):
        levels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3)).astype("uint8")
        given[name] = Image.fromarray(levels)
        given[name].save(tmp_path / f"{name}.png")
    compilations.clear()
    call = [f"--{name}={tmp_path}/{name}.png" for name in given]
    call += ["--num_steps=2", "--seed=3", f"--export_dir={out}", f"--out={pictures}"]
    assert main(["jax", "generate", "a cat", *call]) == 0
    assert compilations == []
    direct = JaxPipeline.from_checkpoint(
        micro_folder(), batch_size=1, controlnet=[net], ip_adapter=[adapter], **size
    )
    theirs = direct("a cat", num_steps=2, seed=3, **given).images
    check_pictures(np.asarray(Image.open(pictures / "3.png"))[None], theirs)
    for left_out in given:
        some = {name: picture for name, picture in given.items() if name != left_out}
        assert psnr(direct("a cat", num_steps=2, seed=3, **some).images, theirs) < 40, left_out
    # A net that is off is not run, or else NaN would come into the picture.
    off = {"image_prompt": given["image_prompt"]}
    plain = direct("a cat", num_steps=2, seed=3, **off).images
    weights = direct.weights["diffusion_model"]
    for name in [name for name in weights if name.startswith("controlnet")]:
        weights[name] = jax.device_put(jax.numpy.full_like(weights[name], jax.numpy.nan))
    for more in ({}, {"control_image": given["control_image"], "control_scale": 0}):
        made = direct("a cat", num_steps=2, seed=3, **off, **more).images
        np.testing.assert_array_equal(made, plain)
    made = direct("a cat", num_steps=2, seed=3, **given).images
    assert made.std() == 0, "without a number there is no picture"


def test_what_compiles_beside_jaxlib_is_compared(tmp_path, monkeypatch):
    assert plugin_versions("cpu") == {}
    assert plugin_versions("tpu") == {"libtpu": importlib.metadata.version("libtpu")}
    plugin = tmp_path / "jax_cuda99_pjrt-1.2.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda99-pjrt\nVersion: 1.2\n")
    (plugin / "entry_points.txt").write_text("[jax_plugins]\ncuda99 = jax_plugins.xla_cuda99\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugin_versions("gpu")["jax-cuda99-pjrt"] == "1.2"


def test_a_damaged_program(compiled, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(compiled, folder)
    path = folder / "decoder" / "serving_default.xla"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ExportError, match=r"serving_default\.xla .*SHA-256 differs"):
        JaxPipeline.load(folder)
    path.unlink()
    with pytest.raises(ExportError, match=r"serving_default\.xla of decoder is missing"):
        JaxPipeline.load(folder)


def test_an_export_is_not_a_compiled_pipeline(tmp_path):
    with pytest.raises(
        ExportError, match=r"has no compiled\.json\. Make it with `sd-tf jax compile`"
    ):
        JaxPipeline.load(tmp_path)


def test_a_later_format(compiled, tmp_path):
    shutil.copytree(compiled, tmp_path / "later")
    path = tmp_path / "later" / FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(ExportError, match=r"version 99, this sd_tf reads 2: .* or compile again"):
        JaxPipeline.load(tmp_path / "later")
    path.write_text("{")
    with pytest.raises(ExportError, match=r"compiled\.json cannot be read: .*\. Compile again"):
        JaxPipeline.load(tmp_path / "later")


def other_checkpoints(folder):
    """Write checkpoints with the weights' names and shapes of the micro one that compute others."""
    text, unet = micro.CONFIG.text_encoders["text_encoder"], micro.CONFIG.denoiser
    others = {
        "text_encoder.activation must be quick_gelu. Received: gelu": {
            "text_encoders": {"text_encoder": replace(text, activation="gelu")}
        },
        "unet.resnet_norm_eps must be 1e-05. Received: 0.001": {
            "denoiser": replace(unet, resnet_norm_eps=1e-3)
        },
        "vae.scaling_factor must be 0.18215. Received: 0.5": {
            "autoencoder": replace(micro.CONFIG.autoencoder, scaling_factor=0.5)
        },
        'what text_encoder reads for "" must be (49406, 49407, 49407, 49407, …). Received: (49406, '
        "49407, 0, 0, …).": {"text_encoders": {"text_encoder": replace(text, pad_token_id=0)}},
    }
    for number, (message, changed) in enumerate(others.items()):
        make_random(replace(micro.CONFIG, **changed).check(), folder / str(number))
        yield re.escape(message), folder / str(number)


def rescheduled(folder):
    """Write the micro checkpoint with another default scheduler."""
    make_random(
        replace(micro.CONFIG, schedule=replace(micro.CONFIG.schedule, sampler="euler")), folder
    )
    return folder


def test_shapes_alone_and_weights_later(tmp_path, capsys):
    """Compiled without weights, it takes those of a checkpoint of its family."""
    config = open_checkpoint(micro_folder()).config
    checkpoint = Checkpoint("shapes", "shapes", "shapes alone", config, {})
    fixed = Fixed(batch_size=1, height=16, width=16, max_steps=2)
    compile_pipeline(checkpoint, fixed, make_mesh(), tmp_path / "out")
    with pytest.raises(ExportError, match=r"holds no weights: give `checkpoint`"):
        JaxPipeline.load(tmp_path / "out")
    with pytest.raises(ExportError, match=r"compiled for the family sd1\. Received: sd2-v"):
        JaxPipeline.load(tmp_path / "out", checkpoint=TINY_FOLDER)
    wider = replace(micro.CONFIG, denoiser=replace(micro.CONFIG.denoiser, channels=(8, 24)))
    make_random(wider, tmp_path / "wider")
    with pytest.raises(ExportError, match=r"wider does not fit .*unet\.\S+ must be .*16.*: .*24"):
        JaxPipeline.load(tmp_path / "out", checkpoint=tmp_path / "wider")
    with pytest.raises(ExportError, match=r"does not fit .* has the component preview_decoder"):
        given = {"checkpoint": micro_folder(), "preview_decoder": micro_decoder()}
        JaxPipeline.load(tmp_path / "out", **given)
    for message, other in other_checkpoints(tmp_path):
        with pytest.raises(ExportError, match=rf"does not fit the compiled pipeline: {message}"):
            JaxPipeline.load(tmp_path / "out", checkpoint=other)
    loaded = JaxPipeline.load(tmp_path / "out", checkpoint=micro_folder())
    assert loaded.manifest.default_sampler == config.schedule.sampler
    other = JaxPipeline.load(tmp_path / "out", checkpoint=rescheduled(tmp_path / "rescheduled"))
    assert other.manifest.default_sampler == "euler"
    direct = JaxPipeline.from_checkpoint(
        micro_folder(), None, "float32", batch_size=1, height=16, width=16, max_steps=2
    )
    call = {"num_steps": 2, "seed": 3}
    plain = direct("a", **call).images
    assert np.array_equal(loaded("a", **call).images, plain)

    file = lora(tmp_path / "style.safetensors", 1)
    merged = JaxPipeline.from_checkpoint(
        micro_folder(),
        None,
        "float32",
        batch_size=1,
        height=16,
        width=16,
        max_steps=2,
        lora=[(file, 0.5)],
    )
    expected = merged("a", **call).images
    assert not np.array_equal(expected, plain)
    generate = ["jax", "generate", "a", "--export_dir", str(tmp_path / "out")]
    generate += ["--num_steps", "2", "--seed", "3", "--out", str(tmp_path / "pictures")]
    assert main([*generate, "--lora", f"{file}@0.5"]) == 1
    assert "holds no weights: give --checkpoint." in capsys.readouterr().err
    assert main([*generate, "--checkpoint", str(micro_folder()), "--lora", f"{file}@0.5"]) == 0
    drawn = np.asarray(Image.open(tmp_path / "pictures" / "3.png"))
    np.testing.assert_array_equal(drawn, expected[0])
    said = json.loads(Image.open(tmp_path / "pictures" / "3.png").text["sd_tf"])["checkpoint"]
    for component in ("text_encoder", "diffusion_model"):
        assert said[component]["name"] == micro_folder().name
        (adapter,) = said[component]["adapters"]
        assert adapter["name"] == "style" and adapter["scale"] == 0.5
        assert adapter["sha256"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    assert said["decoder"]["name"] == micro_folder().name and "adapters" not in said["decoder"]


def test_what_the_families_compile():
    """The numbers in which checkpoints with the same weights differ are recorded by name."""

    def differing(one, other):
        found, wanted = (compiled_config(config) for config in (one, other))
        return {name for name in found if found[name] != wanted[name]}

    sd1, xl = FAMILIES["sd1"], FAMILIES["sdxl-base"]
    assert differing(sd1, with_kerascv_numerics(sd1)) == {
        "unet.geglu",
        "unet.transformer_norm_eps",
        "vae.norm_eps",
    }
    assert differing(xl, replace(xl, zero_empty_negative=False)) == {"zero_empty_negative"}
    penultimate = replace(sd1.text_encoders["text_encoder"], context_layer=2)
    other = replace(sd1, text_encoders={"text_encoder": penultimate})
    assert differing(sd1, other) == {"text_encoder.context_layer"}
    assert not differing(sd1, replace(sd1, denoiser=replace(sd1.denoiser, sample_size=96)))


def test_a_program_for_any_platform_has_no_code_of_one(monkeypatch):
    """On a GPU in bfloat16, Keras' fused attention is cuDNN's, which lowers for CUDA alone."""
    monkeypatch.setitem(components.ON_JAX, "cpu", components.ON_JAX["gpu"])
    of_cuda = jax.jit(lambda q, k, v, scale: jax.lax.platform_dependent(q, cuda=lambda q: q))
    monkeypatch.setattr(ops, "dot_product_attention", of_cuda)
    fixed = Fixed(batch_size=1, height=16, width=16, max_steps=2)
    checkpoint = open_checkpoint(micro_folder())
    part = compiling.components(checkpoint, fixed, make_mesh())["diffusion_model"]
    assert part.rewrites.names == ("fused_attention",)
    shape = geometry_of(checkpoint.config, fixed).shapes.first
    with pytest.raises(NotImplementedError, match="cpu"):
        compiling.compile_endpoint(part, "segment", make_mesh(), shape)
    code = compiling.portable(part, "segment", shape)
    assert jax.export.deserialize(bytearray(code)).platforms == STABLEHLO_PLATFORMS


@pytest.mark.long
def test_t5_from_shapes_alone(small_pipelines, tmp_path):
    """Figures need no tokenizer of T5; what is compiled to be run does, and takes weights later."""
    _, folder = small_pipelines("flux-dev")
    checkpoint = replace(open_checkpoint(folder, max_sequence_length=16), readers={})
    bare, out = replace(checkpoint, tokenizer_readers={}), tmp_path / "out"
    size = {"batch_size": 1, "height": 16, "width": 16, "max_steps": 2}
    parts = compiling.components(bare, Fixed(**size), make_mesh())
    assert {"text_encoder", "diffusion_model", "decoder"} <= parts.keys()
    with pytest.raises(CheckpointError, match=r"a T5, and none comes with sd_tf"):
        compile_pipeline(bare, Fixed(**size), make_mesh(), out)
    compile_pipeline(checkpoint, Fixed(**size, precision="float32"), make_mesh(), out)
    loaded = JaxPipeline.load(out, checkpoint=folder, max_sequence_length=16)
    direct = JaxPipeline.from_checkpoint(folder, None, "float32", max_sequence_length=16, **size)
    call = {"num_steps": 2, "seed": 3}
    np.testing.assert_array_equal(loaded("a star", **call).images, direct("a star", **call).images)


def test_a_folder_with_weights_takes_no_others(compiled):
    with pytest.raises(ExportError, match=r"out holds the weights .* leave out `checkpoint`, or c"):
        JaxPipeline.load(compiled, checkpoint=small_folder())
    with pytest.raises(ExportError, match=r"again with `lora`, or with `adapter_slots`, to load"):
        JaxPipeline.load(compiled, lora=[("a.safetensors", 1.0)])
    with pytest.raises(ExportError, match=r"compiled with: compile again with `ema`\."):
        JaxPipeline.load(compiled, ema=True)


def test_one_kind_of_batches():
    with pytest.raises(ExportError, match=r"Give `batch_size` or `batch_sizes`\."):
        JaxPipeline.from_checkpoint(micro_folder(), batch_size=2, batch_sizes=(4,))


# The commands


def test_compile_and_generate(tmp_path, capfd):
    out, pictures = str(tmp_path / "out"), tmp_path / "pictures"
    size = ["--height", "16", "--width", "16", "--max_steps", "2", "--precision", "float32"]
    assert main(["jax", "compile", "--checkpoint", str(micro_folder()), *size, "--out", out]) == 0
    assert "diffusion_model.segment: traced in" in capfd.readouterr().out
    call = [
        "jax",
        "generate",
        "a cat",
        "--export_dir",
        out,
        "--out",
        str(pictures),
        "--num_steps",
        "2",
    ]
    assert main([*call, "--num_steps", "2", "--seed", "5"]) == 0
    assert (pictures / "5.png").is_file()


def test_compile_takes_several_shapes(monkeypatch, tmp_path):
    given = []

    def compile_nothing(checkpoint, fixed, *_, **__):
        given.append(fixed)
        raise ExportError("compiled nothing")

    monkeypatch.setattr(compiling, "compile_pipeline", compile_nothing)
    flags = ["--sizes", "16x16,16x24", "--batch_sizes", "2,1", "--out", str(tmp_path / "out")]
    assert main(["jax", "compile", "--checkpoint", str(micro_folder()), *flags]) == 1
    assert given[0].sizes == SIZES and given[0].batch_sizes == (2, 1)


SLICE = ["--sweep", "--topology", "v5e:2x2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "x", "--sweep"], "Give --out for a compiled pipeline, or --sweep"),
        ([], "Give --out for a compiled pipeline, or --sweep"),
        (
            ["--out", "x", "--batch_size", "1,2"],
            "are for --sweep; one pipeline",
        ),
        (["--sweep", "--batch_sizes", "1,2"], "--batch_sizes and --sizes are for a compiled pip"),
        (["--sweep", "--sizes", "64x64"], "--batch_sizes and --sizes are for a compiled pipeline"),
        (["--out", "x", "--batch_size", "1", "--batch_sizes", "2"], "--batch_size or --batch_siz"),
        (["--out", "x", "--sizes", "64x60"], "The width is a positive multiple of 8"),
        (["--out", "x", "--sizes", "64x64", "--width", "64"], "Give --height and --width, or --s"),
        (["--out", "x", "--platform", "tpu"], "--platform=tpu takes a --topology"),
        (["--out", "x", "--platform", "cpu", "--topology", "v5e:2x2"], "the others take none"),
        (["--out", "x", "--topology", "v1:2x2"], "one of v5e, v5p, v6e, and a shape"),
        (["--sweep", "--model_axis", "3"], "divides the number of devices"),
        (["--sweep", "--height", "60"], "The height is a positive multiple of 8"),
        ([*SLICE, "--num_steps", "101"], "--num_steps is 1…100. Received: 101"),
        ([*SLICE, "--num_steps", "0"], "--num_steps is 1…100. Received: 0"),
        (
            ["--sweep", "--topology", "v5e:2x2,v5e:2x4", "--batch_size", "4,8"],
            "The batch is divided evenly among 8 devices. Received: batch_size=4",
        ),
        (["--sweep", "--ema"], "--ema is for a checkpoint: give --checkpoint."),
        (["--sweep", "--without", "text_encoder_3"], "text_encoder_3 for the family sd1"),
        (["--sweep", "--max_sequence_length", "9"], "Received: 9 for the family sd1"),
        (["--sweep", "--embedding", "x"], "--embedding is for a checkpoint: give --checkpoint."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags(capsys, flags, message):
    assert main(["jax", "compile", "--family", "sd1", *flags]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert "devices" not in said.out, "something was begun"


# Slices of TPUs


def test_a_slice_elsewhere(tmp_path, capfd):
    """The TPU's own compiler; its memory figures against the counted weights."""
    make_random(micro.WIDE_CONFIG, tmp_path / "checkpoint")
    flags = ["--topology", "v5e:2x2", "--max_steps", "20", "--sweep"]
    flags += ["--json", str(tmp_path / "figures.json")]
    assert main(["jax", "compile", "--checkpoint", str(tmp_path / "checkpoint"), *flags]) == 0
    assert "| v5e:2x2, 4 |" in capfd.readouterr().out
    (result,) = json.loads((tmp_path / "figures.json").read_text())
    segment = result["programs"]["diffusion_model.segment"]
    unet = open_checkpoint(tmp_path / "checkpoint").tensors("unet").values()
    tables = segment["weight_bytes"] - 2 * sum(tensor.size for tensor in unet)
    assert 0 < tables < 2e6
    assert segment["argument_bytes"] == pytest.approx(segment["weight_bytes"], rel=0.05)
    assert segment["flops"] > 1e7


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_what_a_chip_cannot_hold(topology):
    mesh = make_mesh(chips.slice_devices(topology))
    shape = jax.ShapeDtypeStruct((2**18, 2**18), "float32", sharding=NamedSharding(mesh, P()))
    lowered = jax.jit(lambda matrix: matrix @ matrix).lower(shape)
    with pytest.raises(chips.DoesNotFitError, match="Give each chip fewer examples") as refused:
        chips.compile_lowered(lowered)
    available = re.search(r"exceeds available HBM \(([\d.]+)G\)", str(refused.value))[1]
    assert chip_of(topology).memory_bytes == float(available) * 2**30


def test_a_batch_that_does_not_fit(tmp_path, capfd, monkeypatch):
    """Its row says so, and the others have theirs."""
    compile_endpoint = compiling.compile_endpoint

    def up_to_four(component, endpoint, mesh, shape):
        if shape.batch_size > 4 and endpoint == "segment":
            raise chips.DoesNotFitError("Ran out of memory.")
        return compile_endpoint(component, endpoint, mesh, shape)

    monkeypatch.setattr(compiling, "compile_endpoint", up_to_four)
    make_random(micro.CONFIG, tmp_path / "checkpoint")
    flags = ["--checkpoint", str(tmp_path / "checkpoint"), "--topology", "v5e:2x2"]
    assert main(["jax", "compile", *flags, "--batch_size", "8,4", "--sweep"]) == 0
    said = capfd.readouterr().out
    assert "diffusion_model.segment: Ran out of memory." in said
    assert "| v5e:2x2, 8 | – | – | does not fit |" in said
    assert re.search(r"\| v5e:2x2, 4 \| \d", said)
    out = tmp_path / "exports"
    assert main(["jax", "compile", *flags, "--batch_size", "8", "--out", str(out)]) == 1
    assert "Ran out of memory." in capfd.readouterr().err
    assert not out.exists()


def test_a_shape_that_no_slice_has(capsys):
    assert main(["jax", "compile", "--family", "sd1", "--topology", "v5e:3x5x7", "--sweep"]) == 1
    assert "The topology v5e:3x5x7 cannot be described" in capsys.readouterr().err


def report(weights, temporary, flops, accessed):
    return {
        "weight_bytes": weights,
        "argument_bytes": weights + 10,
        "output_bytes": 5,
        "temporary_bytes": temporary,
        "code_bytes": 1,
        "flops": flops,
        "accessed_bytes": accessed,
    }


def test_the_outlook():
    """Weights of every component, the largest temporaries, the loop's body times its calls."""
    chip = chip_of("v5e:2x2")
    assert chip is CHIPS["v5e"]
    reports = {
        "text_encoder.encode": report(1e9, 1e8, 0.0, chip.bandwidth),  # bound by memory: 1 s
        "diffusion_model.segment": report(8e9, 4e9, chip.flops, 0.0),  # by arithmetic: 1 s a step
        "decoder.serving_default": report(2e9, 3e9, chip.flops / 2, chip.bandwidth / 4),
    }
    found = outlook(reports, chip, runs_of(calls=20))
    assert found.weight_bytes == 11e9
    assert found.memory_bytes == 11e9 + 4e9 + 15 + 3
    assert found.fits(chip)
    reports["decoder.serving_default"] = report(2e9, 6e9, 0.0, 0.0)
    larger = outlook(reports, chip, runs_of(calls=20))
    assert not larger.fits(chip)
    assert row("x", larger, chip, made=4, chips=4)[3] == "17.00 of 16.9, does not fit"
    assert found.seconds == pytest.approx(21.5)
    assert row("x", found, chip, made=4, chips=4)[-1] == "0.186"


EDITS = replace(
    micro.CONFIG, denoiser=replace(micro.CONFIG.denoiser, in_channels=8), latent_inputs="image"
).check()
MEMORY = ["train", "memory", "--topology", "v5e:2x2", "--batch_size", "8"]


@pytest.mark.long
def test_what_training_would_hold(monkeypatch, capfd):
    """In place of the slice, whose compiler takes minutes for a gradient, the devices here."""
    seen, held = [], memory.compile_update
    monkeypatch.setattr(
        memory, "compile_update", lambda *given: seen.append(held(*given)) or seen[-1]
    )
    monkeypatch.setattr(chips, "slice_devices", lambda topology: jax.devices())
    monkeypatch.setitem(FAMILIES, "instruct-pix2pix", EDITS)
    assert main([*MEMORY, "--family", "instruct-pix2pix"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "instruct-pix2pix, 16 px, 8 examples on v5e:2x2, mixed_bfloat16" in " ".join(lines)
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| kept", "| computed again"]

    kept, again = seen
    weights = sum(t.size for t in open_checkpoint(micro_folder()).tensors("unet").values())
    weights += 9 * 4 * EDITS.denoiser.channels[0]  # for the picture before
    weights = 4 * (3 * weights + 1)  # two moments; the count of updates
    assert kept["weight_bytes"] == again["weight_bytes"] == weights
    assert 0 < kept["temporary_bytes"] < 1e8
    assert 1.1 < again["flops"] / kept["flops"] < 1.5


def test_an_update_of_sdxl_is_given_its_conditions(monkeypatch):
    monkeypatch.setattr(chips, "compile_lowered", lambda lowered: lowered.as_text())
    monkeypatch.setattr(memory, "figures_of", lambda code: {"arguments": code.split("->")[0]})
    found = memory.compile_update(micro.XL_CONFIG, 16, micro.SETTINGS, jax.devices()[:1])
    for shape in ("4x77x32xf32", "4x8xf32", "4x6xf32"):  # context, pooled, time_ids
        assert f"tensor<{shape}>" in found["arguments"]


def test_sd3s_context_is_as_long_as_its_texts(monkeypatch, capfd):
    seen = []
    monkeypatch.setattr(memory, "table", lambda config, *given: seen.append(config))
    sd3 = [*MEMORY, "--family", "sd3.5-medium"]
    for flags in ([], ["--max_sequence_length", "77"], ["--without", "text_encoder_3"]):
        assert main([*sd3, *flags]) == 0
    assert [conditioner_of(config).length(config, 1) for config in seen] == [333, 154, 78]
    assert main([*MEMORY, "--family", "sd1", "--max_sequence_length", "77"]) == 1
    assert "--max_sequence_length is for SD3 and Flux" in capfd.readouterr().err


def test_training_that_does_not_fit(monkeypatch, capfd):
    def only_again(config, size, settings, devices):
        if not settings.gradient_checkpointing:
            raise chips.DoesNotFitError("Ran out of memory.")
        return {**report(1e9, 1e9, 1e12, 1e9), "compile_seconds": 1.0}

    monkeypatch.setattr(memory, "compile_update", only_again)
    assert main([*MEMORY, "--family", "instruct-pix2pix"]) == 0
    said = capfd.readouterr().out
    assert "kept: Ran out of memory." in said
    assert "| kept | – | – | does not fit |" in said
    assert "| computed again | 1.00 | 1.00 | 2.00 of 16.9 |" in said
    # 4 bytes of CLIP-L's parameters, as published.
    assert f"take {4 * 123_060_480 / 1e9:.2f} GB more on each chip" in said


def test_t5_is_counted_in_bfloat16():
    """Beside CLIP-L and CLIP-G with their projections; sizes as published."""
    clips, t5 = 123_650_304 + 694_659_840, 4_762_310_656
    assert memory.text_bytes(FAMILIES["sd3.5-medium"], "mixed_bfloat16") == 4 * clips + 2 * t5
    assert memory.text_bytes(FAMILIES["sd3.5-medium"], "float32") == 4 * (clips + t5)


def test_what_is_trained_is_estimated(capsys):
    trained = ["sd1", "sd2-base", "sd2-v", "sdxl-base", "instruct-pix2pix"]
    trained += ["sd3-medium", "sd3.5-medium", "sd3.5-large"]
    parser = argparse.ArgumentParser()
    train_memory.add_arguments(parser)
    assert next(a.choices for a in parser._actions if a.dest == "family") == trained


@pytest.mark.parametrize("command", [jax_compile, jax_generate, train_memory])
def test_every_flag_has_help(command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert [action.option_strings for action in parser._actions if not action.help] == []


def test_a_row_has_three_digits():
    figures = report(1e9, 14e9, 0.4e12, 12.345e9)
    found = outlook({"update": figures}, CHIPS["v5e"], {"update": 1})
    cells = row("kept", found, CHIPS["v5e"], made=8, chips=4)
    assert cells[:4] == ["kept", "1.00", "14.00", "15.00 of 16.9"]
    assert cells[4:] == ["0.200", "6.17", "0.0154", "518"]
    unknown = replace(found, flops=math.nan, accessed_bytes=2e12, seconds=math.nan)
    assert row("x", unknown, CHIPS["v5e"], 1, 1)[4:] == ["–", "2000", "–", "–"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--family", "sd1", "--topology", "v1:2x2"], "one of v5e, v5p, v6e, and a shape"),
        (["--family", "sd1", "--batch_size", "6"], "divided evenly among 4 devices"),
        (["--family", "sd1", "--accumulate", "4"], "parts of a batch is divided evenly among 4 d"),
        (["--family", "sd1", "--accumulate", "3"], "--accumulate must divide --batch_size"),
        (["--family", "sd1", "--size", "100"], "--size is a positive multiple of 8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_memory_refuses(capsys, flags, message):
    assert main([*MEMORY, *flags]) == 1
    assert message in capsys.readouterr().err
