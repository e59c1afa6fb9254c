"""Train the embedded transformer in the tiny world, with flow matching.

Texts and latents are those of `tiny`, whose text encoder and autoencoder stay as they are. What it
learns is what the UNet of `tiny` knows of the noise that was drawn.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import keras

from sd_tf.checkpoints import DIT_CONFIG, TINY_FOLDER
from sd_tf.config import PipelineConfig
from sd_tf.models import MODEL_CLASSES
from sd_tf.models.text_encoder import TextEncoder
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.data import World
from sd_tf.training.imitation import Imitation, Teacher
from sd_tf.training.initial_weights import initialize, sinusoids
from sd_tf.training.latents import CACHE, cached_latents
from sd_tf.training.losses import freeze
from sd_tf.training.origin import Record, of_checkpoint
from sd_tf.training.painter import GUIDANCE
from sd_tf.training.settings import Averaging, Settings
from sd_tf.training.tiny import Draws, Models, record_of, run_stages
from sd_tf.training.trainer import alone_in
from sd_tf.weights import Checkpoint, layout, open_checkpoint, save_folder

SEED = 0  # of the initial weights
TEACHER = "teacher"  # among the models of a run


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights depend on, beside the checkpoint that gives texts and latents."""

    config: PipelineConfig
    scenes: int  # number of scenes in the training world
    denoiser: tuple[Draws, ...]
    base: Record  # what that checkpoint is known by

    def record(self, stages: int) -> Record:
        """Record what that many stages depend on."""
        return {
            "config": asdict(self.config),
            "scenes": self.scenes,
            "base": self.base,
            "stages": record_of(self.denoiser[:stages]),
        }


@dataclass(frozen=True)
class Imitates(Draws):
    """A stage whose targets are the predictions of a trained model."""

    teacher: str = TEACHER
    guidance: float = 1.0  # of the teacher

    @property
    def sample_guidance(self) -> float:
        return GUIDANCE / self.guidance

    def loss(self, models: Models, config: PipelineConfig) -> Imitation:
        encoders = [models[name] for name in config.text_encoders]
        denoiser, teacher = models[config.denoiser.component], models[self.teacher]
        return Imitation(denoiser, encoders, config, teacher, self.guidance)


SCENES = 32_000
GUIDED = 3.0  # the teacher's guidance
COMMON = Settings(
    steps=1000,
    batch_size=8,  # of the same examples, small batches taught more than batches of 16
    learning_rate=2.5e-3,
    warm_up=100,
    averaging=Averaging(half_life=200),
    jit_compile=False,  # TensorFlow's own kernels were faster for these matrices
    save_every=250,
    sample_every=1000,
)
STAGES = (
    # Where things are: the noisiest levels, at which hardly anything but the caption tells it.
    Imitates(
        replace(COMMON, final_learning_rate=0.5),
        first_timestep=600,
        complete=True,
        caption_dropout=0.0,
        guidance=GUIDED,
    ),
    # Everything.
    Imitates(
        replace(COMMON, steps=16_000, averaging=Averaging(half_life=600)),
        guidance=GUIDED,
    ),
    # The shapes of two things, learnt last and least …
    Imitates(
        replace(COMMON, steps=8000, learning_rate=2e-3, final_learning_rate=0.5),
        things=2,
        guidance=GUIDED,
    ),
    # … and everything together.
    Imitates(
        replace(COMMON, steps=5000, learning_rate=1e-3, averaging=Averaging(half_life=400)),
        guidance=GUIDED,
    ),
    # Both again, as they were still being learnt.
    Imitates(
        replace(COMMON, steps=14_000, learning_rate=2e-3, final_learning_rate=0.5, seed=1),
        things=2,
        guidance=GUIDED,
    ),
    Imitates(
        replace(COMMON, steps=4000, learning_rate=1e-3, averaging=Averaging(half_life=400), seed=1),
        guidance=GUIDED,
    ),
    # And once more, for longer.
    Imitates(
        replace(COMMON, steps=24_000, learning_rate=2e-3, final_learning_rate=0.5, seed=2),
        things=2,
        guidance=GUIDED,
    ),
    Imitates(
        replace(
            COMMON, steps=14_000, learning_rate=1e-3, averaging=Averaging(half_life=800), seed=2
        ),
        guidance=GUIDED,
    ),
)


def train(folder: Path, report: Callable[[str], None] = print) -> Path:
    """Run all stages, each resumed where it was stopped; return the checkpoint's folder."""
    with alone_in(folder):
        base = open_checkpoint(TINY_FOLDER)
        config = replace(DIT_CONFIG, autoencoder=base.config.autoencoder)
        pictures = World(SCENES, config.default_size)
        record = of_checkpoint(base)
        models = build(base, config)
        begun = {"checkpoint": record, "data": pictures.record()}
        latents = cached_latents(models["vae"], pictures, folder / CACHE, begun, report)
        tokenizers = tokenizers_of(config)
        recipe = Recipe(config, SCENES, STAGES, record)
        tokenize = tokenize_for(tokenizers)
        taught = {**models, TEACHER: Teacher(base, config)}
        run_stages(recipe, taught, pictures, latents, tokenize, folder, report)
        target = folder / "checkpoint"
        save_folder(target, config, models, tokenizers, dtype="float16")
        report(f"saved {target}")
        return target


def tokenizers_of(config: PipelineConfig) -> dict[str, ClipTokenizer]:
    return {
        name: ClipTokenizer.clip(encoder.pad_token_id, encoder.max_length)
        for name, encoder in config.text_encoders.items()
    }


def build(base: Checkpoint, config: PipelineConfig) -> dict[str, keras.layers.Layer]:
    """Build all models: frozen texts and latents of `base`, and a transformer to be trained."""
    name = config.denoiser.component
    models = {
        part: MODEL_CLASSES[type(of_part)](of_part, dtype="float32")
        for part, of_part in config.components.items()
        if part != "vae"
    }
    copy_texts(base, models["text_encoder"])
    close(models["text_encoder_2"])
    for part in config.text_encoders:
        freeze(models[part])
    denoiser = config.denoiser
    initialize(models[name], name, SEED)
    patches = denoiser.sample_size // denoiser.patch_size
    positions = models[name].pos_embed.pos_embed
    positions.values.assign(sinusoids(denoiser.hidden_size, denoiser.max_patches, patches))
    return {**models, "vae": freeze(base.build("vae"))}


def copy_texts(base: Checkpoint, encoder: TextEncoder) -> None:
    """Copy the text encoder of `base`, and let what comes after its layers change nothing.

    SD3 takes the penultimate layer's output for its context. So the last layer, which `base` lacks,
    passes on what it is given, and the projection of the pooled text does.
    """
    tensors = base.tensors("text_encoder")
    close(encoder)
    for path, slot in layout.slots(encoder).items():
        if path in tensors:
            rows = slot.shape[0]  # `base` has more positions
            slot.fill(lambda path=path, rows=rows: tensors[path].read()[:rows].astype("float32"))
    width = encoder.config.hidden_size
    encoder.text_projection.kernel.assign(keras.ops.eye(width))


def close(encoder: TextEncoder) -> None:
    """Set all weights to zero: layers that pass on what they are given, and an output of zeros."""
    for slot in layout.slots(encoder).values():
        slot.variable.assign(keras.ops.zeros(slot.variable.shape))
