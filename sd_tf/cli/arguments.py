"""Arguments that several commands share, each with one spelling and one help text."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sd_tf.errors import SdTfError
from sd_tf.runtime.shapes import Shape, Size, parse_shapes, parse_sizes

TOKEN_VARIABLE = "SD_TF_TOKEN"  # noqa: S105, its name alone
TOKEN_EPILOG = f"A server's key or token is read from the environment variable {TOKEN_VARIABLE}."

EMBEDDED_PREFIX = "tiny:"  # how the names of adapters and ControlNets begin that come with the code
SHAPES = "BxHxW,BxHxW"


class Switch(argparse.Action):
    """A flag and its opposite, spelled as absl spells them: --jit_compile and --nojit_compile."""

    def __init__(self, option_strings, dest, default=False, help=None):
        self.opposites = {f"--no{option.removeprefix('--')}" for option in option_strings}
        super().__init__(
            [*option_strings, *sorted(self.opposites)], dest, nargs=0, default=default, help=help
        )

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string not in self.opposites)


def add_export_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--export_dir", required=True, help="what `sd-tf export` wrote")


def add_compile_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile_cache", help="folder where XLA keeps compiled code")


def add_jit_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jit_compile", action=Switch, default=True, help="run what XLA compiles (the default)"
    )


def add_load_adapter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load_adapter",
        action="append",
        default=[],
        type=named_path,
        metavar="NAME=PATH",
        help="put an adapter (LoRA) into one of the export's places; may be given several times",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the figures")


def write_json(path: Path | None, figures: Any) -> None:
    """Write the figures to the file of --json, where one was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"whole numbers with commas between. Received: {text!r}"
        ) from None


def sizes(text: str) -> tuple[Size, ...]:
    """Parse sizes with commas between them."""
    return _parsed(parse_sizes, text)


def shapes(text: str) -> tuple[Shape, ...]:
    """Parse shapes with commas between them."""
    return _parsed(parse_shapes, text)


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except SdTfError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def names(text: str) -> tuple[str, ...]:
    """Parse names with commas between them."""
    return tuple(filter(None, text.split(",")))


def named_path(text: str) -> tuple[str, Path]:
    """Parse NAME=PATH, where the path may name an embedded adapter."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"NAME=PATH. Received: {text!r}")
    return name, Path(_parsed(place_of_adapter, path))


def scaled_path(text: str) -> tuple[str | Path, float]:
    """Parse PATH@SCALE; without a number behind the last @, all of it is the path."""
    path, _, number = text.rpartition("@")
    try:
        scale = float(number)
    except ValueError:
        path, scale = text, 1.0
    return _parsed(place_of_adapter, path), scale


def place_of_adapter(path: str) -> str | Path:
    """Return the file of an embedded adapter, `tiny:NAME`; any other path stays as it is."""
    if not path.startswith(EMBEDDED_PREFIX):
        return path
    from sd_tf.checkpoints import embedded_adapter

    return embedded_adapter(path)


def controlnet(text: str) -> str:
    """Parse a ControlNet's source: `tiny:NAME` is an embedded one's folder."""
    if not text.startswith(EMBEDDED_PREFIX):
        return text
    from sd_tf.checkpoints import embedded_controlnet

    return str(_parsed(embedded_controlnet, text))


def small_decoder(text: str) -> str:
    """Parse a small decoder's source: `tiny:NAME` is an embedded one's folder."""
    if not text.startswith(EMBEDDED_PREFIX):
        return text
    from sd_tf.checkpoints import embedded_decoder

    return str(_parsed(embedded_decoder, text))


def place_of_addition(source: str) -> str | Path:
    """Return the place of what is embedded beside `tiny`; any other source stays as it is."""
    from sd_tf.checkpoints import CONTROLNETS, DECODERS, embedded_controlnet, embedded_decoder

    for names, place in ((CONTROLNETS, embedded_controlnet), (DECODERS, embedded_decoder)):
        if source in [f"{EMBEDDED_PREFIX}{name}" for name in names]:
            return place(source)
    return place_of_adapter(source)


def token() -> str | None:
    """Return the key for a server, which is not given by a flag: other users see those."""
    return os.environ.get(TOKEN_VARIABLE)


def report(text: str) -> None:
    """Print a line of progress at once, also into a file."""
    print(text, flush=True)
