"""The inputs of all engines: one file for each size, which every worker reads."""

import os
from pathlib import Path

import numpy as np

from sd_tf.bench.peers.engine import NEGATIVE, PROMPT, SAMPLER

COLUMNS = ("timestep", "p", "q", "a", "b0")


def write(
    path: Path, checkpoint: str, latent_shape: tuple[int, int, int], batch_size: int, steps: int
) -> None:
    """Write the inputs, in a process of its own, because reading a checkpoint imports Keras."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from sd_tf.sampling.rows import COLUMNS as TABLE_COLUMNS
    from sd_tf.sampling.tables import steps as steps_of
    from sd_tf.weights import open_checkpoint

    opened = open_checkpoint(checkpoint)
    rng = np.random.default_rng(0)
    rows = steps_of(opened.config.schedule, SAMPLER, steps).rows[:, 0]
    width = opened.config.denoiser.context_dim
    np.savez(
        path,
        tokens=opened.tokenizer()([NEGATIVE, PROMPT]),  # (2, 77)
        context=repeated(rng.standard_normal((2, 77, width), "float32"), batch_size),
        noise=rng.standard_normal((batch_size, *latent_shape), "float32"),
        latent=rng.standard_normal((batch_size, *latent_shape), "float32"),  # to decode
        rows=rows[:, [TABLE_COLUMNS.index(name) for name in COLUMNS]],  # (steps, 5)
    )


def read(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def repeated(context: np.ndarray, batch_size: int) -> np.ndarray:
    """Repeat the negative and the positive prompt's context (2, …) for each picture of a batch."""
    return np.repeat(context, batch_size, axis=0)


def pair(x: np.ndarray) -> np.ndarray:
    """Repeat the samples for guidance's two predictions."""
    return np.concatenate([x, x])
