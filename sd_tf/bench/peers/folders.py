"""The work folder: checkpoint, exports and OpenVINO's files, reused while their sources are equal.

    sd15/             the random checkpoint
    exports/SIZE…/    our SavedModels       openvino/    the converted models
    run/SIZE/         inputs and outputs    logs/        the output of each worker

Each folder has a `.key` file beside it: a hash of everything that it was made from.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import sd_tf
from sd_tf.bench.peers import apart
from sd_tf.bench.peers.process import python_path
from sd_tf.bench.peers.random_checkpoint import make_random
from sd_tf.bench.plan import BenchError
from sd_tf.bench.run import LOG_LINES
from sd_tf.files import atomic

RANDOM = "sd15"
NOT_EXPORTED = ("bench", "serving", "training", "checkpoints")  # code that exports do not use


def checkpoint(given: str | None, work: Path) -> Path:
    """Return the folder of the given checkpoint, or of a random SD1.5, made on first use."""
    if given is not None:
        if not (Path(given) / "model_index.json").is_file():
            raise BenchError(f"`checkpoint` is a diffusers folder. Received: {given!r}")
        return Path(given)
    folder = work / RANDOM
    if not folder.is_dir():
        with atomic.new_folder(folder) as partial:
            apart(make_random, partial)
    return folder


def export(source: Path, folder: Path, flags: dict[str, object]) -> float | None:
    """Export by the command that users run; return its seconds, or None if the export is reused."""
    content = [_state_of(source), _code(), _versions("tensorflow", "keras"), sorted(flags.items())]
    command = [sys.executable, "-m", "sd_tf", "export", f"--checkpoint={source}"]
    command += [f"--out={folder}", "--verify=off", "--overwrite"]
    command += [f"--{name}={value}" for name, value in flags.items()]

    def make():
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": python_path(),
            },
        )
        if result.returncode:
            tail = "\n".join(result.stderr.splitlines()[-LOG_LINES:])
            raise BenchError(f"The export failed:\n{tail}")

    return _once(folder, content, make)


def convert(source: Path, folder: Path) -> float:
    """Convert the checkpoint to OpenVINO's models, for any size; return the seconds it took."""
    libraries = _versions("openvino", "diffusers", "torch")
    from sd_tf.bench.peers.engines.openvino_ir import convert as make

    seconds = _once(folder, [_state_of(source), libraries], lambda: apart(make, source, folder))
    record = folder / "seconds.json"
    if seconds is not None:
        record.write_text(json.dumps(seconds), encoding="utf-8")
    return json.loads(record.read_text(encoding="utf-8"))


def _versions(*libraries: str) -> list[str]:
    try:
        return [importlib.metadata.version(name) for name in libraries]
    except importlib.metadata.PackageNotFoundError as error:
        raise BenchError(f"{error.name} is not installed.") from error


def _once(folder: Path, content, make: Callable[[], None]) -> float | None:
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    file = folder.with_name(folder.name + ".key")
    if folder.is_dir() and file.is_file() and file.read_text(encoding="utf-8") == key:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    make()
    seconds = time.perf_counter() - start
    file.write_text(key, encoding="utf-8")
    return seconds


def _state_of(folder: Path) -> list:
    """Describe a folder by its files' sizes and times, instead of gigabytes of contents."""
    files = sorted(path for path in folder.resolve().rglob("*") if path.is_file())
    return [str(folder.resolve())] + [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files
    ]


def _code() -> str:
    """Hash the code that makes exports, so that an export of older code is not reused."""
    package = Path(sd_tf.__file__).parent
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] not in NOT_EXPORTED:
            found.update(file.read_bytes())
    return found.hexdigest()
