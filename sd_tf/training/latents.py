"""All pictures of a source through the encoder once, kept in files beside the run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from keras import ops

from sd_tf.pictures import to_model
from sd_tf.training.data import Source
from sd_tf.training.settings import TrainingError

PIXELS_AT_ONCE = 2**18
CACHE_FILE = "latents.npy"


def cached_latents(
    vae, pictures: Source, folder: Path, report: Callable[[str], None]
) -> np.ndarray:
    """The posterior's means, not scaled: float16 (N, h, w, C)."""
    cache = folder / CACHE_FILE
    if not cache.exists():
        report(f"encoding {len(pictures)} pictures")
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_suffix(".unfinished.npy")
        np.save(unfinished, _encoded(vae, pictures))
        unfinished.rename(cache)
    latents = np.load(cache, mmap_mode="r")
    if len(latents) != len(pictures):
        raise TrainingError(
            f"{cache} holds {len(latents)} latents, the data has {len(pictures)} pictures. "
            f"Choose another --out, or delete that file."
        )
    return latents


def _encoded(vae, pictures: Source) -> np.ndarray:
    parts = posteriors(vae, pictures.picture, len(pictures))
    return np.concatenate([mean.astype("float16") for mean, _ in parts])


def posteriors(
    vae, picture: Callable[[int], np.ndarray], count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Mean and standard deviation of pictures 0 to `count`, some at a time."""
    height, width, _ = picture(0).shape
    size = max(1, PIXELS_AT_ONCE // (height * width))
    for start in range(0, count, size):
        # The last batch is filled up: every batch of one size is compiled once.
        indices = [min(start + i, count - 1) for i in range(size)]
        images = to_model(np.stack([picture(i) for i in indices]))
        mean, log_variance = vae.encode(ops.convert_to_tensor(images))
        parts = (mean, ops.exp(0.5 * log_variance))
        yield tuple(ops.convert_to_numpy(part)[: count - start] for part in parts)
