"""Whole pictures of SD3, SD3.5 and Flux, against diffusers' pipelines, on both backends."""

import diffusers
import keras
import numpy as np
import pytest

from tests import peer_transformers
from tests.peer_pipelines import (
    NEGATIVE,
    PROMPTS,
    Pair,
    channels_first,
    check_pictures,
    drawer,
    pin_noise,
    psnr,
)

pytestmark = pytest.mark.backend

LENGTH = 32  # T5's tokens
SIZES = ((64, 96), (48, 64))
NAMES = ("sd3", "sd3-without-t5", "sd3.5", "flux-schnell", "flux-dev")
SKIPPED = [7, 8, 9]  # blocks


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    pipeline = peer_transformers.random_pipeline(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(folder / "checkpoint")
    pipeline.set_progress_bar_config(disable=True)
    ours = drawer(folder, {"max_sequence_length": LENGTH}, sizes=SIZES)
    return Pair(pipeline, ours)


def of(*names):
    """On JAX those that differ most: the others are parts of their programs."""
    if keras.backend.backend() == "jax":
        names = [name for name in names if name in ("sd3.5", "flux-dev")] or names
    return pytest.mark.parametrize("pair", names, indirect=True)


def is_flux(pair):
    return pair.ours.manifest.family.startswith("flux")


def noise_for(pair, size, count):
    shape = pair.ours.manifest.shapes.latent(size)
    noise = np.random.default_rng(0).standard_normal(shape).astype("float32")
    return np.stack([noise] * count)


def latents(pair, noise):
    """Return our noise as diffusers' pipeline takes it."""
    theirs = channels_first(noise)
    return diffusers.FluxPipeline._pack_latents(theirs, *theirs.shape) if is_flux(pair) else theirs


def peer(pair, pipeline=None, **arguments):
    pipeline = pipeline or pair.theirs
    output = pipeline(output_type="np", max_sequence_length=LENGTH, **arguments).images
    return (255 * output).round().astype("uint8")


def check(pair, size=SIZES[0], steps=6, theirs=None, ours=None, **common):
    """Compare text to image; `common` are arguments of the same name, the others of one's own."""
    noise = noise_for(pair, size, len(PROMPTS))
    common = {"guidance_scale": 4.0, **common}
    reference = peer(
        pair,
        prompt=PROMPTS,
        latents=latents(pair, noise),
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        **common,
        **(theirs or {}),
    )
    assert psnr(*reference) < 40, "the prompt hardly matters"
    arguments = {"noise": noise, "num_steps": steps, "height": size[0], "width": size[1]}
    pictures = pair.ours(PROMPTS, **arguments, **common, **(ours or {})).images
    check_pictures(pictures, reference)
    return pictures


@pytest.mark.parametrize("size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.long)])
@pytest.mark.parametrize("steps", [1, 4, 7])
@of(*NAMES)
def test_text_to_image(pair, steps, size):
    check(pair, size, steps)


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("scale", [0.0, 1.0, 7.0])
@of("sd3", "sd3-without-t5")
def test_negative_prompts(pair, scale):
    """A scale of at most 1 is the prompt's own prediction."""
    check(pair, guidance_scale=scale, negative_prompt=[NEGATIVE, "green"])


@of("flux-dev")
def test_a_scale_that_the_model_is_told(pair):
    low, high = (check(pair, guidance_scale=scale) for scale in (1.5, 6.0))
    assert psnr(low, high) < 40


@of("flux-schnell", "flux-dev")
def test_true_guidance(pair):
    negative = [NEGATIVE, "green"]
    guided = check(
        pair,
        negative_prompt=negative,
        theirs={"true_cfg_scale": 3.0},
        ours={"true_guidance_scale": 3.0},
    )
    unguided = check(pair)
    assert psnr(guided, unguided) < 40


@of("sd3.5")
def test_skip_layer_guidance(pair):
    """Of 12 calls, the first two after number 0 are guided."""
    assert pair.theirs.transformer.config.num_layers > max(SKIPPED)
    skipping = check(
        pair,
        steps=12,
        theirs={"skip_guidance_layers": SKIPPED, "skip_layer_guidance_scale": 2.8},
        ours={"skip_layer_guidance_scale": 2.8},
    )
    assert psnr(skipping, check(pair, steps=12)) < 40


@pytest.mark.backend(long=True)
@of("sd3")
def test_heun(pair, monkeypatch):
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
    monkeypatch.setattr(pair.theirs, "scheduler", scheduler)
    check(pair, ours={"scheduler": "flow_heun"})


@pytest.mark.parametrize("strength", [0.6, 1.0])
@of("sd3", "flux-dev")
def test_image_to_image(pair, monkeypatch, strength):
    kinds = diffusers.StableDiffusion3Img2ImgPipeline, diffusers.FluxImg2ImgPipeline
    pipeline = kinds[is_flux(pair)](**pair.theirs.components)
    pipeline.set_progress_bar_config(disable=True)
    noise = noise_for(pair, SIZES[0], 1)
    pin_noise(monkeypatch, pipeline, noise)
    height, width = SIZES[0]
    common = {"image": pair.picture(), "strength": strength, "guidance_scale": 4.0}
    reference = peer(
        pair,
        pipeline,
        prompt=PROMPTS[0],
        num_inference_steps=7,
        height=height,
        width=width,
        **common,
    )
    result = pair.ours(PROMPTS[0], noise=noise, num_steps=7, **common)
    check_pictures(result.images, reference)
