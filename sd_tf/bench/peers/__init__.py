"""Our SavedModels beside what one would otherwise take: the same weights, inputs and machine.

Every engine runs in a process of its own (`worker`), driven by lines of JSON (`process`). Ours
stays for all peers of a size; a peer takes turns with it, stage by stage, and goes before the next
one comes, so that what the machine does meanwhile meets both. Nothing in this process imports
TensorFlow or PyTorch: what needs them and is not measured has a process of its own too (`apart`).
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from sd_tf.bench import BenchError


def apart(function: Callable, *arguments):
    """The function's result from a new process, which takes its memory along when it ends. It ends
    with this one, too, however that ends.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:  # whatever a library raises, and the process's own end
            raise BenchError(f"{function.__name__}: {type(error).__name__}: {error}") from error


def _begin() -> None:
    """Silences libraries' progress bars and warnings; what fails comes back as an exception."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _end_with_caller() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
