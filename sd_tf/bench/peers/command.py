"""`python -m sd_tf.bench peers`."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from sd_tf.bench.peers import report, targets
from sd_tf.bench.peers.engine import PEERS
from sd_tf.bench.peers.measure import Options, failed, measure


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"whole numbers with commas between them. Received: {text!r}"
        ) from None


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Of both commands."""
    parser.add_argument("--checkpoint", help="Diffusers folder. Default: a random SD1.5.")
    parser.add_argument(
        "--work", default="out/peers", help="Folder for what is made on the way and used again."
    )
    parser.add_argument("--output", type=Path, help="Folder for the .json and the .html report.")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "float16"], default="float32"
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    defaults = Options()
    parser.add_argument(
        "--sizes", type=numbers, default=defaults.sizes, help="Pixels. Default: 256,512."
    )
    parser.add_argument(
        "--peers", type=names, default=PEERS, help=f"Of {', '.join(PEERS)}. Default: all."
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="Turns of each stage. Default: 3."
    )
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="Of the timed pictures. Default: 4."
    )


def run(options: argparse.Namespace) -> int:
    chosen = Options(**{field.name: getattr(options, field.name) for field in fields(Options)})
    results = measure(chosen, lambda text: print(text, flush=True))
    results["targets"] = targets.judged(results)
    print(report.table(results))
    if options.output is not None:
        print(*report.write(results, options.output, "peers", report.page(results)), sep="\n")
    for item in failed(results):
        print(f"sd_tf.bench: {item['label']} failed. {item['reason']}", file=sys.stderr)
    return int(bool(failed(results)))
