"""Stable Diffusion checkpoints as XLA-compiled TensorFlow SavedModels."""

import importlib

# Public name → its module; imported on first use, so that `import sd_tf` costs nothing.
_HOMES = {
    "ClipTokenizer": "sd_tf.tokenizer.clip",
    "Each": "sd_tf.runtime.parameter",
    "Pipeline": "sd_tf.runtime.pipeline",
    "PipelineConfig": "sd_tf.config",
    "SdTfError": "sd_tf.errors",
    "open_checkpoint": "sd_tf.weights",
    "save_folder": "sd_tf.weights",
}

__all__ = [
    "ClipTokenizer",
    "Each",
    "Pipeline",
    "PipelineConfig",
    "SdTfError",
    "__version__",
    "open_checkpoint",
    "save_folder",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'sd_tf' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
