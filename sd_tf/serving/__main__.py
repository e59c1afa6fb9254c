"""`python -m sd_tf.serving COMMAND`: exports behind a server.

A command is a module with `add_arguments(parser)` and `run(options)`, which returns the exit
status, and a line in COMMANDS. Only the chosen one is imported.
"""

import argparse
import importlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

COMMANDS = {
    "tf_serving": (
        "sd_tf.serving.tf_serving.command",
        "write a folder for TensorFlow Serving, or check one",
    ),
    "ray": ("sd_tf.serving.ray_app.command", "serve an export with Ray Serve, and its page"),
    "load": ("sd_tf.serving.load", "measure how much a running application takes"),
    "client": ("sd_tf.serving.client_command", "make pictures with a server's models"),
    "batch": ("sd_tf.serving.batch.command", "make the pictures of a file of prompts, on Ray"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m sd_tf.serving", description=__doc__)
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
        print(f"sd_tf.serving: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
