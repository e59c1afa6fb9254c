"""Publish a folder: check its place first, lock it, and put the folder there in one step."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sd_tf.files import atomic, locks

REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EACCES: "it is not writable",
    errno.EROFS: "it lies on a read-only file system",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EEXIST: "a part of its path is a file",
}


def link(source: str | Path, target: str | Path) -> None:
    """Link a file to another place if the file system allows it, else copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextlib.contextmanager
def staging(target: Path, overwrite: bool, marker: str, error: type[Exception]) -> Iterator[Path]:
    """Yield a folder to write an export to, which becomes `target` when the block ends well.

    A lock keeps a second export to the same target out. A symbolic link stays one: the folder that
    it points to is replaced.

    Args:
        marker: the file that tells an export from any other folder, which is never replaced.
        error: raised with the rule and how to mend it.
    """
    if target.exists() and not overwrite:
        raise error(f"{target} exists. Choose another `output_dir`, or set `overwrite`.")
    if target.exists() and not (target / marker).is_file() and any(target.iterdir()):
        raise error(
            f"{target} is not an export (it has no {marker}), so `overwrite` leaves it alone."
        )
    target = target.resolve()  # so that both names of a folder have one lock
    if target.is_mount():
        raise error(
            f"{target} is a mount point, which cannot be replaced in one step. Choose a folder "
            f"below it as `output_dir`."
        )
    lock = target.with_name(f".{target.name}.lock")
    busy = error(
        f"Another export to {target} is running (it holds {lock}). Wait for it, or choose another "
        f"`output_dir`."
    )
    with _reported(target, error):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(lock, busy), atomic.new_folder(target) as folder:
            yield folder


@contextlib.contextmanager
def _reported(target: Path, error: type[Exception]) -> Iterator[None]:
    """Explain what keeps a folder from being written."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in REASONS:
            raise
        raise error(
            f"The export cannot be written to {target}: {REASONS[problem.errno]} ({problem}). "
            f"Nothing was changed there."
        ) from problem
