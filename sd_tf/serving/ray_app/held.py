"""Hold the files of the exports that are loaded, for replicas that start after a replacement.

An export is replaced as a whole, and its files go with it. So each replica that loads one links its
files to a folder beside it, which takes no space of its own; the last to let go removes it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path

import ray

from sd_tf.errors import SdTfError
from sd_tf.runtime.manifest import FILE_NAME, file_hash

MARK = ".served-"  # in the names of the folders

log = logging.getLogger("ray.serve")


class StaleError(SdTfError):
    """The export that a call names is not loaded, nor held, and is not the one in the folder."""


class HeldExports:
    """The exports of one folder that the replicas of an application have loaded on this machine."""

    def __init__(self, export_dir: Path):
        self.export_dir = export_dir
        self._target = Path(os.path.abspath(export_dir))  # a link may lead elsewhere later
        self._stem = f".{self._target.name}{MARK}{_application()}-"
        self._held: dict[str, int] = {}  # digest → descriptor of its folder, with a shared lock

    def hold(self, digest: str) -> Path:
        """Return a folder with an export's files, which stay until `release`.

        Where files cannot be linked, it is the export's own folder, in which they may be replaced.

        Raises:
            StaleError: no replica here has the export, and it is not in the folder.
        """
        place = self._place(digest)
        while digest not in self._held:
            if (joined := _joined(place)) is not None:
                self._held[digest] = joined
                break
            before = state_of(self.export_dir, digest)
            try:
                self._link(digest, before)
            except OSError as problem:
                check_state(self.export_dir, digest, before)
                log.warning(
                    "replicas that start after the export was replaced will not have it, because "
                    "its files cannot be linked: %s",
                    problem,
                )
                return self.export_dir
        return place

    def release(self, digest: str) -> None:
        """Let go of an export; its folder is removed unless another replica holds it."""
        if (descriptor := self._held.pop(digest, None)) is not None:
            _remove_unless_held(self._place(digest), descriptor)

    def longest(self) -> str | None:
        """Return the digest of the export that replicas have held the longest, if there is one.

        It is the one that is served, or was until a moment ago, and no candidate for that.
        """
        made = {}
        for place in _beside(self._target, self._stem):
            with contextlib.suppress(OSError):  # it is being removed
                if _is_held(place):
                    made[place.stat().st_ctime_ns] = place.name.removeprefix(self._stem)
        return made[min(made)] if made else None

    def _place(self, digest: str) -> Path:
        return self._target.with_name(self._stem + digest)

    def _link(self, digest: str, before: tuple[int, ...]) -> None:
        """Make the folder of links and hold it, unless another replica is quicker."""

        def link(source: str, target: str) -> None:
            copies = os.path.basename(source) == FILE_NAME  # which may be written to in its place
            (shutil.copy2 if copies else os.link)(source, target)

        part = self._target.with_name(f".{self._target.name}{MARK}{uuid.uuid4().hex}")
        part.mkdir()
        descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # and no `sweep` removes it
            shutil.copytree(self.export_dir, part, copy_function=link, dirs_exist_ok=True)
            check_state(self.export_dir, digest, before)
            os.rename(part, self._place(digest))
            self._held[digest], descriptor = descriptor, None
        except OSError as problem:
            if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            if descriptor is not None:
                shutil.rmtree(part, ignore_errors=True)
                os.close(descriptor)


def state_of(folder: Path, digest: str) -> tuple[int, ...]:
    """Return what another export changes that comes to a folder and goes while it is read.

    It could leave its weights.
    """
    if not (folder / FILE_NAME).is_file() or export_digest(folder) != digest:
        raise StaleError(f"{folder} no longer holds the export that was asked for.")
    return place_of(folder)


def check_state(folder: Path, digest: str, before: tuple[int, ...]) -> None:
    """Refuse what was read of an export, unless its folder was the same all the time."""
    if state_of(folder, digest) != before:
        raise StaleError(f"{folder} was replaced while it was read.")


def export_digest(folder: Path) -> str:
    """Return a digest that differs between exports in the same folder."""
    return file_hash(folder / FILE_NAME)


def place_of(folder: Path) -> tuple[int, ...]:
    """Return what tells a folder from each that takes its place, even with the same export."""
    found = folder.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def sweep(export_dir: Path) -> None:
    """Remove what processes that were killed have left of a folder's exports."""
    target = Path(os.path.abspath(export_dir))
    for place in _beside(target, f".{target.name}{MARK}"):
        with contextlib.suppress(OSError):  # another process removes it
            _remove_unless_held(place, os.open(place, os.O_RDONLY | os.O_DIRECTORY))


def _application() -> str:
    """Return what tells the processes of this application from others on the machine."""
    on_ray = ray.is_initialized()
    name = ray.get_runtime_context().gcs_address if on_ray else f"process-{os.getpid()}"
    return name.replace(":", "-")


def _beside(target: Path, stem: str) -> list[Path]:
    try:
        return [path for path in target.parent.iterdir() if path.name.startswith(stem)]
    except OSError:  # it may not be listed, nor written to
        return []


def _joined(place: Path) -> int | None:
    """Return a descriptor with a shared lock on a folder, or None where there is no such folder."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(descriptor), place.stat()):
            return descriptor
    except OSError:  # removed meanwhile
        pass
    os.close(descriptor)
    return None


def _is_held(place: Path) -> bool:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _remove_unless_held(place: Path, descriptor: int) -> None:
    """Remove a folder if nobody else has a lock on it, and close the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), place.stat()):
            shutil.rmtree(place, ignore_errors=True)
    except OSError:  # somebody holds it, or has removed it
        pass
    finally:
        os.close(descriptor)
