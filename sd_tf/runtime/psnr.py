"""The likeness of two arrays in decibels."""

import numpy as np


def psnr(reference, other, peak: float) -> float:
    """Return the peak signal-to-noise ratio in dB: infinite where both are the same.

    NaN where either has a NaN. `peak` is the largest difference that the values could have, 255
    for pictures of 8 bits.
    """
    error = np.mean(np.square(np.asarray(reference, "float64") - np.asarray(other, "float64")))
    return float("inf") if error == 0 else float(10 * np.log10(peak**2 / error))
