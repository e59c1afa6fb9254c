"""What an export holds, who can run it, and what is refused."""

import dataclasses
import errno
import functools
import json
import operator
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from sd_tf.checkpoints import make_random
from sd_tf.components import COMPONENTS
from sd_tf.components import build as assembling
from sd_tf.components.build import Component
from sd_tf.components.diffusion import DiffusionModel
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES, ScheduleConfig
from sd_tf.export import ExportOptions, bundles, embedded, export, verify
from sd_tf.files.publish import staging
from sd_tf.models.unet import UNet
from sd_tf.runtime.manifest import FILE_NAME, ExportError, Manifest, file_hash
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.shapes import Shapes
from sd_tf.sampling.packed import pack
from sd_tf.sampling.tables import steps
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.weights import open_checkpoint
from tests import commands, micro
from tests.exports import (
    micro_export,
    micro_folder,
    pipeline_of,
    replace_in_micro,
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


@pytest.fixture
def micro_copy(tmp_path):
    return shutil.copytree(micro_export(), tmp_path / "copy")


def test_replace_one_component(micro_copy):
    before = Manifest.read(micro_copy)
    checkpoint, size = open_checkpoint(micro_folder()), {"height": 16, "width": 16}
    options = {**size, "components": ("decoder",)}
    export(checkpoint, micro_copy, ExportOptions(batch_size=2, **options, verify="fast"))
    after = Manifest.read(micro_copy)
    after.check_files(micro_copy)
    assert after.max_steps == before.max_steps == 2 and after.schedulers == before.schedulers
    assert after.verification["decoder"]["level"] == "fast"
    assert after.verification["diffusion_model"] == before.verification["diffusion_model"]
    pipe = Pipeline.load(micro_copy, jit_compile=False)
    assert pipe("a", num_steps=1).images.shape == (1, 16, 16, 3)
    with pytest.raises(
        ExportError,
        match=r"same shapes: the export has 16x16 px in batches of 2\. Received: .* of 3",
    ):
        export(checkpoint, micro_copy, ExportOptions(batch_size=3, **options, verify="off"))


def replace_in(folder, components, checkpoint, report=None):
    size = {"batch_size": 2, "height": 16, "width": 16}
    options = ExportOptions(**size, max_steps=2, components=components, verify="off")
    return export(open_checkpoint(checkpoint), folder, options, report)


def tokenizer_of(folder):
    return {path.name: path.read_bytes() for path in (folder / "tokenizer").iterdir()}


def other_checkpoint(folder, text_encoder=None, **changes):
    """The micro checkpoint with some other fields, and weights in another file."""
    config = dataclasses.replace(micro.CONFIG, **changes)
    if text_encoder is not None:
        (name, part), *_ = config.text_encoders.items()
        changed = {name: dataclasses.replace(part, **text_encoder)}
        width = changed[name].hidden_size
        denoiser = dataclasses.replace(config.denoiser, context_dim=width)
        config = dataclasses.replace(config, text_encoders=changed, denoiser=denoiser)
    make_random(config, folder, "bfloat16")
    return folder


def test_each_component_keeps_what_belongs_to_it(micro_copy, tmp_path):
    """Tokenizer, family, prediction and hashes stay with the components that they serve."""
    schedule = dataclasses.replace(micro.CONFIG.schedule, prediction="v_prediction")
    other = other_checkpoint(tmp_path / "other", {"pad_token_id": 0}, schedule=schedule)
    before, words = Manifest.read(micro_copy), tokenizer_of(micro_copy)
    replace_in(micro_copy, ("decoder",), other)
    after = Manifest.read(micro_copy)
    assert tokenizer_of(micro_copy) == words
    assert (after.family, after.prediction) == (before.family, before.prediction)
    file = other / "vae" / "diffusion_pytorch_model.safetensors"
    assert after.checkpoint.pop("decoder") == {
        "name": "other",
        "format": "diffusers folder",
        "sha256": {"vae": {file.name: file_hash(file)}},
    }
    assert after.checkpoint | {"decoder": before.checkpoint["decoder"]} == before.checkpoint
    assert str(tmp_path) not in (micro_copy / FILE_NAME).read_text()


def test_a_text_encoder_brings_its_tokenizer_alone(micro_copy, tmp_path):
    vae = dataclasses.replace(micro.CONFIG.autoencoder, scaling_factor=0.5)
    other = other_checkpoint(tmp_path / "other", {"pad_token_id": 0}, autoencoder=vae)
    words = tokenizer_of(micro_copy)
    replace_in(micro_copy, ("text_encoder",), other)
    assert tokenizer_of(micro_copy) != words
    assert Manifest.read(micro_copy).scaling_factor == micro.CONFIG.autoencoder.scaling_factor


def test_a_component_that_does_not_fit(micro_copy, tmp_path):
    """It is refused before any work, and the export stays as it was."""
    vae = dataclasses.replace(micro.CONFIG.autoencoder, scaling_factor=0.5)
    other_checkpoint(tmp_path / "scaled", autoencoder=vae)
    other_checkpoint(tmp_path / "wide", {"hidden_size": 32})
    manifest = (micro_copy / FILE_NAME).read_bytes()
    for components, checkpoint, message in (
        (("decoder",), "scaled", r"the same scaling_factor: the export has 0.18215. Received: 0.5"),
        (("diffusion_model",), "scaled", r"the same scaling_factor: .* Received: 0.5"),
        (("text_encoder",), "wide", r"takes, {'context': \(2, 77, 16\)}: .*\(2, 77, 32\)}"),
        (("diffusion_model",), "wide", r"takes, {'context': \(2, 77, 32\)}: .*\(2, 77, 16\)}"),
    ):
        with pytest.raises(ExportError, match=message):
            replace_in(micro_copy, components, tmp_path / checkpoint, pytest.fail)
    assert (micro_copy / FILE_NAME).read_bytes() == manifest


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


def test_below_the_floor_nothing_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "psnr", lambda *_: 59.9)
    with pytest.raises(ExportError, match=r"does not compute .* to 59.9 dB, the floor .* 60 dB"):
        small_export(tmp_path / "export", verify="fast")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("owner", [(UNet, "call"), (DiffusionModel, "begin")])
def test_what_is_traced_is_compared_with_the_model_itself(tmp_path, monkeypatch, owner):
    """The reference shares no trace with the signatures, so a wrong trace of a model is found.

    It is wrong by little: the calls compared are ones whose output counts.
    """
    call = getattr(*owner)

    def wrong_in_graphs(self, *given, **more):
        output = call(self, *given, **more)
        if tf.executing_eagerly():
            return output
        return tf.nest.map_structure(lambda values: 1.02 * values, output)

    monkeypatch.setattr(*owner, wrong_in_graphs)
    with pytest.raises(ExportError, match="diffusion_model does not compute what the model comp"):
        replace_in_micro(
            tmp_path / "export",
            open_checkpoint(micro_folder()),
            ("diffusion_model",),
            verify="fast",
        )


def test_a_wrong_model_is_noticed(exported):
    """The comparison itself: other inputs than the reference's do not pass."""
    inputs = {"latent": np.random.default_rng(0).standard_normal((2, 8, 8, 4)).astype("float32")}
    signature = load(exported, "decoder").signatures["plain_serving_default"]
    reference = {"generated_images": signature(latent=tf.constant(inputs["latent"])).popitem()[1]}
    sample = verify.Sample("serving_default", inputs, reference)
    figures = verify.compare("decoder", exported, [sample], "full", "float32")
    assert figures["saved_model"]["psnr_db"] > 60
    inputs["latent"] *= 1.01
    with pytest.raises(ExportError, match=r"decoder does not compute what the model computes"):
        verify.compare("decoder", exported, [sample], "full", "float32")


def test_a_model_that_overflows_is_noticed():
    """By the model's own values, so the export is not blamed."""

    def overflows(latent):
        return {"generated_images": latent * np.float16(1e4)}

    inputs = {"latent": np.full((1, 8), 1e3, "float16")}
    message = (
        r"The model itself gives .* no numbers in float16 \(generated_images of serving_default"
    )
    with pytest.raises(ExportError, match=message):
        verify.sampled("serving_default", overflows, inputs, "float16")


def test_a_run_that_shows_what_reuse_costs_begins_with_noise():
    """In the range of its first call, not of the call that is compared."""
    tables = pack(FAMILIES["sdxl-base"].schedule, 20)
    number = tables.numbers["euler"]
    reuse = SimpleNamespace(record=SimpleNamespace(most=2))
    part = SimpleNamespace(tables={(64, 64): tables}, default_scheduler=number, reuse=reuse)
    compared = verify.segment_of(part, "full")
    noise = np.random.default_rng(0).standard_normal((1, 64, 64, 4)).astype("float32")
    sample = verify.Sample("segment", {**compared, "latent": noise}, {})
    runs = verify.reuse_runs(part, [sample], "full")
    scale = tables.scales[number, 19]
    spread = verify._spread(part, compared)
    assert 1.5 * spread < scale
    for every, run in runs.items():
        assert (run["num_steps"], run["reuse"], run["first"], run["start"]) == (20, every, 0, 0)
        np.testing.assert_allclose(run["latent"], noise / spread * scale, rtol=1e-3)


WEIGHTS = ("token_weights", "negative_token_weights")


def test_nan_in_one_output_is_noticed(exported):
    tokens = np.zeros((2, 77), "int32")
    inputs = {"tokens": tokens, "negative_tokens": tokens}
    inputs |= {name: np.ones((2, 77), "float32") for name in WEIGHTS}
    signature = load(exported, "text_encoder").signatures["weighted"]
    reference = {name: value.numpy() for name, value in signature(**inputs).items()}
    assert len(reference) > 1
    reference[sorted(reference)[-1]][0, 0] = np.nan
    sample = verify.Sample("weighted", inputs, reference)
    with pytest.raises(ExportError, match=r"text_encoder does not compute .* agrees to nan dB"):
        verify.compare("text_encoder", exported, [sample], "full", "float32")


def test_verified_run():
    """It is one that the default scheduler has, however few steps the export allows."""

    def chosen(schedule, max_steps):
        tables = pack(schedule, max_steps)
        number = tables.numbers[schedule.sampler]
        part = Component("diffusion_model", {}, None, (), {(64, 64): tables}, number)
        whole, early = verify.run_of(part, "full"), verify.segment_of(part, "full")
        for run in (whole, early):
            assert tables.calls[run["scheduler"], run["num_steps"] - 1] > 0
        bounds = (early[name] for name in ("num_steps", "first", "start", "stop"))
        return int(whole["num_steps"]), tuple(map(int, bounds))

    schedule = FAMILIES["sd1"].schedule
    flow = ScheduleConfig(kind="flow", prediction="flow", sampler="flow_euler")
    assert chosen(schedule, 50) == (2, (5, 1, 1, 3))
    assert chosen(flow, 50) == (2, (6, 1, 1, 3))
    assert chosen(schedule, 1) == chosen(flow, 1) == (1, (1, 0, 0, 2))


def test_skip_layer_guidance_is_compared(tmp_path):
    """Verification reaches the prediction without some blocks, and a call that does without it."""
    base = FAMILIES["sd3.5-medium"]
    narrow = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2}
    texts = {
        name: dataclasses.replace(encoder, **narrow, projection_dim=4)
        for name, encoder in base.clip_encoders.items()
    }
    sizes = {"num_layers": 3, "num_heads": 2, "head_dim": 8, "context_dim": 16, "pooled_dim": 8}
    config = dataclasses.replace(
        base,
        text_encoders=texts,
        denoiser=dataclasses.replace(base.denoiser, **sizes, max_patches=8, dual_layers=(0,)),
        autoencoder=dataclasses.replace(base.autoencoder, channels=(8, 16), norm_groups=4),
        zero_tokens=4,
    ).check()
    make_random(config, tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    def compared(skip_layers, max_steps, level):
        denoiser = dataclasses.replace(config.denoiser, skip_layers=skip_layers)
        own = dataclasses.replace(checkpoint.config, denoiser=denoiser)
        geometry = geometry_of(own, Fixed(height=16, width=16, max_steps=max_steps))
        tokens = assembling.empty_tokens_of(checkpoint)
        part = assembling.component(
            "diffusion_model", own, geometry, "float32", tokens, checkpoint.build
        )
        names = verify.endpoints_for("diffusion_model", own, geometry, level)
        endpoint = part.endpoints(geometry.shapes.first)[names[0]]
        specs = {name: tf.TensorSpec(s.shape, s.dtype) for name, s in endpoint.inputs.items()}
        inputs = verify.sample_inputs(specs, part, level)
        return names, inputs, verify.eager(endpoint.function, inputs)["latent"]

    for level, calls in (("fast", 1), ("full", 2)):
        names, inputs, latent = compared((1,), 8, level)
        assert names == ["segment", "noise", "begin", "begin_image"]
        assert (inputs["start"], inputs["stop"]) == (1, 1 + calls)
        assert 0.01 < 1 / inputs["num_steps"] < 0.2 < 2 / inputs["num_steps"]
        *_, broken = compared((2,), 8, level)
        assert psnr(latent, broken, np.ptp(latent)) < verify.FLOORS["float32"]
    _, inputs, _ = compared((1,), 5, "full")  # too few for a call that leaves out blocks
    assert (inputs["start"], inputs["stop"], inputs["num_steps"]) == (0, 2, 2)


def test_a_denoiser_that_is_told_the_guidance_scale():
    config = FAMILIES["sd1"]
    config = dataclasses.replace(
        config, denoiser=dataclasses.replace(config.denoiser, guidance_embed_dim=256)
    )
    assert geometry_of(config, Fixed(guidance="none")).guidance == "none"
    with pytest.raises(ExportError, match=r"LCM.*`guidance` must be none.*classifier_free"):
        geometry_of(config, Fixed())


def test_a_mount_point_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with (
        pytest.raises(ExportError, match=r"is a mount point.* folder below it as `output_dir`"),
        staging(tmp_path, True, FILE_NAME, ExportError),
    ):
        pytest.fail("it was let in")


def test_another_checkpoint_in_the_default_folder(tmp_path, monkeypatch):
    """It is drawn with, and by its own defaults."""
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    shutil.copytree(micro_export(), tmp_path / "tiny")
    said = []
    assert embedded.embedded_export("tiny", said.append) == (tmp_path / "tiny", {})
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


# Publishing


def test_existing_and_foreign_targets(tmp_path):
    target = tmp_path / "export"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    for options, message in (
        ({}, r"exists. Choose another `output_dir`, or set `overwrite`"),
        (
            {"overwrite": True},
            r"is not an export \(it has no pipeline\.json\), so `overwrite` leaves it alone",
        ),
    ):
        with pytest.raises(ExportError, match=message):
            small_export(target, **options)
    assert (target / "notes.txt").read_text() == "mine"


def staged(target, overwrite):
    return staging(target, overwrite, FILE_NAME, ExportError)


def write(folder, text):
    (folder / "pipeline.json").write_text(text)


def test_overwriting_is_one_step(tmp_path):
    target = tmp_path / "export"
    with staged(target, overwrite=False) as folder:
        write(folder, "one")
        assert not target.exists()
    with pytest.raises(RuntimeError), staged(target, overwrite=True) as folder:
        write(folder, "lost")
        raise RuntimeError
    assert (target / "pipeline.json").read_text() == "one"
    with staged(target, overwrite=True) as folder:
        write(folder, "two")
        assert (target / "pipeline.json").read_text() == "one"
    assert (target / "pipeline.json").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".export.lock", "export"]


def test_a_symbolic_link_stays_one(tmp_path):
    """The folder behind it is replaced, again and again; both names have one lock."""
    link, target = tmp_path / "link", tmp_path / "disk" / "export"
    link.symlink_to(target)
    for number in range(3):
        with staged(link, overwrite=number > 0) as folder:
            write(folder, str(number))
            with (
                pytest.raises(ExportError, match=r"Another export to .*disk/export is running"),
                staged(target, overwrite=True),
            ):
                pass
        assert link.is_symlink() and not target.is_symlink()
        assert (target / "pipeline.json").read_text() == str(number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert sorted(path.name for path in target.parent.iterdir()) == [".export.lock", "export"]


def test_two_exports_to_one_target(tmp_path):
    target = tmp_path / "export"
    with staged(target, overwrite=False) as folder:
        write(folder, "first")
        with pytest.raises(ExportError, match=r"Another export to .*export is running"):
            small_export(target)
    assert (target / "pipeline.json").read_text() == "first"


def test_unwritable_target(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=r"cannot be written to .*a part of its path is a file"):
        small_export(tmp_path / "file" / "export")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_space_left(small_disk):
    target = small_disk / "export"
    with pytest.raises(ExportError, match=r"no space is left on the device"):
        small_export(target)
    assert [path.name for path in small_disk.iterdir()] == [".export.lock"]


def test_no_space_left_for_values(small_disk, tmp_path):
    """TensorFlow's error is told as Python's, also where values are copied and merged."""
    values, model = tmp_path / "values", small_disk / "model"
    tf.raw_ops.SaveV2(
        prefix=str(values), tensor_names=["x"], shape_and_slices=[""], tensors=[tf.ones(2**20)]
    )
    with pytest.raises(OSError, match="No space left") as problem:
        bundles._copy(values, model, ["x"])
    assert problem.value.errno == errno.ENOSPC


@pytest.mark.long
def test_killed_at_random_moments():
    """-9 at 10 moments of exports: the target is absent or complete, and the next run succeeds.

    CONTRIBUTING.md has the command for 100 kills of the embedded checkpoint's exports.
    """
    size = ["--height=16", "--width=16", "--max_steps=2", "--verify=off"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.kill_exports", "--kills=10", "--whole_every=5", "--fork"]
        + ["--", f"--checkpoint={micro_folder()}", *size],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) >= 5, result.stdout


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
