"""Locks between processes, by files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def held(path: Path, refusal: Exception | None = None) -> Iterator[None]:
    """Hold the lock file `path`, or raise `refusal` at once where another process holds it.

    Without `refusal`, wait for it.

    The operating system releases the lock when its process ends, however it ends; so a file
    system without such locks is an OSError, never a weaker lock. The file itself stays.
    """
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(blocking=refusal is None)
    except Timeout:
        raise refusal from None
    try:
        yield
    finally:
        lock.release()
