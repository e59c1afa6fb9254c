"""Checkpoints that need no download: tiny trained ones, and random ones of any architecture."""

from sd_tf.checkpoints.embedded import (
    ADAPTERS,
    CONFIG,
    CONTROLNETS,
    DECODERS,
    DIT,
    DIT_CONFIG,
    DIT_FOLDER,
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
    "DIT",
    "DIT_CONFIG",
    "DIT_FOLDER",
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
