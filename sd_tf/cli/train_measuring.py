"""Arguments that the commands which measure an export's pictures share, and the measurement."""

import argparse
import dataclasses
from pathlib import Path

from sd_tf.cli.arguments import add_compile_cache, add_export_dir, report


def add_measuring(parser: argparse.ArgumentParser) -> None:
    add_export_dir(parser)
    parser.add_argument(
        "--out",
        dest="folder",
        type=Path,
        default=Path("out/evaluation"),
        help="folder for figures and pictures (default: out/evaluation)",
    )
    parser.add_argument("--num_steps", type=int, default=20, help="as in a call (default: 20)")
    parser.add_argument("--guidance_scale", type=float, help="as in a call; default: the export's")
    parser.add_argument("--scheduler", help="as in a call; default: the export's")
    add_compile_cache(parser)


def add_more_guidance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--more_guidance",
        type=float,
        nargs="*",
        default=[],
        metavar="SCALE",
        help="further guidance scales to measure",
    )


def measure(evaluate, kind: type, options: argparse.Namespace) -> int:
    """Call `evaluate` with the export and with the options that the dataclass `kind` names."""
    from sd_tf.runtime.pipeline import Pipeline

    pipe = Pipeline.load(options.export_dir, compile_cache=options.compile_cache)
    names = [field.name for field in dataclasses.fields(kind)]
    chosen = kind(**{name: getattr(options, name) for name in names})
    evaluate(pipe, chosen, options.folder, report)
    report(f"written to {options.folder}")
    return 0
