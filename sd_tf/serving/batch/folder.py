"""The output folder of one job, written by one process; every file is complete or absent.

    job.json       the job: input, export, flags
    failed.jsonl   rows that cannot be drawn: row (from 0), id, reason; written anew by each start
    ID.png         one for each row, or
    part-N.parquet   one for each unit, N its first row: a row's id, prompt, settings and its
                     picture as PNG

Only the driver writes here, so Ray's workers need no common file system, and a unit that two of
them made is written once.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sd_tf.files import atomic, locks
from sd_tf.runtime.kinds import Kind, Mixture
from sd_tf.runtime.parameter import Parameter
from sd_tf.serving.batch import BatchError
from sd_tf.serving.batch.rows import ID, Failure, Row, Unit, row_parameters

PARQUET = "parquet"
FORMATS = ("png", PARQUET)
JOB, FAILED, LOCK = "job.json", "failed.jsonl", ".lock"
NAME_LENGTH = 150  # of 255 bytes


class Folder:
    """The output folder of one job; see `opened`."""

    def __init__(self, path: Path, file_format: str):
        self.path, self.file_format = path, file_format
        self.failures: list[Failure] = []

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, file_format: str) -> Iterator["Folder"]:
        """Open the folder for one job; a lock keeps a second one out."""
        busy = BatchError(
            f"Another job is writing to {path}. Wait for it, or choose another `out`."
        )
        with contextlib.ExitStack() as stack:
            try:
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locks.held(path / LOCK, busy))
            except OSError as error:
                raise BatchError(f"`out` {path} cannot be written: {error}") from error
            yield cls(path, file_format)

    def claim(self, job: dict[str, Any], failures: Iterable[Failure]) -> None:
        """Mark the folder as this job's; refuse a folder that belongs to another job."""
        path = self.path / JOB
        job = json.loads(json.dumps(job))  # with lists for tuples, as the file has them
        if not path.exists():
            if others := sorted(p.name for p in self.path.iterdir() if p.name[0] != "."):
                raise BatchError(
                    f"{self.path} is not empty and has no {JOB}, so no job began it "
                    f"(it holds {others[0]}). Choose another `out`."
                )
            self._write(JOB, (json.dumps(job, indent=1, ensure_ascii=False) + "\n").encode())
        else:
            _check_same(path, job)
        self.fail(failures)

    def fail(self, failures: Iterable[Failure]) -> None:
        """List rows that cannot be drawn, beside those that this start has listed."""
        by_row = {failure.row: failure for failure in (*self.failures, *failures)}
        self.failures = [by_row[row] for row in sorted(by_row)]
        lines = [
            json.dumps(dataclasses.asdict(f), ensure_ascii=False).encode(errors="replace") + b"\n"
            for f in self.failures
        ]
        if lines:
            self._write(FAILED, b"".join(lines))
        else:
            (self.path / FAILED).unlink(missing_ok=True)

    def missing(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows whose picture is in no file."""
        if self.file_format == PARQUET:
            done = {name for path in self.path.glob("part-*.parquet") for name in _ids(path)}
            return [row for row in rows if row.id not in done]
        present = {entry.name for entry in os.scandir(self.path)}
        return [row for row in rows if _png_name(row) not in present]

    def add(self, unit: Unit, pngs: list[bytes]) -> None:
        contents = [_table(unit, pngs)] if self.file_format == PARQUET else pngs
        for name, content in zip(self._names(unit), contents, strict=True):
            if not (self.path / name).exists():
                self._write(name, content)

    def _names(self, unit: Unit) -> list[str]:
        if self.file_format == PARQUET:
            return [f"part-{unit.rows[0].number:06d}.parquet"]
        return [_png_name(row) for row in unit.rows]

    def _write(self, name: str, content: bytes) -> None:
        atomic.write(self.path / name, content, durable=True)


def _png_name(row: Row) -> str:
    return f"{safe_name(row.id)}.png"


def safe_name(identity: str) -> str:
    """Return a file name for an id: one for each, not hidden, and inside the folder."""
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
        raise BatchError(f"{path} cannot be read: {error}. Choose another `out`.") from error
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
        f"or another `out`."
    )


def _ids(path: Path) -> list[str]:
    """Return the ids of the rows in a part."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).read([ID])[ID].to_pylist()
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise BatchError(
            f"{path} cannot be read: {error}. Delete it: its rows are then made again."
        ) from error


def _cell(known: Parameter, value: Any) -> Any:
    """Return a parameter's value as a cell of a table has it."""
    if known.takes_several and value is not None:
        return [[one] if isinstance(one, str) else one for one in value]
    return str(value) if isinstance(value, Mixture) else value


def _table(unit: Unit, pngs: list[bytes]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    types = {
        Kind.TEXT: pyarrow.string(),
        Kind.CHOICE: pyarrow.string(),
        Kind.WHOLE: pyarrow.int64(),
        Kind.SEED: pyarrow.int64(),
        Kind.NUMBER: pyarrow.float64(),
        Kind.PAIR: pyarrow.list_(pyarrow.int64(), 2),
        Kind.MIXTURE: pyarrow.string(),
        Kind.SWITCH: pyarrow.bool_(),
        Kind.PICTURE: pyarrow.string(),
        Kind.MASK: pyarrow.string(),
    }
    known = row_parameters()
    of_one = {name: types[one.kind] for name, one in known.items()}
    several = {name: pyarrow.list_(of_one[name]) for name in known if known[name].takes_several}
    of_model = {**of_one, **several}
    lists = {
        name: pyarrow.list_(of_model[name]) for name, one in known.items() if one.per is not None
    }
    schema = {ID: pyarrow.string(), **of_one, **lists}
    columns = {
        name: [_cell(one, getattr(row.call, name)) for row in unit.rows]
        for name, one in known.items()
    }
    columns = {ID: [row.id for row in unit.rows], **columns, "png": pngs}
    schema = pyarrow.schema({**schema, "png": pyarrow.binary()}.items())
    table = pyarrow.table(columns, schema=schema)
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression="none")  # PNG is compressed
    return file.getvalue()
