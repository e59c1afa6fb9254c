"""Random checkpoints, to try and to measure an architecture without its real weights."""

import zlib
from pathlib import Path

import numpy as np

from sd_tf.config import PipelineConfig
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.weights import layout, save_folder


def make_random(config: PipelineConfig, folder: Path, dtype: str = "float32") -> None:
    """Write a diffusers folder whose random weights depend on the tensors' names alone."""
    models = {}
    for name, part in config.components.items():
        models[name] = layout.abstract_model(part, dtype)
        for path, slot in layout.slots(models[name]).items():
            seed = zlib.crc32(f"{name}.{path}".encode())
            slot.fill(lambda slot=slot, path=path, seed=seed: _random(path, slot.shape, seed))
    tokenizers = {
        name: ClipTokenizer.clip(part.pad_token_id) for name, part in config.text_encoders.items()
    }
    save_folder(folder, config, models, tokenizers)


def _random(path: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw a tensor, scaled so that activations keep their size; norms start as identities."""
    if len(shape) == 1:
        is_scale = path.endswith("weight")
        return np.full(shape, 1.0 if is_scale else 0.0, "float32")
    scale = 0.5 if "embedding" in path else np.prod(shape[1:]) ** -0.5
    return np.random.default_rng(seed).standard_normal(shape, "float32") * np.float32(scale)
