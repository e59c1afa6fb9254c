"""`python -m sd_tf.bench COMMAND`: our exports beside what one would otherwise take."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from sd_tf.commands import dispatch

COMMANDS = {
    "peers": (
        "sd_tf.bench.peers.command",
        "compare the SavedModels with KerasCV, PyTorch, OpenVINO and JAX on the same weights",
    ),
    "scaling": (
        "sd_tf.bench.peers.scaling",
        "pictures per second of the SavedModels by batch and by size",
    ),
    "training": (
        "sd_tf.bench.peers.training",
        "examples per second of the trainer and of PyTorch's, on the same UNet",
    ),
    "starts": (
        "sd_tf.bench.starts",
        "time to an export's first pictures with and without a cache, and the host's share",
    ),
}


def main(argv: list[str] | None = None) -> int:
    return dispatch("sd_tf.bench", __doc__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
