"""Exports of the embedded checkpoints, made on first use."""

from collections.abc import Callable
from pathlib import Path

from sd_tf.checkpoints import EMBEDDED, TINY, embedded_decoder
from sd_tf.export import ExportOptions, export
from sd_tf.files import locks
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.weights import open_checkpoint

FOLDER = Path("exports")
PREVIEWED = {TINY: "preview"}  # the small decoder for a server's previews, where there is one


def embedded_export(name: str, report: Callable[[str], None]) -> Path:
    """Return the folder of an embedded checkpoint's export, making it on first use.

    The folder is `exports/NAME` in the working directory; an export of another checkpoint that
    lies there is used as it is.
    """
    if name not in EMBEDDED:
        raise ExportError(
            f"The embedded checkpoints are {', '.join(EMBEDDED)}; `sd-tf export` exports others. "
            f"Received: {name!r}"
        )
    folder = FOLDER / name
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with locks.held(FOLDER / f".{name}.first_use"):  # another process may be making it
            if not folder.exists():
                _make(name, folder, report)
    found = Manifest.read(folder).checkpoint["diffusion_model"]["name"]
    if found != name:
        report(f"{folder} is an export of {found}")
    return folder


def _make(name: str, folder: Path, report: Callable[[str], None]) -> None:
    report(f"exporting the embedded checkpoint {name} to {folder}, once")
    decoder = embedded_decoder(PREVIEWED[name]) if name in PREVIEWED else None
    checkpoint = open_checkpoint(EMBEDDED[name], preview_decoder=decoder)
    export(checkpoint, folder, ExportOptions(verify="fast"))
