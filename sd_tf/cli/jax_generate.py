"""`sd-tf jax generate "a prompt" --export_dir COMPILED`: make PNG files, without TensorFlow.

It takes the flags of `sd-tf generate`, and writes files like it.
"""

import argparse
from pathlib import Path

from sd_tf.cli.drawing import add_drawing_arguments, draw, read_wanted
from sd_tf.jax.pipeline import JaxPipeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser)
    parser.add_argument("--export_dir", required=True, help="what `sd-tf jax compile` wrote")
    parser.add_argument("--checkpoint", help="source of the weights, if the folder holds none")


def run(options: argparse.Namespace) -> int:
    wanted = read_wanted(options)
    pipe = JaxPipeline.load(options.export_dir, checkpoint=options.checkpoint)
    print(f"loaded {options.export_dir} in {pipe.load_seconds:.1f} s", flush=True)
    draw(pipe, wanted, Path(options.out))
    return 0
