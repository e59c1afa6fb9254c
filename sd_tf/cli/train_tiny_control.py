"""`sd-tf train tiny_control --out RUN`: train the embedded ControlNet anew."""

import argparse

from sd_tf.cli.arguments import report
from sd_tf.cli.train_run import add_run, use_backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)


def run(options: argparse.Namespace) -> int:
    use_backend(options)
    from sd_tf.training import tiny_control

    tiny_control.train(options.folder, report)
    return 0
