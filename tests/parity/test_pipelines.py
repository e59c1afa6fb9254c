"""Whole pictures: prompts in, uint8 out, against the pipelines of diffusers, on both backends.

On TensorFlow an export is what draws, on JAX a `JaxPipeline`; the tests are the same.

The weights are random, and left at `peers`' scale they give pictures of high contrast: standard
deviation 70, one pixel value in eight at 0 or 255. Another prompt, negative prompt or guidance
changes them to a PSNR of 10 to 30 dB, so that 50 dB can come from nothing but agreement.
"""

import sys

import diffusers
import keras
import numpy as np
import pytest
from PIL import Image

from sd_tf.sampling.noise import INITIAL, normal
from tests import peers
from tests.peer_adapters import ATTENTION, EVERYWHERE, save_lora
from tests.peer_pipelines import (
    DETERMINISTIC,
    FLOOR,
    NEGATIVE,
    PROMPTS,
    STEPS,
    Pair,
    channels_first,
    check_pictures,
    check_text_to_image,
    drawer,
    first_latent,
    pin_noise,
    psnr,
)

pytestmark = pytest.mark.backend

# One export each. 72×88 is a multiple of 8 and not of 16: every level has odd sizes.
PLACES = {"adapter_slots": 2, "adapter_rank": 4, "adapter_layers": "all"}
FAMILIES = {
    "sd1": {"height": 72, "width": 88, **PLACES},
    "sd2-v": {"height": 64, "width": 96, "guidance_rescale": 0.7, **PLACES},
    "sdxl-base": {"height": 64, "width": 64, **PLACES},
    "sdxl-refiner": {"height": 64, "width": 64},
    "inpaint": {"height": 64, "width": 64},
    "instruct-pix2pix": {"height": 64, "width": 64},
    "sdxl-instruct-pix2pix": {"height": 64, "width": 64},
}


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """One family's pipelines; pytest orders the tests so that one of each serves them all.

    Blocks of one layer, to save time: `test_families` has the models' whole depth.
    """
    options = FAMILIES[request.param]
    pipeline = peers.random_pipeline(request.param, layers_per_block=1)
    folder = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(folder / "checkpoint")
    return Pair(pipeline, drawer(folder, **options))


IMAGE_TO_IMAGE = ("ddim", "euler", "dpmpp_2m", "heun", "unipc")
SD2_LONG = pytest.param("sd2-v", marks=pytest.mark.long)


def of(*families):
    """On JAX those that differ: SD1's and SD2's walks are SDXL's program with other tables, and are
    taken where no other family has the feature.
    """
    if keras.backend.backend() == "jax":
        families = [name for name in families if name not in ("sd1", "sd2-v", SD2_LONG)] or families
    return pytest.mark.parametrize("pair", families, indirect=True)


@pytest.fixture(scope="module")
def adapter_files(pair, tmp_path_factory):
    """name → a random LoRA's file, saved by diffusers; of different ranks."""
    kinds = {
        "attention": {"targets": ATTENTION, "r": 3, "lora_alpha": 3},
        "all": {"targets": EVERYWHERE, "r": 4, "lora_alpha": 2},
    }
    files = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        files[name] = save_lora(pair.theirs, tmp_path_factory.mktemp(name), seed, **kind)
    return files


@pytest.fixture
def adapters(pair, adapter_files):
    """Both pipelines have the adapters, during one test."""
    for name, file in adapter_files.items():
        pair.theirs.load_lora_weights(file.parent, adapter_name=name)
        pair.ours.load_adapter(name, file)
    yield
    pair.theirs.unload_lora_weights()
    for name in adapter_files:
        pair.ours.unload_adapter(name)


@pytest.mark.backend(long=True)
@pytest.mark.parametrize(
    ("scales", "negative"),
    [
        ({"attention": 0.8}, {}),
        ({"all": -0.6}, {"negative_prompt": [NEGATIVE, "green"]}),
        ({"attention": 0.5, "all": 0.7}, {}),
    ],
    ids=["one", "negative", "two"],
)
@of("sd1", SD2_LONG, "sdxl-base")
def test_adapters_are_switched(pair, adapters, scales, negative):
    pair.theirs.set_adapters(list(scales), list(scales.values()))
    without = pair.ours(
        PROMPTS, noise=pair.noise(2), num_steps=STEPS, scheduler="ddim", **negative
    ).images
    theirs = {"guidance_rescale": pair.ours.manifest.guidance_rescale}
    adapted = check_text_to_image(pair, "ddim", theirs, {"adapters": scales}, **negative)
    assert psnr(adapted, without) < 35, "the adapters hardly matter"


@pytest.mark.parametrize(
    ("sampler", "negative"),
    [("ddim", None), *((sampler, (NEGATIVE, "green")) for sampler in DETERMINISTIC)],
    ids=str,
)
@of("sd1", "sd2-v", "sdxl-base")
def test_text_to_image(pair, sampler, negative):
    theirs = {"guidance_rescale": pair.ours.manifest.guidance_rescale}
    negative = None if negative is None else list(negative)
    check_text_to_image(pair, sampler, theirs, negative_prompt=negative)


@of("sd1", "sdxl-base")
def test_empty_negative_prompts(pair):
    """SDXL takes no negative prompt for zeros and encodes an explicit ""; SD1 encodes both."""
    check_text_to_image(pair, "euler", negative_prompt=["", ""])
    arguments = {"num_steps": STEPS, "noise": pair.noise(1)}
    absent, empty = (
        pair.ours(PROMPTS[0], negative_prompt=negative, **arguments).images
        for negative in (None, "")
    )
    assert (psnr(absent, empty) > FLOOR) == (pair.ours.manifest.family == "sd1")


@of("sdxl-base")
def test_sdxl_sizes(pair):
    sizes = {"original_size": (512, 768), "target_size": (1024, 960)}
    theirs, ours = {"crops_coords_top_left": (16, 128)}, {"crop_top_left": (16, 128)}
    check_text_to_image(pair, "euler", theirs, ours, **sizes)
    arguments = {"num_steps": STEPS, "noise": pair.noise(1), "scheduler": "euler"}
    default = pair.ours(PROMPTS[0], **arguments).images
    assert psnr(default, pair.ours(PROMPTS[0], **arguments, **sizes).images) < 40


@pytest.mark.backend(long=True)
@of("sd1")
def test_noise_in_every_step(pair, monkeypatch):
    """Seeds in place of noise: the streams of `sampling.noise` are handed to diffusers."""
    seed = 42

    def stream(number):
        return channels_first(np.asarray(normal([seed], number, first_latent(pair.ours.manifest))))

    fresh = (stream(step + 1) for step in range(STEPS))
    module = sys.modules[diffusers.EulerAncestralDiscreteScheduler.__module__]
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(fresh))
    reference = pair.peer(
        "euler_ancestral", prompt=PROMPTS[0], latents=stream(INITIAL), **pair.size
    )
    result = pair.ours(PROMPTS[0], num_steps=STEPS, scheduler="euler_ancestral", seed=seed)
    check_pictures(result.images, reference)


@pytest.mark.backend(long=True)
@pytest.mark.parametrize(
    ("sampler", "strength"),
    [*((name, 0.5) for name in IMAGE_TO_IMAGE), ("ddim", 1.0), ("euler", 1.0)],
)
@of("sd1")
def test_image_to_image(pair, monkeypatch, sampler, strength):
    pipeline = diffusers.StableDiffusionImg2ImgPipeline(
        **pair.theirs.components, requires_safety_checker=False
    )
    noise = pair.noise(1)
    pin_noise(monkeypatch, pipeline, noise)
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": strength}
    common["negative_prompt"] = NEGATIVE
    reference = pair.peer(sampler, pipeline, **common)
    result = pair.ours(**common, num_steps=STEPS, scheduler=sampler, noise=noise)
    check_pictures(result.images, reference)


@pytest.mark.backend(long=True)
@pytest.mark.parametrize(
    ("sampler", "strength"),
    [("ddim", 0.5), ("euler", 0.5), ("dpmpp_2m", 0.5), ("ddim", 1.0)],
)
@of("inpaint")
def test_inpainting(pair, monkeypatch, sampler, strength):
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.theirs, noise)
    mask = np.zeros(tuple(pair.size.values()), "uint8")
    mask[11:42, 21:61] = 255  # edges inside a latent's 8×8 pixels
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": strength}
    reference = pair.peer(sampler, mask_image=Image.fromarray(mask), **common, **pair.size)
    arguments = {**common, "num_steps": STEPS, "scheduler": sampler, "noise": noise}
    result = pair.ours(mask=mask, **arguments)
    check_pictures(result.images, reference)
    other = pair.ours(mask=255 - mask, **arguments)
    assert psnr(result.images, other.images) < 40, "the mask hardly matters"


@pytest.mark.backend(long=True)
@of("sdxl-refiner")
def test_refiner(pair, monkeypatch):
    """A picture and a score of beauty in place of a target size; the second text encoder alone."""
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.theirs, noise)
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": 0.5}
    common["negative_prompt"] = NEGATIVE
    reference = pair.peer("euler", **common)
    arguments = {"num_steps": STEPS, "scheduler": "euler", "noise": noise}
    check_pictures(pair.ours(**common, **arguments).images, reference)


@pytest.mark.backend(long=True)
@pytest.mark.parametrize(
    ("sampler", "guidance"),
    [
        *((sampler, (7.5, 1.5)) for sampler in ("ddim", "euler", "euler_ancestral", "pndm")),
        ("euler", (3.0, 2.5)),
        ("euler", (10.0, 1.0)),
    ],
    ids=str,
)
@of("instruct-pix2pix", "sdxl-instruct-pix2pix")
def test_edits(pair, monkeypatch, sampler, guidance):
    """Two guidances over three model outputs; the picture's latents are not scaled."""
    shape = first_latent(pair.ours.manifest)
    streams = [channels_first(np.asarray(normal([7], i, shape))) for i in range(STEPS + 1)]
    fresh = iter(streams[1:])
    module = sys.modules[diffusers.EulerAncestralDiscreteScheduler.__module__]
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(fresh))
    scale, image_scale = guidance
    common = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "image": pair.picture()}
    common |= {"guidance_scale": scale, "image_guidance_scale": image_scale}
    reference = pair.peer(sampler, latents=streams[0], **common)
    arguments = {"num_steps": STEPS, "scheduler": sampler, "seed": 7}
    check_pictures(pair.ours(**common, **arguments).images, reference)
    if guidance == (7.5, 1.5):
        other = pair.ours(**{**common, "image_guidance_scale": 4.0}, **arguments).images
        assert psnr(reference, other) < 40, "the image's guidance hardly matters"
