"""Pictures with captions, from the tiny world, a folder or parquet, in a resumable order.

Captions are kept in memory, pictures are not: of parquet, a few row groups are at a time.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np

from sd_tf.files import atomic
from sd_tf.files.rows import ParquetRows, RowsError, read_rows
from sd_tf.runtime.pictures import PictureError, open_picture, square
from sd_tf.training import world
from sd_tf.training.hosts import ALONE, Host
from sd_tf.training.origin import Record, digest, of_files
from sd_tf.training.settings import TrainingError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
CAPTION_FILES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN, CAPTION_COLUMN, IMAGE_COLUMN = "file_name", "text", "image"
ON_ERROR = ("refuse", "skip")
GROUPS_AT_ONCE = 8  # row groups whose rows are mixed with one another
ORDER = 1  # a seed's stream of random numbers, for the order of examples


class Source(Protocol):
    """Examples by index. A caption may differ from epoch to epoch; a picture may not."""

    def __len__(self) -> int: ...

    def picture(self, index: int) -> np.ndarray: ...  # uint8 (H, W, 3)

    def original_size(self, index: int) -> tuple[int, int]: ...  # height, width, before scaling

    def caption(self, index: int, epoch: int) -> str: ...

    def order(self, position: int, seed: int) -> tuple[int, int]:
        """Return the index at a position in an endless series of shuffled epochs, and its epoch."""

    def record(self) -> Record:
        """Record which examples these are; every host of a run gives the same record."""


@dataclass(frozen=True)
class World:
    """The first `count` scenes of the tiny world; each of n hosts has every n-th of them.

    Captions are new in every epoch.
    """

    count: int
    size: int
    seed: int = 0
    complete: bool = False  # captions that leave nothing out
    host: Host = ALONE

    def __len__(self) -> int:
        return len(self.host.part(range(self.count)))

    def picture(self, index: int) -> np.ndarray:
        return world.draw(self.scene(index), self.size)

    def original_size(self, index: int) -> tuple[int, int]:
        return self.size, self.size

    def caption(self, index: int, epoch: int) -> str:
        scene, number = self.scene(index), self._number(index)
        return world.describe(scene, number, self.seed + epoch, self.complete)[0]

    def order(self, position: int, seed: int) -> tuple[int, int]:
        return shuffled(position, len(self), seed)

    def scene(self, index: int) -> world.Scene:
        return world.sample_scene(self._number(index), self.seed)

    def _number(self, index: int) -> int:
        return self.host.part(range(self.count))[index]

    def record(self) -> Record:
        return without_host(self)

    def with_things(self, things: int) -> "Chosen":
        """Select the scenes with that number of things."""
        return Chosen(self, [i for i in range(len(self)) if len(self.scene(i).things) == things])


@dataclass(frozen=True)
class Chosen:
    """A selection of another source's examples."""

    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def picture(self, index: int) -> np.ndarray:
        return self.source.picture(self.indices[index])

    def original_size(self, index: int) -> tuple[int, int]:
        return self.source.original_size(self.indices[index])

    def caption(self, index: int, epoch: int) -> str:
        return self.source.caption(self.indices[index], epoch)

    def order(self, position: int, seed: int) -> tuple[int, int]:
        return shuffled(position, len(self), seed)

    def record(self) -> Record:
        return {"chosen": digest(self.indices), **self.source.record()}


def without_host(source) -> Record:
    """Record a dataclass's fields, but not which host it is for."""
    record = dataclasses.asdict(source)
    del record["host"]
    return record


@dataclass(frozen=True)
class Cell:
    """The place of a picture in a parquet file."""

    file: Path
    group: int
    row: int  # in its group
    column: str


@dataclass
class Captioned:
    """Rows from a folder or from parquet: the place of a picture, and a caption."""

    rows: Sequence[tuple[Path | Cell, str]]
    size: int
    content: Record  # of all rows, those of other hosts, too
    skipped: list[str] = field(default_factory=list)  # places of rows left out, and why

    def __post_init__(self):
        self._group = lru_cache(maxsize=GROUPS_AT_ONCE)(_pictures)
        groups = groupby(_group_of(place) for place, _ in self.rows)
        self._sizes = tuple(sum(1 for _ in rows) for _, rows in groups)

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self, index: int) -> np.ndarray:
        return read_picture(self._stored(index), self.size)

    def original_size(self, index: int) -> tuple[int, int]:
        width, height = open_picture(self._stored(index)).size
        return height, width

    def _stored(self, index: int) -> bytes | Path:
        place = self.rows[index][0]
        if isinstance(place, Cell):
            return self._group(place.file, place.group, place.column)[place.row]
        return place

    def caption(self, index: int, epoch: int) -> str:
        return self.rows[index][1]

    def order(self, position: int, seed: int) -> tuple[int, int]:
        """Return the row at a position, and its epoch; few row groups are read at a time."""
        return mixed(position, self._sizes, seed)

    def record(self) -> Record:
        return {**self.content, "size": self.size}


def _group_of(place: Path | Cell) -> tuple[Path, int] | None:
    return (place.file, place.group) if isinstance(place, Cell) else None


def read_picture(picture: bytes | Path, size: int) -> np.ndarray:
    return np.asarray(square(open_picture(picture), size))


def open_source(
    path: str | Path,
    size: int,
    on_error: str = "refuse",
    host: Host = ALONE,
    checked: Path | None = None,
    **columns,
) -> Captioned:
    """Open a folder of pictures with captions, or parquet (a file, or a folder of files).

    A folder's captions are in `metadata.jsonl` or `metadata.csv` (columns `file_name` and `text`),
    or in a `.txt` file beside each picture, of the same name. Every picture is read once, to find
    the bad ones; none is kept.

    Args:
        on_error: `refuse` raises at the first bad row; `skip` leaves bad rows out and lists them.
        host: each of several hosts gets its part of the rows, of parquet whole row groups.
        checked: a file in which the bad rows are listed for the next start, which then reads the
            captions alone, unless the data has changed.
        columns: `caption_column` and `image_column`, if they have other names. Without captions,
            `caption_column` is None.
    """
    if on_error not in ON_ERROR:
        raise TrainingError(f"on_error must be one of {', '.join(ON_ERROR)}. Received: {on_error}")
    path = Path(path)
    if not path.exists():
        raise TrainingError(f"No such file or folder: {path}")
    parquet = [path] if path.suffix == ".parquet" else sorted(path.glob("**/*.parquet"))
    is_captioned = columns.get("caption_column", CAPTION_COLUMN) is not None
    rows, skipped, bad = [], [], {}
    try:
        if parquet:
            found, content = _parquet(path, parquet, host, **columns)
        else:
            found, content = _folder(path, host, **columns)
        of_part = {**content, "hosts": host.count}
        known = _known_bad(checked, of_part)
        for number, row in enumerate(found(known is not None)):
            problem = problem_of(row, is_captioned) if known is None else known.get(str(number))
            if problem is None:
                rows.append((row.picture if row.cell is None else row.cell, row.caption))
            elif on_error == "skip":
                bad[str(number)] = problem
                skipped.append(f"{row.where}: {problem}")
            else:
                raise TrainingError(
                    f"{row.where}: {problem}. To leave such rows out, set `on_error` to skip."
                )
    except RowsError as error:
        raise TrainingError(str(error)) from error
    if not rows:
        first = f"; the first: {skipped[0]}" if skipped else ""
        part = "" if host.count == 1 else f" for host {host.number} of {host.count}"
        raise TrainingError(f"{path} has no usable example{part}. Skipped: {len(skipped)}{first}.")
    if checked is not None and known is None:
        checked.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(checked, json.dumps({"data": of_part, "bad": bad}))
    return Captioned(rows, size, content, skipped)


@dataclass(frozen=True)
class Row:
    """A row as it was found, usable or not."""

    where: str
    picture: bytes | Path | None
    caption: str | None
    problem: str | None = None  # why the row could not be read, if so
    cell: Cell | None = None  # where to find the picture's bytes again


def _known_bad(checked: Path | None, data: Record) -> dict[str, str] | None:
    """Return the bad rows of this host, number → problem, if that same data was checked before."""
    if checked is None or not checked.is_file():
        return None
    before = json.loads(checked.read_text(encoding="utf-8"))
    return before["bad"] if before["data"] == data else None


def problem_of(row: Row, is_captioned: bool) -> str | None:
    """Say why a row cannot be used, or return None. The whole picture is read, not its header."""
    picture, caption = row.picture, row.caption
    if row.problem is not None:
        return row.problem
    if caption is not None and not isinstance(caption, str):
        return f"the caption must be text, not {type(caption).__name__}"
    if is_captioned and (caption is None or not caption.strip()):
        return "the caption is empty"
    if picture is None:
        return "there is no picture"
    if not isinstance(picture, bytes | Path):
        return f"the picture must be bytes, not {type(picture).__name__}"
    try:
        read_picture(picture, size=1)
    except PictureError as error:
        return str(error)
    return None


# Yields the rows of this host; those that were checked before come without what only checks need.
Rows = Callable[[bool], Iterable[Row]]


def _folder(folder: Path, host: Host, **columns) -> tuple[Rows, Record]:
    """Return this host's rows of a folder, and a record of all rows."""
    rows = list(_folder_rows(folder, **columns))
    pictures = [row.picture for row in rows if row.picture is not None]
    content = {
        "rows": len(rows),
        **of_files(pictures, folder),
        "captions": digest(row.caption for row in rows),
    }
    return lambda is_checked: host.part(rows), content


def _folder_rows(
    folder: Path, caption_column: str | None = CAPTION_COLUMN, image_column: str = FILE_COLUMN
) -> Iterator[Row]:
    if not folder.is_dir():
        raise TrainingError(f"Data must be a folder or a .parquet file. Received: {folder}")
    tables = [folder / name for name in CAPTION_FILES if (folder / name).is_file()]
    if tables:
        yield from _table_rows(tables[0], caption_column, image_column)
        return
    pictures = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURE_SUFFIXES)
    if not pictures:
        raise TrainingError(f"{folder} has no pictures ({', '.join(PICTURE_SUFFIXES)}).")
    for picture in pictures:
        found = (None, None) if caption_column is None else _caption_beside(picture)
        yield Row(str(picture), picture, *found)


def _table_rows(path: Path, caption_column: str | None, image_column: str) -> Iterator[Row]:
    """Yield the rows of a table that names pictures in its own folder."""
    folder = path.parent
    for number, entry in enumerate(read_rows(path), start=1):
        where = f"{path}, row {number}"
        if isinstance(entry, str):
            yield Row(where, None, None, entry)
            continue
        if missing := {caption_column, image_column} - {None, *entry}:
            raise TrainingError(
                f"{where}: no column {', '.join(sorted(missing))}; it has {', '.join(entry)}. Name "
                "them with `caption_column` and `image_column`."
            )
        name = str(entry[image_column] or "")
        if "\0" in name:
            raise TrainingError(f"{where}: no file has a zero byte in its name. Received: {name!r}")
        picture = folder / name
        if not picture.resolve().is_relative_to(folder.resolve()):
            raise TrainingError(f"{where} points outside the folder of its table: {picture}")
        found = picture if picture.is_file() else None
        yield Row(f"{where} ({picture.name})", found, entry.get(caption_column))


def _caption_beside(picture: Path) -> tuple[str | None, str | None]:
    """Return the caption from the `.txt` file, or the reason why there is none."""
    text = picture.with_suffix(".txt")
    if not text.is_file():
        return None, f"there is no {text.name}"
    try:
        return text.read_text(encoding="utf-8-sig").strip(), None
    except UnicodeDecodeError as error:
        return None, f"{text.name} is not UTF-8 ({error})"


def _parquet(
    path: Path,
    files: Sequence[Path],
    host: Host,
    caption_column: str | None = CAPTION_COLUMN,
    image_column: str = IMAGE_COLUMN,
) -> tuple[Rows, Record]:
    """Return the rows of this host's row groups, and a record of all files."""
    groups, sizes = [], []  # file, number of the group, number of its first row; rows of each
    for file in files:
        table = ParquetRows(file)
        if missing := {caption_column, image_column} - {None, *table.columns}:
            raise TrainingError(
                f"{file}: no column {', '.join(sorted(missing))}; it has "
                f"{', '.join(table.columns)}. Name them with `caption_column` and `image_column`."
            )
        starts = np.cumsum([0, *table.group_sizes])
        groups += [(file, number, int(starts[number])) for number in range(len(starts) - 1)]
        sizes += table.group_sizes

    def rows(is_checked: bool) -> Iterator[Row]:
        captions = [] if caption_column is None else [caption_column]
        read = captions if is_checked else [image_column, *captions]
        for file, group, first in host.part(groups):
            for row, entry in enumerate(ParquetRows(file).group(group, read)):
                where = f"{file}, row {first + row + 1}"
                picture = embedded(entry.get(image_column))
                cell = Cell(file, group, row, image_column)
                yield Row(where, picture, entry.get(caption_column), cell=cell)

    root = path if path.is_dir() else path.parent
    content = {
        "rows": sum(sizes),
        **of_files(files, root),
        "groups": digest(sizes),
        "columns": [image_column, caption_column],
    }
    return rows, content


def _pictures(file: Path, group: int, column: str) -> list[bytes]:
    """Read the pictures of a row group."""
    return [embedded(row[column]) for row in ParquetRows(file).group(group, [column])]


def embedded(picture):
    """Return the bytes of a picture that is stored in a parquet file."""
    if isinstance(picture, dict):  # the layout of Hugging Face's datasets
        return picture.get("bytes")
    return picture


def shuffled(position: int, count: int, seed: int) -> tuple[int, int]:
    """Return the example at a position in an endless series of shuffled epochs, and its epoch."""
    epoch, place = divmod(position, count)
    return int(_order(epoch, count, seed)[place]), epoch


@lru_cache(maxsize=4)
def _order(epoch, count, seed):
    return np.random.default_rng([seed, ORDER, epoch]).permutation(count)


def mixed(position: int, rows: tuple[int, ...], seed: int) -> tuple[int, int]:
    """Return the row at a position in an endless series of epochs, and its epoch.

    In every epoch groups are shuffled, and rows among `GROUPS_AT_ONCE` groups.

    Args:
        rows: the number of rows in each group.
    """
    epoch, place = divmod(position, sum(rows))
    return int(_mixed(epoch, rows, seed)[place]), epoch


@lru_cache(maxsize=4)
def _mixed(epoch, rows, seed):
    draws = np.random.default_rng([seed, ORDER, epoch])
    starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
    groups = draws.permutation(len(rows))
    parts = []
    for first in range(0, len(groups), GROUPS_AT_ONCE):
        chosen = groups[first : first + GROUPS_AT_ONCE]
        parts.append(
            draws.permutation(np.concatenate([starts[g] + np.arange(rows[g]) for g in chosen]))
        )
    return np.concatenate(parts)
