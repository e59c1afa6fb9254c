"""The tiny transformer: how it begins, what it learns from, and that diffusers draws the same."""

from dataclasses import replace

import diffusers
import keras
import numpy as np
import pytest
import torch

from sd_tf.checkpoints import DIT_CONFIG, TINY_FOLDER, make_random
from sd_tf.sampling.noise import INITIAL, normal
from sd_tf.training import imitation, tiny_dit
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.initial_weights import sinusoids
from sd_tf.training.painter import Painter
from sd_tf.weights import layout, open_checkpoint, save_folder
from tests.peer_transformers import NO_T5
from tests.test_lora_training import tensor


def test_positions_equal_diffusers():
    for side, patches, width in ((8, 8, 128), (12, 4, 64)):
        theirs = diffusers.models.embeddings.PatchEmbed(
            height=2 * patches, width=2 * patches, embed_dim=width, pos_embed_max_size=side,
            patch_size=2,
        ).pos_embed  # fmt: skip
        np.testing.assert_allclose(sinusoids(width, side, patches), theirs, atol=1e-6)


@pytest.fixture(scope="module")
def dit():
    """The models before training, and the configuration."""
    base = open_checkpoint(TINY_FOLDER)
    config = replace(DIT_CONFIG, autoencoder=base.config.autoencoder)
    return tiny_dit.build(base, config), config


def test_texts_are_those_of_tiny(dit):
    """The context is the last hidden state, and the pooled text the normalized one, unprojected."""
    models, config = dit
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(
        TINY_FOLDER, torch_dtype=torch.float32
    ).text_encoder
    tokens = tiny_dit.tokenizers_of(config)["text_encoder"](["a red star", "a large blue ring"])
    ours = models["text_encoder"](tokens)
    with torch.no_grad():
        found = theirs(torch.from_numpy(tokens).long(), output_hidden_states=True)
    for value, other in (
        (ours["context"], found.hidden_states[-1]),
        (ours["pooled"], found.pooler_output),
    ):
        np.testing.assert_allclose(np.array(value), other.numpy(), rtol=1e-5, atol=1e-4)
    none = models["text_encoder_2"](tokens)
    assert not np.array(none["context"]).any() and not np.array(none["pooled"]).any()


def test_diffusers_draws_the_same(dit, tmp_path):
    """The transformer's closed layers are opened, so that texts and levels matter."""
    models, config = dit
    draws = np.random.default_rng(0)
    for slot in layout.slots(models["transformer"]).values():
        if not np.array(slot.variable).any():
            slot.variable.assign(draws.standard_normal(slot.variable.shape, "float32") * 0.05)
    tokenizers = tiny_dit.tokenizers_of(config)
    save_folder(tmp_path, config, models, tokenizers, dtype="float32")
    assert open_checkpoint(tmp_path).config == config
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path, **NO_T5)
    pipeline.set_progress_bar_config(disable=True)
    prompts = ["a red star", "a large blue ring left of a small white star"]
    ours = Painter(config, models, tokenize_for(tokenizers)).draw(prompts, num_steps=4)
    noise = our_noise(config, len(prompts))
    theirs = pipeline(
        prompts, num_inference_steps=4, guidance_scale=4.0, latents=tensor(noise), output_type="np",
        height=64, width=64,
    ).images  # fmt: skip
    assert ours.std() > 5
    assert np.abs(ours.astype(int) - np.round(255 * theirs)).max() <= 2


@pytest.mark.parametrize("guidance", (1.0, 3.0))
def test_a_teacher_predicts_what_diffusers_does(dit, guidance):
    """Its prediction at another schedule's levels, and with captions of fewer tokens."""
    _, config = dit
    base = open_checkpoint(TINY_FOLDER)
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        TINY_FOLDER, torch_dtype=torch.float32
    )
    draws = np.random.default_rng(0)
    latents, noise = draws.standard_normal((2, 4, 16, 16, 4), "float32")
    timesteps, captions = (
        np.array([30, 400, 800, 990]),
        ["a red star", "", "a blue ring", "a cross"],
    )
    tokens = tiny_dit.tokenizers_of(config)["text_encoder"](captions)
    sigma = np.float32((timesteps + 1) / 1000)
    sigma = (2 * sigma / (1 + sigma))[:, None, None, None]  # shifted by 2
    noisy = (1 - sigma) * latents + sigma * noise
    ours = imitation.Teacher(base, config)(noisy, timesteps, tokens, guidance=guidance)

    norm = np.sqrt((1 - sigma) ** 2 + sigma**2)
    signal, level = (1 - sigma) / norm, sigma / norm
    abar = pipeline.scheduler.alphas_cumprod.numpy()
    told = np.interp(
        np.log(sigma / (1 - sigma)).ravel(), np.log((1 - abar) / abar) / 2, np.arange(1000)
    )
    contexts = pipeline.encode_prompt(captions, "cpu", 1, True)
    told = torch.tensor(told).float()
    with torch.no_grad():
        output, without = (
            pipeline.unet(tensor(noisy / norm), told, context).sample for context in contexts
        )
    output = without + guidance * (output - without)
    output = output.permute(0, 2, 3, 1).numpy()
    expected = (signal + level) * output + (level - signal) * noisy / norm
    assert np.abs(np.array(ours) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_teacher_with_the_same_schedule_is_asked_as_it_is():
    config = open_checkpoint(TINY_FOLDER).config
    told, scale, p, q = imitation.tables(config, config)
    np.testing.assert_allclose(told, np.arange(1000), atol=1e-3)
    np.testing.assert_allclose([scale, q], 1.0, atol=1e-6)
    np.testing.assert_allclose(p, 0.0, atol=1e-6)


def our_noise(config, count):
    shape = (config.denoiser.sample_size, config.denoiser.sample_size, 4)
    seeds = keras.ops.arange(count, dtype="int32")
    return np.array(normal(seeds, INITIAL, shape))


def test_the_files_are_small(tmp_path):
    make_random(DIT_CONFIG, tmp_path, dtype="float16")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= 21e6
