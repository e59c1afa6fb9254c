"""What a run and its caches depend on: recorded beside them, and compared before they are used.

A record is a dictionary of what JSON can hold. Contents are recorded by digests.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sd_tf.files import atomic
from sd_tf.runtime.manifest import file_hash
from sd_tf.training.settings import TrainingError
from sd_tf.weights import Checkpoint

Record = dict[str, Any]

ORIGIN_FILE = "depends_on.json"
DIGITS = 16  # of a digest


def of_checkpoint(checkpoint: Checkpoint) -> Record:
    """Record a checkpoint's weights, embeddings, and its configuration without the sampler."""
    config = dataclasses.asdict(checkpoint.config)
    del config["schedule"]["sampler"]  # for drawing only
    files = {name: checkpoint.files(name) for name in checkpoint.config.components}
    hashes = {file: file_hash(file)[:DIGITS] for file in {f for fs in files.values() for f in fs}}
    weights = {  # KerasCV names no files
        name: [hashes[file] for file in found] or checkpoint.source for name, found in files.items()
    }
    embeddings = {
        embedding.token: file_hash(embedding.file)[:DIGITS] for embedding in checkpoint.embeddings
    }
    return {"weights": weights, "config": config, "embeddings": embeddings}


def of_files(files: Sequence[Path], root: Path) -> Record:
    """Record files by their order, their names below `root` and their sizes."""
    return {
        "files": len(files),
        "names": digest(file.relative_to(root).as_posix() for file in files),
        "sizes": digest(file.stat().st_size for file in files),
    }


def digest(values: Iterable) -> str:
    """Return a digest of values that JSON can hold, in their order."""
    found = hashlib.sha256()
    for value in values:
        found.update(json.dumps(value).encode() + b"\n")
    return found.hexdigest()[:DIGITS]


def check_same(recorded: str | None, now: Record, what: Path, mend: str) -> None:
    """Raise unless `what` was made from what is given now.

    Args:
        recorded: the record that was kept with it, as JSON; None if there is none.
        mend: what the user can do.
    """
    if recorded is None:
        raise TrainingError(
            f"{what} does not say what it depends on: an earlier version wrote it. {mend}"
        )
    before, after = _flat(json.loads(recorded)), _flat(json.loads(json.dumps(now)))
    found = [
        f"`{name}` was {json.dumps(before.get(name))}, is {json.dumps(after.get(name))}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    if found:
        raise TrainingError(f"{what} was made from something else: {'; '.join(found)}. {mend}")


def check_cache(folder: Path, now: Record) -> None:
    """Raise unless a cache was made from what is given now."""
    file = folder / ORIGIN_FILE
    recorded = file.read_text(encoding="utf-8") if file.is_file() else None
    check_same(recorded, now, folder, "Choose another `folder`, or delete that one.")


def mark_cache(folder: Path, now: Record) -> None:
    """Record in a cache's folder what the cache was made from."""
    atomic.write(folder / ORIGIN_FILE, json.dumps(now, indent=1))


def _flat(record: Record, prefix: str = "") -> Record:
    """Return the values of nested dictionaries by dotted names."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
