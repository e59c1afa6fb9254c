"""The configurations of the text encoders: CLIP's and T5's."""

from dataclasses import dataclass
from typing import ClassVar

START_TOKEN, END_TOKEN = 49406, 49407


@dataclass(frozen=True)
class TextEncoderConfig:
    """A CLIP text transformer; the defaults are SD1's ViT-L."""

    tokens: ClassVar[str] = "tokens"  # the input that takes its ids

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    activation: str = "quick_gelu"  # quick_gelu | gelu | gelu_tanh
    vocab_size: int = 49408
    max_length: int = 77
    layer_norm_eps: float = 1e-5
    context_layer: int = 1  # counted from the end: 1 is the last layer, 2 the penultimate
    context_norm: bool = True  # the final LayerNorm applied to the context
    projection_dim: int | None = None  # width of the pooled output; None: it is not projected
    pools_unprojected: bool = False  # without a projection there is a pooled output, too
    eos_token_id: int | None = END_TOKEN  # None: the row of the highest id is pooled
    pad_token_id: int = END_TOKEN

    @property
    def pooled_dim(self) -> int | None:
        """The width of the pooled output; None: there is none."""
        return self.hidden_size if self.pools_unprojected else self.projection_dim


@dataclass(frozen=True)
class T5EncoderConfig:
    """T5's encoder, of which a context alone is taken; the defaults are v1.1 XXL's."""

    tokens: ClassVar[str] = "t5_tokens"  # the input that takes its ids
    pooled_dim: ClassVar[None] = None  # it has no pooled output

    hidden_size: int = 4096
    intermediate_size: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    head_dim: int = 64
    vocab_size: int = 32128
    num_buckets: int = 32  # of distances between tokens
    max_distance: int = 128
    norm_eps: float = 1e-6
    max_length: int = 256  # tokens of a prompt; an export fixes it
    pad_token_id: int = 0
