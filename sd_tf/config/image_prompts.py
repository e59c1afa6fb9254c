"""The configurations of image prompts (IP-Adapter): a vision encoder, and adapters to a UNet."""

from dataclasses import dataclass
from typing import ClassVar

from sd_tf.config.errors import ConfigError
from sd_tf.config.unet import UNetConfig

LINEAR, FULL, RESAMPLER = "linear", "full", "resampler"


@dataclass(frozen=True)
class VisionEncoderConfig:
    """CLIP's vision transformer; the defaults are those of ViT-H."""

    component: ClassVar[str] = "vision_encoder"

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_layers: int = 32
    num_heads: int = 16
    patch_size: int = 14
    image_size: int = 224
    projection_dim: int = 1024
    activation: str = "gelu"  # quick_gelu | gelu | gelu_tanh
    layer_norm_eps: float = 1e-5

    @property
    def num_tokens(self) -> int:
        """The patches of a picture, and one token for all of it."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True)
class ImageProjectionConfig:
    """What makes tokens of an encoded picture.

    `linear`, of the base adapters, takes the encoder's one output for the picture. `full` (full
    face) takes the penultimate layer's tokens as they are, `resampler` (plus, plus face) distils
    them to few.
    """

    component: ClassVar[str] = "image_projection"

    kind: str  # linear | full | resampler
    embed_dim: int  # width of what it takes
    context_dim: int  # width of the tokens
    # All kinds but `full`, which has as many as the encoder.
    num_tokens: int = 0
    # A resampler's:
    hidden_size: int = 0
    inner_size: int = 0  # of attention: heads of 64
    intermediate_size: int = 0
    num_layers: int = 0

    def tokens(self, encoder: VisionEncoderConfig) -> int:
        """Return the number of tokens of one picture."""
        return encoder.num_tokens if self.kind == FULL else self.num_tokens

    def check_fits(self, encoder: VisionEncoderConfig) -> None:
        of_picture = self.kind == LINEAR
        wanted = encoder.projection_dim if of_picture else encoder.hidden_size
        if self.embed_dim != wanted:
            raise ConfigError(
                f"This IP-Adapter takes {'the projected picture' if of_picture else 'tokens'} of "
                f"width {self.embed_dim}, the vision encoder gives {wanted}: give the encoder that "
                f"it was published with (`image_encoder`)."
            )


@dataclass(frozen=True)
class ImageAttentionConfig:
    """An adapter's keys and values in a UNet's attention to the prompt."""

    component: ClassVar[str] = "image_attention"

    widths: tuple[int, ...]  # of each attention: on the way down, on the way up, in the middle
    context_dim: int  # width of the tokens

    def check_fits(self, unet: UNetConfig) -> None:
        wanted = {"a context of width": unet.context_dim, "attentions of the widths": widths(unet)}
        found = {"a context of width": self.context_dim, "attentions of the widths": self.widths}
        for name, value in wanted.items():
            if found[name] != value:
                raise ConfigError(
                    f"An IP-Adapter for this {unet.kind} UNet has {name} {_shown(value)}. "
                    f"Received: {_shown(found[name])}"
                )


@dataclass(frozen=True)
class ImageAdapterConfig:
    """An IP-Adapter: pictures as prompts."""

    projection: ImageProjectionConfig
    attention: ImageAttentionConfig


@dataclass(frozen=True)
class ImagePromptsConfig:
    """The adapters of a pipeline, in the order in which calls give their pictures."""

    encoder: VisionEncoderConfig
    adapters: tuple[ImageAdapterConfig, ...]

    @property
    def components(self) -> dict[str, object]:
        """The parts of a checkpoint by name."""
        parts = {self.encoder.component: self.encoder}
        for number, adapter in enumerate(self.adapters):
            for part in (adapter.projection, adapter.attention):
                parts[numbered(part.component, number)] = part
        return parts

    def check_fits(self, unet: UNetConfig) -> None:
        for adapter in self.adapters:
            adapter.attention.check_fits(unet)
            adapter.projection.check_fits(self.encoder)
            if adapter.projection.context_dim != unet.context_dim:
                raise ConfigError(
                    f"An IP-Adapter's tokens are as wide as the UNet's context, "
                    f"{unet.context_dim}. Received: {adapter.projection.context_dim}"
                )


def numbered(name: str, number: int) -> str:
    """Return the name of one of several parts, which are counted from 0."""
    return name if number == 0 else f"{name}_{number + 1}"


def places(unet: UNetConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the widths of attentions to the prompt: on the way down, up, in the middle."""
    channels, last = unet.channels, unet.channels[-1]
    down = [
        width
        for width, depths in zip(channels, unet.down_depths, strict=True)
        for _ in range(sum(depths))
    ]
    up = [
        width
        for width, depths in zip(channels[::-1], unet.up_depths, strict=True)
        for _ in range(sum(depths))
    ]
    return tuple(down), tuple(up), (last,) * (unet.mid_depth or 0)


def widths(unet: UNetConfig) -> tuple[int, ...]:
    """Return the widths of all attentions to the prompt, in the order of an IP-Adapter's file."""
    return sum(places(unet), ())


def _shown(value) -> str:
    """Return a value for a message, with the equal numbers of a list counted."""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(f"{value.count(one)} × {one}" for one in dict.fromkeys(value)) or "none"
