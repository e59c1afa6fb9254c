"""`python -m sd_tf.serving COMMAND`: exports behind a server."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from sd_tf.commands import dispatch

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
    return dispatch("sd_tf.serving", __doc__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
