"""The named families: counted against the published numbers, and refused where parts do not fit."""

from dataclasses import replace

import numpy as np
import pytest

from sd_tf.config import (
    CLIP_L,
    FAMILIES,
    OPENCLIP_H,
    SAMPLERS,
    SDXL_OPENCLIP_G,
    ConfigError,
    with_kerascv_numerics,
)
from sd_tf.weights import layout

# Family → component → (tensors, parameters) of the published checkpoints.
PUBLISHED = {
    "sd1": {"text_encoder": (196, 123_060_480), "unet": (686, 859_520_964)},
    "sd2-base": {"text_encoder": (372, 340_387_840), "unet": (686, 865_910_724)},
    "sdxl-base": {"text_encoder_2": (517, 694_659_840), "unet": (1680, 2_567_463_684)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_named_families(family):
    config = FAMILIES[family].check()
    assert config.family == family
    assert config.is_named_family
    assert config.schedule.sampler in SAMPLERS
    assert config.default_size == {"sd2-v": 768}.get(family, 1024 if "xl" in family else 512)
    for component, (tensors, parameters) in PUBLISHED.get(family, {}).items():
        found = layout.slots(layout.abstract_model(config.components[component]))
        assert len(found) == tensors
        assert sum(int(np.prod(slot.shape)) for slot in found.values()) == parameters


def test_image_inputs():
    kinds = {family: config.latent_inputs for family, config in FAMILIES.items()}
    assert kinds.pop("instruct-pix2pix") == kinds.pop("sdxl-instruct-pix2pix") == "image"
    assert kinds.pop("inpaint") == "mask_and_image"
    assert set(kinds.values()) == {"none"}


def test_clip_skip():
    assert CLIP_L.skip(1).context_layer == 2
    with pytest.raises(ConfigError, match=r"between 0 and 11 for a text encoder of 12 .*: 12"):
        CLIP_L.skip(12)
    with pytest.raises(ConfigError, match=r"Received: -1"):
        CLIP_L.skip(-1)


def test_parts_that_do_not_fit():
    sd1, xl = FAMILIES["sd1"], FAMILIES["sdxl-base"]
    for config, message in (
        (replace(sd1, text_encoder=OPENCLIP_H), r"width 768 .*, but the text encoders give 1024"),
        (
            replace(xl, text_encoder_2=replace(SDXL_OPENCLIP_G, projection_dim=640)),
            r"one pooled text embedding of width 1280, but the text encoders give \[640\]",
        ),
        (replace(sd1, unet=replace(sd1.unet, in_channels=5)), r"takes 4, 8, 9 input channels"),
        (
            replace(sd1, schedule=replace(sd1.schedule, sampler="heun")),
            r"Unknown scheduler 'heun'. Known: ddim",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config.check()


def test_kerascv_numerics():
    config = with_kerascv_numerics(FAMILIES["sd2-base"])
    assert config.text_encoder.activation == config.unet.geglu == "gelu_tanh"
    assert config.unet.transformer_norm_eps == config.vae.norm_eps == 1e-5
    assert with_kerascv_numerics(FAMILIES["sd1"]).text_encoder.activation == "quick_gelu"
