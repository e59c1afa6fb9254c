"""Publish a folder: check its place first, lock it, and put the folder there in one step."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sd_tf.files import atomic, locks

LOCK = ".lock"
ENDS = (atomic.STAGING, atomic.RETIRED, LOCK)  # of what lies beside a target while it is written
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
    it points to is replaced. What may be replaced is checked at the start, and again at the end:
    somebody may have put files there in between.

    Args:
        marker: the file that tells an export from any other folder, which is never replaced.
        error: raised with the rule and how to mend it.
    """

    def check() -> None:
        if not target.exists():
            return
        if not overwrite:
            raise error(f"{target} exists. Choose another `output_dir`, or set `overwrite`.")
        is_empty = target.is_dir() and not any(target.iterdir())
        if not (target / marker).is_file() and not is_empty:
            raise error(
                f"{target} is not an export (it has no {marker}), so `overwrite` leaves it alone."
            )

    check()  # before a lock lies beside it
    target = target.resolve()  # so that both names of a folder have one lock
    if target.is_mount():
        raise error(
            f"{target} is a mount point, which cannot be replaced in one step. Choose a folder "
            f"below it as `output_dir`."
        )
    lock = target.with_name(f".{target.name}{LOCK}")
    busy = error(
        f"Another export to {target} is running (it holds {lock}). Wait for it, or choose another "
        f"`output_dir`."
    )
    with _reported(target, error):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(lock, busy), atomic.new_folder(target) as folder:
            check()  # another export may have ended, or a killed one's old copy been put back
            yield folder
            check()


@contextlib.contextmanager
def _reported(target: Path, error: type[Exception]) -> Iterator[None]:
    """Explain what keeps a folder from being written; other errors of the block pass."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in REASONS or not _is_of(problem, target):
            raise
        raise error(
            f"The export cannot be written to {target}: {REASONS[problem.errno]} ({problem}). "
            f"Nothing was changed there."
        ) from problem


def _is_of(problem: OSError, target: Path) -> bool:
    """Whether an error concerns a target, what lies beside it for it, or a folder above it."""
    named = [name for name in (problem.filename, problem.filename2) if name is not None]
    if not named:  # a write, where the disk is full
        return problem.errno == errno.ENOSPC
    own = {target, *(target.with_name(f".{target.name}{end}") for end in ENDS)}
    paths = [Path(os.fsdecode(name)).resolve() for name in named if not isinstance(name, int)]
    return any(path in target.parents or own & {path, *path.parents} for path in paths)
