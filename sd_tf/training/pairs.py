"""Pairs to learn from: a picture, a text, and the picture that is to come of both.

For edits the text is an instruction; for a ControlNet the first picture is what it follows, and the
text a caption. They come from the tiny world, or from parquet in the layouts that were published.
Row groups are read when they are needed, so a dataset need not fit into memory.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from sd_tf.files.rows import ParquetRows, RowsError
from sd_tf.runtime.pictures import PictureError, open_picture
from sd_tf.training import world
from sd_tf.training.data import ON_ERROR, without_host
from sd_tf.training.hosts import ALONE, Host
from sd_tf.training.order import GROUPS_AT_ONCE, mixed, shuffled
from sd_tf.training.origin import Record, digest, of_files
from sd_tf.training.rows import embedded
from sd_tf.training.settings import TrainingError


@dataclass(frozen=True)
class Columns:
    """The names that the columns of a table of pairs may have, the first that is there counts."""

    before: tuple[str, ...]
    text: tuple[str, ...]
    after: tuple[str, ...]

    def of(self, names: Sequence[str]) -> list[str] | None:
        """Return a table's own names of the three columns; None where one is missing."""
        known = (self.before, self.text, self.after)
        found = [next((name for name in one if name in names), None) for one in known]
        return None if None in found else found

    def __str__(self) -> str:
        *most, last = (" or ".join(one) for one in (self.before, self.text, self.after))
        return f"{', '.join(most)} and {last}"


EDITS = Columns(("input_image", "original_image"), ("edit_prompt",), ("edited_image",))
CONTROLS = Columns(
    ("conditioning_image", "control_image", "source"), ("text", "caption"), ("image", "target")
)


@dataclass(frozen=True)
class Pair:
    """A picture, a text, and the picture that is to come of both."""

    before: Image.Image
    text: str
    after: Image.Image


class Pairs(Protocol):
    """Pairs by index, in an order of their own."""

    def __len__(self) -> int: ...

    def pair(self, index: int) -> Pair: ...

    def order(self, position: int, seed: int) -> tuple[int, int]:
        """Return the index at a position in an endless series of shuffled epochs, and its epoch."""

    def record(self) -> Record:
        """Record which pairs these are; every host of a run gives the same record."""


@dataclass(frozen=True)
class WorldPairs:
    """The first `count` edits of the tiny world; each of n hosts has every n-th of them."""

    count: int
    size: int
    seed: int = 0
    split: str = "train"
    host: Host = ALONE

    def __len__(self) -> int:
        return len(self.host.part(range(self.count)))

    def pair(self, index: int) -> Pair:
        edit = self.edit(index)
        before, after = (
            Image.fromarray(world.draw(scene, self.size)) for scene in (edit.before, edit.after)
        )
        return Pair(before, edit.instruction, after)

    def edit(self, index: int) -> world.Edit:
        number = self.host.part(range(self.count))[index]
        return world.sample_edit(number, self.seed, self.split)

    def order(self, position: int, seed: int) -> tuple[int, int]:
        return shuffled(position, len(self), seed)

    def record(self) -> Record:
        return without_host(self)


@dataclass(frozen=True)
class WorldOutlines:
    """Outline drawings of the tiny world's scenes, captions of what they cannot show, and scenes.

    These are the first `count`; each of n hosts has every n-th of them.
    """

    count: int
    size: int
    seed: int = 0
    host: Host = ALONE

    def __len__(self) -> int:
        return len(self.host.part(range(self.count)))

    def pair(self, index: int) -> Pair:
        number = self.host.part(range(self.count))[index]
        scene = world.sample_scene(number, self.seed)
        before, after = world.outline(scene, self.size), world.draw(scene, self.size)
        caption = world.unplaced(scene, number, self.seed)
        return Pair(Image.fromarray(before), caption, Image.fromarray(after))

    def order(self, position: int, seed: int) -> tuple[int, int]:
        return shuffled(position, len(self), seed)

    def record(self) -> Record:
        return without_host(self)


@dataclass(frozen=True)
class Group:
    """A row group, and the place of its rows among all pairs."""

    file: Path
    number: int
    first_row: int  # its first row's number in the file
    rows: int
    start: int  # its first row's index among all pairs


class GroupError(PictureError):
    """A row group that cannot be read."""


@dataclass
class ParquetPairs:
    """Pairs from this host's row groups of parquet files."""

    groups: Sequence[Group]
    columns: Columns
    content: Record  # of all files
    on_error: str
    report: Callable[[str], None]
    skipped: dict[str, str] = field(default_factory=dict)  # the place of a row → why it is skipped
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self):
        self._rows = lru_cache(maxsize=2 * GROUPS_AT_ONCE)(partial(_read_group, self.columns))
        self._starts = np.array([group.start for group in self.groups])

    def __len__(self) -> int:
        return self.groups[-1].start + self.groups[-1].rows

    def pair(self, index: int) -> Pair:
        """Read a pair; with `on_error` "skip", a bad row is replaced by the next usable one.

        In place of a row group that cannot be read, each row is looked for in the next group.
        """
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - self.groups[number].start
        for _ in range(len(self) + len(self.groups)):
            group = self.groups[number % len(self.groups)]
            row %= group.rows
            try:
                return _pair_of(self._rows_of(group)[row])
            except PictureError as error:
                where = f"{group.file}, row {group.first_row + row + 1}"
                if self.on_error == "refuse":
                    raise TrainingError(
                        f"{where}: {error}. To leave such rows out, set `on_error` to skip."
                    ) from error
                self._skip(where, str(error))
                if isinstance(error, GroupError):
                    number += 1
                elif (row := row + 1) == group.rows:
                    number, row = number + 1, 0
        raise TrainingError(f"The data has no usable pair. Skipped: {len(self.skipped)} rows.")

    def order(self, position: int, seed: int) -> tuple[int, int]:
        """Return the pair at a position, and its epoch; few row groups are read at a time."""
        return mixed(position, tuple(group.rows for group in self.groups), seed)

    def record(self) -> Record:
        return self.content

    def _rows_of(self, group: Group) -> list[dict]:
        with self._lock:
            rows = self._rows(group)
        if isinstance(rows, str):
            raise GroupError(rows)
        return rows

    def _skip(self, where: str, problem: str) -> None:
        with self._lock:
            is_new = where not in self.skipped
            self.skipped[where] = problem
        if is_new:
            self.report(f"skipped {where}: {problem} ({len(self.skipped)} so far)")


def open_pairs(
    path: str | Path,
    on_error: str = "refuse",
    host: Host = ALONE,
    report: Callable[[str], None] = print,
    columns: Columns = EDITS,
) -> ParquetPairs:
    """Open a parquet file, or a folder of them; each of several hosts gets some of the row groups.

    Args:
        on_error: `refuse` raises at a damaged row or an unreadable file; `skip` leaves the file
            out, and takes another row in place of the damaged one.
    """
    if on_error not in ON_ERROR:
        raise TrainingError(f"on_error must be one of {', '.join(ON_ERROR)}. Received: {on_error}")
    path = Path(path)
    files = [path] if path.suffix == ".parquet" else sorted(path.glob("**/*.parquet"))
    if not files or not path.exists():
        raise TrainingError(
            f"Pairs are read from a parquet file or a folder of them. Received: {path}"
        )
    sizes, skipped = [], {}
    for file in files:
        try:
            sizes += _sizes(file, columns)
        except TrainingError as error:
            if on_error == "refuse":
                raise
            skipped[str(file)] = str(error)
            report(f"skipped {error}")
    groups, start = [], 0
    for file, group, first, rows in host.part(sizes):
        groups.append(Group(file, group, first, rows, start))
        start += rows
    if not groups:
        raise TrainingError(
            f"{path} must have at least one row group for each of {host.count} hosts. "
            f"It has {len(sizes)}: write it with smaller groups."
        )
    rows = [rows for *_, rows in sizes]
    root = path if path.is_dir() else path.parent
    content = {"rows": sum(rows), **of_files(files, root), "groups": digest(rows)}
    return ParquetPairs(groups, columns, content, on_error, report, skipped)


def _sizes(file: Path, columns: Columns) -> list[tuple[Path, int, int, int]]:
    """Return (file, group, its first row, rows) of each group, from the file's footer."""
    try:
        table = ParquetRows(file)
    except RowsError as error:
        raise TrainingError(str(error)) from error
    if columns.of(table.columns) is None:
        raise TrainingError(
            f"{file}: pairs have the columns {columns}; it has {', '.join(table.columns)}."
        )
    found, first = [], 0
    for group, rows in enumerate(table.group_sizes):
        if rows:
            found.append((file, group, first, rows))
        first += rows
    return found


def _read_group(columns: Columns, group: Group) -> list[dict] | str:
    """Read a group's rows, or return the reason why it cannot be read."""
    try:
        table = ParquetRows(group.file)
        names = columns.of(table.columns)
        rows = table.group(group.number, names)
    except RowsError as error:
        return f"its row group cannot be read ({error})"
    return [
        dict(zip(("before", "text", "after"), (row[name] for name in names), strict=True))
        for row in rows
    ]


def _pair_of(row: dict) -> Pair:
    text = row["text"]
    if not isinstance(text, str) or not text.strip():
        raise PictureError("there is no text")
    pictures = []
    for name in ("before", "after"):
        content = embedded(row[name])
        if not isinstance(content, bytes):
            raise PictureError(f"there is no picture {name}")
        try:
            pictures.append(open_picture(content))
        except PictureError as error:
            raise PictureError(f"{name}: {error}") from error
    return Pair(pictures[0], text, pictures[1])
