"""Commands and groups of commands; only the chosen command's module is imported.

A command is a module with `add_arguments(parser)` and `run(options)`, which returns the exit
status.
"""

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from sd_tf.cli.quiet import debugging, silence_libraries

INTERRUPTED = 128 + signal.SIGINT
# A command's extra and a package that only its `--backend jax` needs → the extra that has that.
FURTHER_EXTRAS = {("train", "jax"): "jax"}


@dataclass(frozen=True)
class Command:
    """A command: its module, one line about it, and the environment that its imports need.

    `extra` is the extra of the package that installs what it imports, if not its group's.
    """

    module: str
    summary: str
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: str | None = None


@dataclass(frozen=True)
class Group:
    """Commands that share a first word."""

    summary: str
    commands: Mapping[str, Command]
    extra: str | None = None


def dispatch(
    program: str, about: str, commands: Mapping[str, Command | Group], argv: Sequence[str]
) -> int:
    """Parse the arguments, run the command that they name, and return its exit status."""
    silence_libraries()
    parser = argparse.ArgumentParser(prog=program, description=about, allow_abbrev=False)
    try:
        chosen, its_parser, extra = _add(parser, commands, list(argv))
    except _MissingError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    options, unknown = parser.parse_known_args(argv)
    if unknown:  # the command's usage, not the program's
        its_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return run_reported(chosen, options, its_parser.prog, flags_of(its_parser), extra)


class _MissingError(Exception):
    """A package that a command needs is not installed."""


@contextlib.contextmanager
def _installed(extra: str | None) -> Iterator[None]:
    """Say how to install a package of somebody else's that turns out to be missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if debugging() or error.name is None or error.name.startswith("sd_tf"):
            raise
        needed = FURTHER_EXTRAS.get((extra, error.name), extra)
        how = error.name if needed is None else f"'sd_tf[{needed}]'"
        raise _MissingError(f"{error.name} is not installed: pip install {how}") from error


def run_reported(
    command: ModuleType,
    options: argparse.Namespace,
    program: str,
    flags: Mapping[str, str],
    extra: str | None = None,
) -> int:
    """Run the command; report errors that a user can mend as a message and exit status 1.

    Ctrl+C ends a command with the status that shells give it.
    """
    try:
        with _installed(extra):
            return command.run(options)
    except KeyboardInterrupt:
        if debugging():
            raise
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, _MissingError) as error:  # SdTfError is a ValueError
        if debugging():
            raise
        print(f"{program}: {message(error, flags)}", file=sys.stderr)
        return 1


def message(error: Exception, flags: Mapping[str, str]) -> str:
    """Return the error's message, with parameters replaced by the flags that set them."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"  # without the system's number
    parameter = getattr(error, "parameter", None)
    if parameter in flags:
        text = text.replace(parameter, flags[parameter], 1)
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1], found[0]), text)


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the flag for each parameter: an argument's `dest` is the parameter's name."""
    return {a.dest: a.option_strings[0] for a in parser._actions if a.option_strings}


def _add(parser, commands: Mapping[str, Command | Group], argv: list[str], extra=None):
    """Add all commands to the parser; return the chosen one's module, parser and extra."""
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = None, parser, None
    for name, entry in commands.items():
        sub = parsers.add_parser(
            name, help=entry.summary, description=entry.summary, allow_abbrev=False
        )
        if name not in argv[:1]:
            continue
        if isinstance(entry, Group):
            chosen = _add(sub, entry.commands, argv[1:], entry.extra)
        else:
            os.environ.update(entry.environment)
            needs = entry.extra or extra
            with _installed(needs):
                chosen = importlib.import_module(entry.module), sub, needs
            chosen[0].add_arguments(sub)
    return chosen
