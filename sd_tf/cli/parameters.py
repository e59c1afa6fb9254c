"""The parameters of a call as flags of a command."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from sd_tf.cli.arguments import Switch
from sd_tf.runtime.call import Call
from sd_tf.runtime.kinds import Kind, Mixture
from sd_tf.runtime.parameter import CallError, Parameter

METAVARS = {
    Kind.PICTURE: "FILE",
    Kind.MASK: "FILE",
    Kind.PAIR: "HEIGHTxWIDTH",
    Kind.MIXTURE: "NAME@SCALE",
}


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
            names = [f"--{known.name}"]
            if known.kind is Kind.SWITCH:
                parser.add_argument(*names, action=Switch, default=None, help=text)
                continue
            action = "append" if known.is_file and known.per is not None else "store"
            if known.kind is Kind.MIXTURE:  # one for all, or given again for each name
                names, action = [f"--{known.name.removesuffix('s')}", *names], Mixed
            parser.add_argument(
                *names,
                dest=known.name,
                action=action,
                type=_read(known),
                metavar=METAVARS.get(known.kind),
                help=text,
            )


def flag_parameters() -> list[Parameter]:
    return [known for known in Call.parameters().values() if not known.in_python_only]


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters that the command line gives, by name."""
    values = {known.name: getattr(options, known.name, None) for known in flag_parameters()}
    for name, value in values.items():
        if isinstance(value, list) and len(value) == 1 and Call.parameters()[name].per is not None:
            values[name] = value[0]  # one for all models
    return {name: value for name, value in values.items() if value not in (None, [])}


class Mixed(argparse.Action):
    """Joins the mixtures of a flag that is given several times."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest) or {}
        if twice := sorted(before.keys() & values.keys()):
            raise argparse.ArgumentError(self, f"{', '.join(twice)} is given twice")
        setattr(namespace, self.dest, Mixture({**before, **values}))


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
