"""`python -m sd_tf.jax generate "a prompt" --export_dir COMPILED`: PNG files, without TensorFlow.

Flags and files are those of `sd_tf.generate`.
"""

import argparse
from pathlib import Path

from sd_tf import generate
from sd_tf.jax.pipeline import JaxPipeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generate.add_arguments(parser)
    parser.add_argument("--export_dir", required=True, help="what sd_tf.jax compile wrote")
    parser.add_argument("--checkpoint", help="whose weights to take where it holds none")


def run(options: argparse.Namespace) -> int:
    if message := generate.misused(options):
        raise ValueError(message)
    wanted = generate.read_wanted(options)
    pipe = JaxPipeline.load(options.export_dir, checkpoint=options.checkpoint)
    print(f"loaded {options.export_dir} in {pipe.load_seconds:.1f} s", flush=True)
    generate.draw(pipe, wanted, Path(options.out))
    return 0
