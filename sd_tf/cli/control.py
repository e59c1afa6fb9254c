"""`sd-tf control KIND IMAGE`: make a control picture from an ordinary one."""

import argparse
from pathlib import Path

from sd_tf.runtime.pictures import PictureError, open_picture
from sd_tf.runtime.preprocess import (
    CANNY_HIGH,
    CANNY_LOW,
    KINDS,
    SCRIBBLE_THRESHOLD,
    TILE_FACTOR,
)

# Option → the kinds that take it.
TAKEN_BY = {"low": "canny", "high": "canny", "threshold": "scribble", "factor": "tile"}
LEVELS = range(256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make the picture that a ControlNet for edges (canny), scribbles, gray pictures or tiles "
        "follows. Networks for poses, depth and the like are not part of sd_tf."
    )
    parser.add_argument("kind", choices=KINDS, help="of control picture")
    parser.add_argument("image", help="a PNG, JPEG, WebP or AVIF file")
    parser.add_argument("--out", help="the PNG to write (default: IMAGE with the kind in its name)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    parser.add_argument("--low", type=int, help=f"canny: lower threshold (default: {CANNY_LOW})")
    parser.add_argument("--high", type=int, help=f"canny: upper threshold (default: {CANNY_HIGH})")
    parser.add_argument(
        "--threshold",
        type=int,
        help=f"scribble: the higher, the fewer lines (default: {SCRIBBLE_THRESHOLD})",
    )
    parser.add_argument(
        "--factor", type=int, help=f"tile: how much smaller (default: {TILE_FACTOR})"
    )


def run(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in TAKEN_BY}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if TAKEN_BY[name] != options.kind:
            raise ValueError(f"--{name} is for {TAKEN_BY[name]}. Received: {options.kind}")
        if name == "factor" and value < 1:
            raise ValueError(f"--factor is a whole number from 1. Received: {value}")
        if name != "factor" and value not in LEVELS:
            raise ValueError(f"--{name} is a whole number from 0 to 255. Received: {value}")
    source = Path(options.image).expanduser()
    out = source.with_name(f"{source.stem}-{options.kind}.png")
    out = out if options.out is None else Path(options.out).expanduser()
    if out.exists() and not options.overwrite:
        raise ValueError(f"{out} exists. Choose another --out, or give --overwrite.")
    try:
        image = open_picture(source)
    except PictureError as error:
        raise ValueError(f"{source}: {error}.") from error
    KINDS[options.kind](image, **given).save(out, "PNG")
    print(out)
    return 0
