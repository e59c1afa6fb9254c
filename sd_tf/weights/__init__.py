"""Read checkpoints of every supported format, strictly and one tensor at a time."""

from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers_save import (
    save_controlnet,
    save_folder,
    save_small_decoder,
    write_folder,
)
from sd_tf.weights.layout import layers_of
from sd_tf.weights.open import open_checkpoint, open_controlnet, open_small_decoder
from sd_tf.weights.texts import t5_readers, with_texts

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "StoredTensor",
    "layers_of",
    "open_checkpoint",
    "open_controlnet",
    "open_small_decoder",
    "save_controlnet",
    "save_folder",
    "save_small_decoder",
    "t5_readers",
    "with_texts",
    "write_folder",
]
