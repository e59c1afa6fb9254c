"""Textual inversion: train the vectors of a new token alone, through a frozen text encoder."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from keras import ops

from sd_tf.files import atomic
from sd_tf.files.tensors import save_safetensors
from sd_tf.models.layers import Block
from sd_tf.training.data import Source
from sd_tf.training.origin import Record
from sd_tf.training.settings import TrainingError
from sd_tf.weights import Checkpoint
from sd_tf.weights.added_tokens import TABLE, with_embeddings
from sd_tf.weights.embeddings import ENCODERS

FILE, INITIAL_FILE = "learned_embeds.safetensors", "initial_embeds.safetensors"
CAPTIONS = 1000  # captions that are searched for the token


@dataclass(frozen=True)
class InversionOptions:
    """The token that is trained, the token whose vector it begins with, and how many it has."""

    placeholder_token: str
    initializer_token: str
    num_vectors: int = 1

    def check(self) -> "InversionOptions":
        """Raise if a value is out of range; return self."""
        if self.num_vectors < 1:
            raise TrainingError(f"`num_vectors` must be at least 1. Received: {self.num_vectors}")
        return self

    def record(self) -> Record:
        return dataclasses.asdict(self)

    def check_captions(self, source: Source) -> None:
        """Raise unless one of the first captions names the token."""
        token = self.placeholder_token.lower()
        some = range(min(len(source), CAPTIONS))
        if not any(token in source.caption(index, 0).lower() for index in some):
            raise TrainingError(
                f"No caption has the `placeholder_token` {self.placeholder_token!r}, so it would "
                f"learn nothing. The first caption: {source.caption(0, 0)!r}"
            )


def with_placeholder(checkpoint: Checkpoint, options: InversionOptions, folder: Path) -> Checkpoint:
    """Return the checkpoint with the new token, whose vectors are the initializer's.

    They are written into the run's folder.
    """
    rows = {}
    for name in checkpoint.config.text_encoders:
        pieces = checkpoint.tokenizer(name).tokens(options.initializer_token)
        if len(pieces) != 1:
            raise TrainingError(
                f"`initializer_token` must be one token of the checkpoint. Received: "
                f"{options.initializer_token!r}, which is {len(pieces)}"
            )
        row = checkpoint.tensors(name)[TABLE].rows(pieces[0].id, pieces[0].id + 1).read()
        rows[name] = np.repeat(row.astype("float32"), options.num_vectors, axis=0)
    folder.mkdir(parents=True, exist_ok=True)
    _write(rows, folder / INITIAL_FILE, options.placeholder_token)
    source = f"{options.placeholder_token}={folder / INITIAL_FILE}"
    return with_embeddings(checkpoint, [source])


def _write(rows: Mapping[str, np.ndarray], path: Path, token: str) -> None:
    """Write vectors by text encoder: of one under the token, of SDXL's two as clip_l and clip_g."""
    names = {encoder: name for name, encoder in ENCODERS.items()}
    tensors = {token if len(rows) == 1 else names[encoder]: x for encoder, x in rows.items()}
    with atomic.new_file(path, shared=True) as part:  # each of several hosts writes it
        save_safetensors(tensors, part, {"format": "pt"})


class LearntRows(Block):
    """An embedding whose last rows are trained, and no others."""

    def __init__(self, table: keras.layers.Embedding, count: int):
        super().__init__()
        self.table = table
        table.trainable = False
        self.first = table.input_dim - count
        rows = np.array(table.embeddings)[self.first :]
        # Norms, biases and embeddings do not decay; the name tells.
        self.rows = keras.Variable(rows, dtype="float32", name="embedding_rows")

    def call(self, tokens):
        known = self.table(ops.minimum(tokens, self.first - 1))
        rows = ops.cast(ops.convert_to_tensor(self.rows), known.dtype)
        new = ops.take(rows, ops.maximum(tokens - self.first, 0), axis=0)
        return ops.where((tokens >= self.first)[..., None], new, known)


class Inversion:
    """The trained rows of a checkpoint's text encoders, which are frozen apart from these."""

    def __init__(self, encoders: Mapping[str, keras.layers.Layer], options: InversionOptions):
        self.options, self.learnt = options, {}
        for name, encoder in encoders.items():
            encoder.trainable = False
            embeddings = encoder.text_model.embeddings
            embeddings.token_embedding = LearntRows(embeddings.token_embedding, options.num_vectors)
            self.learnt[name] = embeddings.token_embedding

    def save(self, path: Path) -> None:
        """Write the file that diffusers' `load_textual_inversion` and our exports read."""
        rows = {name: np.array(learnt.rows) for name, learnt in self.learnt.items()}
        _write(rows, path, self.options.placeholder_token)
