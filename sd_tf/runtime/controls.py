"""The ControlNets that an export has, and the inputs of its loop that are for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sd_tf.config.image_prompts import numbered

# Inputs with an entry for each net: how much of what it adds is taken, and the model calls
# [first, stop) in which it runs.
SCALES, FIRST, STOP = "control_scales", "control_first", "control_stop"
GUESS = "control_guess"  # whether the nets run without the prompt's opposite; one for all nets
PER_NET = (SCALES, FIRST, STOP)


@dataclass(frozen=True)
class ControlRecord:
    """A ControlNet in an export's loop."""

    name: str  # of its checkpoint
    pools: bool  # what it adds is averaged over each map


def image_input(number: int) -> str:
    """Return the name of the input for a net's pictures, (B, H, W, 3) in 0…1."""
    return numbered("control_image", number)


def calls_of(start: float, end: float, first: int, calls: int) -> tuple[int, int]:
    """Return the model calls [first, stop) of a net's share of the calls that are made.

    Of the calls numbered from 0 to N − 1, i is in it if start ≤ i / N and (i + 1) / N ≤ end.

    Args:
        start: where the share begins, from 0; `end`, up to 1: where it ends.
        first: the first model call that is made; calls: one after the last.
    """
    count = calls - first
    made = [i for i in range(count) if i / count >= start and (i + 1) / count <= end]
    return (first + made[0], first + made[-1] + 1) if made else (first, first)


def inputs_of(
    scales: Sequence[float], shares: Sequence[tuple[int, int]], guesses: bool
) -> dict[str, np.ndarray]:
    """Return the inputs other than pictures, as the models take them."""
    bounds = np.array(shares, "int32").reshape(-1, 2)
    return {
        SCALES: np.array(scales, "float32"),
        FIRST: bounds[:, 0],
        STOP: bounds[:, 1],
        GUESS: np.bool_(guesses),
    }
