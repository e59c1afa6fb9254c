"""A transformer's export wherever an export is used: verified, compiled, served, in batches."""

import base64
import functools
import io
import json
import urllib.request
from dataclasses import replace

import diffusers
import numpy as np
import pytest
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.config.rewrites import REWRITES
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.serving.client.client import Client
from sd_tf.serving.tf_serving.predict import ModelServer, load
from sd_tf.weights import open_checkpoint
from tests import peer_transformers
from tests.fronts import running_front
from tests.peer_pipelines import channels_first, check_pictures, psnr
from tests.serving_server import grpc_server

LENGTH = 32
SIZE = {"height": 48, "width": 64}
PROMPT = "a red bicycle against a wall"
CALL = {"num_steps": 2, "guidance_scale": 4.0, "seed": 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function: name → a random checkpoint's folder, saved by diffusers."""

    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        peer_transformers.random_pipeline(name).save_pretrained(folder)
        return folder

    return made


def opened(folder, **opening):
    return open_checkpoint(folder, max_sequence_length=LENGTH, **opening)


@pytest.fixture(scope="module")
def exported(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "flux-dev"
    options = ExportOptions(**SIZE, max_steps=4, verify="fast", disabled_rewrites=REWRITES)
    export(opened(folders("flux-dev")), folder, options)
    return folder


@pytest.fixture(scope="module")
def pipe(exported):
    return Pipeline.load(exported, jit_compile=False)


def test_verified(exported):
    """The plain signatures agree with the models as they are written."""
    manifest = Manifest.read(exported)
    for component, figures in manifest.verification.items():
        assert figures["saved_model"]["psnr_db"] >= 80, component
    assert manifest.further_scales == ("true_guidance_scale",)
    assert manifest.suited == {"num_steps": 28, "guidance_scale": 3.5, "strength": 0.6}


@pytest.mark.long
def test_compiled_pictures(exported, pipe):
    """XLA's code draws what the plain form draws, with and without the further prediction."""
    compiled = Pipeline.load(exported)
    for negative, further in ((None, {}), ("green", {"true_guidance_scale": 2.0})):
        ours, theirs = (one(PROMPT, negative, **CALL, **further).images for one in (compiled, pipe))
        check_pictures(ours, theirs)


@pytest.mark.long
def test_bfloat16(folders, tmp_path, pipe):
    options = ExportOptions(**SIZE, max_steps=4, precision="bfloat16", verify="fast")
    export(opened(folders("flux-dev")), tmp_path / "narrow", options)
    narrow = Pipeline.load(tmp_path / "narrow", jit_compile=False)
    assert psnr(narrow(PROMPT, **CALL).images, pipe(PROMPT, **CALL).images) >= 30


@pytest.mark.long
def test_http(exported, pipe):
    """The application's front, and what its page would ask for."""
    with running_front(exported) as front:
        body = {"prompt": PROMPT, "negative_prompt": "green", "true_guidance_scale": 2, **CALL}
        request = urllib.request.Request(
            f"http://{front.http}/generate", json.dumps(body).encode(), method="POST"
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            [picture] = json.load(answer)["images"]
        drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["png"]))))
        with urllib.request.urlopen(f"http://{front.http}/about") as answer:
            asked = {field["name"]: field for field in json.load(answer)["fields"]}
    assert {"true_guidance_scale", "num_steps"} <= asked.keys()
    assert "skip_layer_guidance_scale" not in asked and "prompt_syntax" not in asked
    assert asked["num_steps"]["default"] == 4, "28, but the export has only 4"
    theirs = pipe(PROMPT, "green", true_guidance_scale=2, **CALL).images[0]
    assert np.abs(drawn.astype(int) - theirs).max() <= 1


@pytest.mark.long
def test_tensorflow_serving(exported, tmp_path, pipe):
    """The folder with its warm-up requests, and the client."""
    out = ["--out", str(tmp_path / "serving"), "--device", "cpu"]
    assert main(["serve", "tf_serving", "--export_dir", str(exported), *out]) == 0
    models = load(exported, Manifest.read(exported).components)
    server = ModelServer({name: {1: servable} for name, servable in models.items()})
    with (
        grpc_server(server) as address,
        Client(f"grpc://{address}", exported, jit_compile=False) as client,
    ):
        drawn = client(PROMPT, **CALL).images
    check_pictures(drawn, pipe(PROMPT, **CALL).images, floor=60)


@pytest.mark.long
def test_text_to_image(folders, tmp_path):
    """Without a T5 the whole pipeline is one SavedModel."""
    options = ExportOptions(**SIZE, max_steps=4, verify="fast", text_to_image=True)
    manifest = export(opened(folders("sd3-without-t5")), tmp_path / "without", options)
    assert manifest.verification["text_to_image"]["saved_model"]["psnr_db"] >= 60


@pytest.fixture(scope="module")
def doubly_attending(folders, tmp_path_factory):
    """SD3.5's kind, saved in two sizes over one set of weights."""
    folder = tmp_path_factory.mktemp("export") / "sd3.5"
    sizes = ((48, 64), (64, 48))
    options = ExportOptions(sizes=sizes, max_steps=12, verify="fast", disabled_rewrites=REWRITES)
    export(opened(folders("sd3.5")), folder, options)
    return folder


@pytest.mark.parametrize("size", [(48, 64), pytest.param((64, 48), marks=pytest.mark.long)])
def test_dual_attention_in_several_sizes(folders, doubly_attending, size):
    """With skip-layer guidance, whose blocks are left out in the first calls but number 0."""
    pipe = Pipeline.load(doubly_attending, jit_compile=False)
    noise = np.random.default_rng(0).standard_normal((1, size[0] // 8, size[1] // 8, 16))
    shared = {"height": size[0], "width": size[1], "guidance_scale": 4.0}
    shared |= {"skip_layer_guidance_scale": 2.8}
    ours = pipe(PROMPT, noise=noise.astype("float32"), num_steps=12, **shared)
    theirs = diffusers.StableDiffusion3Pipeline.from_pretrained(folders("sd3.5"))
    theirs.set_progress_bar_config(disable=True)
    reference = theirs(
        PROMPT,
        latents=channels_first(noise.astype("float32")),
        num_inference_steps=12,
        skip_guidance_layers=[7, 8, 9],
        max_sequence_length=LENGTH,
        output_type="np",
        **shared,
    ).images
    check_pictures(ours.images, (255 * reference).round().astype("uint8"))


@pytest.mark.long
def test_batch(doubly_attending, tmp_path):
    """A job of two sizes on Ray draws what a pipeline draws."""
    sizes = {"wide": {"height": 48, "width": 64}, "high": {"height": 64, "width": 48}}
    rows = [{"id": name, "prompt": PROMPT, **size} for name, size in sizes.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    given = ["--export_dir", str(doubly_attending), "--prompts", str(tmp_path / "rows.jsonl")]
    given += ["--num_steps", "2", "--seed", "5", "--nojit_compile"]
    assert main(["serve", "batch", *given, "--out", str(tmp_path / "drawn")]) == 0
    pipe = Pipeline.load(doubly_attending, jit_compile=False)
    for number, (name, size) in enumerate(sizes.items()):
        drawn = np.asarray(Image.open(tmp_path / "drawn" / f"{name}.png"))
        theirs = pipe(PROMPT, num_steps=2, seed=5 + number, **size).images[0]
        assert np.abs(drawn.astype(int) - theirs).max() <= 1


def test_refusals(folders, tmp_path, pipe):
    checkpoint = opened(folders("sd3"))
    for changes, message in (
        ({"height": 40}, "The height is a positive multiple of 16. Received: 40"),
        ({"width": 208}, "The width is at most 192 for this checkpoint. Received: 208"),
        ({"prompt_chunks": 2}, "Prompts of several chunks are for SD1, SD2 and SDXL: `prompt_ch"),
        ({"text_to_image": True}, "for checkpoints whose text encoders are all CLIP"),
        ({"reuse": 2}, "Only a UNet has deep layers whose features later model calls can reuse"),
        ({"guidance_rescale": 0.5}, "for checkpoints that edit pictures or have a transformer"),
    ):
        with pytest.raises(ExportError, match=message):
            export(checkpoint, tmp_path, replace(ExportOptions(height=48, width=64), **changes))
    with pytest.raises(ExportError, match="text_encoder takes no weights: SD3's and Flux's do not"):
        pipe("a (cat:1.3)", prompt_syntax="weighted", **CALL)
