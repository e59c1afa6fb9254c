"""Python in processes of its own, with Keras on JAX."""

import os
import subprocess
import sys

FRESH = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_python(*arguments, **environment) -> str:
    """Run it to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**FRESH, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
