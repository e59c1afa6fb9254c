"""Hold the files of the exports that are loaded, for replicas that start after a replacement.

An export is replaced as a whole, and its files go with it. So each replica that loads one links its
files to a folder beside it; the last replica to let go removes it.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import uuid
from pathlib import Path

from sd_tf.errors import SdTfError
from sd_tf.runtime.manifest import FILE_NAME, file_hash

MARK = ".served-"  # in the names of the folders, before the application and the export's digest
LOCK = ".lock"  # in each folder: who holds it has a shared lock on this file; see also `mark`

log = logging.getLogger("ray.serve")


class StaleError(SdTfError):
    """The export that a call names is not loaded, nor held, and is not the one in the folder."""


class HeldExports:
    """The exports of one folder that an application's replicas hold, as one replica sees them."""

    def __init__(self, export_dir: Path, application: str):
        """Hold nothing yet.

        Args:
            application: hexadecimal digits that all replicas share, and no other application has.
        """
        self.export_dir = export_dir
        self._target = _absolute(export_dir)
        self._stem = f".{self._target.name}{MARK}{application}-"
        self._held: dict[str, int] = {}  # digest → descriptor of the lock file

    def hold(self, digest: str) -> Path:
        """Return a folder with an export's files, which stay until `release`.

        Where files cannot be linked, it is the export's own folder, in which they may be replaced.

        Raises:
            StaleError: no replica holds the export, and it is not in the folder.
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

    def mark(self, digest: str) -> None:
        """Say that a held export is the one that is served, for replicas that start later."""
        if (descriptor := self._held.get(digest)) is not None:
            os.utime(descriptor)

    def served(self) -> str | None:
        """Return the digest of the held export that was marked last; None: nothing is held.

        While none is marked, it is the one that was held first.
        """
        found = []
        for place in _beside(self._target):
            digest = place.name.removeprefix(self._stem)
            with contextlib.suppress(OSError):  # it is being made or removed
                if place == self._place(digest) and _is_held(place):
                    marked = (place / LOCK).stat().st_mtime_ns
                    found.append((marked, -place.stat().st_ctime_ns, digest))
        return max(found)[-1] if found else None

    def _place(self, digest: str) -> Path:
        return self._target.with_name(self._stem + digest)

    def _link(self, digest: str, before: tuple[int, ...]) -> None:
        """Make the folder of links and hold it, unless another replica is quicker."""
        part = _unused(self._target)
        part.mkdir()
        descriptor = os.open(part / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:  # there are no locks here
            os.close(descriptor)
            shutil.rmtree(part, ignore_errors=True)
            raise
        try:
            if not _is_at(descriptor, part):  # somebody's `sweep` came before the lock
                return
            _link_files(self.export_dir, part)
            check_state(self.export_dir, digest, before)
            os.utime(descriptor, (0, 0))  # not marked
            with contextlib.suppress(FileExistsError):
                _rename(part, self._place(digest))
                self._held[digest], descriptor = descriptor, None
        finally:
            if descriptor is not None:
                _remove_unless_held(part, descriptor)


def state_of(folder: Path, digest: str) -> tuple[int, ...]:
    """Return what differs once another export, which may have been read, was in the folder."""
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
    for place in _beside(_absolute(export_dir)):
        with contextlib.suppress(OSError):  # it is being made or removed
            _remove_unless_held(place, os.open(place / LOCK, os.O_RDWR))


def _absolute(export_dir: Path) -> Path:
    """Return the absolute path of a folder. A link stays one: it may lead elsewhere later."""
    return Path(os.path.abspath(export_dir))


def _unused(target: Path) -> Path:
    """Name a folder that is being made or removed, which `sweep` knows."""
    return target.with_name(f".{target.name}{MARK}{uuid.uuid4().hex}")


def _beside(target: Path) -> list[Path]:
    """Return the folders with links to a folder's exports."""
    pattern = re.compile(re.escape(f".{target.name}{MARK}") + "[0-9a-f]+(-[0-9a-f]{64})?")
    try:
        return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:  # it may not be listed, nor written to
        return []


def _link_files(source: Path, target: Path) -> None:
    for folder, _, names in os.walk(source, followlinks=True):
        made = target / Path(folder).relative_to(source)
        made.mkdir(exist_ok=True)
        for name in names:
            path = os.path.realpath(os.path.join(folder, name))
            copies = name == FILE_NAME  # it may be written to in its place
            (shutil.copyfile if copies else os.link)(path, made / name)


def _rename(folder: Path, place: Path) -> None:
    try:
        os.rename(folder, place)
    except OSError:
        if place.exists():  # the system has two numbers for it
            raise FileExistsError(place) from None
        raise


def _joined(place: Path) -> int | None:
    """Return a descriptor with a shared lock on a folder, or None where there is no such folder."""
    try:
        descriptor = os.open(place / LOCK, os.O_RDWR)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_at(descriptor, place):  # and was not removed meanwhile
            return descriptor
    os.close(descriptor)
    return None


def _is_at(descriptor: int, place: Path) -> bool:
    """Return whether an open lock file is still that of a folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), (place / LOCK).stat())
    except OSError:
        return False


def _is_held(place: Path) -> bool:
    descriptor = os.open(place / LOCK, os.O_RDWR)
    try:
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock a file for oneself alone; return False where somebody else has a lock on it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unless_held(place: Path, descriptor: int) -> None:
    """Remove a folder unless somebody else has a lock on it, and close its lock file."""
    gone = _unused(place.with_name(place.name[1:].rsplit(MARK, 1)[0]))
    try:
        if _locked(descriptor) and _is_at(descriptor, place):
            os.rename(place, gone)  # so that nobody joins what is half removed
    except OSError as problem:
        log.warning("%s cannot be removed: %s", place, problem)
    finally:
        os.close(descriptor)
    shutil.rmtree(gone, ignore_errors=True)
    if gone.exists():
        log.warning("%s cannot be removed", gone)
