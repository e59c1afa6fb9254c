"""The names that a T5 encoder's tensors have in files."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sd_tf.files.tensors import CheckpointError, StoredTensor

TABLE = "shared.weight"
ALIAS = "encoder.embed_tokens.weight"


def t5_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a T5 encoder's tensors with its table of tokens once, under the model's name.

    Files hold the table as `shared.weight`, as `encoder.embed_tokens.weight`, or as both. That the
    two are equal is checked when the table is read.

    Raises:
        CheckpointError: the two differ.
    """
    if ALIAS not in tensors:
        return dict(tensors)
    named = {name: tensor for name, tensor in tensors.items() if name != ALIAS}
    return {**named, TABLE: _equal(tensors.get(TABLE), tensors[ALIAS])}


def _equal(table: StoredTensor | None, alias: StoredTensor) -> StoredTensor:
    if table is None:
        return alias
    if table.shape != alias.shape:
        raise _differ(table, f"their shapes are {list(table.shape)} and {list(alias.shape)}")

    def read() -> np.ndarray:
        values = table.read()
        if not np.array_equal(values, alias.read()):
            raise _differ(table, "their values differ")
        return values

    return replace(table, read=read)


def _differ(table: StoredTensor, how: str) -> CheckpointError:
    where = f" of {table.file}" if table.file is not None else ""
    return CheckpointError(
        f"A T5 encoder has one table of tokens: {TABLE} and {ALIAS}{where} must be equal, but "
        f"{how}."
    )
