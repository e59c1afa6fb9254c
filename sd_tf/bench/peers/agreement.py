"""Check that two engines did the same work: compare their outputs in decibels."""

import numpy as np

from sd_tf.bench.peers.engine import GUIDANCE
from sd_tf.bench.plan import BenchError
from sd_tf.runtime.psnr import psnr

LIMIT = 40.0  # dB
IDENTICAL = 999.0  # dB; JSON has no infinity


def decibels(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the PSNR as JSON can hold it: `IDENTICAL` for infinity, 0 for NaN.

    The peak is 255 for pictures, else the largest magnitude in `ours`.
    """
    if ours.shape != theirs.shape:
        raise BenchError(f"Outputs have the shape {ours.shape}. Received: {theirs.shape}")
    peak = 255.0 if ours.dtype == np.uint8 else float(np.abs(ours).max())
    found = psnr(ours, theirs, peak)
    if found == np.inf:
        return IDENTICAL
    return found if np.isfinite(found) else 0.0


def check(label: str, stage: str, found: float, ours: str, theirs: str) -> None:
    """Raise if an engine's float32 output differs from ours: its timing would mean nothing.

    Where one of the two computes in a coarser precision, outputs differ anyway: nothing is checked.
    """
    if ours == theirs == "float32" and found < LIMIT:
        raise BenchError(
            f"In float32, an engine's output must agree with our SavedModels' to at least "
            f"{LIMIT:.0f} dB. Received: {found:.1f} dB of {label} in the stage {stage}"
        )


# The outputs of the UNet stage are compared as guided predictions, (B, h, w, 4).


def guided(pair: np.ndarray) -> np.ndarray:
    """Combine a peer's two predictions, the negative one first, into the guided prediction."""
    negative, positive = np.split(np.asarray(pair, "float64"), 2)
    return negative + GUIDANCE * (positive - negative)


def solved(x: np.ndarray, after: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Solve our sampler's update for the model output, so that it can be compared with a peer's.

    The update is x' = a x + b (p x + q r); r is the guided prediction.
    """
    _, p, q, a, b = row
    x, after = np.asarray(x, "float64"), np.asarray(after, "float64")
    return ((after - a * x) / b - p * x) / q


def pixels(images: np.ndarray) -> np.ndarray:
    """Round a decoder's output, about in [-1, 1], to uint8 as our decoder does."""
    images = np.asarray(images, "float32")
    return np.round(255.0 * np.clip(images / 2.0 + 0.5, 0.0, 1.0)).astype("uint8")
