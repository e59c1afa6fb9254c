"""Training of small decoders, which turn a checkpoint's latents into pictures at little cost."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from keras import ops

from sd_tf.config import PREVIEW_DECODER, AutoencoderConfig, SmallDecoderConfig
from sd_tf.models.small_decoder import SmallDecoder
from sd_tf.runtime.pictures import contact_sheet, to_model
from sd_tf.training.batches import PictureBatches, part_of_batch
from sd_tf.training.data import Source
from sd_tf.training.hosts import this_host
from sd_tf.training.initial_weights import initialize
from sd_tf.training.losses import Decoding, freeze
from sd_tf.training.origin import of_checkpoint
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.trainer import Run, alone_in
from sd_tf.weights import Checkpoint, save_small_decoder

NAME = "small_decoder"  # of its folder in a run's
SHOWN = 12  # pictures of a sample sheet, each beside what the decoder makes of it


@dataclass(frozen=True)
class SmallDecoderOptions:
    """The size of a small decoder, and how it is saved."""

    channels: int = 64
    blocks: tuple[int, ...] | None = None  # on each level; None: three, and one on the last
    save_dtype: str | None = None

    def config(self, autoencoder: AutoencoderConfig) -> SmallDecoderConfig:
        """Return the configuration of a decoder for an autoencoder's latents."""
        levels = len(autoencoder.channels)
        blocks = (*[3] * (levels - 1), 1) if self.blocks is None else tuple(self.blocks)
        if len(blocks) != levels or min(blocks) < 0:
            raise TrainingError(
                f"`blocks` has a number for each of the autoencoder's {levels} levels, 0 or more. "
                f"Received: {', '.join(map(str, blocks))}"
            )
        if self.channels < 1:
            raise TrainingError(f"`channels` is at least 1. Received: {self.channels}")
        return SmallDecoderConfig(
            out_channels=autoencoder.out_channels,
            latent_channels=autoencoder.latent_channels,
            channels=self.channels,
            blocks=blocks,
        )


def train(
    checkpoint: Checkpoint,
    source: Source,
    settings: Settings,
    options: SmallDecoderOptions,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Path:
    """Train a small decoder on pictures, resumed where it was stopped; return its folder.

    On several hosts, `source` is this host's part of the pictures.
    """
    with alone_in(folder):
        autoencoder = checkpoint.config.autoencoder
        config, scale = options.config(autoencoder), autoencoder.latent_scale
        vae = freeze(checkpoint.build("vae"))
        model = SmallDecoder(config, dtype=settings.precision)
        initialize(model, PREVIEW_DECODER, settings.seed)
        host, shown = this_host(), min(SHOWN, len(source))
        pictures = np.stack([source.picture(index) for index in range(shown)])
        height, width = (side // autoencoder.downscale for side in pictures.shape[1:3])
        latent = (height, width, autoencoder.latent_channels)
        given = (source, part_of_batch(settings, host), settings.seed, latent, host, source.order)
        batches = PictureBatches(*given)

        def sample(step):
            mean, _ = vae.encode(ops.convert_to_tensor(to_model(pictures)))
            drawn = ops.convert_to_numpy(ops.cast(model.decode(scale.apply(mean)), "float32"))
            drawn = np.round(255.0 * np.clip(drawn / 2.0 + 0.5, 0.0, 1.0)).astype("uint8")
            both = np.stack([pictures, drawn], axis=1).reshape(-1, *pictures.shape[1:])
            contact_sheet(both).save(folder / f"{step:06d}.png")

        begun = {
            "checkpoint": of_checkpoint(checkpoint),
            "data": source.record(),
            "hosts": host.count,
            "decoder": asdict(config),
        }
        loss = Decoding(model, vae, scale)
        Run(loss, batches, settings, folder, report, sample, depends_on=begun).train()
        target = folder / NAME
        if host.is_first:
            save_small_decoder(target, config, model, options.save_dtype)
            report(f"saved {target}")
        return target
