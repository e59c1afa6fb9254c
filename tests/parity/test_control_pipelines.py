"""ControlNets in the loop against the pipelines of diffusers, on both backends.

Every export has two nets, random as their zero convolutions are. A call that gives one of them no
picture is compared with diffusers' pipeline of the other net alone. The first net beside the
inpainting checkpoint pools.
"""

import diffusers
import keras
import numpy as np
import pytest
import torch
from PIL import Image

from tests import peers
from tests.peer_pipelines import (
    NEGATIVE,
    PROMPTS,
    STEPS,
    Pair,
    channels_first,
    check_pictures,
    drawer,
    pin_noise,
    psnr,
)

HINT = (4, 8, 8, 8)  # channels of the layers that the pictures pass through
SIZES = {
    "sd1": {"height": 72, "width": 88},
    "sd2-v": {"height": 64, "width": 96},
    "sdxl-base": {"height": 64, "width": 64},
    "inpaint": {"height": 64, "width": 64},
    "sd2-inpaint": {"height": 64, "width": 96},
    "sdxl-inpaint": {"height": 64, "width": 64},
}
# Inpainting checkpoint → the one whose nets are for it: they take the noisy latents alone.
STEERED_LIKE = {"inpaint": "sd1", "sd2-inpaint": "sd2-base", "sdxl-inpaint": "sdxl-base"}
PIPELINES = {
    "sd1": diffusers.StableDiffusionControlNetPipeline,
    "sd2-v": diffusers.StableDiffusionControlNetPipeline,
    "sdxl-base": diffusers.StableDiffusionXLControlNetPipeline,
    "inpaint": diffusers.StableDiffusionControlNetInpaintPipeline,
    "sd2-inpaint": diffusers.StableDiffusionControlNetInpaintPipeline,
    "sdxl-inpaint": diffusers.StableDiffusionXLControlNetInpaintPipeline,
}


def random_net(unet, seed, **changes):
    """A net for a UNet, whose picture does not fade in its random layers."""
    net = diffusers.ControlNetModel.from_unet(
        unet, conditioning_channels=3, conditioning_embedding_out_channels=HINT
    )
    net.register_to_config(**changes)
    net = peers.randomized(net, seed)
    with torch.no_grad():
        net.controlnet_cond_embedding.conv_out.weight.mul_(30.0)
        for layer in [*net.controlnet_down_blocks, net.controlnet_mid_block]:
            layer.weight.mul_(0.4)
    return net


class Steered(Pair):
    """Also the nets, and pipelines of diffusers with all of them or one."""

    def __init__(self, family, theirs, ours, nets):
        super().__init__(theirs, ours)
        self.family, self.nets = family, nets

    def pipeline(self, kind, *numbers):
        nets = [self.nets[number] for number in numbers]
        safety = {} if "XL" in kind.__name__ else {"requires_safety_checker": False}
        net = nets[0] if len(nets) == 1 else nets
        return kind(**self.theirs.components, controlnet=net, **safety)

    def hints(self):
        height, width = self.size.values()
        rng = np.random.default_rng(3)
        lines = 255 * (rng.random((height, width, 1)) > 0.7).repeat(3, -1)
        return [Image.fromarray(lines.astype("uint8")), self.picture().rotate(90)]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    pipeline = peers.random_pipeline(request.param, layers_per_block=1)
    paints = request.param in STEERED_LIKE
    unet = peers.random_pipeline(STEERED_LIKE[request.param], 1).unet if paints else pipeline.unet
    nets = [random_net(unet, 11, global_pool_conditions=paints), random_net(unet, 12)]
    folder = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(folder / "checkpoint")
    for number, net in enumerate(nets):
        net.save_pretrained(folder / f"net-{number}")
    opening = {"controlnet": [folder / f"net-{number}" for number in range(len(nets))]}
    return Steered(request.param, pipeline, drawer(folder, opening, **SIZES[request.param]), nets)


def of(*families):
    """On JAX SDXL alone, whose nets have all that the others have."""
    if keras.backend.backend() == "jax":
        families = [name for name in families if name == "sdxl-base"]
    return pytest.mark.parametrize("pair", families, indirect=True)


def both(pair, kind, numbers, theirs=None, ours=None, sampler="euler", scale=1.0, **common):
    """Return diffusers' pictures and ours, with the nets of these numbers."""
    pipeline = pair.pipeline(kind, *numbers)
    hints = pair.hints()
    chosen = [hints[number] for number in numbers]
    theirs = dict(theirs or {})
    scales = scale if isinstance(scale, list) else [scale] * len(numbers)
    theirs["controlnet_conditioning_scale"] = scales if len(numbers) > 1 else scales[0]
    key = "image" if kind in PIPELINES.values() and "Inpaint" not in kind.__name__ else None
    theirs[key or "control_image"] = chosen if len(numbers) > 1 else chosen[0]
    reference = pair.peer(sampler, pipeline, **theirs, **common)
    given = dict(zip(numbers, scales, strict=True))
    pictures = pair.ours(
        num_steps=STEPS,
        scheduler=sampler,
        control_image=[hint if n in numbers else None for n, hint in enumerate(hints)],
        control_scale=[given.get(n) for n in range(len(hints))],
        **(ours or {}),
        **common,
    ).images
    return reference, pictures


def text_to_image(pair, family, numbers, ours=None, theirs=None, **more):
    noise = pair.noise(len(PROMPTS))
    theirs = {"latents": channels_first(noise), **pair.size, **(theirs or {})}
    ours = {"noise": noise, **(ours or {})}
    return both(pair, PIPELINES[family], numbers, theirs, ours, prompt=PROMPTS, **more)


def plain(pair, **arguments):
    noise = pair.noise(len(PROMPTS))
    return pair.ours(PROMPTS, noise=noise, num_steps=STEPS, scheduler="euler", **arguments).images


@pytest.mark.backend(long=True)
@pytest.mark.parametrize(
    "numbers",
    [pytest.param([number], marks=pytest.mark.long) for number in (0, 1)] + [[0, 1]],
    ids=["first", "second", "both"],
)
@of("sd1", "sdxl-base", pytest.param("sd2-v", marks=pytest.mark.long))
def test_text_to_image(pair, numbers):
    reference, pictures = text_to_image(
        pair, pair.family, numbers, scale=[0.7, 1.2][: len(numbers)]
    )
    check_pictures(pictures, reference)
    assert psnr(pictures, plain(pair)) < 35, "the nets hardly matter"


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("share", [(0.0, 0.5), (0.34, 0.66)], ids=str)
@of("sd1", "sdxl-base")
def test_share_of_the_steps(pair, share):
    start, end = share
    theirs = {"control_guidance_start": start, "control_guidance_end": end}
    ours = {"control_start": start, "control_end": end}
    reference, pictures = text_to_image(pair, pair.family, [0], ours, theirs)
    check_pictures(pictures, reference)
    whole, _ = text_to_image(pair, pair.family, [0])
    assert psnr(reference, whole) < 45, "the share hardly matters"


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("negative", [None, [NEGATIVE, "green"]], ids=["absent", "negative"])
@of("sd1", "sdxl-base")
def test_guess_mode(pair, negative):
    more = {"guidance_scale": 3.0, "negative_prompt": negative}
    theirs, ours = {"guess_mode": True}, {"control_guess": True}
    reference, pictures = text_to_image(pair, pair.family, [0, 1], ours, theirs, **more)
    check_pictures(pictures, reference)
    usual, _ = text_to_image(pair, pair.family, [0, 1], **more)
    assert psnr(reference, usual) < 40, "guessing hardly matters"


@pytest.mark.parametrize("sampler", ["pndm", "heun"])
@of("sd1")
def test_samplers_of_more_calls_than_steps(pair, sampler):
    """The share counts model calls."""
    theirs = {"control_guidance_start": 0.2, "control_guidance_end": 0.8}
    ours = {"control_start": 0.2, "control_end": 0.8}
    reference, pictures = text_to_image(pair, "sd1", [1], ours, theirs, sampler=sampler)
    check_pictures(pictures, reference)


@of("sd1")
def test_scale_0_is_the_plain_picture(pair):
    """Bit for bit: what has no weight is not computed."""
    expected = plain(pair)
    off = {"control_image": pair.hints(), "control_scale": 0.0}
    np.testing.assert_array_equal(plain(pair, **off), expected)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@of("sd1", pytest.param("sd2-v", marks=pytest.mark.long))
def test_image_to_image(pair, monkeypatch, strength):
    """The share is of the calls that the strength leaves."""
    kind = diffusers.StableDiffusionControlNetImg2ImgPipeline
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.pipeline(kind, 0), noise)
    common = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "image": pair.picture()}
    reference, pictures = both(
        pair,
        kind,
        [0],
        {"control_guidance_end": 0.7},
        {"control_end": 0.7, "noise": noise},
        "ddim",
        strength=strength,
        **common,
    )
    check_pictures(pictures, reference)


@pytest.mark.backend(long=True)
@of("sdxl-base")
def test_image_to_image_of_sdxl(pair, monkeypatch):
    kind = diffusers.StableDiffusionXLControlNetImg2ImgPipeline
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.pipeline(kind, 0), noise)
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": 0.5}
    reference, pictures = both(pair, kind, [0, 1], ours={"noise": noise}, **common)
    check_pictures(pictures, reference)


NETS = {"pooling": [0], "other": [1], "both": [0, 1]}
PAINTED = [pytest.param("inpaint", numbers, id=f"sd1-{which}") for which, numbers in NETS.items()]
PAINTED += [
    # Diffusers adds to a pooled middle in place, which fails where that of the other net is larger.
    pytest.param(f"{family}-inpaint", NETS[which], id=f"{family}-{which}", marks=pytest.mark.long)
    for family in ("sd2", "sdxl")
    for which in ("pooling", "other")
]


@pytest.mark.parametrize(("pair", "numbers"), PAINTED, indirect=["pair"])
def test_inpainting(pair, monkeypatch, numbers):
    """The nets do not see the mask and the picture beside the noisy latents.

    The net that pools has all guess where it is the first that is on, and only there; with SDXL,
    nowhere.
    """
    kind = PIPELINES[pair.family]
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.pipeline(kind, 0), noise)
    mask = np.zeros(tuple(pair.size.values()), "uint8")
    mask[11:42, 21:61] = 255
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": 1.0}
    reference, pictures = both(
        pair,
        kind,
        numbers,
        {"mask_image": Image.fromarray(mask), **pair.size},
        {"mask": mask, "noise": noise},
        "ddim",
        **common,
    )
    check_pictures(pictures, reference)
    unsteered = pair.ours(num_steps=STEPS, scheduler="ddim", mask=mask, noise=noise, **common)
    assert psnr(pictures, unsteered.images) < 45, "the nets hardly matter"
