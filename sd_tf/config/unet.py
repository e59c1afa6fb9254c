"""The configuration of the UNet, the denoiser of the Stable Diffusion 1, 2 and XL families."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class AddedConditioning:
    """SDXL's conditioning beside the timestep: pooled text and six (or five) numbers for sizes."""

    num_time_ids: int = 6
    time_embed_dim: int = 256
    pooled_dim: int = 1280

    @property
    def input_dim(self) -> int:
        return self.pooled_dim + self.num_time_ids * self.time_embed_dim


@dataclass(frozen=True)
class UNetConfig:
    """The denoiser; the defaults are SD1's.

    `down_depths[level][resnet]` is the number of transformer layers after that resnet, 0 for no
    attention. A `mid_depth` of None means that there is no middle block at all.
    """

    component: ClassVar[str] = "unet"  # its name in a checkpoint

    in_channels: int = 4
    out_channels: int = 4
    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    num_heads: tuple[int, ...] = (8, 8, 8, 8)
    down_depths: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1), (1, 1), (0, 0))
    mid_depth: int | None = 1
    up_depths: tuple[tuple[int, ...], ...] = ((0, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    context_dim: int = 768
    linear_projection: bool = False
    upcast_attention: bool = False
    added: AddedConditioning | None = None
    guidance_embed_dim: int | None = None  # LCM's embedding of the guidance scale
    sample_size: int = 64  # native latent height and width
    norm_groups: int = 32
    resnet_norm_eps: float = 1e-5
    transformer_norm_eps: float = 1e-6
    geglu: str = "gelu"  # gelu | gelu_tanh

    @property
    def time_embed_dim(self) -> int:
        return 4 * self.channels[0]
