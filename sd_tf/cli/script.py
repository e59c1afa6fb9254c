"""Run a command as a script of its own, with absl's flags."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from absl import app

from sd_tf.cli.dispatch import run_reported
from sd_tf.cli.options import Option, parsed_flags
from sd_tf.cli.quiet import silence_libraries


def run(command: ModuleType, options: Sequence[Option]) -> None:
    """Parse absl's flags, run the command, and exit with its status."""

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
        silence_libraries()  # after absl has set its own levels
        os.environ["KERAS_BACKEND"] = "tensorflow"
        flags = {option.name: f"--{option.name}" for option in options}
        sys.exit(run_reported(command, parsed_flags(options), Path(argv[0]).name, flags))

    app.run(main)
