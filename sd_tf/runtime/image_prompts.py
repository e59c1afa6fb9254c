"""The IP-Adapters that an export has, and the inputs that are for the pictures of its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sd_tf.config.image_prompts import numbered

VISION_ENCODER = "vision_encoder"  # the component that reads such pictures
SCALES = "image_prompt_scales"  # how much of each adapter's attention is added
SHOWN = "_shown"  # ends of the names of inputs that say which places of tokens are taken
GIVEN = "given"  # the vision encoder's: 0 in place of no picture


@dataclass(frozen=True)
class ImageAdapterRecord:
    """An IP-Adapter in an export's loop."""

    name: str  # of its checkpoint
    tokens: int  # of one picture


@dataclass(frozen=True)
class ImagePrompts:
    """What an export can do with pictures as prompts."""

    adapters: tuple[ImageAdapterRecord, ...]  # in the order of their inputs
    most: int  # pictures of a prompt for each adapter
    size: int  # pixels of a side, as the vision encoder takes pictures
    width: int  # of the tokens

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.adapters]


NO_IMAGE_PROMPTS = ImagePrompts((), 0, 0, 0)


def tokens_of(number: int) -> str:
    """Return the name of an adapter's tokens: the encoder's output, the loop's input."""
    return numbered("image_context", number)


def shown_of(number: int) -> str:
    """Return the name of the input that says which places of an adapter's tokens are taken."""
    return tokens_of(number) + SHOWN


def blank_inputs(prompts: ImagePrompts, batch: int) -> dict[str, np.ndarray]:
    """Return the loop's inputs with which no picture is a prompt."""
    found = {}
    for number, adapter in enumerate(prompts.adapters):
        shape = (batch, prompts.most * adapter.tokens, prompts.width)
        for prefix in ("", "unconditional_"):
            found[prefix + tokens_of(number)] = np.zeros(shape, "float32")
        found[shown_of(number)] = np.zeros((batch, prompts.most), "float32")
    return {**found, **scales_input(prompts, [0.0] * len(prompts.adapters))}


def scales_input(prompts: ImagePrompts, scales: Sequence[float]) -> dict[str, np.ndarray]:
    return {SCALES: np.array(scales, "float32")} if prompts.adapters else {}
