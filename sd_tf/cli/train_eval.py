"""`sd-tf train eval --export_dir …`: measure how often a prompt is drawn right."""

import argparse

from sd_tf.cli.train_measuring import add_measuring, add_more_guidance, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measuring(parser)
    add_more_guidance(parser)
    parser.add_argument("--prompts", type=int, default=250, help="in each of the four groups")
    parser.add_argument(
        "--negative_prompts",
        action="store_true",
        help="also measure negative prompts that name something else",
    )
    parser.add_argument("--reuse", type=int, help="as in a call; default: 1")


def run(options: argparse.Namespace) -> int:
    from sd_tf.training.evaluate import EvaluationOptions, evaluate

    return measure(evaluate, EvaluationOptions, options)
