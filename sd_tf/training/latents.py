"""All pictures of a source through the encoder once, kept in a file beside the run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from keras import ops

from sd_tf.training.batches import to_model
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
    height, width, _ = pictures.picture(0).shape
    size = max(1, PIXELS_AT_ONCE // (height * width))
    parts = []
    for start in range(0, len(pictures), size):
        # The last batch is filled up: every batch of one size is compiled once.
        indices = [min(start + i, len(pictures) - 1) for i in range(size)]
        images = to_model(np.stack([pictures.picture(i) for i in indices]))
        mean = ops.convert_to_numpy(vae.encode(ops.convert_to_tensor(images))[0])
        parts.append(mean[: len(pictures) - start].astype("float16"))
    return np.concatenate(parts)
