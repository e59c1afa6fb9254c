"""`sd-tf train tiny_adapter outline --out RUN`: train an embedded adapter anew."""

import argparse

from sd_tf.checkpoints import ADAPTERS
from sd_tf.cli.arguments import report
from sd_tf.cli.train_run import add_run, use_backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=ADAPTERS, help="which one to train")
    add_run(parser)


def run(options: argparse.Namespace) -> int:
    use_backend(options)
    from sd_tf.training import tiny_adapter

    tiny_adapter.train(options.name, options.folder, report)
    return 0
