"""`sd-tf train edit_pairs --out FOLDER --count N`: write the tiny world's edits."""

import argparse
from pathlib import Path

from sd_tf.cli.arguments import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", dest="folder", type=Path, required=True, help="a new folder")
    parser.add_argument("--count", type=int, required=True, help="pairs to write")
    parser.add_argument(
        "--split",
        choices=["train", "held_out"],
        default="train",
        help="which combinations of words occur (default: train)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=(),
        metavar="KIND",
        help="such as move or shape, which then take turns (default: all kinds alike)",
    )
    parser.add_argument("--size", type=int, default=64, help="pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the scenes (default: 0)")


def run(options: argparse.Namespace) -> int:
    from sd_tf.training.write_pairs import write_pairs

    write_pairs(
        options.folder,
        options.count,
        options.size,
        options.seed,
        options.split,
        options.kinds,
        report,
    )
    return 0
