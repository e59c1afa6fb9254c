"""Exports of the embedded checkpoints, made where they are first asked for."""

from collections.abc import Callable
from pathlib import Path

from sd_tf.checkpoints import EMBEDDED
from sd_tf.export import Options, export
from sd_tf.weights import open_checkpoint

FOLDER = Path("exports")


def embedded_export(name: str, report: Callable[[str], None]) -> Path:
    """The folder `exports/NAME` below the working directory."""
    folder = FOLDER / name
    if not folder.exists():
        report(f"exporting the embedded checkpoint {name} to {folder}, once")
        export(open_checkpoint(EMBEDDED[name]), folder, Options(verify="fast"))
    return folder
