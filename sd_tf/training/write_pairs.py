"""Write the tiny world's edits as parquet, in the layout of the published InstructPix2Pix data."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sd_tf.training import world
from sd_tf.training.settings import TrainingError

FILE_ROWS = 4096  # rows in a file
GROUP_ROWS = 256  # rows in a row group


def write_pairs(
    folder: Path,
    count: int,
    size: int = 64,
    seed: int = 0,
    split: str = "train",
    kinds: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> list[Path]:
    """Write `count` pairs into an empty folder; return its files.

    `kinds` take turns; if there are none, every kind is equally likely.
    """
    import pyarrow
    import pyarrow.parquet

    if count < 1:
        raise TrainingError(f"`count` is at least 1. Received: {count}")
    if unknown := set(kinds) - set(world.KINDS):
        raise TrainingError(
            f"`kinds` are of {', '.join(world.KINDS)}. Received: {', '.join(sorted(unknown))}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise TrainingError(f"{folder} is not empty. Choose another `folder`, or empty it.")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for start in range(0, count, FILE_ROWS):
        rows = [
            row(index, size, seed, split, kinds)
            for index in range(start, min(start + FILE_ROWS, count))
        ]
        file = folder / f"{split}-{start // FILE_ROWS:05d}.parquet"
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), file, row_group_size=GROUP_ROWS
        )
        files.append(file)
        report(f"{file}: {start + len(rows)} of {count} pairs")
    return files


def row(index: int, size: int, seed: int, split: str, kinds: Sequence[str] = ()) -> dict:
    """Return the pair of that index as a row."""
    kind = kinds[index % len(kinds)] if kinds else None
    edit = world.sample_edit(index, seed, split, kind)
    captions = [
        world.describe(scene, index, seed, complete=True)[0] for scene in (edit.before, edit.after)
    ]
    before, after = (_png(world.draw(scene, size)) for scene in (edit.before, edit.after))
    return {
        "original_prompt": captions[0],
        "original_image": {"bytes": before, "path": None},
        "edit_prompt": edit.instruction,
        "edited_prompt": captions[1],
        "edited_image": {"bytes": after, "path": None},
        "kind": edit.kind,
    }


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
