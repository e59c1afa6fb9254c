"""Round a matrix to 8 bits: whole numbers from -127 to 127, and a scale for each of its rows."""

import numpy as np

LARGEST = 127
CHUNK = 1 << 22  # numbers that are float32 at one time


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 (rows, columns) and float32 (rows,), whose product is nearest to the matrix.

    The largest number of each row keeps its value. A row that is not finite gets such a scale.
    """
    rows, columns = matrix.shape
    values = np.empty(matrix.shape, "int8")
    scale = np.empty(rows, "float32")
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = matrix[start : start + step].astype("float32")
        largest = np.abs(part).max(axis=1)
        scale[start : start + step] = largest / LARGEST
        divisor = np.where((largest > 0) & np.isfinite(largest), largest / LARGEST, 1)
        part /= divisor[:, None]
        np.clip(np.rint(part, out=part), -LARGEST, LARGEST, out=part)
        values[start : start + step] = np.nan_to_num(part, copy=False)
    return values, scale
