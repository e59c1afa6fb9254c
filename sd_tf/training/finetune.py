"""Fine-tune a text-to-image checkpoint on captioned pictures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sd_tf.config import family_of
from sd_tf.runtime.pictures import contact_sheet
from sd_tf.training.batches import LatentBatches, PriorBatches, check_run
from sd_tf.training.conditions import check_trainable, text_precisions, time_ids, tokenize_for
from sd_tf.training.data import Source
from sd_tf.training.hosts import by_itself, this_host
from sd_tf.training.inversion import Inversion, InversionOptions, with_placeholder
from sd_tf.training.latents import CACHE, cached_latents
from sd_tf.training.lora import adapt, recorded
from sd_tf.training.losses import Denoising, freeze_unused, recomputed
from sd_tf.training.origin import Record, of_checkpoint
from sd_tf.training.settings import LoraOptions, Settings, TrainingError, frozen_precision
from sd_tf.training.task import TrainingTask
from sd_tf.training.trainer import alone_in
from sd_tf.weights import Checkpoint
from sd_tf.weights.diffusers_schedule import write_schedule

SAMPLES = 9
PRIOR_CACHE, PRIOR_SEED = "prior_latents", 2**20


@dataclass(frozen=True)
class FinetuneOptions:
    """The options of a fine-tuning, beside the run's settings."""

    train_text_encoder: bool = False
    caption_dropout: float = 0.1  # share of examples whose caption is dropped
    min_snr: float | None = 5.0  # bound of the loss's weights; None: equal weights
    first_timestep: int = 0  # train only noise levels from this one on
    save_dtype: str | None = None  # of all but T5; None: the variables', float32
    lora: LoraOptions | None = None  # train an adapter, not the weights
    prior_weight: float = 1.0  # of the loss of a prior's pictures
    inversion: InversionOptions | None = None  # train a token's vectors, not the weights

    def check(self) -> "FinetuneOptions":
        """Raise if a value is out of range; return self."""
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise TrainingError(
                f"`caption_dropout` must be from 0 to 1. Received: {self.caption_dropout}"
            )
        if not self.prior_weight >= 0:
            raise TrainingError(
                f"`prior_weight` must not be below 0. Received: {self.prior_weight}"
            )
        if self.inversion is None:
            return self
        self.inversion.check()
        if self.train_text_encoder or self.lora is not None:
            raise TrainingError(
                "A token's vectors are trained alone: `placeholder_token` goes neither with "
                "`lora_rank` nor with `train_text_encoder`."
            )
        return self

    def record(self) -> Record:
        """Return the options that a resumed run must repeat, by name."""
        every = recorded(self)
        # Part of a run that has them.
        del every["prior_weight"], every["inversion"]
        return every if self.inversion is None else {**every, **self.inversion.record()}


def finetune(
    checkpoint: Checkpoint,
    source: Source,
    settings: Settings,
    options: FinetuneOptions,
    folder: Path,
    report: Callable[[str], None] = print,
    prior: Source | None = None,
) -> Path:
    """Train the denoiser, and the text encoders if asked for; return the new checkpoint's folder.

    With options for an adapter or a token, train that, and return its file.

    Args:
        source: the data; on several hosts, this host's part of it.
        prior: pictures of the same class, of which the model is to forget nothing.
    """
    check_trainable(checkpoint.config)
    options.check()
    if options.inversion is not None:
        if checkpoint.config.schedule.is_flow:
            raise TrainingError(
                "A token's vectors are trained for SD1, SD2 and SDXL. "
                f"Received: {family_of(checkpoint.config)}"
            )
        options.inversion.check_captions(source)
    elif options.lora is None:
        write_schedule(checkpoint.config.schedule)  # raises where diffusers has none for it
    with alone_in(folder):
        task = prepare(checkpoint, source, settings, options, folder, report, prior)
        prompts = [source.caption(i, 0) for i in range(min(SAMPLES, len(source)))]

        def sample(step):
            pictures = task.painter.draw(prompts, source.picture(0).shape[0])
            contact_sheet(pictures).save(folder / f"{step:06d}.png")

        return task.run(settings, folder, options.save_dtype, report, sample)


def prepare(
    checkpoint: Checkpoint,
    source: Source,
    settings: Settings,
    options: FinetuneOptions,
    folder: Path,
    report: Callable[[str], None],
    prior: Source | None,
) -> TrainingTask:
    """Build the models, loss and batches; `folder` keeps the latents."""
    host = this_host()
    check_run(settings, host, options.first_timestep, checkpoint.config)
    if options.lora is not None:  # raises where the denoiser has no layers for them
        options.lora.targets(checkpoint.config.denoiser.component)
    begun = {"checkpoint": of_checkpoint(checkpoint), "data": source.record(), "hosts": host.count}
    record = {**options.record(), **begun}
    if prior is not None:
        record |= {"prior_data": prior.record(), "prior_weight": options.prior_weight}
    if options.inversion is not None:
        checkpoint = with_placeholder(checkpoint, options.inversion, folder)
    config = checkpoint.config
    tokenizers = checkpoint.tokenizers()
    with by_itself():
        vae = checkpoint.build("vae")

    def batches_of(pictures, cache, settings):
        cache = folder / host.named(cache)
        with by_itself():
            depends_on = {**begun, "data": pictures.record()}
            latents = cached_latents(vae, pictures, cache, depends_on, report)
        return LatentBatches(
            pictures,
            settings,
            latents,
            config,
            tokenize_for(tokenizers),
            options.caption_dropout,
            options.first_timestep,
            host,
            time_ids(config, pictures, cache),
        )

    batches = batches_of(source, CACHE, settings)
    if prior is not None:
        others = replace(settings, seed=settings.seed + PRIOR_SEED)
        of_class = batches_of(prior, PRIOR_CACHE, others)
        batches = PriorBatches(batches, of_class, options.prior_weight)

    denoiser_name, precision = config.denoiser.component, settings.precision
    is_adapted = options.lora is not None
    is_frozen = is_adapted or options.inversion is not None
    denoiser = checkpoint.build(
        denoiser_name, frozen_precision(precision) if is_frozen else precision
    )
    if settings.gradient_checkpointing:
        recomputed(denoiser)
    precisions = text_precisions(config, precision, are_frozen=is_adapted)
    encoders = {name: checkpoint.build(name, one) for name, one in precisions.items()}
    clips = {name: encoders[name] for name in config.clip_encoders}
    for name, encoder in encoders.items():
        encoder.trainable = options.train_text_encoder and name in clips
    for encoder in clips.values():
        freeze_unused(encoder)
    patches = config.patches(source.picture(0).shape[:2])  # a flow's shift may depend on them
    here = replace(config, schedule=config.schedule.for_patches(patches))
    loss = Denoising(denoiser, encoders.values(), here, options.min_snr)
    lora = inversion = None
    if options.inversion is not None:
        denoiser.trainable = False
        inversion = Inversion(encoders, options.inversion)
    else:
        trained = {denoiser_name: denoiser, **(clips if options.train_text_encoder else {})}
        loss, lora = adapt(loss, trained, options.lora, settings.seed)
    models = {**encoders, denoiser_name: denoiser, "vae": vae}
    return TrainingTask(
        *(checkpoint.name, config, tokenizers, models, loss, batches, record, lora, inversion),
        unchanged={name: checkpoint.tensors(name) for name in config.t5_encoders},
    )
