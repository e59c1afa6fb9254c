"""XLA's persistent compilation cache, made safe against sharing, damage and full disks.

TensorFlow by itself fails every call whose entry is damaged, runs code that was compiled for
another processor or with other XLA_FLAGS, and fails a call whose code it cannot write. So each
process gives it a temporary folder of its own, with links to those entries whose checksums are
right. What TensorFlow adds there is published in the user's folder, in one step, with its checksum.
"""

import atexit
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
from pathlib import Path

from sd_tf.errors import SdTfError
from sd_tf.files import atomic

FORMAT = 1  # of the folder's names
ENTRY = re.compile(r"(.+)\.([0-9a-f]{64})\.pb")
FLAGS, FLAG = "TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory"
CPUINFO = Path("/proc/cpuinfo")
# The lines of it that tell processors apart, on x86 and on ARM.
CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)

logger = logging.getLogger(__name__)


class CacheError(SdTfError):
    """A second cache for a process that has one."""


class CompileCache:
    """The cache folder as one process uses it."""

    def __init__(self, folder: Path):
        self.folder = folder
        check_folder(folder)
        self._own = Path(tempfile.mkdtemp(prefix="sd_tf_xla_"))  # the only one that XLA sees
        self._lock = threading.Lock()
        self._is_full = False
        atexit.register(self._close)
        if not _point_xla(self._own):
            logger.warning(
                "%s is not used: the compile cache has to be set before anything else asks "
                "TensorFlow to run or to name its devices.",
                folder,
            )
        self._entries = folder / kind()
        self._entries.mkdir(exist_ok=True)
        self._link()

    def publish(self) -> None:
        """Publish what this process compiled, for other processes."""
        with self._lock:
            for path in self._own.glob("*.pb"):
                if path.is_symlink() or self._is_full:
                    continue
                try:
                    entry = self._entries / f"{path.stem}.{self._digest(path, path.stem)}.pb"
                    with atomic.new_file(entry, shared=True) as part:
                        shutil.copyfile(path, part)
                    _replace_by_link(path, entry)
                except OSError as error:
                    self._is_full = True
                    logger.warning("Compiled code is not kept in %s: %s", self.folder, error)

    def _link(self) -> None:
        for path in self._entries.iterdir():
            if not (match := ENTRY.fullmatch(path.name)):
                continue
            name, digest = match.groups()
            try:
                if self._digest(path, name) != digest:
                    logger.warning(
                        "%s is damaged or of another machine; it is removed and compiled again.",
                        path,
                    )
                    path.unlink()
                elif not (link := self._own / f"{name}.pb").exists():  # compiled by two
                    link.symlink_to(path)
            except FileNotFoundError:  # removed by another process
                continue
            except OSError as error:  # another user's
                logger.warning("%s is not used: %s", path, error)

    def _digest(self, path: Path, name: str) -> str:
        """Hash the content and the place, so that an entry is right only where it was made."""
        start = hashlib.sha256(f"{self._entries.name}/{name}\n".encode())
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: start).hexdigest()

    def _close(self) -> None:
        self.publish()
        shutil.rmtree(self._own, ignore_errors=True)


_cache: CompileCache | None = None  # one for the process, as XLA reads its flags once


def set_compile_cache(folder: str | Path) -> None:
    """Keep compiled code in a folder. Call it before the process first uses XLA."""
    global _cache
    folder = Path(folder).expanduser().resolve()
    if _cache is None:
        _cache = CompileCache(folder)
    elif _cache.folder != folder:
        raise CacheError(
            f"A process has one compile cache, as XLA reads the setting once: {_cache.folder}. "
            f"Received: {folder}"
        )


def publish() -> None:
    """Publish what this process compiled, for other processes, if it has a cache."""
    if _cache is not None:
        _cache.publish()


def check_folder(folder: Path) -> None:
    """Make a folder if it is missing; refuse one that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"The compile cache is a folder that can be written. Received: {folder} "
            f"({error.strerror})"
        ) from error


def for_workers(folder: str | None, are_here: bool) -> str | None:
    """Return the folder's path for worker processes, checked if they run on this machine."""
    if folder is None:
        return None
    path = Path(folder).expanduser().resolve()
    if are_here:
        check_folder(path)
    return str(path)


def kind() -> str:
    """Name the surroundings that compiled code depends on: version, flags and hardware."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = {
        "format": FORMAT,
        "build": tf.version.GIT_VERSION,
        "flags": [os.environ.get(name, "").split() for name in ("XLA_FLAGS", FLAGS)],
        "cpu": processor(),
        "gpus": [str(tf.config.experimental.get_device_details(gpu)) for gpu in gpus],
    }
    digest = hashlib.sha256(json.dumps(details).encode()).hexdigest()
    return f"tensorflow-{tf.__version__}-{platform.machine()}-{digest[:16]}"


def _point_xla(folder: Path) -> bool:
    """Have XLA keep what it compiles in a folder; return whether it does.

    XLA reads its flags once, so it does not if they have been read before. The setting is tried,
    then removed from the environment, so that child processes do not inherit it.
    """
    import tensorflow as tf

    given = os.environ.get(FLAGS)
    os.environ[FLAGS] = f"{given or ''} {FLAG}={folder}"
    try:
        tf.function(lambda: tf.ones(()) + 1, jit_compile=True)()
    finally:
        if given is None:
            del os.environ[FLAGS]
        else:
            os.environ[FLAGS] = given
    kept = list(folder.iterdir())
    for path in kept:
        path.unlink()
    return bool(kept)


def processor() -> list[str]:
    """Return the properties of this CPU that compiled code depends on."""
    if not CPUINFO.is_file():
        return [platform.processor(), platform.node()]
    first, _, _ = CPUINFO.read_text(encoding="utf-8").partition("\n\n")
    return [line for line in first.splitlines() if line.split(":")[0].strip() in CPU_FIELDS]


def _replace_by_link(path: Path, target: Path) -> None:
    link = path.with_suffix(".link")
    link.symlink_to(target)
    link.replace(path)
