"""`sd-tf train eval_edits --export_dir …`: measure how often it edits as instructed."""

import argparse

from sd_tf.cli.train_measuring import add_measuring, add_more_guidance, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measuring(parser)
    add_more_guidance(parser)
    parser.add_argument("--pairs", type=int, default=500, help="of each split")
    parser.add_argument(
        "--image_guidance_scale", type=float, help="as in a call; default: the export's"
    )
    parser.add_argument(
        "--more_image_guidance",
        type=float,
        nargs="*",
        default=[],
        metavar="SCALE",
        help="further image guidance scales to measure",
    )


def run(options: argparse.Namespace) -> int:
    from sd_tf.training.evaluate_edits import EditEvaluationOptions, evaluate

    return measure(evaluate, EditEvaluationOptions, options)
