"""Rows of training data as they are found in a folder or in parquet, usable or not."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sd_tf.files.rows import ParquetRows, read_rows
from sd_tf.runtime.pictures import PictureError, open_picture, square
from sd_tf.training.hosts import Host
from sd_tf.training.origin import Record, digest, of_files
from sd_tf.training.settings import TrainingError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
CAPTION_FILES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN, CAPTION_COLUMN, IMAGE_COLUMN = "file_name", "text", "image"


@dataclass(frozen=True)
class Cell:
    """The place of a picture in a parquet file."""

    file: Path
    group: int
    row: int  # in its group
    column: str


@dataclass(frozen=True)
class Row:
    """A row as it was found, usable or not."""

    where: str
    picture: bytes | Path | None
    caption: str | None
    problem: str | None = None  # why the row could not be read, if so
    cell: Cell | None = None  # where to find the picture's bytes again


def read_picture(picture: bytes | Path, size: int) -> np.ndarray:
    return np.asarray(square(open_picture(picture), size))


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


def rows_of_folder(folder: Path, host: Host, **columns) -> tuple[Rows, Record]:
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


def rows_of_parquet(
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


def pictures_of(file: Path, group: int, column: str) -> list[bytes]:
    """Read the pictures of a row group."""
    return [embedded(row[column]) for row in ParquetRows(file).group(group, [column])]


def embedded(picture):
    """Return the bytes of a picture that is stored in a parquet file."""
    if isinstance(picture, dict):  # the layout of Hugging Face's datasets
        return picture.get("bytes")
    return picture
