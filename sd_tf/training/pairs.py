"""Pairs to learn edits from: a picture, an instruction, the picture after. The world's, or parquet.

Parquet in either published layout: `input_image`, `edit_prompt`, `edited_image`; or
`original_image`, `edit_prompt`, `edited_image` beside the prompts of both pictures. Read a row
group at a time, when it is wanted, so that a dataset need not fit anywhere.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from sd_tf.pictures import PictureError, open_picture
from sd_tf.training import world
from sd_tf.training.data import ON_ERROR, ORDER, shuffled
from sd_tf.training.hosts import ALONE, Host
from sd_tf.training.settings import TrainingError

BEFORE_COLUMNS, INSTRUCTION, AFTER = (
    ("input_image", "original_image"),
    "edit_prompt",
    "edited_image",
)
GROUPS_AT_ONCE = 8  # row groups whose rows are mixed with one another


@dataclass(frozen=True)
class Pair:
    before: Image.Image
    instruction: str
    after: Image.Image


class Pairs(Protocol):
    def __len__(self) -> int: ...

    def pair(self, index: int) -> Pair: ...

    def order(self, position: int, seed: int) -> tuple[int, int]:
        """The index at a position of an endless series of shuffled epochs, and its epoch."""


@dataclass(frozen=True)
class WorldPairs:
    """The first `count` edits of the tiny world; of several hosts, each has every n-th of them."""

    count: int
    size: int
    seed: int = 0
    split: str = "train"
    host: Host = ALONE

    def __len__(self) -> int:
        return len(range(self.host.number, self.count, self.host.count))

    def pair(self, index: int) -> Pair:
        edit = self.edit(index)
        before, after = (
            Image.fromarray(world.draw(scene, self.size)) for scene in (edit.before, edit.after)
        )
        return Pair(before, edit.instruction, after)

    def edit(self, index: int) -> world.Edit:
        number = self.host.number + self.host.count * index
        return world.sample_edit(number, self.seed, self.split)

    def order(self, position: int, seed: int) -> tuple[int, int]:
        return shuffled(position, len(self), seed)


@dataclass(frozen=True)
class Group:
    """A row group and where its rows stand among all."""

    file: Path
    number: int
    first_row: int  # in its file
    rows: int
    start: int  # the index of its first row


@dataclass
class ParquetPairs:
    """The row groups of this host among those of all files."""

    groups: Sequence[Group]
    on_error: str
    report: Callable[[str], None]
    skipped: dict[str, str] = field(default_factory=dict)  # where → why
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self):
        self._rows = lru_cache(maxsize=2 * GROUPS_AT_ONCE)(_read_group)
        self._starts = np.array([group.start for group in self.groups])

    def __len__(self) -> int:
        return self.groups[-1].start + self.groups[-1].rows

    def pair(self, index: int) -> Pair:
        """With `skip`, the next usable row stands in for one that is not."""
        for place in range(len(self)):
            where, row = self._row((index + place) % len(self))
            try:
                return _pair_of(row)
            except PictureError as error:
                if self.on_error == "refuse":
                    raise TrainingError(
                        f"{where}: {error}. To leave such rows out: --on_error skip"
                    ) from error
                self._skip(where, str(error))
        raise TrainingError(f"No usable pair; {len(self.skipped)} rows were skipped.")

    def order(self, position: int, seed: int) -> tuple[int, int]:
        """Groups in a new order in every epoch; the rows of several at once are mixed."""
        epoch, place = divmod(position, len(self))
        return int(_mixed(tuple(g.rows for g in self.groups), epoch, seed)[place]), epoch

    def _row(self, index: int):
        group = self.groups[int(np.searchsorted(self._starts, index, side="right")) - 1]
        place = index - group.start
        with self._lock:
            rows = self._rows(group)
        return f"{group.file}, row {group.first_row + place + 1}", rows[place]

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
) -> ParquetPairs:
    """A parquet file, or a folder of them; of several hosts, each has some of the row groups.

    `on_error` says what a damaged row, or a file that cannot be read, leads to: `refuse` stops,
    `skip` goes on without and counts.
    """
    if on_error not in ON_ERROR:
        raise TrainingError(f"on_error is one of {', '.join(ON_ERROR)}. Received: {on_error}")
    path = Path(path)
    files = [path] if path.suffix == ".parquet" else sorted(path.glob("**/*.parquet"))
    if not files or not path.exists():
        raise TrainingError(f"{path} is no parquet file and no folder that has one.")
    sizes, skipped = [], {}
    for file in files:
        try:
            sizes += _sizes(file)
        except TrainingError as error:
            if on_error == "refuse":
                raise
            skipped[str(file)] = str(error)
            report(f"skipped {error}")
    groups, start = [], 0
    for file, group, first, rows in sizes[host.number :: host.count]:
        groups.append(Group(file, group, first, rows, start))
        start += rows
    if not groups:
        raise TrainingError(
            f"{path} has {len(sizes)} row groups, which is not one for each of {host.count} hosts. "
            f"Write it in smaller groups."
        )
    return ParquetPairs(groups, on_error, report, skipped)


def _sizes(file: Path) -> list[tuple[Path, int, int, int]]:
    """(file, group, its first row, rows), from the file's footer."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise TrainingError(f"{file} is not readable as parquet: {error}") from error
    names = set(table.schema_arrow.names)
    if not names & set(BEFORE_COLUMNS) or not {INSTRUCTION, AFTER} <= names:
        raise TrainingError(
            f"{file}: pairs have the columns {' or '.join(BEFORE_COLUMNS)}, {INSTRUCTION} and "
            f"{AFTER}; it has {', '.join(table.schema_arrow.names)}."
        )
    found, first = [], 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if rows:
            found.append((file, group, first, rows))
        first += rows
    return found


def _read_group(group: Group) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(group.file)
        before = next(name for name in BEFORE_COLUMNS if name in table.schema_arrow.names)
        columns = [before, INSTRUCTION, AFTER]
        rows = table.read_row_group(group.number, columns=columns).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        problem = PictureError(f"its row group cannot be read ({error})")
        return [{"problem": problem}] * group.rows
    return [
        {"before": row[before], "instruction": row[INSTRUCTION], "after": row[AFTER]}
        for row in rows
    ]


def _pair_of(row: dict) -> Pair:
    if "problem" in row:
        raise row["problem"]
    instruction = row["instruction"]
    if not isinstance(instruction, str) or not instruction.strip():
        raise PictureError("there is no instruction")
    pictures = []
    for name in ("before", "after"):
        content = row[name]
        if isinstance(content, dict):  # the layout of Hugging Face's datasets
            content = content.get("bytes")
        if not isinstance(content, bytes):
            raise PictureError(f"there is no picture {name}")
        try:
            pictures.append(open_picture(content))
        except PictureError as error:
            raise PictureError(f"{name}: {error}") from error
    return Pair(pictures[0], instruction, pictures[1])


@lru_cache(maxsize=4)
def _mixed(rows: tuple[int, ...], epoch: int, seed: int) -> np.ndarray:
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
