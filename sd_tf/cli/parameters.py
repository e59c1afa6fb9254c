"""The parameters of a call as flags of a command."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from sd_tf.runtime.call import Call
from sd_tf.runtime.parameter import CallError, Kind, Parameter

METAVARS = {Kind.PICTURE: "FILE", Kind.MASK: "FILE", Kind.PAIR: "HEIGHTxWIDTH"}


def add_parameters(
    parser: argparse.ArgumentParser, parameters: Iterable[Parameter] | None = None, **helps: str
) -> None:
    """Add a flag for each parameter; required ones are words without a flag.

    Args:
        parameters: those to add; None: all that a command line can give.
        helps: name → help in place of the parameter's own.
    """
    for known in flag_parameters() if parameters is None else parameters:
        text = helps.get(known.name, known.help)
        if known.default is not None:
            text = f"{text} (default: {known.default})"
        if known.is_required:
            parser.add_argument(known.name, nargs="*", help=text)
        else:
            parser.add_argument(
                f"--{known.name}", type=_read(known), metavar=METAVARS.get(known.kind), help=text
            )


def flag_parameters() -> list[Parameter]:
    return [known for known in Call.parameters().values() if not known.in_python_only]


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters that the command line gives, by name."""
    values = {known.name: getattr(options, known.name, None) for known in flag_parameters()}
    return {name: value for name, value in values.items() if value not in (None, [])}


def _read(known: Parameter) -> Callable[[str], Any]:
    """Return a flag's type, which checks what does not depend on the export at once."""

    def read(text: str) -> Any:
        if known.is_file:
            return text
        try:
            return known.check(known.from_text(text))
        except CallError as error:
            # argparse puts the flag's name in front.
            text = str(error).removeprefix(f"{known.name} is ")
            raise argparse.ArgumentTypeError(text) from error

    return read
