"""Text-to-image fine-tuning of a checkpoint on captioned pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sd_tf.generate import contact_sheet
from sd_tf.training.batches import LatentBatches
from sd_tf.training.data import Source
from sd_tf.training.latents import cached_latents
from sd_tf.training.losses import Denoising
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.trainer import Run
from sd_tf.weights import Checkpoint, save_folder

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
    prompts = [source.caption(i, 0) for i in range(min(SAMPLES, len(source)))]
    painter = Painter(config, text_encoder, unet, vae, tokenizer)

    def sample(step):
        contact_sheet(painter.draw(prompts)).save(folder / f"{step:06d}.png")

    loss = Denoising(unet, text_encoder, config.schedule, options.min_snr)
    Run(loss, batches, settings, folder, report, sample).train()
    target = folder / "checkpoint"
    models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
    save_folder(target, config, models, {"text_encoder": tokenizer}, options.save_dtype)
    report(f"saved {target}")
    return target
