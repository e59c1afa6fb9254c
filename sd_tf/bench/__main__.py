"""`python -m sd_tf.bench COMMAND`: our exports beside what one would otherwise take.

A command is a module with `add_arguments(parser)` and `run(options)`, which returns the exit
status, and a line in COMMANDS. Only the chosen one is imported.
"""

import argparse
import importlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

COMMANDS = {
    "peers": (
        "sd_tf.bench.peers.command",
        "compare the SavedModels with KerasCV, PyTorch, OpenVINO and JAX on the same weights",
    ),
    "scaling": (
        "sd_tf.bench.peers.scaling",
        "pictures per second of the SavedModels by batch and by size",
    ),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m sd_tf.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            chosen = importlib.import_module(module)
            chosen.add_arguments(command)
    options = parser.parse_args(argv)
    try:
        return chosen.run(options)
    except (ValueError, OSError) as error:
        print(f"sd_tf.bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
