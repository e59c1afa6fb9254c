"""What a denoiser in training is told: tokens of its text encoders, and SDXL's sizes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from sd_tf.config import PipelineConfig, family_of
from sd_tf.files import atomic
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.training.data import Source
from sd_tf.training.settings import TrainingError

SIZES = "sizes.npy"

Tokenize = Callable[[Sequence[str]], np.ndarray]


def check_trainable(config: PipelineConfig) -> None:
    """Raise unless text-to-image training knows all that the denoiser takes."""
    added, guidance = config.denoiser.added, config.denoiser.guidance_embed_dim
    is_refiner = added is not None and added.num_time_ids != 6
    if config.latent_inputs != "none" or guidance is not None or is_refiner:
        raise TrainingError(
            "Text-to-image training takes a checkpoint of SD1, SD2 or SDXL base, which must not be "
            "distilled for guidance (LCM), nor take a picture or a mask. "
            f"Received: {family_of(config)}"
        )


def tokenize_for(tokenizers: Mapping[str, ClipTokenizer]) -> Tokenize:
    """Return a function: texts → int32 (N, 77), or (N, encoders, 77) for several encoders."""

    def tokenize(texts):
        ids = [tokenizer(texts) for tokenizer in tokenizers.values()]
        return ids[0] if len(ids) == 1 else np.stack(ids, axis=1)

    return tokenize


def time_ids(config: PipelineConfig, source: Source, cache: Path) -> np.ndarray | None:
    """Return SDXL's numbers of each picture, float32 (N, 6), or None for other families.

    They are the original height and width, the corner that was cut off after scaling (top, left),
    and the size in training. The original sizes are kept in the folder `cache`.
    """
    if not config.denoiser.num_time_ids:
        return None
    file = cache / SIZES
    if not file.is_file():
        sizes = np.array([source.original_size(i) for i in range(len(source))], "int32")
        with atomic.new_file(file) as part, part.open("wb") as stream:
            np.save(stream, sizes)
    sizes, side = np.load(file), source.picture(0).shape[0]
    scaled = np.round(sizes * (side / sizes.min(axis=1, keepdims=True)))
    corners = np.round((scaled - side) / 2)
    return np.concatenate([sizes, corners, np.full_like(sizes, side)], axis=1).astype("float32")


def same_time_ids(config: PipelineConfig, height: int, width: int) -> np.ndarray | None:
    """Return the numbers (1, 6) of a picture that is drawn whole, or None for other families."""
    if not config.denoiser.num_time_ids:
        return None
    return np.array([[height, width, 0, 0, height, width]], "float32")
