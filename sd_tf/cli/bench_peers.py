"""`sd-tf bench peers`: compare our SavedModels with KerasCV, PyTorch, OpenVINO and JAX."""

import argparse
import sys

from sd_tf.bench.peers import report, targets
from sd_tf.bench.peers.engine import PEERS, SELDOM
from sd_tf.bench.peers.measure import ComparisonOptions, failed, measure
from sd_tf.cli.arguments import names, whole_numbers
from sd_tf.cli.arguments import report as tell
from sd_tf.cli.bench_options import add_models, add_out, add_work, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ComparisonOptions()
    add_models(parser)
    parser.add_argument(
        "--sizes", type=whole_numbers, default=defaults.sizes, help="pixels (default: 256,512)"
    )
    parser.add_argument("--batch_size", type=int, default=1, help="pictures at once (default: 1)")
    parser.add_argument(
        "--peers",
        type=names,
        default=defaults.peers,
        help=f"of {', '.join(PEERS)} (default: all but {' and '.join(SELDOM)})",
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="turns of each stage (default: 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="of the timed pictures (default: 4)"
    )
    parser.add_argument(
        "--full_steps",
        type=int,
        default=defaults.full_steps,
        help="of the pictures in the report, extrapolated from those (default: 20)",
    )
    add_work(parser)
    add_out(parser)


def run(options: argparse.Namespace) -> int:
    results = measure(read(ComparisonOptions, options), tell)
    results["targets"] = targets.judged(results)
    print(report.table(results))
    if options.out is not None:
        print(*report.write(results, options.out, "peers", report.page(results)), sep="\n")
    for label, reason in failed(results).items():
        print(f"sd-tf bench peers: {label} failed. {reason}", file=sys.stderr)
    return int(bool(failed(results)))
