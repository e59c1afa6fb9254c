"""Rows of .txt, .csv, .jsonl and .parquet files, read one after the other.

An entry stands for a row: a dict of its values by column, or a text that says why this row cannot
be read. A file that cannot be read as a whole raises a `RowsError`.
"""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_tf.errors import SdTfError

SUFFIXES = (".txt", ".csv", ".jsonl", ".parquet")

Entry = dict[str, Any] | str


class RowsError(SdTfError):
    """A file that cannot be read: where, and why."""


@dataclass(frozen=True)
class Rows:
    """The rows of a file, which can be read once.

    `columns` are those of the header; None where every row names its own (.jsonl).
    """

    columns: list[str] | None
    entries: Iterator[Entry]

    def __iter__(self) -> Iterator[Entry]:
        return self.entries


def read_rows(path: Path, content: bytes | None = None, line_column: str = "text") -> Rows:
    """Open a file whose suffix is one of `SUFFIXES`.

    Args:
        content: what the file holds, where the caller has read it already.
        line_column: the only column of a .txt file, whose rows are its lines.
    """
    if path.suffix == ".parquet":
        table = ParquetRows(path, content)
        return Rows(table.columns, iter(table))
    text = _text(path, path.read_bytes() if content is None else content)
    if path.suffix == ".csv":
        return _csv(path, text)
    if path.suffix == ".jsonl":
        return Rows(None, map(_json, _lines(text)))
    return Rows([line_column], ({line_column: line} for line in _lines(text)))


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # Excel writes a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RowsError(f"{path}, line {line}, is not UTF-8: {error}.") from error


def _lines(text: str) -> Iterator[str]:
    lines = io.StringIO(text, newline="\n")  # splitlines would also cut at U+2028
    return (line.removesuffix("\n").removesuffix("\r") for line in lines)


def _csv(path: Path, text: str) -> Rows:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)

    def lines() -> Iterator[list[str]]:
        try:
            yield from filter(None, reader)
        except csv.Error as error:
            raise RowsError(f"{path}, line {reader.line_num}, is not CSV: {error}.") from error

    found = lines()
    header = next(found, [])
    return Rows(header, (_csv_row(header, values) for values in found))


def _csv_row(header: list[str], values: list[str]) -> Entry:
    """Return a row by column; an empty cell becomes None."""
    if len(values) != len(header):
        return f"{len(values)} values for {len(header)} columns; a text with commas needs quotes"
    return {name: value or None for name, value in zip(header, values, strict=True)}


def _json(line: str) -> Entry:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"this is not JSON ({error})"
    return row if isinstance(row, dict) else f"this is no JSON object but {type(row).__name__}"


class ParquetRows:
    """A parquet file, of which one row group at a time is in memory."""

    def __init__(self, path: Path, content: bytes | None = None):
        import pyarrow
        import pyarrow.parquet

        self.path = path
        with self._understood():
            source = path if content is None else pyarrow.BufferReader(content)
            self._file = pyarrow.parquet.ParquetFile(source)
        self.columns: list[str] = self._file.schema_arrow.names
        footer = self._file.metadata
        self.group_sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.rows()

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        for number in range(len(self.group_sizes)):
            yield from self.group(number, columns)

    def group(self, number: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Read one row group; None: all of its columns."""
        with self._understood():
            return self._file.read_row_group(number, columns=columns).to_pylist()

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise RowsError(f"{self.path} is not readable as parquet: {error}") from error
