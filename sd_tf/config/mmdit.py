"""The configuration of the MMDiT, the denoiser of Stable Diffusion 3 and 3.5."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class MMDiTConfig:
    """A transformer over patches of the latents and over texts; the defaults are SD3-medium's."""

    component: ClassVar[str] = "transformer"  # its name in a checkpoint
    conditioner: ClassVar[str] = "sd3"  # how texts become its conditions
    num_time_ids: ClassVar[int] = 0
    is_told_guidance: ClassVar[bool] = False
    feature_channels: ClassVar[None] = None  # it has no deep layers that could be left out

    in_channels: int = 16
    out_channels: int = 16
    patch_size: int = 2
    num_layers: int = 24
    num_heads: int = 24
    head_dim: int = 64
    context_dim: int = 4096
    pooled_dim: int = 2048
    max_patches: int = 192  # of a side, for which there are positions
    dual_layers: tuple[int, ...] = ()  # those that attend twice within the picture
    qk_norm: bool = False  # queries and keys are normalized (RMS)
    sample_size: int = 128  # native latent height and width
    # Blocks that skip-layer guidance leaves out of its prediction; none: it is not offered.
    skip_layers: tuple[int, ...] = ()

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def latent_channels(self) -> int:
        return self.in_channels

    @property
    def most_latents(self) -> int:
        """The longest side of the latents for which there are positions."""
        return self.max_patches * self.patch_size
