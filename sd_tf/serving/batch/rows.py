"""Prompts from txt, csv, jsonl or parquet, checked row by row, and divided into units."""

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_tf.manifest import Manifest
from sd_tf.serving.batch import BatchError

SETTINGS = ("negative_prompt", "seed", "num_steps", "guidance_scale", "scheduler")
COLUMNS = ("prompt", *SETTINGS, "id")
LARGEST = 3.4e38  # the models take the guidance scale as float32
SHOWN = 60  # characters of a value in a reason

Entry = dict[str, Any] | str  # the values given in a row, or why it could not be read


@dataclass(frozen=True)
class Row:
    """One picture to make."""

    id: str  # what was given, or the row's number
    prompt: str
    negative_prompt: str | None
    seed: int
    num_steps: int
    guidance_scale: float
    scheduler: str


@dataclass(frozen=True)
class Failure:
    row: int  # counted from 0
    id: str
    reason: str


@dataclass(frozen=True)
class Unit:
    """Rows that one call of the models makes, of equal steps, guidance and scheduler."""

    index: int
    rows: tuple[Row, ...]


# Reading


def read_entries(path: Path, content: bytes) -> list[Entry]:
    """Rows as they stand in the file; a file that is wrong as a whole is refused."""
    readers = {".txt": _txt, ".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise BatchError(
            f"Prompts are read from {', '.join(readers)}. Received: {path.name or path}"
        )
    entries = readers[path.suffix](path, content)
    if not entries:
        raise BatchError(f"{path} has no rows.")
    return entries


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # Excel writes a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BatchError(f"{path}, line {line}, is not UTF-8: {error}.") from error


def _lines(path: Path, content: bytes) -> list[str]:
    lines = _text(path, content).split("\n")  # splitlines would also cut at U+2028
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _txt(path: Path, content: bytes) -> list[Entry]:
    return [{"prompt": line} for line in _lines(path, content)]


def _csv(path: Path, content: bytes) -> list[Entry]:
    """An empty cell is a value that is not given."""
    reader = csv.reader(io.StringIO(_text(path, content), newline=""), strict=True)
    entries = []
    try:
        header = next(reader, [])
        _check_columns(path, header)
        for values in filter(None, reader):
            entry = {name: value for name, value in zip(header, values, strict=False) if value}
            if len(values) != len(header):
                entry = (
                    f"{len(values)} values for {len(header)} columns; a text with commas needs "
                    f"quotes"
                )
            entries.append(entry)
    except csv.Error as error:
        raise BatchError(f"{path}, line {reader.line_num}, is not CSV: {error}.") from error
    return entries


def _jsonl(path: Path, content: bytes) -> list[Entry]:
    entries = [_json(line) for line in _lines(path, content)]
    objects = [entry for entry in entries if isinstance(entry, dict)]
    if objects:
        _check_columns(path, list(dict.fromkeys(name for entry in objects for name in entry)))
    return entries


def _json(line: str) -> Entry:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"this is not JSON ({error})"
    if not isinstance(entry, dict):
        return f"this is no JSON object but {type(entry).__name__}"
    return {name: value for name, value in entry.items() if value is not None}


def _parquet(path: Path, content: bytes) -> list[Entry]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
        _check_columns(path, file.schema_arrow.names)
        found = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BatchError(f"{path} is not readable as parquet: {error}") from error
    return [{k: value for k, value in entry.items() if value is not None} for entry in found]


def _check_columns(path: Path, names: list[str]) -> None:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise BatchError(
            f"{path}: unknown column {', '.join(unknown)}. The columns are {', '.join(COLUMNS)}."
        )
    if "prompt" not in names:
        raise BatchError(f"{path}: no column prompt. Received: {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        raise BatchError(f"{path}: a column stands there twice. Received: {', '.join(names)}")


# Checking


def check_settings(settings: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    """What the flags give to every row that has nothing of its own."""
    checked = {name: CHECKS[name](name, settings[name]) for name in SETTINGS}
    if settings["scheduler"] not in manifest.samplers:
        manifest.model_calls(settings["scheduler"], 1)  # says which there are
    return checked


def check_rows(
    entries: Iterable[Entry], settings: dict[str, Any], manifest: Manifest
) -> tuple[list[Row], list[Failure]]:
    """A row without a seed gets the flag's plus its number, so that every run draws the same."""
    rows, failures, numbers = [], [], {}
    for number, entry in enumerate(entries):
        name = f"{number:06d}"
        try:
            if isinstance(entry, str):
                raise ValueError(entry)
            if "id" in entry:
                name = _id(entry["id"])
            if name in numbers:
                raise ValueError(f"the id is that of row {numbers[name]} too")
            numbers[name] = number
            defaults = {**settings, "seed": settings["seed"] + number}
            rows.append(_row(name, entry, defaults, manifest))
        except ValueError as error:
            failures.append(Failure(number, name, str(error)))
    return rows, failures


def divide(rows: Iterable[Row], batch_size: int) -> list[Unit]:
    """Units in the order of their first rows."""
    groups: dict[tuple, list[tuple[int, Row]]] = {}
    for place, row in enumerate(rows):
        alike = (row.num_steps, row.guidance_scale, row.scheduler, row.negative_prompt is None)
        groups.setdefault(alike, []).append((place, row))
    chunks = [
        group[start : start + batch_size]
        for group in groups.values()
        for start in range(0, len(group), batch_size)
    ]
    chunks.sort(key=lambda chunk: chunk[0][0])
    return [Unit(i, tuple(row for _, row in chunk)) for i, chunk in enumerate(chunks)]


def _row(name: str, entry: dict[str, Any], defaults: dict[str, Any], manifest: Manifest) -> Row:
    prompt = _unicode("prompt", entry.get("prompt", ""))
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    values = {key: CHECKS[key](key, entry.get(key, defaults[key])) for key in SETTINGS}
    manifest.model_calls(values["scheduler"], values["num_steps"])
    return Row(id=name, prompt=prompt, **values)


def _id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"an id is a text or a whole number. Received: {_shown(value)}")
    return _unicode("id", str(value))


def _unicode(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is a text. Received: {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no valid Unicode: {error.reason}") from error
    return value


def _optional_text(name: str, value: Any) -> str | None:
    return None if value is None else _unicode(name, value)


def _whole(name: str, value: Any) -> int:
    """pandas makes floats of whole numbers with gaps, and CSV knows only text."""
    with contextlib.suppress(ValueError):
        if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number. Received: {_shown(value)}")
    return value


def _seed(name: str, value: Any) -> int:
    seed = _whole(name, value)
    if not -(2**31) <= seed < 2**31:
        raise ValueError(f"{name} is a whole number of 32 bits. Received: {_shown(value)}")
    return seed


def _finite(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not abs(number) < LARGEST:
        raise ValueError(f"{name} is a finite number. Received: {_shown(value)}")
    return number


CHECKS = {
    "negative_prompt": _optional_text,
    "seed": _seed,
    "num_steps": _whole,
    "guidance_scale": _finite,
    "scheduler": _unicode,
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
