"""The configuration of a small decoder, which stands in for the autoencoder's."""

import math
from dataclasses import dataclass

from sd_tf.config.autoencoder import AutoencoderConfig, LatentScale
from sd_tf.config.errors import ConfigError

DECODER, PREVIEW_DECODER = "decoder", "preview_decoder"  # the components that may be small ones


@dataclass(frozen=True)
class SmallDecoderConfig:
    """The decoder of diffusers' `AutoencoderTiny`: convolutions alone, without norms."""

    out_channels: int = 3
    latent_channels: int = 4
    channels: int = 64  # the same on all levels
    blocks: tuple[int, ...] = (3, 3, 3, 1)  # on each level, from the latents on
    activation: str = "relu"  # relu | silu | gelu | mish
    scaling_factor: float = 1.0  # most take the denoiser's latents as they are
    shift_factor: float = 0.0

    @property
    def latent_scale(self) -> LatentScale:
        return LatentScale(self.scaling_factor, self.shift_factor)

    @property
    def downscale(self) -> int:
        return 2 ** (len(self.blocks) - 1)

    @property
    def reach(self) -> int:
        """The latents beside its own that a pixel depends on: each convolution sees one more."""
        pixels = (1 + 3 * self.blocks[0]) + sum(
            (1 + 3 * blocks) / 2**level for level, blocks in enumerate(self.blocks[1:], start=1)
        )
        return math.ceil(pixels + 1 / self.downscale)

    def check_fits(self, autoencoder: AutoencoderConfig) -> None:
        """Raise if it does not decode the latents of this autoencoder."""
        for name in ("latent_channels", "downscale", "out_channels"):
            wanted, found = getattr(autoencoder, name), getattr(self, name)
            if wanted != found:
                raise ConfigError(
                    f"A small decoder for this autoencoder has {name} {wanted}. Received: {found}"
                )
