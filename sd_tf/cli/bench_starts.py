"""`sd-tf bench starts --export_dir …`: measure start-up, and the host's share of a call."""

import argparse

from sd_tf.bench import starts
from sd_tf.cli.arguments import add_export_dir, add_json, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_export_dir(parser)
    parser.add_argument("--num_steps", type=int, default=20, help="of a call (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the starts (default: 3)")
    parser.add_argument("--calls", type=int, default=9, help="warm calls (default: 9)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    found = starts.measure(options.export_dir, options.num_steps, options.rounds, options.calls)
    print(starts.table(found))
    write_json(options.json, found)
    return 0
