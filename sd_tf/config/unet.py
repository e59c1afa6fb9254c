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


# Layers of the first resolution's way down that are computed in every model call, as are its last
# ones on the way up, one more. All others are deep: features of an earlier call can stand for them.
SHALLOW = 1


@dataclass(frozen=True)
class UNetConfig:
    """The denoiser; the defaults are SD1's.

    `down_depths[level][resnet]` is the number of transformer layers after that resnet, 0 for no
    attention. A `mid_depth` of None means that there is no middle block at all.
    """

    component: ClassVar[str] = "unet"  # its name in a checkpoint
    conditioner: ClassVar[str] = "clip"  # how texts become its conditions
    patch_size: ClassVar[int] = 1  # latent sides are multiples of it
    most_latents: ClassVar[None] = None  # the longest side of the latents, where there is one
    skip_layers: ClassVar[tuple[int, ...]] = ()  # of skip-layer guidance

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

    @property
    def shallow_skips(self) -> int:
        """How many skip connections lead from shallow layers to shallow layers."""
        return SHALLOW + 1

    @property
    def first_shallow(self) -> int:
        """The first layer of the last way up that is shallow."""
        return len(self.up_depths[-1]) - self.shallow_skips

    @property
    def feature_channels(self) -> int:
        """The channels of what the deep layers give to the shallow ones."""
        return self.channels[0] if self.first_shallow else self.channels[:2][-1]

    @property
    def kind(self) -> str:
        """The kind of Stable Diffusion that it belongs to, by which a ControlNet is chosen."""
        if self.added is not None:
            return "SDXL"
        return "SD2" if self.linear_projection else "SD1"

    @property
    def latent_channels(self) -> int:
        """The channels of its input: the noisy latents and what is concatenated to them."""
        return self.in_channels

    @property
    def pooled_dim(self) -> int | None:
        """The width of the pooled text that it takes; None: it takes none."""
        return None if self.added is None else self.added.pooled_dim

    @property
    def num_time_ids(self) -> int:
        """The number of sizes and corners that it is told for each picture."""
        return 0 if self.added is None else self.added.num_time_ids

    @property
    def is_told_guidance(self) -> bool:
        """Whether it takes the guidance scale as an input, as distilled models do."""
        return self.guidance_embed_dim is not None
