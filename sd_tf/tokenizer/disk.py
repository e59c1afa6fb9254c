"""The disk's errors, for which the tokenizers' library has no class of its own."""

import contextlib
import os
import re
from collections.abc import Iterator

NUMBER = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Raise Python's error where the library could not write a file."""
    try:
        yield
    except Exception as error:
        found = NUMBER.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
