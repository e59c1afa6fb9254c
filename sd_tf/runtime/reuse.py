"""Deep features that an export's loop keeps from one model call to later ones (DeepCache)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sd_tf.runtime.shapes import Shape, Shapes

REUSE = "reuse"  # the loop's input: the denoiser's deep layers run in every such model call
FEATURES = "features"  # what they gave last, a part of a segment's state


@dataclass(frozen=True)
class ReuseRecord:
    """What an export's loop keeps."""

    most: int  # model calls that one run of the deep layers may serve; 1: only its own
    parts: int  # of the denoiser's batch
    channels: int  # of the features

    def shape(self, shape: Shape, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of the features for a shape of the export's."""
        height, width, _ = shapes.latent(shape.size)
        return self.parts, shape.batch_size, height, width, self.channels

    def empty(self, shape: Shape, shapes: Shapes) -> dict[str, np.ndarray]:
        """Return the part of the state before the first model call; none without reuse."""
        if self.most == 1:
            return {}
        # One zero, seen as all of them: the first call computes its own, whatever is here.
        return {FEATURES: np.broadcast_to(np.float32(0), self.shape(shape, shapes))}


def reuse_input(record: ReuseRecord, every: int | None) -> dict[str, np.ndarray]:
    """Return the loop's input with which every such model call runs the deep layers."""
    return {} if record.most == 1 else {REUSE: np.int32(every)}


def figure_name(every: int) -> str:
    """Name what a verification found of such a run, in an export's manifest."""
    return f"{REUSE} {every}"


def named_reuses(record: ReuseRecord, verification: Mapping[str, Any]) -> dict[int, str]:
    """Say what each value of `reuse` gains and costs, as far as the export's verification knows."""
    figures = verification.get("diffusion_model", {})
    exact = figures.get(figure_name(1))
    named = {1: "exact"}
    for every in range(2, record.most + 1):
        found = figures.get(figure_name(every))
        if exact is None or found is None or not found["seconds"]:
            named[every] = f"{every}: faster, less exact"
        else:
            gain = exact["seconds"] / found["seconds"]
            named[every] = f"{every}: {gain:.1f} × as fast, {found['psnr_db']:.0f} dB"
    return named


NO_REUSE = ReuseRecord(1, 0, 0)
