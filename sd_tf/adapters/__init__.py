"""Adapters (LoRA and its relatives): what a file changes in a model's layers. No model code."""

from sd_tf.adapters.adapter import Adapter, AdapterFile, open_adapter, read_adapter, recognize
from sd_tf.adapters.changes import Change, merged
from sd_tf.adapters.errors import AdapterError
from sd_tf.adapters.spellings import Layers

__all__ = [
    "Adapter",
    "AdapterError",
    "AdapterFile",
    "Change",
    "Layers",
    "merged",
    "open_adapter",
    "read_adapter",
    "recognize",
]
