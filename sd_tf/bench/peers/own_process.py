"""Run a function in a process of its own."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from sd_tf.bench.plan import BenchError


def apart(function: Callable, *arguments):
    """Run the function in a new process, which frees its memory when it ends; return its result.

    The process also ends when this one does, for whatever reason.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:  # of any library, or because the process was killed
            raise BenchError(f"{function.__name__}: {type(error).__name__}: {error}") from error


def _begin() -> None:
    """Silence libraries' progress bars and warnings; a failure comes back as an exception."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _end_with_caller() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
