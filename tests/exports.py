"""Small exports for tests, made through the same call as the command's."""

from pathlib import Path

from sd_tf.checkpoints import tiny_folder
from sd_tf.export import Options, export
from sd_tf.weights import open_checkpoint

SMALL = {"height": 64, "width": 64, "max_steps": 8, "verify": "off"}


def tiny_export(folder: Path, **options) -> Path:
    export(open_checkpoint(tiny_folder()), folder, Options(**{**SMALL, **options}))
    return folder
