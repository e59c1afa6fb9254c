"""`python -m sd_tf.jax COMMAND`: compile ahead of time, and draw with what was compiled."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from sd_tf.commands import dispatch

COMMANDS = {
    "compile": (
        "sd_tf.jax.compile_command",
        "compile a checkpoint ahead of time, for this machine or for a TPU slice elsewhere",
    ),
    "generate": ("sd_tf.jax.generate_command", "make pictures with what was compiled"),
}


def main(argv: list[str] | None = None) -> int:
    return dispatch("sd_tf.jax", __doc__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
