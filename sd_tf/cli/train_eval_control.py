"""`sd-tf train eval_control --export_dir …`: measure how often it follows an outline drawing."""

import argparse

from sd_tf.cli.train_measuring import add_measuring, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measuring(parser)
    parser.add_argument("--drawings", type=int, default=250, help="of each group")
    parser.add_argument(
        "--control_scale", type=float, default=1.0, help="as in a call (default: 1)"
    )


def run(options: argparse.Namespace) -> int:
    from sd_tf.training.evaluate_control import ControlEvaluationOptions, evaluate

    return measure(evaluate, ControlEvaluationOptions, options)
