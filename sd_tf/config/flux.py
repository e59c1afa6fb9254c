"""The configuration of Flux.1's transformer."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class FluxConfig:
    """A transformer whose first blocks keep texts and picture apart; the defaults are schnell's."""

    component: ClassVar[str] = "transformer"  # its name in a checkpoint
    conditioner: ClassVar[str] = "flux"  # how texts become its conditions
    num_time_ids: ClassVar[int] = 0
    patch_size: ClassVar[int] = 2
    most_latents: ClassVar[None] = None  # positions are computed
    skip_layers: ClassVar[tuple[int, ...]] = ()
    feature_channels: ClassVar[None] = None  # it has no deep layers that could be left out

    in_channels: int = 64  # of a patch
    out_channels: int = 64
    num_layers: int = 19
    num_single_layers: int = 38
    num_heads: int = 24
    head_dim: int = 128
    context_dim: int = 4096
    pooled_dim: int = 768
    guidance_embeds: bool = False  # dev: it is told the guidance scale
    rope_axes: tuple[int, ...] = (16, 56, 56)  # of a head's channels
    sample_size: int = 128  # native latent height and width

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def latent_channels(self) -> int:
        return self.in_channels // self.patch_size**2

    @property
    def is_told_guidance(self) -> bool:
        return self.guidance_embeds
