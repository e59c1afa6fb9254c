"""A ControlNet and an IP-Adapter in one call against diffusers' pipeline with both."""

import diffusers
import numpy as np
import pytest
from PIL import Image

from tests import peer_image_prompts as prompts
from tests import peers
from tests.parity.test_control_pipelines import random_net
from tests.peer_pipelines import (
    NEGATIVE,
    PROMPTS,
    STEPS,
    Pair,
    check_pictures,
    drawer,
    pin_noise,
    psnr,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A UNet of SD1, a net and an adapter, all in diffusers' pipeline."""
    folder = tmp_path_factory.mktemp("both")
    pipeline = peers.random_pipeline("sd1", layers_per_block=1)
    pipeline.save_pretrained(folder / "checkpoint")
    net = random_net(pipeline.unet, 11)
    net.save_pretrained(folder / "net")
    (folder / "models").mkdir()
    prompts.vision_encoder().save_pretrained(folder / "models" / "image_encoder")
    prompts.save(folder / "models" / "plus.safetensors", "plus", pipeline.unet)
    opening = {"controlnet": [folder / "net"], "ip_adapter": [folder / "models/plus.safetensors"]}
    ours = drawer(folder, opening, image_prompts=2, height=64, width=64)
    kind = diffusers.StableDiffusionControlNetImg2ImgPipeline
    theirs = kind(**pipeline.components, controlnet=net, requires_safety_checker=False)
    theirs.load_ip_adapter(str(folder), subfolder="models", weight_name="plus.safetensors")
    theirs.set_ip_adapter_scale(0.8)
    return Pair(theirs, ours)


def drawing():
    """Lines on nothing, larger than what is drawn."""
    rng = np.random.default_rng(3)
    levels = np.kron(rng.integers(0, 256, (13, 17, 4)), np.ones((7, 9, 1)))
    levels[..., 3] = 255 * (levels[..., 3] > 100)
    return Image.fromarray(levels.astype("uint8"), "RGBA")


def test_image_to_image(pair, monkeypatch):
    """With a share of the calls that the strength leaves, and a drawing that is scaled."""
    noise, look = pair.noise(1), pair.picture().rotate(90)
    pin_noise(monkeypatch, pair.theirs, noise)
    common = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "strength": 0.7}
    common["image"] = pair.picture()
    reference = pair.peer(
        "euler",
        control_image=drawing(),
        controlnet_conditioning_scale=0.9,
        control_guidance_start=0.2,
        control_guidance_end=0.8,
        ip_adapter_image=look,
        **pair.size,
        **common,
    )
    given = {"control_image": drawing(), "image_prompt": look}
    scales = {"control_scale": 0.9, "control_start": 0.2, "control_end": 0.8}
    common |= {"scheduler": "euler", "num_steps": STEPS, "noise": noise}

    def ours(**more):
        return pair.ours(**common, **more).images

    check_pictures(ours(**given, **scales, image_prompt_scale=0.8), reference)
    for name, more in (("control_image", scales), ("image_prompt", {"image_prompt_scale": 0.8})):
        alone = ours(**{name: given[name]}, **more)
        assert psnr(alone, reference) < 45, f"{name} alone gives nearly the same"
