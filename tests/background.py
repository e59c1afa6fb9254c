"""Work that goes on beside a test."""

import threading
from contextlib import contextmanager


@contextmanager
def in_background(work):
    """Calls `work(stop)` in a thread until the block ends; its exception is raised there."""
    stop, errors = threading.Event(), []

    def run():
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
