"""Pictures with captions: from the world, a folder or parquet; in an order that can be resumed."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from sd_tf.pictures import PictureError, open_picture, square
from sd_tf.training import world
from sd_tf.training.settings import TrainingError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
CAPTION_FILES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN, CAPTION_COLUMN, IMAGE_COLUMN = "file_name", "text", "image"
ON_ERROR = ("refuse", "skip")
ORDER = 1  # stream of a seed


class Source(Protocol):
    """Examples by index. A caption may differ from epoch to epoch, a picture does not."""

    def __len__(self) -> int: ...

    def picture(self, index: int) -> np.ndarray: ...  # uint8 (H, W, 3)

    def caption(self, index: int, epoch: int) -> str: ...


@dataclass(frozen=True)
class World:
    """The first `count` scenes of the tiny world, described anew in every epoch."""

    count: int
    size: int
    seed: int = 0
    complete: bool = False  # captions that leave nothing out

    def __len__(self) -> int:
        return self.count

    def picture(self, index: int) -> np.ndarray:
        return world.draw(self.scene(index), self.size)

    def caption(self, index: int, epoch: int) -> str:
        return world.describe(self.scene(index), index, self.seed + epoch, self.complete)[0]

    def scene(self, index: int) -> world.Scene:
        return world.sample_scene(index, self.seed)

    def with_things(self, things: int) -> "Chosen":
        """The scenes of so many things."""
        return Chosen(self, [i for i in range(len(self)) if len(self.scene(i).things) == things])


@dataclass(frozen=True)
class Chosen:
    """Some examples of another source."""

    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def picture(self, index: int) -> np.ndarray:
        return self.source.picture(self.indices[index])

    def caption(self, index: int, epoch: int) -> str:
        return self.source.caption(self.indices[index], epoch)


@dataclass
class Captioned:
    """Rows that were read from somewhere: bytes of a picture or its path, and a caption."""

    name: str
    rows: Sequence[tuple[str, bytes | Path, str]]  # where it stands, the picture, the caption
    size: int
    skipped: list[str] = field(default_factory=list)  # what was left out, and why

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self, index: int) -> np.ndarray:
        return read_picture(self.rows[index][1], self.size)

    def caption(self, index: int, epoch: int) -> str:
        return self.rows[index][2]


def read_picture(picture: bytes | Path, size: int) -> np.ndarray:
    return np.asarray(square(open_picture(picture), size))


def open_source(path: str | Path, size: int, on_error: str = "refuse", **columns) -> Captioned:
    """A folder of pictures with captions, or parquet (a file, or a folder of them).

    A folder names its captions in `metadata.jsonl` or `metadata.csv` (columns `file_name` and
    `text`), or beside each picture in a `.txt` file of the same name.

    Args:
        on_error: `refuse` raises at the first bad row, `skip` leaves bad rows out and counts them.
        columns: `caption_column` and `image_column`, where they are called otherwise.
    """
    if on_error not in ON_ERROR:
        raise TrainingError(f"on_error is one of {', '.join(ON_ERROR)}. Received: {on_error}")
    path = Path(path)
    if not path.exists():
        raise TrainingError(f"No such file or folder: {path}")
    parquet = [path] if path.suffix == ".parquet" else sorted(path.glob("**/*.parquet"))
    found = _parquet_rows(parquet, **columns) if parquet else _folder_rows(path, **columns)
    rows, skipped = [], []
    for where, picture, caption, unread in found:
        problem = problem_of(picture, caption) if unread is None else unread
        if problem is None:
            rows.append((where, picture, caption))
        elif on_error == "skip":
            skipped.append(f"{where}: {problem}")
        else:
            raise TrainingError(f"{where}: {problem}. To leave such rows out: --on_error skip")
    if not rows:
        first = f", the first of them {skipped[0]}" if skipped else ""
        raise TrainingError(f"{path} has no usable example; {len(skipped)} were skipped{first}.")
    return Captioned(str(path), rows, size, skipped)


def problem_of(picture: bytes | Path | None, caption: str | None) -> str | None:
    """Why a row cannot be used, or None. The picture is read: a header alone proves little."""
    if caption is not None and not isinstance(caption, str):
        return f"the caption is no text but {type(caption).__name__}"
    if caption is None or not caption.strip():
        return "the caption is empty"
    if picture is None:
        return "there is no picture"
    if not isinstance(picture, bytes | Path):
        return f"the picture is no bytes but {type(picture).__name__}"
    try:
        read_picture(picture, size=1)
    except PictureError as error:
        return str(error)
    return None


# Where it stands, the picture, the caption, and why the row could not be read at all.
Row = tuple[str, bytes | Path | None, str | None, str | None]


def _folder_rows(
    folder: Path, caption_column: str = CAPTION_COLUMN, image_column: str = FILE_COLUMN
) -> Iterator[Row]:
    if not folder.is_dir():
        raise TrainingError(f"{folder}: data is a folder or a .parquet file.")
    tables = [folder / name for name in CAPTION_FILES if (folder / name).is_file()]
    if tables:
        for number, (entry, problem) in enumerate(_read_table(tables[0]), start=1):
            where = f"{tables[0]}, row {number}"
            if problem is not None:
                yield where, None, None, problem
                continue
            if missing := {caption_column, image_column} - entry.keys():
                raise TrainingError(
                    f"{where}: no column {', '.join(sorted(missing))}; it has {', '.join(entry)}."
                )
            picture = folder / str(entry[image_column])
            if not picture.resolve().is_relative_to(folder.resolve()):
                raise TrainingError(f"{where} points outside: {picture}")
            found = picture if picture.is_file() else None
            yield f"{where} ({picture.name})", found, entry[caption_column], None
        return
    pictures = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURE_SUFFIXES)
    if not pictures:
        raise TrainingError(f"{folder} has no pictures ({', '.join(PICTURE_SUFFIXES)}).")
    for picture in pictures:
        yield str(picture), picture, *_caption_beside(picture)


def _caption_beside(picture: Path) -> tuple[str | None, str | None]:
    """The caption, or why there is none."""
    text = picture.with_suffix(".txt")
    if not text.is_file():
        return None, f"there is no {text.name}"
    try:
        return text.read_text(encoding="utf-8-sig").strip(), None
    except UnicodeDecodeError as error:
        return None, f"{text.name} is not UTF-8 ({error})"


def _read_table(path: Path) -> Iterator[tuple[dict, str | None]]:
    """Rows, and why one of them could not be read."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Excel writes a byte order mark
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path} is not UTF-8: {error}") from error
    if path.suffix == ".csv":
        for entry in csv.DictReader(io.StringIO(text, newline="")):
            extra = entry.pop(None, None)
            problem = f"more values than columns: {extra}; quote commas" if extra else None
            yield entry, problem
        return
    for line in io.StringIO(text):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            yield {}, f"this is not JSON ({error})"
            continue
        is_row = isinstance(entry, dict)
        yield entry, None if is_row else f"this is no JSON object but {type(entry).__name__}"


def _parquet_rows(
    files: Sequence[Path], caption_column: str = CAPTION_COLUMN, image_column: str = IMAGE_COLUMN
) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    for file in files:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            yield from _rows_of(table, file, caption_column, image_column)
        except (pyarrow.ArrowInvalid, OSError) as error:  # of the file, or of a page within it
            raise TrainingError(f"{file} is not readable as parquet: {error}") from error


def _rows_of(table, file: Path, caption_column: str, image_column: str) -> Iterator[Row]:
    names = table.schema_arrow.names
    if missing := {caption_column, image_column} - set(names):
        raise TrainingError(
            f"{file}: no column {', '.join(sorted(missing))}; it has {', '.join(names)}. "
            f"Name them with --caption_column and --image_column."
        )
    number = 0
    for batch in table.iter_batches(columns=[image_column, caption_column]):
        for entry in batch.to_pylist():
            number += 1
            picture = entry[image_column]
            if isinstance(picture, dict):  # the layout of Hugging Face's datasets
                picture = picture.get("bytes")
            yield f"{file}, row {number}", picture, entry[caption_column], None


def shuffled(position: int, count: int, seed: int) -> tuple[int, int]:
    """The example at a position of an endless series of shuffled epochs, and its epoch."""
    epoch, place = divmod(position, count)
    return int(_order(epoch, count, seed)[place]), epoch


@lru_cache(maxsize=4)
def _order(epoch, count, seed):
    return np.random.default_rng([seed, ORDER, epoch]).permutation(count)
