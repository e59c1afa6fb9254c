"""A sampler as a table: NumPy, float64, computed once and gathered row by row in the loop.

Every sampler here is linear in the sample and in the last predictions. With r_i the model's raw
output at row i (after guidance), m_i the prediction that the sampler keeps of it, and fresh unit
noise:

    m_i     = p_i x_i + q_i r_i
    x_{i+1} = a_i x_i + Σ_{j < HISTORY} b_{i,j} m_{i-j} + c_i noise_i

The model sees input_scale_i x_i at timestep_i. A table has one row for each model call.
Image-to-image starts in the middle, where there is no history yet, so each row has VARIANTS: the
one to take is k = min(i - start, VARIANTS - 1), the number of earlier predictions. The loop shifts
every m_i into its history, starting from zeros.

PNDM sets both sizes. Its second call restarts from the saved sample and is left out of the
multistep formula, yet sits in the loop's history: order four then reaches back over it to m_{i-4}
in the fifth call (k = 4), and is the ordinary formula from the sixth (k = 5) on.
"""

from dataclasses import dataclass

import numpy as np

HISTORY = 5  # the current prediction and the four before it
VARIANTS = 6  # 0 to 4 earlier predictions, and more
COLUMNS = ("timestep", "input_scale", "p", "q", "a", *(f"b{j}" for j in range(HISTORY)), "c")


@dataclass(frozen=True, eq=False)
class Steps:
    """A sampler's walk; image-to-image starts at row i from signal_i latents + sigma_i noise."""

    rows: np.ndarray  # (calls, VARIANTS, len(COLUMNS))
    initial_scale: float  # of the unit noise that text-to-image starts from
    signal: np.ndarray  # (calls,)
    sigma: np.ndarray  # (calls,)

    @property
    def calls(self) -> int:
        return len(self.rows)


def stack_rows(timestep, keep, a, b, c=0.0, input_scale=1.0):
    """Stack columns of shape (), (calls,) or (calls, VARIANTS); `b` lists its first j's."""
    calls, unused = len(timestep), (0.0,) * (HISTORY - len(b))
    rows = np.empty((calls, VARIANTS, len(COLUMNS)))
    for index, column in enumerate((timestep, input_scale, *keep, a, *b, *unused, c)):
        rows[..., index] = np.reshape(column, (-1, 1)) if np.ndim(column) == 1 else column
    # Row i has at most i earlier predictions: what lies beyond repeats its last variant.
    i, k = np.ogrid[:calls, :VARIANTS]
    return rows[i, np.minimum(i, k)]
