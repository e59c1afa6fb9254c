"""Arguments that the commands which compare engines share."""

import argparse
import dataclasses
from pathlib import Path

from sd_tf.cli.options import PRECISIONS, place_of


def checkpoint_folder(source: str) -> str:
    """Return an embedded checkpoint's folder for its name; any other folder stays as it is."""
    return str(place_of(source))


def add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work", default="out/peers", help="folder for intermediate files, used again"
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder for the report")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint to measure, its precision and the device."""
    parser.add_argument(
        "--checkpoint", type=checkpoint_folder, help="diffusers folder (default: a random SD1.5)"
    )
    add_precision(parser)
    parser.add_argument(
        "--device", choices=["cpu", "gpu"], default="cpu", help="to measure on (default: cpu)"
    )


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of all engines (default: float32)",
    )


def read(kind: type, options: argparse.Namespace):
    """Make the options dataclass `kind` from the arguments with its fields' names."""
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})
