"""The named families: counted against the published numbers, and refused where parts do not fit."""

from dataclasses import replace

import numpy as np
import pytest

from sd_tf.config import (
    FAMILIES,
    SAMPLERS,
    ConfigError,
    family_of,
    has_named_sizes,
    with_kerascv_numerics,
)
from sd_tf.config.families import OPENCLIP_H, SDXL_OPENCLIP_G
from sd_tf.weights import layout

# Family → component → (tensors, parameters) of the published checkpoints.
PUBLISHED = {
    "sd1": {"text_encoder": (196, 123_060_480), "unet": (686, 859_520_964)},
    "sd2-base": {"text_encoder": (372, 340_387_840), "unet": (686, 865_910_724)},
    "sdxl-base": {"text_encoder_2": (517, 694_659_840), "unet": (1680, 2_567_463_684)},
}


SMALL = ("sd1", "sd2-base", "instruct-pix2pix", "inpaint")


@pytest.mark.parametrize("family", FAMILIES)
def test_named_families(family):
    config = FAMILIES[family].check()
    assert family_of(config) == family
    assert has_named_sizes(config)
    assert config.schedule.sampler in SAMPLERS
    assert config.default_size == {"sd2-v": 768}.get(family, 512 if family in SMALL else 1024)
    for component, (tensors, parameters) in PUBLISHED.get(family, {}).items():
        found = layout.slots(layout.abstract_model(config.components[component]))
        assert len(found) == tensors
        assert sum(int(np.prod(slot.shape)) for slot in found.values()) == parameters


def test_image_inputs():
    for family, config in FAMILIES.items():
        added = {"instruct-pix2pix": "image", "inpaint": "mask_and_image"}
        assert config.latent_inputs == added.get(family.removeprefix("sdxl-"), "none")


def test_parts_that_do_not_fit():
    sd1, xl = FAMILIES["sd1"], FAMILIES["sdxl-base"]
    for config, message in (
        (
            replace(sd1, text_encoders={"text_encoder": OPENCLIP_H}),
            r"context_dim=768 .*, but the text encoders give 1024",
        ),
        (
            replace(
                xl,
                text_encoders={
                    **xl.text_encoders,
                    "text_encoder_2": replace(SDXL_OPENCLIP_G, projection_dim=640),
                },
            ),
            r"one pooled text embedding, of width 1280\. The text encoders give: \[640\]",
        ),
        (
            replace(sd1, denoiser=replace(sd1.denoiser, in_channels=5)),
            r"in_channels must be one of 4, 8, 9\. Received: in_channels=5",
        ),
        (
            replace(sd1, schedule=replace(sd1.schedule, sampler="dpm_fast")),
            r"Unknown scheduler 'dpm_fast'. Known: ddim",
        ),
        (
            replace(sd1, schedule=replace(sd1.schedule, sampler="flow_heun")),
            r"scheduler of a beta schedule is one of ddim, .*, lcm, .* Received: 'flow_heun'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config.check()


def test_kerascv_numerics():
    config = with_kerascv_numerics(FAMILIES["sd2-base"])
    assert config.text_encoders["text_encoder"].activation == config.denoiser.geglu == "gelu_tanh"
    assert config.denoiser.transformer_norm_eps == config.autoencoder.norm_eps == 1e-5
    assert (
        with_kerascv_numerics(FAMILIES["sd1"]).text_encoders["text_encoder"].activation
        == "quick_gelu"
    )
