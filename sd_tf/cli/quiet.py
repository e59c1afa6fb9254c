"""Keep TensorFlow's, oneDNN's, CUDA's and absl's log lines out of a normal run.

The environment variable SD_TF_LOG=debug shows them all, and tracebacks in place of messages.
"""

import contextlib
import faulthandler
import importlib.abc
import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from absl import logging as absl_logging

VARIABLE = "SD_TF_LOG"
# Lines that C++ libraries write while they are loaded, before any setting of theirs is read.
NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} |"
    rb"To enable the following instructions:"
)


def debugging() -> bool:
    """Return whether everything is to be shown."""
    return os.environ.get(VARIABLE) == "debug"


def silence_libraries() -> None:
    """Silence all libraries; call it before TensorFlow is imported.

    Level 3 hides TensorFlow's error lines too, as it logs a missing GPU and the use of its compile
    cache as errors. Failures still raise exceptions, and fatal errors are still logged.
    """
    if debugging():
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    absl_logging.set_verbosity(absl_logging.ERROR)
    for name in ("tensorflow", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "tensorflow" not in sys.modules and not any(
        isinstance(finder, TensorFlowFinder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, TensorFlowFinder())


class TensorFlowFinder(importlib.abc.MetaPathFinder):
    """Find TensorFlow as Python does, and hold its lines back while it is loaded."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_quietly(module):
                with noise_held_back():
                    execute(module)

            spec.loader.exec_module = execute_quietly
        return spec


@contextlib.contextmanager
def noise_held_back() -> Iterator[None]:
    """Hold back what is written to the error output, and drop the noise unless the block fails.

    If the process crashes meanwhile, Python's own report of it still appears.
    """
    sys.stderr.flush()
    crashes_reported = faulthandler.is_enabled()
    terminal = os.dup(2)
    faulthandler.enable(terminal)
    noise: re.Pattern | None = NOISE
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            noise = None
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            faulthandler.disable()
            if crashes_reported:
                faulthandler.enable()
            os.close(terminal)
            held.seek(0)
            for line in held:
                if noise is None or not noise.match(line):
                    os.write(2, line)
