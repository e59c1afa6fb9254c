"""Writing beside the target and putting it in place at once: the target is absent or complete."""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sd_tf.manifest import FILE_NAME, ExportError

STAGING, RETIRED = ".staging", ".retired"
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def staging(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write to, which becomes `target` when the block ends without an error.

    A lock, which dies with its process, keeps two exports from one target. What a killed export
    left behind is removed by the next one.
    """
    if target.exists() and not overwrite:
        raise ExportError(f"{target} exists. Choose another --output_dir, or give --overwrite.")
    if target.exists() and not (target / FILE_NAME).is_file() and any(target.iterdir()):
        raise ExportError(f"{target} is not an export, so --overwrite leaves it alone.")
    with _reported(target), _lock(target):
        folder = target.with_name(f".{target.name}{STAGING}")
        retired = target.with_name(f".{target.name}{RETIRED}")
        for leftover in (folder, retired):
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
            _put_in_place(folder, target, retired)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _reported(target: Path):
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "no space is left on the device",
            errno.EACCES: "it is not writable",
            errno.EROFS: "it lies on a read-only file system",
            errno.ENOTDIR: "a part of its path is a file",
            errno.EEXIST: "a part of its path is a file",
        }
        if error.errno not in reasons:
            raise
        raise ExportError(
            f"The export cannot be written to {target}: {reasons[error.errno]} ({error}). "
            f"Nothing was changed there."
        ) from error


@contextlib.contextmanager
def _lock(target: Path):
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.lock")
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(
                f"Another export to {target} is running (it holds {path}). Wait for it, or choose "
                f"another --output_dir."
            ) from None
        yield


def _put_in_place(folder: Path, target: Path, retired: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    if _exchange(folder, target):
        return  # what was the target is removed with the staging folder
    os.rename(target, retired)
    os.rename(folder, target)
    shutil.rmtree(retired)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step, where system and file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0
