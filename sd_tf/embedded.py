"""Exports of the embedded checkpoints, made where they are first asked for."""

from collections.abc import Callable
from pathlib import Path

from sd_tf.checkpoints import EDITOR, EMBEDDED, TINY
from sd_tf.export import Options, export
from sd_tf.weights import open_checkpoint

FOLDER = Path("exports")


def embedded_export(edits: bool, report: Callable[[str], None]) -> Path:
    """Of the one that edits, or of the one that draws: `exports/NAME` in the working directory."""
    name = EDITOR if edits else TINY
    folder = FOLDER / name
    if not folder.exists():
        report(f"exporting the embedded checkpoint {name} to {folder}, once")
        export(open_checkpoint(EMBEDDED[name]), folder, Options(verify="fast"))
    return folder
