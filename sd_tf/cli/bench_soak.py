"""`sd-tf bench soak`: attack the Ray application, and judge how it takes it."""

import argparse

from sd_tf.bench.soak import SoakOptions, soak, table
from sd_tf.cli.arguments import add_json, report, write_json
from sd_tf.cli.bench_options import read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = SoakOptions()
    parser.add_argument(
        "--minutes", type=float, default=defaults.minutes, help="(default: %(default)g)"
    )
    parser.add_argument("--clients", type=int, default=defaults.clients, help="at once")
    parser.add_argument(
        "--kill_every",
        type=float,
        default=defaults.kill_every,
        help="seconds after which the next replica is killed (default: %(default)g)",
    )
    parser.add_argument(
        "--replacements",
        type=int,
        default=defaults.replacements,
        help="of the export by another one; between them comes a damaged one "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=defaults.replicas,
        help="of each model that draws (default: %(default)s)",
    )
    parser.add_argument(
        "--work", default=defaults.work, help="folder for exports and compiled code, used again"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    figures = soak(read(SoakOptions, options), report)
    print("\n" + table(figures))
    write_json(options.json, figures)
    return int(bool(figures["broken"]))
