"""Latents of all pictures of a source, encoded once and kept in a folder beside the run."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from keras import ops

from sd_tf.files import atomic
from sd_tf.runtime.pictures import to_model
from sd_tf.training.data import Source
from sd_tf.training.origin import Record, check_cache, mark_cache
from sd_tf.training.settings import TrainingError

PIXELS_AT_ONCE = 2**18  # most pixels that the encoder takes at once
CACHE, FILE = "latents", "latents.npy"


def cached_latents(
    vae, pictures: Source, cache: Path, depends_on: Record, report: Callable[[str], None]
) -> np.ndarray:
    """Return the posteriors' unscaled means, float16 (N, h, w, C), from files.

    They are encoded if there is no folder `cache`. A folder that was made from something else than
    `depends_on` is refused.
    """
    if not cache.exists():
        report(f"encoding {len(pictures)} pictures")
        with atomic.new_folder(cache) as folder:
            parts = posteriors(vae, pictures.picture, len(pictures))
            write_parts(((mean,) for mean, _ in parts), len(pictures), [folder / FILE])
            mark_cache(folder, depends_on)
    check_cache(cache, depends_on)
    latents = np.load(cache / FILE, mmap_mode="r")
    if len(latents) != len(pictures):
        raise TrainingError(
            f"{cache} holds {len(latents)} latents, the data has {len(pictures)} pictures. "
            f"Choose another `folder`, or delete that one."
        )
    return latents


def write_parts(parts: Iterator[Sequence[np.ndarray]], count: int, files: Sequence[Path]) -> None:
    """Write arrays of `count` rows, which come in parts, as float16; one part is in memory."""
    arrays, start = None, 0
    for part in parts:
        if arrays is None:
            arrays = [
                np.lib.format.open_memmap(file, "w+", "float16", (count, *values.shape[1:]))
                for file, values in zip(files, part, strict=True)
            ]
        for array, values in zip(arrays, part, strict=True):
            array[start : start + len(values)] = values
        start += len(part[0])
    for array in arrays:
        array.flush()


def posteriors(
    vae, picture: Callable[[int], np.ndarray], count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield mean and standard deviation of the latents of pictures 0 to `count`, in batches.

    Pictures are asked for in their order, one after another.
    """
    height, width, _ = picture(0).shape
    size = max(1, PIXELS_AT_ONCE // (height * width))
    for start in range(0, count, size):
        images = to_model(np.stack([picture(i) for i in range(start, min(start + size, count))]))
        # The last batch is padded, so that only one batch size is compiled.
        images = np.concatenate([images, np.repeat(images[-1:], size - len(images), axis=0)])
        mean, log_variance = vae.encode(ops.convert_to_tensor(images))
        parts = (mean, ops.exp(0.5 * log_variance))
        yield tuple(ops.convert_to_numpy(part)[: count - start] for part in parts)
