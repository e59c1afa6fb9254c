"""What all engines compute from: made once for a size, the same file for every worker."""

import os
from pathlib import Path

import numpy as np

from sd_tf.bench.peers.engine import NEGATIVE, PROMPT, SAMPLER

COLUMNS = ("timestep", "p", "q", "a", "b0")


def write(path: Path, checkpoint: str, latent_shape: tuple[int, int, int], steps: int) -> None:
    """Runs in a process of its own, because reading a checkpoint imports Keras."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from sd_tf.sampling import tables
    from sd_tf.weights import open_checkpoint

    opened = open_checkpoint(checkpoint)
    rng = np.random.default_rng(0)
    rows = tables.steps(opened.config.schedule, SAMPLER, steps).rows[:, 0]
    width = opened.config.unet.context_dim
    np.savez(
        path,
        tokens=opened.tokenizer()([NEGATIVE, PROMPT]),  # (2, 77)
        context=rng.standard_normal((2, 77, width), "float32"),
        noise=rng.standard_normal((1, *latent_shape), "float32"),
        latent=rng.standard_normal((1, *latent_shape), "float32"),  # to decode
        rows=rows[:, [tables.COLUMNS.index(name) for name in COLUMNS]],  # (steps, 5)
    )


def read(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def pair(x: np.ndarray) -> np.ndarray:
    """The batch of guidance: both halves see the same sample."""
    return np.concatenate([x, x])
