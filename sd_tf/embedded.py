"""Exports of the embedded checkpoints, made where they are first asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sd_tf.checkpoints import EDITOR, EMBEDDED, TINY
from sd_tf.export import Options, export
from sd_tf.weights import open_checkpoint

FOLDER = Path("exports")
# Parameters that suit each better than the ones for large models; measured in README.md.
SUITED = {TINY: {"guidance_scale": 4.0}, EDITOR: {"guidance_scale": 2.0}}


def embedded_export(edits: bool, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Of the one that edits, or of the one that draws: `exports/NAME` in the working directory.

    Beside it, the parameters that suit it where none are given.
    """
    name = EDITOR if edits else TINY
    folder = FOLDER / name
    if not folder.exists():
        report(f"exporting the embedded checkpoint {name} to {folder}, once")
        export(open_checkpoint(EMBEDDED[name]), folder, Options(verify="fast"))
    return folder, SUITED[name]
