"""Fine-tune a text-to-image checkpoint on captioned pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sd_tf.config import family_of
from sd_tf.runtime.pictures import contact_sheet
from sd_tf.training.batches import LatentBatches
from sd_tf.training.data import Source
from sd_tf.training.hosts import by_itself, this_host
from sd_tf.training.latents import CACHE, cached_latents
from sd_tf.training.lora import LoraOptions, adapt, recorded
from sd_tf.training.losses import Denoising, recomputed
from sd_tf.training.origin import Record, of_checkpoint
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.task import TrainingTask, has_further_conditions
from sd_tf.training.trainer import alone_in
from sd_tf.weights import Checkpoint

SAMPLES = 9


@dataclass(frozen=True)
class FinetuneOptions:
    """The options of a fine-tuning, beside the run's settings."""

    train_text_encoder: bool = False
    caption_dropout: float = 0.1  # share of examples whose caption is dropped
    min_snr: float | None = 5.0  # bound of the loss's weights; None: equal weights
    first_timestep: int = 0  # train only noise levels from this one on
    save_dtype: str | None = None  # None: the variables' dtype, float32
    lora: LoraOptions | None = None  # train an adapter, not the weights

    def record(self) -> Record:
        """Return the options that a resumed run must repeat, by name."""
        return recorded(self)


def finetune(
    checkpoint: Checkpoint,
    source: Source,
    settings: Settings,
    options: FinetuneOptions,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Path:
    """Train the UNet, and the text encoder if asked for; return the new checkpoint's folder.

    On several hosts, `source` is this host's part of the data.
    """
    config, host = checkpoint.config, this_host()
    if has_further_conditions(config) or config.latent_inputs != "none":
        raise TrainingError(
            f"Text-to-image training needs a checkpoint with one text encoder and no further "
            f"inputs (SD1, SD2, but no LCM). Received: {family_of(config)}"
        )
    with alone_in(folder):
        begun = {
            "checkpoint": of_checkpoint(checkpoint),
            "data": source.record(),
            "hosts": host.count,
        }
        with by_itself():
            vae = checkpoint.build("vae")
            cache = folder / host.named(CACHE)
            latents = cached_latents(vae, source, cache, begun, report)
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
            host,
        )
        loss = Denoising(unet, text_encoder, config.schedule, options.min_snr)
        models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
        trained = {"unet": unet}
        if options.train_text_encoder:
            trained["text_encoder"] = text_encoder
        loss, lora = adapt(loss, trained, options.lora, settings.seed)
        task = TrainingTask(
            checkpoint.name,
            config,
            tokenizer,
            models,
            loss,
            batches,
            {**options.record(), **begun},
            lora,
        )
        prompts = [source.caption(i, 0) for i in range(min(SAMPLES, len(source)))]

        def sample(step):
            pictures = task.painter.draw(prompts, source.picture(0).shape[0])
            contact_sheet(pictures).save(folder / f"{step:06d}.png")

        return task.run(settings, folder, options.save_dtype, report, sample)
