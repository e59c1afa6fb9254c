"""Read checkpoints of every supported format, strictly and one tensor at a time."""

from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers import save_folder
from sd_tf.weights.open import open_checkpoint
from sd_tf.weights.tensors import CheckpointError, StoredTensor

__all__ = ["Checkpoint", "CheckpointError", "StoredTensor", "open_checkpoint", "save_folder"]
