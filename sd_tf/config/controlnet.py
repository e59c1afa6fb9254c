"""The configuration of a ControlNet, which steers a UNet by a picture."""

from dataclasses import dataclass
from typing import ClassVar

from sd_tf.config.errors import ConfigError
from sd_tf.config.unet import UNetConfig


@dataclass(frozen=True)
class ControlNetConfig:
    """A copy of a UNet's way down and middle, which also reads a control picture.

    The `trunk` is a UNet's configuration without a way up; it takes the noisy latents alone.
    """

    component: ClassVar[str] = "controlnet"

    trunk: UNetConfig
    hint_channels: tuple[int, ...] = (16, 32, 96, 256)  # from the picture's size to the latents'
    hint_is_bgr: bool = False  # the picture's channels are read in the order blue, green, red
    pools: bool = False  # what it adds is averaged over each map (`shuffle`)

    @property
    def downscale(self) -> int:
        """The picture's pixels to a latent's side."""
        return 2 ** (len(self.hint_channels) - 1)

    def check_fits(self, unet: UNetConfig, latent_channels: int, downscale: int) -> None:
        """Raise if what it adds is not what the UNet takes.

        Args:
            latent_channels: those of the noisy latents, without what stands beside them.
            downscale: the autoencoder's, in pixels to a latent's side.
        """
        if self.trunk.kind != unet.kind:
            raise ConfigError(
                f"A ControlNet for {self.trunk.kind} does not fit an {unet.kind} UNet."
            )
        wanted = {**_of_both(unet), "in_channels": latent_channels, "downscale": downscale}
        found = {
            **_of_both(self.trunk),
            "in_channels": self.trunk.in_channels,
            "downscale": self.downscale,
        }
        for name, value in wanted.items():
            if found[name] != value:
                raise ConfigError(
                    f"A ControlNet for this UNet has {name} {value}. Received: {found[name]}"
                )


def _of_both(unet: UNetConfig) -> dict:
    """Return what a UNet and its ControlNets have in common, by what a message calls it."""
    return {
        "channels": unet.channels,
        "resnets of each level": tuple(len(depths) for depths in unet.down_depths),
        "a middle": unet.mid_depth is not None,
        "a context of width": unet.context_dim,
        "added conditions": unet.added,
    }
