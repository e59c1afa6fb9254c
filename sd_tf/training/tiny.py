"""Train the embedded checkpoint in the tiny world: autoencoder, then text encoder and UNet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import keras
import numpy as np

from sd_tf.checkpoints import CONFIG
from sd_tf.config import END_TOKEN, START_TOKEN, PipelineConfig
from sd_tf.models import MODEL_CLASSES
from sd_tf.runtime.pictures import contact_sheet
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.training import world
from sd_tf.training.batches import LatentBatches, PictureBatches, ReadingBatches
from sd_tf.training.conditions import Tokenize, tokenize_for
from sd_tf.training.data import World
from sd_tf.training.initial_weights import initialize
from sd_tf.training.latents import CACHE, cached_latents
from sd_tf.training.losses import Autoencoding, Denoising, Reading
from sd_tf.training.origin import Record
from sd_tf.training.painter import GUIDANCE, Painter
from sd_tf.training.settings import Averaging, Settings
from sd_tf.training.trainer import Run, alone_in
from sd_tf.weights import save_folder

Models = Mapping[str, keras.layers.Layer]  # by component
VOCABULARY_SCENES = 4000  # scenes from whose captions the words of the world are collected


@dataclass(frozen=True)
class Draws:
    """A stage that trains the denoiser on noisy latents of captioned scenes.

    It trains the text encoders, too, unless they are frozen.
    """

    settings: Settings
    min_snr: float | None = None  # None: all noise levels have equal weights
    first_timestep: int = 0  # use only noise levels from this one on
    things: int | None = None  # use only scenes with that number of things
    complete: bool = False  # use captions that leave nothing out
    caption_dropout: float = 0.1
    uniform: bool = True  # draw all noise levels equally often

    @property
    def sample_guidance(self) -> float:
        """The guidance of the sample sheets."""
        return GUIDANCE

    def loss(self, models: Models, config: PipelineConfig) -> Denoising:
        encoders = [models[name] for name in config.text_encoders]
        return Denoising(models[config.denoiser.component], encoders, config, self.min_snr)

    def batches(self, pictures: World, latents, config, tokenize) -> LatentBatches:
        source = replace(pictures, complete=self.complete)
        if self.things is not None:
            source = source.with_things(self.things)
            latents = latents[source.indices]
        return LatentBatches(
            source,
            self.settings,
            latents,
            config,
            tokenize,
            self.caption_dropout,
            self.first_timestep,
            uniform=self.uniform,
        )


@dataclass(frozen=True)
class Reads:
    """A stage that trains the text encoder alone, to tell what a complete caption puts where."""

    settings: Settings

    def loss(self, models: Models, config: PipelineConfig) -> Reading:
        return Reading(models["text_encoder"], tuple(world.QUESTIONS.values()))

    def batches(self, pictures: World, latents, config, tokenize) -> ReadingBatches:
        return ReadingBatches(replace(pictures, complete=True), self.settings, tokenize)


@dataclass(frozen=True)
class Recipe:
    """Everything that the tiny checkpoint's weights depend on."""

    config: PipelineConfig
    scenes: int  # number of scenes in the training world
    autoencoder: Settings
    denoiser: tuple[Draws | Reads, ...]

    def record(self, stages: int) -> Record:
        """Record what the autoencoder and that many stages of the denoiser depend on."""
        return {
            "config": asdict(self.config),
            "scenes": self.scenes,
            "autoencoder": self.autoencoder.record(),
            "stages": record_of(self.denoiser[:stages]),
        }


def record_of(stages: Sequence) -> Record:
    """Record what stages depend on: dataclasses with `settings`."""
    records = [{**asdict(stage), "settings": stage.settings.record()} for stage in stages]
    return {str(number): record for number, record in enumerate(records, start=1)}


LAYOUT = Settings(
    steps=800,
    batch_size=32,
    learning_rate=1e-3,
    warm_up=50,
    averaging=Averaging(start=None),
    sample_every=400,
)
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
    denoiser=(
        # How things look.
        Draws(
            Settings(
                steps=8000,
                batch_size=32,
                learning_rate=1e-3,
                warm_up=300,
                averaging=Averaging(half_life=300),
                sample_every=1000,
            ),
            min_snr=5.0,
        ),
        Draws(
            Settings(
                steps=6000,
                batch_size=32,
                learning_rate=8e-4,
                warm_up=200,
                averaging=Averaging(half_life=300),
                sample_every=1000,
            ),
        ),
        # Where things are. With all scenes and noise levels at once, the text encoder learns to
        # ignore the words for that, and later stages do not correct it. The noisiest levels teach
        # them, where hardly anything but the caption tells the picture: first with one thing …
        Draws(
            replace(LAYOUT, steps=600),
            first_timestep=800,
            things=1,
            complete=True,
            caption_dropout=0.0,
        ),
        # … then with two, for which the text encoder first has to learn which of them is where.
        Reads(
            Settings(
                steps=1500,
                batch_size=64,
                learning_rate=1e-3,
                warm_up=50,
                averaging=Averaging(start=None),
            )
        ),
        Draws(
            replace(LAYOUT, final_learning_rate=0.3),
            first_timestep=700,
            complete=True,
            caption_dropout=0.0,
        ),
        # Everything together.
        Draws(
            Settings(
                steps=4000,
                batch_size=32,
                learning_rate=8e-4,
                warm_up=100,
                averaging=Averaging(half_life=150),
                sample_every=1000,
            ),
        ),
    ),
)


def train(recipe: Recipe, folder: Path, report: Callable[[str], None] = print) -> Path:
    """Run all stages, each resumed where it was stopped; return the checkpoint's folder."""
    with alone_in(folder):
        config = recipe.config
        pictures = World(recipe.scenes, config.default_size)
        vae, factor, latents = train_autoencoder(recipe, pictures, folder, report)
        config = replace(config, autoencoder=replace(config.autoencoder, scaling_factor=factor))
        text_encoder, unet, tokenizer = train_denoiser(
            replace(recipe, config=config), pictures, latents, vae, folder, report
        )
        target = folder / "checkpoint"
        models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
        save_folder(target, config, models, {"text_encoder": tokenizer}, dtype="float16")
        report(f"saved {target}")
        return target


def build(recipe: Recipe, name: str, settings: Settings, **options) -> keras.layers.Layer:
    """Build a component's model with initial weights."""
    part = recipe.config.components[name]
    model = MODEL_CLASSES[type(part)](part, dtype=settings.precision)
    initialize(model, name, settings.seed, **options)
    return model


def train_autoencoder(recipe, pictures: World, folder: Path, report):
    """Train the VAE; return it, its scaling factor, and all pictures' latents (N, h, w, C)."""
    config, settings = recipe.config, recipe.autoencoder
    vae = build(recipe, "vae", settings, open_output=True)
    side = config.denoiser.sample_size
    shape = (side, side, config.autoencoder.latent_channels)
    batches = PictureBatches(pictures, settings.batch_size, settings.seed, shape)
    stage = folder / "autoencoder"
    begun = recipe.record(stages=0)
    Run(Autoencoding(vae), batches, settings, stage, report, depends_on=begun).train()

    latents = cached_latents(vae, pictures, stage / CACHE, begun, report)
    factor = round(1.0 / float(np.std(latents.astype("float32"))), 5)
    report(f"latents' mean {latents.mean(dtype='float64'):.3f}, scaling factor {factor}")
    return vae, factor, latents


def train_denoiser(recipe, pictures: World, latents, vae, folder: Path, report):
    """Train text encoder and UNet stage by stage; return them and the tokenizer."""
    config, first = recipe.config, recipe.denoiser[0].settings
    tokenizer = ClipTokenizer.clip(config.text_encoders["text_encoder"].pad_token_id)
    text_encoder = build(recipe, "text_encoder", first, token_ids=vocabulary(pictures, tokenizer))
    unet = build(recipe, "unet", first)
    models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
    tokenize = tokenize_for({"text_encoder": tokenizer})
    run_stages(recipe, models, pictures, latents, tokenize, folder, report)
    return text_encoder, unet, tokenizer


def run_stages(
    recipe,
    models: Models,
    pictures: World,
    latents: np.ndarray,
    tokenize: Tokenize,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Run a recipe's stages of the denoiser, each in a folder of its own."""
    config = recipe.config
    prompts = [text for things in (1, 2) for text, _ in world.prompts(18, "train", things)]
    painter = Painter(config, models, tokenize)
    for number, phase in enumerate(recipe.denoiser, start=1):
        stage = folder / f"denoiser-{number}"
        loss = phase.loss(models, config)
        batches = phase.batches(pictures, latents, config, tokenize)

        def sample(step, stage=stage, phase=phase):
            pictures = painter.draw(prompts, guidance_scale=phase.sample_guidance)
            contact_sheet(pictures).save(stage / f"{step:06d}.png")

        begun = recipe.record(stages=number)
        Run(loss, batches, phase.settings, stage, report, sample, depends_on=begun).train()


def vocabulary(pictures: World, tokenizer: ClipTokenizer) -> np.ndarray:
    """Collect the token ids that occur in captions of this world."""
    count = min(len(pictures), VOCABULARY_SCENES)
    ids = tokenizer([pictures.caption(i, epoch) for i in range(count) for epoch in range(3)])
    return np.union1d(ids, [START_TOKEN, END_TOKEN])
