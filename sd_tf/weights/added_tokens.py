"""A checkpoint with further tokens: embeddings of textual inversion behind its own vocabulary."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from sd_tf.config import UNetConfig, family_of
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.tokenizer.clip import TokenizerError
from sd_tf.weights.checkpoint import Checkpoint, TensorReader
from sd_tf.weights.embeddings import Embedding, read_embedding

TABLE = "text_model.embeddings.token_embedding.weight"


def with_embeddings(checkpoint: Checkpoint, sources: Sequence[str | Path]) -> Checkpoint:
    """Return the checkpoint with the tokens of embeddings, each in all of its text encoders.

    The pooled output is then that of the end token in every case. Files with `eos_token_id` 2 take
    the highest id's, which is the end token's only as long as no token has been added.

    Args:
        sources: files, or TOKEN=FILE; see `weights.embeddings`.
    """
    config = checkpoint.config
    if not isinstance(config.denoiser, UNetConfig):
        raise CheckpointError(
            f"Embeddings of textual inversion are for SD1, SD2 and SDXL. Received: "
            f"{checkpoint.source}, which is {family_of(config)}"
        )
    embeddings = [read_embedding(source) for source in sources]
    _refuse_doubles(embeddings)
    parts = [embedding.vectors(config, checkpoint.source) for embedding in embeddings]
    encoders, readers = dict(config.text_encoders), dict(checkpoint.readers)
    tokenizers = dict(checkpoint.tokenizer_readers)
    for name, encoder in config.text_encoders.items():
        old = tokenizer = checkpoint.tokenizer(name)
        for embedding in embeddings:
            try:
                tokenizer = tokenizer.with_tokens({embedding.token: embedding.count})
            except TokenizerError as error:
                raise CheckpointError(
                    f"The embedding {embedding.file} cannot be added: {error} Give it as "
                    f"TOKEN={embedding.file}."
                ) from error
        has_eos = encoder.eos_token_id is not None
        encoders[name] = replace(
            encoder,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=encoder.eos_token_id if has_eos else tokenizer.end_token_id,
        )
        rows = [part[name] for part in parts]
        readers[name] = partial(_with_rows, checkpoint.readers[name], old.vocab_size, rows)
        tokenizers[name] = lambda tokenizer=tokenizer: tokenizer
    return replace(
        checkpoint,
        config=replace(config, text_encoders=encoders),
        readers=readers,
        tokenizer_readers=tokenizers,
        embeddings=(*checkpoint.embeddings, *embeddings),
    )


def _refuse_doubles(embeddings: Sequence[Embedding]) -> None:
    files = {}
    for embedding in embeddings:
        token = embedding.token.lower()  # as texts are searched for it
        if token in files:
            raise CheckpointError(
                f"Each embedding must have a token of its own, in lower case, too. Received: "
                f"{embedding.token!r} for {files[token]} and {embedding.file}. Give one of them as "
                f"TOKEN=FILE."
            )
        files[token] = embedding.file


def _with_rows(read: TensorReader, kept: int, rows: Sequence[StoredTensor]):
    """Read a text encoder's tensors, with rows behind the first `kept` ones of its table.

    A table may have rows for tokens that its tokenizer does not have. They make room.
    """
    tensors = read()
    if TABLE not in tensors:  # strict loading says so
        return tensors
    table = tensors[TABLE]
    return {**tensors, TABLE: _joined(table.rows(0, min(kept, table.shape[0])), rows)}


def _joined(table: StoredTensor, rows: Sequence[StoredTensor]) -> StoredTensor:
    parts = [table, *rows]
    same = {part.dtype for part in parts} == {table.dtype}
    dtype = table.dtype if same else "float32"

    def read() -> np.ndarray:
        return np.concatenate(
            [part.read() if same else part.read().astype(dtype) for part in parts]
        )

    shape = (sum(part.shape[0] for part in parts), *table.shape[1:])
    return replace(table, shape=shape, dtype=dtype, read=read)
