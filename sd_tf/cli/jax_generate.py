"""`sd-tf jax generate "a prompt" --export_dir COMPILED`: make PNG files, without TensorFlow.

It writes files as `sd-tf generate` does.
"""

import argparse
from pathlib import Path

from sd_tf.cli.arguments import add_load_adapter
from sd_tf.cli.drawing import add_drawing_arguments, draw, read_wanted
from sd_tf.cli.options import WEIGHTS, chosen, place_of
from sd_tf.cli.options import add_arguments as add_options
from sd_tf.jax.pipeline import JaxPipeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser)
    parser.add_argument("--export_dir", required=True, help="what `sd-tf jax compile` wrote")
    parser.add_argument("--checkpoint", help="source of the weights, if the folder holds none")
    add_load_adapter(parser)
    add_options(parser, WEIGHTS)


def run(options: argparse.Namespace) -> int:
    wanted = read_wanted(options)
    weights = {name: value for name, value in chosen(options, WEIGHTS).items() if value}
    if options.checkpoint is not None:
        weights["checkpoint"] = place_of(options.checkpoint)
    pipe = JaxPipeline.load(options.export_dir, **weights)
    for name, path in options.load_adapter:
        pipe.load_adapter(name, path)
    print(f"loaded {options.export_dir} in {pipe.load_seconds:.1f} s", flush=True)
    draw(pipe, wanted, Path(options.out))
    return 0
