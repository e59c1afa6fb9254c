"""Pauses before an attempt is repeated."""

import random
from collections.abc import Iterator

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds, before random shortening


def pauses(count: int) -> Iterator[float]:
    """Yield the seconds to wait before each of `count` repetitions.

    They double up to a limit; the random shortening keeps clients that failed together from
    coming back together.
    """
    for repetition in range(count):
        yield min(LONGEST_PAUSE, FIRST_PAUSE * 2**repetition) * random.uniform(0.5, 1.0)


def asked(seconds: float) -> float:
    """Return the pause before a repetition that the server asked for after `seconds`, at least.

    It is lengthened at random for the same reason.
    """
    return max(seconds, FIRST_PAUSE) * random.uniform(1.0, 1.5)
