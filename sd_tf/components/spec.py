"""The types with which a component declares its endpoints and their inputs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sd_tf.runtime.image_prompts import VISION_ENCODER

__all__ = ["COMPONENTS", "VISION_ENCODER", "Endpoint", "Spec", "as_is"]

COMPONENTS = ("text_encoder", "diffusion_model", "decoder", "image_encoder")


@dataclass(frozen=True)
class Spec:
    """An input's shape and dtype; None stands for a size that differs from call to call."""

    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Endpoint:
    function: Callable[..., dict]  # keyword arguments → outputs by name
    inputs: dict[str, Spec] = field(default_factory=dict)
    compiled: bool = True  # False: a few multiplications, not worth compiling


def as_is(function, open_batch: bool = False, fixed: Collection[str] = ()):
    """Return the function as it is: the default of `shared`, which may trace it once for several.

    Args:
        open_batch: arguments and outputs have the batch as their first dimension, which may be any.
        fixed: the names of those that have none.
    """
    return function
