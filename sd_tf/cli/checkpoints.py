"""`sd-tf checkpoints FAMILY FOLDER`: write a random checkpoint of a real release's size."""

import argparse
from pathlib import Path

from sd_tf.checkpoints import CONFIG, TINY, make_random
from sd_tf.cli.arguments import names
from sd_tf.config import FAMILIES
from sd_tf.weights import CheckpointError, with_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a diffusers folder with seeded random weights, to try and to measure an "
        "architecture without its real weights."
    )
    parser.add_argument("family", choices=[TINY, *FAMILIES], help="whose sizes it has")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of the weights (default: float32)",
    )
    parser.add_argument(
        "--without",
        type=names,
        default=(),
        metavar="NAME",
        help="leave out SD3's T5: text_encoder_3",
    )


def run(options: argparse.Namespace) -> int:
    if options.folder.exists():
        raise CheckpointError(f"{options.folder} exists. Choose another folder.")
    config = CONFIG if options.family == TINY else FAMILIES[options.family]
    config = with_texts(config, options.without, where=options.family)
    make_random(config, options.folder, options.dtype)
    print(options.folder)
    return 0
