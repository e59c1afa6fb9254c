"""What a denoiser in training is told: tokens of its text encoders, and SDXL's sizes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from sd_tf.config import PipelineConfig, family_of
from sd_tf.files import atomic
from sd_tf.runtime.text_inputs import ids_and_weights
from sd_tf.tokenizer import Tokenizer
from sd_tf.training.data import Source
from sd_tf.training.settings import TrainingError, frozen_precision

SIZES = "sizes.npy"

Tokenize = Callable[[Sequence[str]], dict[str, np.ndarray]]


def check_nothing_added(config: PipelineConfig) -> None:
    """Raise if a checkpoint was opened with what is neither trained nor saved with it."""
    added = {
        "controlnet": config.controlnets,
        "ip_adapter": config.image_prompts,
        **dict.fromkeys(config.small_decoders, True),
    }
    if names := [name for name, part in added.items() if part]:
        raise TrainingError(
            f"A checkpoint is trained without what can be added to it: open it without "
            f"{', '.join(names)}, and add that to what was trained."
        )


def check_trainable(config: PipelineConfig) -> None:
    """Raise unless text-to-image training knows all that the denoiser takes."""
    check_nothing_added(config)
    denoiser = config.denoiser
    is_known = denoiser.conditioner != "flux" and denoiser.num_time_ids in (0, 6)
    if config.latent_inputs != "none" or denoiser.is_told_guidance or not is_known:
        raise TrainingError(
            "Text-to-image training takes a checkpoint of SD1, SD2, SDXL base or SD3, which must "
            "not be distilled for guidance (LCM), nor take a picture or a mask. "
            f"Received: {family_of(config)}"
        )


def tokenize_for(tokenizers: Mapping[str, Tokenizer]) -> Tokenize:
    """Return a function: texts → ids by the text encoders' inputs, as a pipeline gives them."""

    def tokenize(texts):
        ids, _ = ids_and_weights([*tokenizers.values()], texts)
        return ids

    return tokenize


def text_precisions(
    config: PipelineConfig, precision: str, are_frozen: bool = False
) -> dict[str, str]:
    """Return each text encoder's precision; T5 is never trained."""
    frozen = frozen_precision(precision)
    of_t5 = dict.fromkeys(config.t5_encoders, frozen)
    return {**dict.fromkeys(config.text_encoders, frozen if are_frozen else precision), **of_t5}


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
