"""`sd-tf bench scaling`: measure pictures per second by batch and by size."""

import argparse
import sys

from sd_tf.bench.peers import report, scaling
from sd_tf.cli.arguments import report as tell
from sd_tf.cli.arguments import whole_numbers
from sd_tf.cli.bench_options import add_models, add_out, add_work, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = scaling.ScalingOptions()
    add_models(parser)
    for name, about in (("batches", "pictures at once"), ("sizes", "pixels")):
        default = getattr(defaults, name)
        parser.add_argument(
            f"--{name}",
            type=whole_numbers,
            default=default,
            help=f"{about} (default: {','.join(map(str, default))})",
        )
    parser.add_argument(
        "--grid",
        choices=["cross", "full"],
        default=defaults.grid,
        help="cross: all batches at the smallest size, all sizes at the smallest batch",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=defaults.steps,
        help="a step is timed by a picture of 1 step and one of 1 + STEPS (default: 2)",
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="turns of each picture (default: 3)"
    )
    add_work(parser)
    add_out(parser)


def run(options: argparse.Namespace) -> int:
    results = scaling.scale(read(scaling.ScalingOptions, options), tell)
    print("\n" + scaling.table(results))
    if options.out is not None:
        print(*report.write(results, options.out, "scaling", scaling.page(results)), sep="\n")
    for item in results["left_out"]:
        what = f"batch {item['batch']}, {item['size']} px"
        print(f"sd-tf bench scaling: {what} failed. {item['reason']}", file=sys.stderr)
    return int(bool(results["left_out"]))
