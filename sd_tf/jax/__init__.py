"""Stable Diffusion on JAX: many devices, compiled ahead of time, for CPUs, GPUs and TPUs."""

import importlib
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

_HOMES = {
    "JaxPipeline": "sd_tf.jax.pipeline",
    "compile_pipeline": "sd_tf.jax.compile",
    "make_mesh": "sd_tf.jax.sharding",
}
__all__ = ["JaxPipeline", "compile_pipeline", "make_mesh"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'sd_tf.jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
