"""Whether two engines did the same work: their outputs, decibels apart."""

import numpy as np

from sd_tf.bench import BenchError
from sd_tf.bench.peers.engine import GUIDANCE

LIMIT = 40.0  # dB
IDENTICAL = 999.0  # dB; infinity is no JSON


def psnr(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Peak signal to noise; the peak is a picture's 255, else the greatest value of ours."""
    if ours.shape != theirs.shape:
        raise BenchError(f"Outputs have the shape {ours.shape}. Received: {theirs.shape}")
    peak = 255.0 if ours.dtype == np.uint8 else float(np.abs(ours).max())
    error = np.sqrt(np.mean((ours.astype("float64") - theirs.astype("float64")) ** 2))
    if error == 0:
        return IDENTICAL
    return float(20 * np.log10(peak / error)) if np.isfinite(error) else 0.0


def check(label: str, stage: str, decibels: float, precision: str) -> None:
    """Timings of different work mean nothing. Coarser numbers than float32 differ by themselves."""
    if precision == "float32" and decibels < LIMIT:
        raise BenchError(
            f"Every engine does the same work: in float32 its output is within {LIMIT:.0f} dB of "
            f"ours. Received: {decibels:.1f} dB of {label} in the stage {stage}"
        )


# What the UNet stage is compared by, (B, h, w, 4): the guided prediction.


def guided(pair: np.ndarray) -> np.ndarray:
    """Of a peer, which gives both halves, the negative one first."""
    negative, positive = np.split(np.asarray(pair, "float64"), 2)
    return negative + GUIDANCE * (positive - negative)


def solved(x: np.ndarray, after: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Of ours, which gives the next sample: r of x' = a x + b (p x + q r)."""
    _, p, q, a, b = row
    x, after = np.asarray(x, "float64"), np.asarray(after, "float64")
    return ((after - a * x) / b - p * x) / q


def pixels(images: np.ndarray) -> np.ndarray:
    """A decoder's numbers, about [-1, 1], as our decoder rounds them."""
    images = np.asarray(images, "float32")
    return np.round(255.0 * np.clip(images / 2.0 + 0.5, 0.0, 1.0)).astype("uint8")
