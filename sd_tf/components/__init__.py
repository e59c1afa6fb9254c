"""What each component of a pipeline computes, endpoint by endpoint, in `keras.ops`.

`export` makes SavedModels of these, `sd_tf.jax` jits them or compiles them ahead of time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

COMPONENTS = ("text_encoder", "diffusion_model", "decoder", "image_encoder")
PROMPT_LENGTH = 77


@dataclass(frozen=True)
class Spec:
    """An input; None stands for a size that differs from call to call."""

    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Endpoint:
    function: Callable[..., dict]  # keyword arguments → outputs by name
    inputs: dict[str, Spec] = field(default_factory=dict)
    compiled: bool = True  # else it is a few multiplications, and compiling does not repay


def as_is(function):
    """For `shared`: how a component runs what several of its endpoints have in common."""
    return function
