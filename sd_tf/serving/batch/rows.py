"""Read prompts from txt, csv, jsonl or parquet, check them by row, and divide them into units."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_tf.files.rows import SUFFIXES, Entry, RowsError, read_rows
from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.parameter import Parameter
from sd_tf.runtime.pictures import PictureError, check_picture
from sd_tf.serving.batch import BatchError

ID = "id"
SHOWN = 60  # characters of a value in a reason


def row_parameters() -> dict[str, Parameter]:
    """Return the parameters that a row can have; those that are pictures as their paths."""
    return {n: known for n, known in Call.parameters().items() if not known.in_python_only}


COLUMNS = (*row_parameters(), ID)


@dataclass(frozen=True)
class Row:
    """One picture to make."""

    number: int  # of the row, from 0
    id: str  # given by the row, or its number
    call: Call  # its pictures are paths


@dataclass(frozen=True)
class Failure:
    row: int  # counted from 0
    id: str
    reason: str


@dataclass(frozen=True)
class Unit:
    """Rows that one call makes; they agree in the parameters that are one for all pictures."""

    index: int
    rows: tuple[Row, ...]


# Reading


def read_entries(path: Path, content: bytes) -> list[Entry]:
    """Read all rows as they stand in the file; refuse a file that is wrong as a whole."""
    if path.suffix not in SUFFIXES:
        raise BatchError(
            f"Prompts are read from {', '.join(SUFFIXES)}. Received: {path.name or path}"
        )
    try:
        found = read_rows(path, content, line_column="prompt")
        if found.columns is not None:
            _check_columns(path, found.columns)
        rows = list(found)
    except RowsError as error:
        raise BatchError(str(error)) from error
    if not rows:
        raise BatchError(f"{path} has no rows.")
    objects = [row for row in rows if isinstance(row, dict)]
    if found.columns is None and objects:
        _check_columns(path, list(dict.fromkeys(name for row in objects for name in row)))
    return [
        {name: value for name, value in row.items() if value is not None}  # null: not given
        if isinstance(row, dict)
        else row
        for row in rows
    ]


def _check_columns(path: Path, names: list[str]) -> None:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise BatchError(
            f"{path}: unknown column {', '.join(unknown)}. The columns are {', '.join(COLUMNS)}."
        )
    if "prompt" not in names:
        raise BatchError(f"{path}: no column prompt. Received: {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        raise BatchError(f"{path}: a column occurs twice. Received: {', '.join(names)}")


# Checking


def check_rows(
    entries: Iterable[Entry],
    settings: Mapping[str, Any],
    manifest: Manifest,
    folder: Path = Path(),
) -> tuple[list[Row], list[Failure]]:
    """Check each row against the export; return the rows to draw, and the failures.

    Values that a row does not give are those of `settings`. The seed is then that of `settings`
    plus the row's number, so that every run draws the same pictures.

    Args:
        folder: where the paths of pictures in a row begin.
    """
    rows, failures, numbers = [], [], {}
    check = functools.lru_cache(check_picture)  # many rows may have the same one
    for number, entry in enumerate(entries):
        name = f"{number:06d}"
        try:
            if isinstance(entry, str):
                raise ValueError(entry)
            if ID in entry:
                name = _id(entry[ID])
            if name in numbers:
                raise ValueError(f"the id is also that of row {numbers[name]}")
            numbers[name] = number
            values = _completed(_values(entry, folder), settings, number)
            rows.append(Row(number, name, _call(values, manifest, lambda _, path: check(path))))
        except ValueError as error:
            failures.append(Failure(number, name, str(error)))
    return rows, failures


def check_settings(given: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Check the values for rows that give none of their own, and add defaults."""
    settings = {}
    for name, known in row_parameters().items():
        if given.get(name) is not None:
            value = given[name]
            if not known.is_file:
                settings[name] = known.check(value, manifest)
            elif (paths := _paths(known, value, Path.cwd())) is not None:
                settings[name] = paths
        elif (
            known.goes_with is None
            and known.taken_by.holds(manifest)
            and known.default_for(manifest) is not None
        ):
            settings[name] = known.default_for(manifest)
    return settings


def divide(rows: Iterable[Row], batch_size: int) -> list[Unit]:
    """Divide rows into units, in the order of their first rows."""
    groups: dict[tuple, list[tuple[int, Row]]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.call.alike(), []).append((place, row))
    chunks = [
        group[start : start + batch_size]
        for group in groups.values()
        for start in range(0, len(group), batch_size)
    ]
    chunks.sort(key=lambda chunk: chunk[0][0])
    return [Unit(i, tuple(row for _, row in chunk)) for i, chunk in enumerate(chunks)]


def _values(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the parameters that a row gives, parsed where the file has only texts."""
    values = {}
    for name, known in row_parameters().items():
        if name in entry:
            value = entry[name]
            if known.is_file:
                values[name] = _paths(known, value, folder)
            else:
                values[name] = known.from_text(value) if isinstance(value, str) else value
    return values


def _completed(own: Mapping[str, Any], settings: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Complete a row's values with the settings; those of a picture only where it has one."""
    values = {**settings, "seed": settings["seed"] + number, **own}
    known = row_parameters()

    def has_meaning(name: str) -> bool:
        other = known[name].goes_with
        return name in own or other is None or values.get(other) is not None

    return {name: value for name, value in values.items() if has_meaning(name)}


def _paths(known: Parameter, value: Any, folder: Path) -> str | list | None:
    """Return the whole paths of pictures, None where a model has none."""

    def whole(path: Any) -> Any:
        if isinstance(path, list):
            return [whole(one) for one in path]
        return None if path is None else str(folder / Path(path).expanduser())

    return whole(known.paths(value, lambda path: os.path.isfile(whole(path))))


def opened(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values with its pictures opened, which are paths."""
    return _with_pictures(call, lambda known, path: known.open_file(path))


def _with_pictures(values: Mapping[str, Any], read: Callable) -> dict[str, Any]:
    """Return a row's values with what `read` makes of each picture's parameter and path."""

    def of_path(name, path):
        try:
            return read(known[name], path)
        except OSError as error:
            raise ValueError(f"{name}: {path} cannot be read ({error.strerror}).") from error
        except PictureError as error:
            raise ValueError(f"{name}: {path}: {error}.") from error

    def of(name, value):
        if isinstance(value, list):
            return [None if path is None else of(name, path) for path in value]
        return of_path(name, value)

    known = row_parameters()
    return {
        name: of(name, value) if known[name].is_file and value is not None else value
        for name, value in values.items()
    }


def _call(values: Mapping[str, Any], manifest: Manifest, read_picture: Callable) -> Call:
    prompt = values.get("prompt", "")
    if isinstance(prompt, str) and not prompt.strip():
        raise ValueError("the prompt is empty")
    for name, known in row_parameters().items():
        if known.each and known.is_many(values.get(name)):  # a row is one picture
            raise known.refusal(values[name], manifest)
    call = Call(**_with_pictures(values, read_picture)).completed(manifest)
    known = row_parameters()
    paths = {name: known[name].for_models(values[name], manifest) for name in call.files()}
    return replace(call, **paths)


def _id(value: Any) -> str:
    is_text = isinstance(value, int | str) and not isinstance(value, bool) and value != ""
    with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair
        if is_text and str(value).encode():
            return str(value)
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
    raise ValueError(f"an id is a text or a whole number. Received: {shown}")
