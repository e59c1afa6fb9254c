"""Training of ControlNets: at first a copy of the UNet's way down, which adds nothing."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sd_tf.config import ControlNetConfig, PipelineConfig, family_of
from sd_tf.models.controlnet import ControlNet
from sd_tf.runtime.pictures import contact_sheet, square
from sd_tf.training.batches import Batch, check_run
from sd_tf.training.conditions import check_nothing_added, tokenize_for
from sd_tf.training.edit import EditBatches, check_cuts
from sd_tf.training.hosts import this_host
from sd_tf.training.initial_weights import initialize
from sd_tf.training.losses import Denoising, Steered, Steering, freeze, recomputed
from sd_tf.training.origin import Record, of_checkpoint
from sd_tf.training.pairs import Pairs
from sd_tf.training.settings import Settings, TrainingError, frozen_precision
from sd_tf.training.task import TrainingTask
from sd_tf.training.trainer import alone_in
from sd_tf.weights import Checkpoint, CheckpointError, layout
from sd_tf.weights.diffusers_controlnet import write_controlnet

NAME = ControlNetConfig.component
HINT_CHANNELS = (16, 32, 96, 256)  # as many of them as the autoencoder has levels
SAMPLES = 6
ZEROS = ("controlnet_down_blocks.", "controlnet_mid_block.", "controlnet_cond_embedding.conv_out.")


@dataclass(frozen=True)
class ControlOptions:
    """The options of a ControlNet's training, beside the run's settings."""

    size: int
    resize: int | None = None  # pictures are scaled to this, then cropped to `size`; None: `size`
    flip: float = 0.0  # share of pairs that are mirrored; 0 if captions name sides
    dropout: float = 0.1  # share without a caption
    first_timestep: int = 0  # train only noise levels from this one on
    save_dtype: str | None = None

    def record(self) -> Record:
        """Return the options that a resumed run must repeat, by name."""
        every = asdict(self)
        del every["save_dtype"]
        return every

    def check(self) -> "ControlOptions":
        """Raise if a value is out of range; return self."""
        if not 0.0 <= self.dropout <= 1.0:
            raise TrainingError(f"`dropout` must be from 0 to 1. Received: {self.dropout}")
        check_cuts(self.flip, self.resize, self.size)
        return self


class ControlBatches(EditBatches):
    """Batches of pairs, of which `dropout` lose their caption, and none its picture."""

    scaled = staticmethod(square)

    def dropped(self, r: np.ndarray) -> tuple[np.ndarray, Batch]:
        without = r < self.options.dropout
        if self.config.zero_empty_negative:  # as pictures are drawn without a negative prompt
            return without, {"has_text": 1.0 - without.astype("float32")}
        return without, {}

    def told(self, places: np.ndarray, flips: np.ndarray, resize: int) -> Batch:
        """Return SDXL's numbers: the size of the pictures, where they were cut, and to what.

        The place is that in the mirrored picture, if it was mirrored.
        """
        if not self.config.denoiser.num_time_ids:
            return {}
        size = self.options.size
        left, top = np.round(places * (resize - size)).T
        corners = np.stack([top, np.where(flips, resize - size - left, left)], axis=1)
        parts = [np.full_like(corners, resize), corners, np.full_like(corners, size)]
        return {"time_ids": np.concatenate(parts, axis=1).astype("float32")}


def check_family(config: PipelineConfig) -> None:
    """Refuse checkpoints for which no ControlNet is trained."""
    check_nothing_added(config)
    denoiser, family = config.denoiser, family_of(config)
    is_base = denoiser.conditioner == "clip" and denoiser.num_time_ids in (0, 6)
    if not is_base or denoiser.is_told_guidance:
        raise TrainingError(
            f"A ControlNet is trained for SD1, SD2 and SDXL base, but for no LCM. "
            f"Received: {family}"
        )
    if config.latent_inputs != "none":
        raise TrainingError(
            f"A ControlNet is trained beside a UNet that takes noisy latents alone, not one that "
            f"edits or paints in pictures: train it on the checkpoint that this one was made from. "
            f"Received: {family}"
        )
    if denoiser.mid_depth is None:
        raise TrainingError(
            "A ControlNet is trained beside a UNet with a middle, which diffusers' ControlNets "
            "have. Received: a UNet without one"
        )
    try:
        write_controlnet(net_config(config))  # as it will be saved
    except CheckpointError as error:
        raise TrainingError(f"This checkpoint's ControlNet could not be saved. {error}") from error


def net_config(config: PipelineConfig) -> ControlNetConfig:
    """Return the configuration of a ControlNet for a checkpoint's UNet."""
    trunk = replace(config.denoiser, up_depths=(), guidance_embed_dim=None)
    return ControlNetConfig(trunk, HINT_CHANNELS[: len(config.autoencoder.channels)])


def new_net(checkpoint: Checkpoint, precision: str = "float32", seed: int = 0) -> ControlNet:
    """Build a net with the UNet's weights; its picture's layers are random, its last ones zeros."""
    config = net_config(checkpoint.config)
    net = ControlNet(config, dtype=precision)
    initialize(net, NAME, seed)
    unet = checkpoint.tensors(checkpoint.config.denoiser.component)
    for path, slot in layout.slots(net).items():
        if path.startswith(ZEROS):
            slot.fill(lambda slot=slot: np.zeros(slot.shape, "float32"))
        elif path in unet:
            slot.fill(lambda path=path: unet[path].read())
    return net


def prepare(
    checkpoint: Checkpoint, pairs: Pairs, settings: Settings, options: ControlOptions
) -> TrainingTask:
    """Build the models, loss and batches; `pairs` are, on several hosts, this host's part."""
    options.check()
    check_family(checkpoint.config)
    host = this_host()
    check_run(settings, host, options.first_timestep, checkpoint.config)
    begun = {"checkpoint": of_checkpoint(checkpoint), "data": pairs.record(), "hosts": host.count}
    begun |= options.record()
    config = checkpoint.config
    tokenizers = checkpoint.tokenizers()
    tokenize = tokenize_for(tokenizers)
    batches = ControlBatches(pairs, settings, options, config, tokenize, host)
    vae = freeze(checkpoint.build("vae"))
    models = {
        name: freeze(checkpoint.build(name, frozen_precision(settings.precision)))
        for name in (*config.text_encoders, "unet")
    }
    net = new_net(checkpoint, settings.precision, settings.seed)
    if settings.gradient_checkpointing:
        recomputed(models["unet"])
        recomputed(net)
    denoiser = Steered(models["unet"], net)
    encoders = [models[name] for name in config.text_encoders]
    denoising = Denoising(denoiser, encoders, config, min_snr=None)
    loss = Steering(denoising, vae, config.autoencoder.latent_scale)
    return TrainingTask(
        checkpoint.name,
        replace(config, controlnets={NAME: net.control}),
        tokenizers,
        {**models, NAME: net, "vae": vae},
        loss,
        batches,
        begun,
        net=net,
    )


def train(
    checkpoint: Checkpoint,
    pairs: Pairs,
    settings: Settings,
    options: ControlOptions,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Path:
    """Train a net; return its folder."""
    with alone_in(folder):
        task = prepare(checkpoint, pairs, settings, options)
        shown = [pairs.pair(i) for i in range(min(SAMPLES, len(pairs)))]
        size = options.size
        before = np.stack([np.asarray(square(pair.before, size)) for pair in shown])

        def sample(step):
            after = task.painter.steer([pair.text for pair in shown], before)
            both = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
            contact_sheet(both).save(folder / f"{step:06d}.png")

        return task.run(settings, folder, options.save_dtype, report, sample)
