"""Merge adapters into a checkpoint: W + Σ scale · ΔW, one tensor at a time as it is read."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from sd_tf.adapters import Adapter, AdapterError, Change, merged, read_adapter
from sd_tf.files.tensors import StoredTensor
from sd_tf.weights.checkpoint import Checkpoint, MergedAdapter, TensorReader
from sd_tf.weights.layout import layers_of

Changes = Sequence[tuple[Change, float]]  # and their scales


def merge_files(checkpoint: Checkpoint, lora: Sequence[tuple[str | Path, float]]) -> Checkpoint:
    """Return the checkpoint with adapter files merged into its weights, each with its scale."""
    if not lora:
        return checkpoint
    layers = layers_of(checkpoint.config)
    return merge(checkpoint, [(read_adapter(path, layers), scale) for path, scale in lora])


def merge(checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> Checkpoint:
    """Return the checkpoint with adapters merged into its weights, each with its scale.

    A tensor is changed when it is read, in float32, and stays in float32: what is made of it rounds
    once. All adapters change the original weights, so their order makes no difference.

    Raises:
        AdapterError: a scale is not finite, or an adapter changes a bias where there is none.
    """
    by_component: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for adapter, scale in adapters:
        if not math.isfinite(scale):
            raise AdapterError(f"{adapter.name}: a scale is a finite number. Received: {scale}")
        for (component, module), change in adapter.changes.items():
            by_component[component][f"{module}.weight"].append((change, scale))
            if change.has_bias:
                _check_bias(checkpoint, adapter, component, module)
                by_component[component][f"{module}.bias"].append((change, scale))
    readers = {
        component: partial(_read_merged, checkpoint.readers[component], changes)
        for component, changes in by_component.items()
    }
    records = [
        MergedAdapter(adapter.name, float(scale), adapter.files, adapter.components)
        for adapter, scale in adapters
    ]
    return replace(
        checkpoint,
        readers={**checkpoint.readers, **readers},
        adapters=(*checkpoint.adapters, *records),
    )


def _check_bias(checkpoint: Checkpoint, adapter: Adapter, component: str, module: str) -> None:
    if f"{module}.bias" not in checkpoint.tensors(component):
        raise AdapterError(
            f"{adapter.name} changes the bias of {component} {module}, which has none."
        )


def _read_merged(read: TensorReader, changes: dict[str, Changes]) -> dict[str, StoredTensor]:
    tensors = dict(read())
    for name, of_tensor in changes.items():
        values = _merged_bias if name.endswith(".bias") else _merged_weight
        stored = tensors[name]
        tensors[name] = replace(stored, dtype="float32", read=partial(values, stored, of_tensor))
    return tensors


def _merged_weight(stored: StoredTensor, changes: Changes) -> np.ndarray:
    return merged(stored.read(), changes)


def _merged_bias(stored: StoredTensor, changes: Changes) -> np.ndarray:
    bias = stored.read().astype("float32")
    return bias + sum(np.float32(scale) * change.bias() for change, scale in changes)
