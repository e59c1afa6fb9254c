"""Checkpoints that need no download: two tiny trained ones, and random ones of any architecture."""

from sd_tf.checkpoints.embedded import CONFIG, EDITOR, EDITOR_FOLDER, EMBEDDED, TINY, TINY_FOLDER
from sd_tf.checkpoints.random import make_random

__all__ = ["CONFIG", "EDITOR", "EDITOR_FOLDER", "EMBEDDED", "TINY", "TINY_FOLDER", "make_random"]
