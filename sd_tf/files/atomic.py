"""Files and folders that are absent or complete: made beside their place, put there in one step."""

import contextlib
import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

PART, STAGING, RETIRED = ".part", ".staging", ".retired"
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def new_file(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a path to write to; its file replaces `path` when the block ends without an error.

    Args:
        durable: reach the disk before and after the replacement, so that a power failure leaves
            the old file or the new one.
        shared: several processes may write `path` at the same time, so each needs a name of its
            own beside it. Without it, what a killed process left is overwritten by the next.
    """
    name = uuid.uuid4().hex if shared else f".{path.name}"
    part = path.with_name(name + PART)
    try:
        yield part
        if durable:
            _sync(part)
        part.replace(path)
        if durable:
            _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write or replace a whole file, text as UTF-8."""
    with new_file(path, durable) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, which replaces `target` when the block ends without an error.

    What a killed process left behind is removed first, or put back where it is the only complete
    copy. If `target` is a symbolic link, the folder that it points to is replaced. Only one process
    at a time may make a target; where there could be two, hold a lock around it.
    """
    target = target.resolve()
    folder = target.with_name(f".{target.name}{STAGING}")
    retired = target.with_name(f".{target.name}{RETIRED}")
    if retired.exists() and not target.exists():
        os.rename(retired, target)  # killed between the two steps of `_put_in_place`
    for leftover in (folder, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        _put_in_place(folder, target, retired)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path, retired: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    if _exchange(folder, target):
        return  # the old target is removed as the staging folder
    # In two steps. Whatever stops them, one complete copy remains, and the next run puts it back.
    os.rename(target, retired)
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(retired, target)
        raise
    shutil.rmtree(retired)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step, where system and file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
