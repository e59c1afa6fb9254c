"""The embedded checkpoint's making: autoencoder, then text encoder and UNet, in the tiny world."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import keras
import numpy as np

from sd_tf.checkpoints import CONFIG
from sd_tf.config import END_TOKEN, START_TOKEN, PipelineConfig
from sd_tf.generate import contact_sheet
from sd_tf.models import MODEL_CLASSES
from sd_tf.tokenizer import ClipTokenizer
from sd_tf.training import world
from sd_tf.training.batches import LatentBatches, PictureBatches
from sd_tf.training.data import Source, World
from sd_tf.training.initial import initialize
from sd_tf.training.latents import cached_latents
from sd_tf.training.losses import Autoencoding, Denoising
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Averaging, Settings
from sd_tf.training.trainer import Run
from sd_tf.weights import save_folder

VOCABULARY_SCENES = 4000  # captions from which the words of the world are collected


@dataclass(frozen=True)
class Recipe:
    """Everything that the tiny checkpoint's weights depend on."""

    config: PipelineConfig
    scenes: int  # of the training world
    autoencoder: Settings
    denoiser: Settings
    caption_dropout: float = 0.1
    min_snr: float | None = 5.0


TINY = Recipe(
    config=CONFIG,
    scenes=40_000,
    autoencoder=Settings(
        steps=3200,
        batch_size=8,
        learning_rate=1e-3,
        warm_up=100,
        averaging=Averaging(half_life=100),
        sample_every=800,
    ),
    denoiser=Settings(
        steps=8_000,
        batch_size=32,
        learning_rate=1e-3,
        warm_up=300,
        averaging=Averaging(half_life=300),
        sample_every=1000,
    ),
)


def train(recipe: Recipe, folder: Path, report: Callable[[str], None] = print) -> Path:
    """All stages, each going on where it was stopped; returns the checkpoint's folder."""
    config = recipe.config
    pictures = World(recipe.scenes, config.default_size)
    vae, factor, latents = train_autoencoder(recipe, pictures, folder, report)
    config = replace(config, vae=replace(config.vae, scaling_factor=factor))
    text_encoder, unet, tokenizer = train_denoiser(
        replace(recipe, config=config), pictures, latents, vae, folder, report
    )
    target = folder / "checkpoint"
    models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
    save_folder(target, config, models, {"text_encoder": tokenizer}, dtype="float16")
    report(f"saved {target}")
    return target


def build(recipe: Recipe, name: str, **options) -> keras.layers.Layer:
    part = recipe.config.components[name]
    model = MODEL_CLASSES[type(part)](part, dtype=recipe.denoiser.precision)
    initialize(model, name, recipe.denoiser.seed, **options)
    return model


def train_autoencoder(recipe, pictures: Source, folder: Path, report):
    """Returns the VAE, its scaling factor, and the latents (N, h, w, C) of all pictures."""
    config, settings = recipe.config, recipe.autoencoder
    vae = build(recipe, "vae", open_output=True)
    side = config.unet.sample_size
    shape = (side, side, config.vae.latent_channels)
    batches = PictureBatches(pictures, settings.batch_size, settings.seed, shape)
    stage = folder / "autoencoder"
    Run(Autoencoding(vae), batches, settings, stage, report).train()

    latents = cached_latents(vae, pictures, stage, report)
    factor = round(1.0 / float(np.std(latents.astype("float32"))), 5)
    report(f"latents' mean {latents.mean(dtype='float64'):.3f}, scaling factor {factor}")
    return vae, factor, latents


def train_denoiser(recipe, pictures: Source, latents, vae, folder: Path, report):
    config, settings = recipe.config, recipe.denoiser
    tokenizer = ClipTokenizer.clip(config.text_encoder.pad_token_id)
    text_encoder = build(recipe, "text_encoder", token_ids=vocabulary(pictures, tokenizer))
    unet = build(recipe, "unet")
    batches = LatentBatches(
        pictures,
        settings.batch_size,
        settings.seed,
        latents,
        config.vae.scaling_factor,
        tokenizer,
        config.schedule.num_train_timesteps,
        recipe.caption_dropout,
    )
    prompts = [text for things in (1, 2) for text, _ in world.prompts(18, "train", things)]
    painter = Painter(config, text_encoder, unet, vae, tokenizer)
    stage = folder / "denoiser"

    def sample(step):
        contact_sheet(painter.draw(prompts)).save(stage / f"{step:06d}.png")

    loss = Denoising(unet, text_encoder, config.schedule, recipe.min_snr)
    Run(loss, batches, settings, stage, report, sample).train()
    return text_encoder, unet, tokenizer


def vocabulary(pictures: Source, tokenizer: ClipTokenizer) -> np.ndarray:
    """The token ids that captions of this world are made of."""
    count = min(len(pictures), VOCABULARY_SCENES)
    ids = tokenizer([pictures.caption(i, epoch) for i in range(count) for epoch in range(3)])
    return np.union1d(ids, [START_TOKEN, END_TOKEN])
