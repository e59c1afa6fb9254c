"""`python -m PACKAGE COMMAND`: a package's commands, of which only the chosen one is imported.

A command is a module with `add_arguments(parser)` and `run(options)`, which returns the exit
status.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping


def dispatch(
    package: str, about: str, commands: Mapping[str, tuple[str, str]], argv: list[str] | None
) -> int:
    """`commands`: name → (module, summary). A wrong value or file is a message, not a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in commands.items():
        command = parsers.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            chosen = importlib.import_module(module)
            chosen.add_arguments(command)
    options = parser.parse_args(argv)
    try:
        return chosen.run(options)
    except (ValueError, OSError) as error:
        print(f"{package}: {error}", file=sys.stderr)
        return 1
