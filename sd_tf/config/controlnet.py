"""The configuration of a ControlNet, which steers a UNet by a picture."""

from dataclasses import dataclass
from typing import ClassVar

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
    def kind(self) -> str:
        """The kind of Stable Diffusion whose UNets it steers."""
        if self.trunk.added is not None:
            return "SDXL"
        return "SD2" if self.trunk.linear_projection else "SD1"

    @property
    def downscale(self) -> int:
        """The picture's pixels to a latent's side."""
        return 2 ** (len(self.hint_channels) - 1)
