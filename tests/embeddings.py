"""Files of textual inversion with random vectors."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def vectors(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype("float32")


def write(path: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors, path)
    return path
