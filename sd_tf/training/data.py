"""Pictures with captions, from the tiny world, a folder or parquet, in a resumable order.

Captions are kept in memory, pictures are not: of parquet, a few row groups are at a time.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np

from sd_tf.files import atomic
from sd_tf.files.rows import RowsError
from sd_tf.runtime.pictures import open_picture
from sd_tf.training import world
from sd_tf.training.hosts import ALONE, Host
from sd_tf.training.order import GROUPS_AT_ONCE, mixed, shuffled
from sd_tf.training.origin import Record, digest
from sd_tf.training.rows import (
    CAPTION_COLUMN,
    Cell,
    pictures_of,
    problem_of,
    read_picture,
    rows_of_folder,
    rows_of_parquet,
)
from sd_tf.training.settings import TrainingError

ON_ERROR = ("refuse", "skip")


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


@dataclass
class Captioned:
    """Rows from a folder or from parquet: the place of a picture, and a caption."""

    rows: Sequence[tuple[Path | Cell, str]]
    size: int
    content: Record  # of all rows, those of other hosts, too
    skipped: list[str] = field(default_factory=list)  # places of rows left out, and why

    def __post_init__(self):
        self._group = lru_cache(maxsize=GROUPS_AT_ONCE)(pictures_of)
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
            found, content = rows_of_parquet(path, parquet, host, **columns)
        else:
            found, content = rows_of_folder(path, host, **columns)
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


def _known_bad(checked: Path | None, data: Record) -> dict[str, str] | None:
    """Return the bad rows of this host, number → problem, if that same data was checked before."""
    if checked is None or not checked.is_file():
        return None
    before = json.loads(checked.read_text(encoding="utf-8"))
    return before["bad"] if before["data"] == data else None
