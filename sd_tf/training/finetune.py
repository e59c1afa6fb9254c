"""Text-to-image fine-tuning of a checkpoint on captioned pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sd_tf.generate import contact_sheet
from sd_tf.training.batches import LatentBatches
from sd_tf.training.data import Source
from sd_tf.training.latents import cached_latents
from sd_tf.training.lesson import Lesson
from sd_tf.training.losses import Denoising, recomputed
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.weights import Checkpoint

SAMPLES = 9


@dataclass(frozen=True)
class Options:
    train_text_encoder: bool = False
    caption_dropout: float = 0.1
    min_snr: float | None = 5.0
    first_timestep: int = 0
    save_dtype: str | None = None  # None: as the variables are, float32


def finetune(
    checkpoint: Checkpoint,
    source: Source,
    settings: Settings,
    options: Options,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Path:
    """Train the UNet (and the text encoder); returns the new checkpoint's folder."""
    config = checkpoint.config
    if config.unet.added is not None or config.latent_inputs != "none":
        raise TrainingError(
            f"Text-to-image training is for checkpoints with one text encoder and no further "
            f"inputs (SD1, SD2). Received: {config.family}"
        )
    vae = checkpoint.build("vae")
    latents = cached_latents(vae, source, folder, report)
    unet = checkpoint.build("unet", settings.precision)
    if settings.gradient_checkpointing:
        recomputed(unet)
    text_encoder = checkpoint.build("text_encoder", settings.precision)
    text_encoder.trainable = options.train_text_encoder
    tokenizer = checkpoint.tokenizer()
    batches = LatentBatches(
        source,
        settings,
        latents,
        config,
        tokenizer,
        options.caption_dropout,
        options.first_timestep,
    )
    loss = Denoising(unet, text_encoder, config.schedule, options.min_snr)
    models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
    lesson = Lesson(config, tokenizer, models, loss, batches)
    prompts = [source.caption(i, 0) for i in range(min(SAMPLES, len(source)))]

    def sample(step):
        contact_sheet(lesson.painter.draw(prompts)).save(folder / f"{step:06d}.png")

    return lesson.learn(settings, folder, options.save_dtype, report, sample)
