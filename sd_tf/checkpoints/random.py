"""Random checkpoints, to try and to measure an architecture without its real weights."""

import zlib
from functools import partial
from pathlib import Path

import numpy as np

from sd_tf.checkpoints.words import words_tokenizer
from sd_tf.config import PipelineConfig, T5EncoderConfig, TextConfig
from sd_tf.files.tensors import StoredTensor, numpy_dtype
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.t5 import T5Tokenizer
from sd_tf.weights import layout, write_folder

SHARD_BYTES = 5 * 10**9


def make_random(
    config: PipelineConfig,
    folder: Path,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a diffusers folder whose random weights depend on the tensors' names alone.

    One tensor is in memory at a time.
    """
    tensors = {
        name: {
            path: StoredTensor(
                slot.shape, dtype, partial(_random, f"{name}.{path}", slot.shape, dtype)
            )
            for path, slot in layout.slots(layout.abstract_model(part)).items()
        }
        for name, part in config.components.items()
    }
    tokenizers = {name: _tokenizer(part) for name, part in config.text_encoders.items()}
    write_folder(folder, config, tensors, tokenizers, shard_bytes)


def _tokenizer(config: TextConfig) -> ClipTokenizer | T5Tokenizer:
    if isinstance(config, T5EncoderConfig):
        return words_tokenizer(config.vocab_size, config.max_length)
    return ClipTokenizer.clip(config.pad_token_id)


def _random(path: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw a tensor, scaled so that activations keep their size; norms start as identities."""
    kind = numpy_dtype(dtype)
    if len(shape) == 1:
        is_scale = path.endswith("weight")
        return np.full(shape, 1.0 if is_scale else 0.0, kind)
    is_table = "embedding" in path or path.endswith("pos_embed.pos_embed")
    scale = 0.5 if is_table else np.prod(shape[1:]) ** -0.5
    random = np.random.default_rng(zlib.crc32(path.encode()))
    return (random.standard_normal(shape, "float32") * np.float32(scale)).astype(kind)
