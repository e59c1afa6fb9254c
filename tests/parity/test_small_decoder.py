"""Small decoders against diffusers' `AutoencoderTiny`, alone and in whole pictures."""

import diffusers
import numpy as np
import pytest
import torch

from sd_tf.config import PREVIEW_DECODER
from sd_tf.weights import open_checkpoint, open_small_decoder, save_small_decoder
from tests import peers
from tests.parity.test_families import channels_first, channels_last, close
from tests.peer_pipelines import FLOOR, PROMPTS, STEPS, Pair, drawer, psnr

pytestmark = pytest.mark.backend

SIZE = {"height": 64, "width": 96}


def tiny(folder, seed=3, **changes):
    module = diffusers.AutoencoderTiny(
        **{"decoder_block_out_channels": (16,) * 4, "num_decoder_blocks": (2, 1, 1, 1), **changes}
    )
    peers.randomized(module, seed).save_pretrained(folder)
    return module


KINDS = {
    "as published": {
        "decoder_block_out_channels": (64,) * 4,
        "num_decoder_blocks": (3, 3, 3, 1),
    },
    "16 channels, three levels": {
        "latent_channels": 16,
        "encoder_block_out_channels": (16,) * 3,
        "num_encoder_blocks": (1, 1, 1),
        "decoder_block_out_channels": (16,) * 3,
        "num_decoder_blocks": (1, 0, 2),
    },
    "silu": {"act_fn": "silu"},
    "mish": {"act_fn": "mish"},
    "gelu": {"act_fn": "gelu"},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_decoder(tmp_path, changes):
    theirs = tiny(tmp_path, **changes)
    channels = theirs.config.latent_channels
    latents = 2.0 * np.random.default_rng(0).standard_normal((2, 8, 5, channels), "float32")
    with torch.no_grad():
        decoded = theirs.decode(channels_first(latents)).sample
    opened = open_small_decoder(tmp_path)
    close(opened.build().decode(latents), channels_last(decoded))
    save_small_decoder(tmp_path / "saved", opened.config, opened.build())
    again = diffusers.AutoencoderTiny.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again.decode(channels_first(latents)).sample, decoded)


@pytest.mark.backend(long=True)
def test_pictures(tmp_path, small_pipelines):
    """Previews beside the large autoencoder's pictures: a pipeline's whose autoencoder is small."""
    whole, folder = small_pipelines("sd1")
    small = tiny(tmp_path / "small")
    parts = {**whole.components, "vae": small}
    theirs = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    (tmp_path / "checkpoint").symlink_to(folder)
    ours = drawer(tmp_path, {PREVIEW_DECODER: tmp_path / "small"}, **SIZE)
    pair = Pair(theirs, ours)
    noise = pair.noise(1)
    given = {"num_steps": STEPS, "noise": noise, "scheduler": "ddim", "guidance_scale": 7.5}
    picture = pair.peer(
        "ddim", prompt=PROMPTS[:1], latents=channels_first(noise), guidance_scale=7.5, **SIZE
    )
    seen = []
    exact = ours(PROMPTS[:1], **given, callback=lambda *state: seen.append(state[2]))
    np.testing.assert_array_equal(ours.decode(seen[-1]), exact.images)
    assert psnr(ours.preview(seen[-1]), picture) >= FLOOR


def test_open_checkpoint_reads_the_small_parts(tmp_path, small_pipelines):
    _, folder = small_pipelines("sd1")
    tiny(tmp_path / "small")
    checkpoint = open_checkpoint(folder, preview_decoder=tmp_path / "small")
    assert checkpoint.config.components[PREVIEW_DECODER].channels == 16
    names = set(checkpoint.tensors(PREVIEW_DECODER))
    assert {name.partition(".")[0] for name in names} == {"decoder"}
