"""What an export holds, who can run it, and what is refused."""

import dataclasses
import functools
import json
import operator
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from sd_tf.components import COMPONENTS
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES
from sd_tf.export import embedded
from sd_tf.runtime.manifest import FILE_NAME, ExportError, Manifest, file_hash
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.shapes import Shapes
from sd_tf.sampling.tables import steps
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.weights import open_checkpoint
from tests import commands
from tests.exports import (
    micro_export,
    micro_folder,
    pipeline_of,
    shared_export,
    small_export,
    small_folder,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def exported():
    return shared_export()


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


def load(folder, component):
    return tf.saved_model.load(str(folder / component / "1"))


# What is in it


def test_manifest(exported):
    manifest = Manifest.read(exported)
    assert manifest.family == "sd1" and manifest.shapes == Shapes(((64, 64),), (2,), 8, 4)
    assert tuple(manifest.components) == COMPONENTS
    assert manifest.schedulers["pndm"].calls == [
        1,
        *range(3, 10),
    ]  # one more call than steps, from 2 on
    assert manifest.schedulers["euler"].calls == list(range(1, 9))
    unet = manifest.checkpoint["diffusion_model"]
    assert unet["name"] == small_folder().name and unet["format"] == "diffusers folder"
    file = small_folder() / "unet" / "diffusion_pytorch_model.safetensors"
    assert unet["sha256"] == {"unet": {file.name: file_hash(file)}}
    assert str(small_folder().parent) not in (exported / FILE_NAME).read_text()
    manifest.check_files(exported)


def test_the_original_client_runs_unchanged(exported):
    """Names, shapes and calls of the benchmark that this project answers to."""
    loaded = [load(exported, name) for name in COMPONENTS[:3]]
    text_encoder, diffusion_model, decoder = (part.signatures["serving_default"] for part in loaded)
    tokens = tf.constant(ClipTokenizer.clip()("a lighthouse"))
    encoded = text_encoder(tokens=tokens)
    assert encoded["context"].shape == encoded["unconditional_context"].shape == (2, 77, 64)

    @tf.function(jit_compile=True)
    def denoise(context, unconditional_context, num_steps, scale):
        return diffusion_model(
            context=context,
            unconditional_context=unconditional_context,
            num_steps=num_steps,
            unconditional_guidance_scale=scale,
        )

    @tf.function(jit_compile=True)
    def decode(latent):
        return decoder(latent=latent)

    latent = denoise(
        encoded["context"], encoded["unconditional_context"], tf.constant(4), tf.constant(7.5)
    )["latent"]
    images = decode(latent)["generated_images"]
    assert images.dtype == tf.uint8 and images.shape == (2, 64, 64, 3)
    assert np.abs(latent[0] - latent[1]).max() > 0.1, "each image of the batch has its own seed"
    seeded = pipeline_of(exported, jit_compile=True)(["a lighthouse"] * 2, num_steps=4, seed=0)
    assert np.abs(images.numpy().astype(int) - seeded.images).max() <= 1


def test_signatures_agree(exported):
    """All ways to the same picture: seeded, from noise, in segments; compiled and plain."""
    signatures = load(exported, "diffusion_model").signatures
    rng = np.random.default_rng(0)
    context = rng.standard_normal((2, 2, 77, 64)).astype("float32")
    call = {
        "context": tf.constant(context[0]),
        "unconditional_context": tf.constant(context[1]),
        "num_steps": tf.constant(5),
        "unconditional_guidance_scale": tf.constant(4.0),
    }
    seeds = tf.constant([11, 12])
    noise = signatures["noise"](seed=seeds)["noise"]
    for index, name in enumerate(Manifest.read(exported).samplers):
        scheduler = tf.constant(index)
        whole = signatures["seeded"](**call, seed=seeds, scheduler=scheduler)["latent"]
        plain = signatures["plain_seeded"](**call, seed=seeds, scheduler=scheduler)["latent"]
        scale = np.abs(whole).max()
        assert np.isfinite(scale)
        assert np.abs(whole - plain).max() <= 1e-3 * scale, name
        state = signatures["begin"](noise=noise, scheduler=scheduler, num_steps=call["num_steps"])
        state["history"] = tf.zeros((5, 2, 8, 8, 4))
        for start, stop in ((0, 2), (2, 3), (3, 100)):
            bounds = {"first": 0, "start": start, "stop": stop}
            state = signatures["segment"](
                **call,
                **state,
                **{key: tf.constant(value) for key, value in bounds.items()},
                seed=seeds,
                scheduler=scheduler,
            )
        assert np.abs(state["latent"] - whole).max() <= 1e-3 * scale, name
        if not any(part in name for part in ("ancestral", "sde", "lcm")):
            again = signatures["from_noise"](**call, noise=noise, scheduler=scheduler)["latent"]
            assert np.abs(again - whole).max() <= 1e-3 * scale, name


def test_png_signature(exported):
    signatures = load(exported, "decoder").signatures
    latent = tf.random.normal((2, 8, 8, 4), seed=1)
    pictures = signatures["serving_default"](latent=latent)["generated_images"]
    for name in ("png", "plain_png"):
        encoded = signatures[name](latent=latent)["image_bytes"]
        decoded = tf.stack([tf.io.decode_png(one) for one in encoded])
        assert np.abs(decoded.numpy().astype(int) - pictures.numpy()).max() <= 1


def test_steps_outside_the_table_are_refused_in_the_graph(exported):
    signatures = load(exported, "diffusion_model").signatures
    inputs = {"noise": tf.zeros((2, 8, 8, 4))}
    for num_steps, scheduler, message in (
        (9, 0, "num_steps must be 1…8"),
        (0, 0, "num_steps must be 1…8"),
        (4, 21, "scheduler must be 0…20"),
        (4, -1, "scheduler must be 0…20"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            signatures["begin"](
                **inputs, num_steps=tf.constant(num_steps), scheduler=tf.constant(scheduler)
            )
    inputs |= {"image_latent": inputs["noise"], "scheduler": tf.constant(0)}
    for start, message in (
        (-1, "start must not be before first"),
        (4, "below the number of model calls"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            signatures["begin_image"](**inputs, num_steps=tf.constant(4), start=tf.constant(start))


CALLS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from sd_tf.runtime.pipeline import Pipeline

def compiled():
    return len(list(Path(sys.argv[2]).rglob("*.pb")))

pipe = Pipeline.load(sys.argv[1], compile_cache=sys.argv[2])
assert compiled() == 0
pipe.warm_up()
first = compiled()
for name in pipe.manifest.samplers:
    pipe(["a", "b"], num_steps=3, scheduler=name, seed=1)
for changes in ({"num_steps": 8}, {"guidance_scale": 1.0}, {"seed": 7}, {"negative_prompt": "x"},
                {"callback": lambda done, calls, latents: None}):
    pipe(["another prompt", "c"], **{"num_steps": 2, **changes})
print(first, compiled())
"""


@pytest.mark.long
def test_nothing_compiles_again(exported, tmp_path):
    """XLA leaves one file in its cache for each compilation: the loop's and the decoder's."""
    result = subprocess.run(
        [sys.executable, "-c", CALLS, str(exported), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2", "2"]


def test_saved_model_cli(exported, tmp_path):
    calls, inputs = [], []
    for component, tensors in (
        ("text_encoder", {"tokens": np.full((1, 77), 49407, "int32")}),
        ("decoder", {"latent": np.zeros((2, 8, 8, 4), "float32")}),
        (
            "diffusion_model",
            {
                "context": np.zeros((2, 77, 64), "float32"),
                "unconditional_context": np.zeros((2, 77, 64), "float32"),
                "num_steps": np.int32(2),
                "unconditional_guidance_scale": np.float32(7.5),
            },
        ),
    ):
        folder = str(exported / component / "1")
        calls.append(["show", "--dir", folder, "--all"])
        files = []
        for name, value in tensors.items():
            np.save(tmp_path / f"{name}.npy", value)
            files.append(f"{name}={tmp_path / name}.npy")
        signature = "serving_default" if component == "text_encoder" else "plain_serving_default"
        calls.append(
            ["run", "--dir", folder, "--tag_set", "serve", "--signature_def", signature]
            + ["--inputs", ";".join(files), "--outdir", str(tmp_path), "--overwrite"]
        )
        inputs.append(tensors)
    results = commands.run(Path(sys.executable).parent / "saved_model_cli", *calls)
    for result in results:
        assert result.returncode == 0, result.stderr
    for shown, tensors in zip(results[::2], inputs, strict=True):
        assert "signature_def['serving_default']" in shown.stdout
        for name in tensors:
            assert f"inputs['{name}']" in shown.stdout
    assert np.load(tmp_path / "latent.npy").shape == (2, 8, 8, 4)
    assert np.load(tmp_path / "generated_images.npy").dtype == np.uint8


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 100}, r"The height is a positive multiple of 8. Received: 100"),
        ({"width": 0}, r"The width is a positive multiple of 8. Received: 0"),
        ({"batch_size": 0}, r"The batch size is at least 1. Received: 0"),
        ({"prompt_chunks": 0}, r"A prompt has at least 1 chunk. Received: 0"),
        ({"max_steps": 0}, r"max_steps is 1…250. Received: 0"),
        ({"max_steps": 2000}, r"max_steps is 1…250. Received: 2000"),
        ({"guidance_rescale": 2.0}, r"between 0 and 1. Received: 2.0"),
        (
            {"guidance_rescale": 0.7, "guidance": "none"},
            r"`guidance_rescale` must be 0 without guidance.*Received: 0.7",
        ),
        ({"guidance_rescale": float("nan")}, r"between 0 and 1. Received: nan"),
        ({"components": ("unet",)}, r"Components are text_encoder, .*Received: unet"),
        ({"components": ()}, r"At least one component .*Received: none"),
        ({"precision": "int8"}, r"precision is one of float32, .*Received: int8"),
    ],
)
def test_options(tmp_path, options, message):
    with pytest.raises(ExportError, match=message):
        small_export(tmp_path / "export", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_denoiser_that_is_told_the_guidance_scale():
    config = FAMILIES["sd1"]
    config = dataclasses.replace(
        config, denoiser=dataclasses.replace(config.denoiser, guidance_embed_dim=256)
    )
    assert geometry_of(config, Fixed(guidance="none")).guidance == "none"
    with pytest.raises(ExportError, match=r"LCM.*`guidance` must be none.*classifier_free"):
        geometry_of(config, Fixed())


def test_another_checkpoint_in_the_default_folder(tmp_path, monkeypatch):
    """It is drawn with."""
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    shutil.copytree(micro_export(), tmp_path / "tiny")
    said = []
    assert embedded.embedded_export("tiny", said.append) == tmp_path / "tiny"
    name = Manifest.read(micro_export()).checkpoint["diffusion_model"]["name"]
    assert said == [f"{tmp_path / 'tiny'} is an export of {name}"]
    with pytest.raises(ExportError, match=r"checkpoints are tiny, .*exports others. Received: 'a'"):
        embedded.embedded_export("a", said.append)


def test_damaged_exports(copy):
    path = copy / "pipeline.json"
    manifest = json.loads(path.read_text())

    def refused(match):
        with pytest.raises(ExportError, match=match):
            Pipeline.load(copy)

    for changes, message in (
        ({"format_version": 1}, r"format version 1, this sd_tf reads 11: use the sd_tf"),
        ({"extra": 1}, r"missing nothing, unknown \['extra'\]"),
    ):
        path.write_text(json.dumps({**manifest, **changes}))
        refused(message)
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != "schedulers"}))
    refused(r"missing \['schedulers'\], unknown nothing")
    for content in ("{", "[]", "3"):
        path.write_text(content)
        refused(r"pipeline\.json cannot be read: .*\. Export again")
    path.unlink()
    refused(r"is not an export: it has no pipeline\.json")
    path.write_text(json.dumps(manifest))

    for component in ("text_encoder", "diffusion_model", "decoder"):
        folder = copy / component / "1"
        for file in (folder / "saved_model.pb", folder / "variables/variables.data-00000-of-00001"):
            content = file.read_bytes()
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
            refused(rf"{file.name} of {component} is not the file that was exported")
            file.write_bytes(content[:-1])
            refused(rf"{file.name} of {component} has {len(content) - 1} bytes, it was exported")
            file.unlink()
            refused(rf"{file.name} of {component} is missing")
            file.write_bytes(content)
    assert Pipeline.load(copy).manifest.family == "sd1"


def test_format_2_loads_and_draws(exported, copy):
    """An export of an older format: schedulers by their place, and one checkpoint, by its path."""
    pictures = pipeline_of(exported)("a cat", num_steps=2, seed=1).images
    path = copy / "pipeline.json"
    manifest = json.loads(path.read_text())
    schedulers = manifest.pop("schedulers")
    older = {"format_version": 2, "calls": {k: v["calls"] for k, v in schedulers.items()}}
    manifest = {**manifest, **older}
    for name in ("history", "shift_factor", "shapes", "prompt_chunks"):
        del manifest[name]
    manifest |= {"batch_size": 2, "height": 64, "width": 64, "latent_shape": [8, 8, 4]}
    origins = [part.pop("checkpoint") for part in manifest["components"].values()]
    manifest["checkpoint"] = {
        "source": f"/home/me/{origins[0]['name']}",
        "format": origins[0]["format"],
        "sha256": functools.reduce(operator.or_, (origin["sha256"] for origin in origins)),
    }
    path.write_text(json.dumps(manifest))
    pipe = Pipeline.load(copy, jit_compile=False)
    assert pipe.manifest == Manifest.read(exported)
    assert np.array_equal(pipe("a cat", num_steps=2, seed=1).images, pictures)
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != "calls"}))
    with pytest.raises(ExportError, match=r"missing \['schedulers'\]"):
        Pipeline.load(copy)


def test_large_variables_are_checked_by_tensorflow(copy, monkeypatch):
    """Files that are too large to hash at every start: TensorFlow compares their checksums."""
    manifest = json.loads((copy / "pipeline.json").read_text())
    data = "diffusion_model/1/variables/variables.data-00000-of-00001"
    del manifest["components"]["diffusion_model"]["files"][data]["sha256"]
    (copy / "pipeline.json").write_text(json.dumps(manifest))
    content = bytearray((copy / data).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / data).write_bytes(content)
    with pytest.raises(ExportError, match=r"diffusion_model/1 cannot be loaded: .*[Cc]hecksum"):
        Pipeline.load(copy)


def test_command(tmp_path):
    """The command as a user gives it, and with wrong flags."""
    target = tmp_path / "export"
    refused = (
        ([f"--output_dir={target}"], "exists. Choose another --output_dir"),
        (["--checkpoint=/nowhere"], "No such file or folder: /nowhere"),
        (["--checkpoint=model.ckpt"], "is a pickle"),
        ([f"--output_dir={tmp_path / 'x'}", "--height=65"], "multiple of 4. Received: 65"),
        (["--precision=int4"], "value should be one of <float32|bfloat16|float16>"),
        (["tiny"], "Unknown arguments: tiny"),
    )
    result, *results = commands.run(
        ROOT / "serialize_savedmodels.py",
        [f"--checkpoint={micro_folder()}", f"--output_dir={target}", "--height=16", "--width=24"]
        + ["--max_steps=3", "--verify=fast"],
        *(flags for flags, _ in refused),
    )
    assert result.returncode == 0, result.stderr
    assert "decoder: done in" in result.stdout and "agrees: saved_model" in result.stdout
    assert "16x24 px in batches of 1, float32, up to 3 steps" in result.stdout
    manifest = Manifest.read(target)
    assert manifest.shapes.latent((16, 24)) == (8, 12, 4)
    for name, figures in manifest.verification.items():
        assert figures["level"] == "fast"
        assert figures["saved_model"]["psnr_db"] >= 60, name
    for (_, message), result in zip(refused, results, strict=True):
        assert result.returncode != 0
        assert message in result.stderr + result.stdout
        assert "Traceback" not in result.stderr


def test_every_step_count_of_every_sampler_is_in_the_graph(exported):
    """The rows that the graph gathers are those that NumPy made."""
    schedule = open_checkpoint(small_folder()).config.schedule
    manifest = Manifest.read(exported)
    for name, scheduler in manifest.schedulers.items():
        assert scheduler.calls == [steps(schedule, name, n).calls for n in range(1, 9)]
