"""The output folder: one job's, written by one process, every file there complete or not at all.

    job.json       what the job is: input, export, flags
    failed.jsonl   rows that cannot be drawn: row (from 0), id, reason
    ID.png         one for each row, or
    part-N.parquet   one for each unit: a row's id, prompt, settings and its picture as PNG

Only the driver writes here, so Ray's workers need no common file system, and a unit that two of
them made is written once.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sd_tf.serving.batch import BatchError
from sd_tf.serving.batch.rows import Failure, Unit

FORMATS = ("png", "parquet")
JOB, FAILED, LOCK, PARTIAL = "job.json", "failed.jsonl", ".lock", ".partial"
NAME_LENGTH = 150  # of 255 bytes


class Folder:
    """See `opened`."""

    def __init__(self, path: Path, file_format: str):
        self.path, self.file_format = path, file_format

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, file_format: str) -> Iterator["Folder"]:
        """A lock, which dies with its process, keeps two jobs from one folder."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = open(path / LOCK, "w")  # noqa: SIM115
        except OSError as error:
            raise BatchError(f"--out {path} cannot be written: {error}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(
                    f"Another job is writing to {path}. Wait for it, or choose another --out."
                ) from None
            yield cls(path, file_format)

    def claim(self, job: dict[str, Any], failures: Iterable[Failure]) -> None:
        """Make the folder this job's, or see that it already is."""
        path = self.path / JOB
        if not path.exists():
            if others := sorted(p.name for p in self.path.iterdir() if p.name[0] != "."):
                raise BatchError(
                    f"{self.path} is not empty and has no {JOB}, so no job began it "
                    f"(it holds {others[0]}). Choose another --out."
                )
            self._write(JOB, (json.dumps(job, indent=1, ensure_ascii=False) + "\n").encode())
        else:
            _check_same(path, job)
        lines = [
            json.dumps(dataclasses.asdict(f), ensure_ascii=False).encode(errors="replace") + b"\n"
            for f in failures
        ]
        if lines and not (self.path / FAILED).exists():
            self._write(FAILED, b"".join(lines))

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """Those of which at least a file is not there."""
        present = {entry.name for entry in os.scandir(self.path)}
        return [unit for unit in units if not present.issuperset(self._names(unit))]

    def add(self, unit: Unit, pngs: list[bytes]) -> None:
        contents = [_table(unit, pngs)] if self.file_format == "parquet" else pngs
        for name, content in zip(self._names(unit), contents, strict=True):
            if not (self.path / name).exists():
                self._write(name, content)

    def _names(self, unit: Unit) -> list[str]:
        if self.file_format == "parquet":
            return [f"part-{unit.index:06d}.parquet"]
        return [f"{safe_name(row.id)}.png" for row in unit.rows]

    def _write(self, name: str, content: bytes) -> None:
        """Absent or complete, even if the power fails."""
        partial = self.path / PARTIAL
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, self.path / name)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def safe_name(identity: str) -> str:
    """A file's name for any id, a different one for each, that is visible and leads nowhere."""
    name = re.sub(
        rb"[^A-Za-z0-9_.-]|^\.", lambda found: b"%%%02X" % found[0][0], identity.encode()
    ).decode()
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[:NAME_LENGTH]}~{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def _check_same(path: Path, job: dict[str, Any]) -> None:
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BatchError(f"{path} cannot be read: {error}. Choose another --out.") from error
    if begun == job:
        return
    begun = begun if isinstance(begun, dict) else {}
    differing = [
        f"{name} was {json.dumps(begun.get(name), ensure_ascii=False)}, is "
        f"{json.dumps(job.get(name), ensure_ascii=False)}"
        for name in {**job, **begun}
        if begun.get(name) != job.get(name)
    ]
    raise BatchError(
        f"{path.parent} holds another job: {'; '.join(differing)}. Give what it was begun with, "
        f"or another --out."
    )


def _table(unit: Unit, pngs: list[bytes]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    text, number = pyarrow.string(), pyarrow.int64()
    types = {
        "id": text,
        "prompt": text,
        "negative_prompt": text,
        "seed": number,
        "num_steps": number,
        "guidance_scale": pyarrow.float64(),
        "scheduler": text,
        "png": pyarrow.binary(),
    }
    columns = {name: [getattr(row, name) for row in unit.rows] for name in types if name != "png"}
    table = pyarrow.table({**columns, "png": pngs}, schema=pyarrow.schema(types.items()))
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression="none")  # PNG is compressed
    return file.getvalue()
