"""Checkpoints that need no download: two tiny trained ones, and random ones of any architecture."""

from sd_tf.checkpoints.embedded import (
    ADAPTERS,
    CONFIG,
    CONTROLNETS,
    DECODERS,
    DIT_CONFIG,
    EDITOR,
    EDITOR_FOLDER,
    EMBEDDED,
    TINY,
    TINY_FOLDER,
    embedded_adapter,
    embedded_controlnet,
    embedded_decoder,
)
from sd_tf.checkpoints.random import make_random

__all__ = [
    "ADAPTERS",
    "CONFIG",
    "CONTROLNETS",
    "DECODERS",
    "DIT_CONFIG",
    "EDITOR",
    "EDITOR_FOLDER",
    "EMBEDDED",
    "TINY",
    "TINY_FOLDER",
    "embedded_adapter",
    "embedded_controlnet",
    "embedded_decoder",
    "make_random",
]
