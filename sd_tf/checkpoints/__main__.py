"""`python -m sd_tf.checkpoints FAMILY FOLDER`: a checkpoint of a real release's size, random."""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from sd_tf.checkpoints import CONFIG, TINY, make_random
from sd_tf.config import FAMILIES


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sd_tf.checkpoints",
        description="Write a diffusers folder with seeded random weights, to try and to measure "
        "an architecture where its real weights are not at hand.",
    )
    parser.add_argument("family", choices=[TINY, *FAMILIES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    options = parser.parse_args(argv)
    if options.folder.exists():
        parser.error(f"{options.folder} exists. Choose another folder.")
    config = CONFIG if options.family == TINY else FAMILIES[options.family]
    make_random(config, options.folder, options.dtype)
    print(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
