"""The order of examples: endless shuffled epochs, any place of them found without the others."""

from functools import lru_cache

import numpy as np

GROUPS_AT_ONCE = 8  # row groups whose rows are mixed with one another
ORDER = 1  # a seed's stream of random numbers, for the order of examples


def shuffled(position: int, count: int, seed: int) -> tuple[int, int]:
    """Return the example at a position in an endless series of shuffled epochs, and its epoch."""
    epoch, place = divmod(position, count)
    return int(_order(epoch, count, seed)[place]), epoch


@lru_cache(maxsize=4)
def _order(epoch, count, seed):
    return np.random.default_rng([seed, ORDER, epoch]).permutation(count)


def mixed(position: int, rows: tuple[int, ...], seed: int) -> tuple[int, int]:
    """Return the row at a position in an endless series of epochs, and its epoch.

    In every epoch groups are shuffled, and rows among `GROUPS_AT_ONCE` groups.

    Args:
        rows: the number of rows in each group.
    """
    epoch, place = divmod(position, sum(rows))
    return int(_mixed(epoch, rows, seed)[place]), epoch


@lru_cache(maxsize=4)
def _mixed(epoch, rows, seed):
    draws = np.random.default_rng([seed, ORDER, epoch])
    starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
    groups = draws.permutation(len(rows))
    parts = []
    for first in range(0, len(groups), GROUPS_AT_ONCE):
        chosen = groups[first : first + GROUPS_AT_ONCE]
        parts.append(
            draws.permutation(np.concatenate([starts[g] + np.arange(rows[g]) for g in chosen]))
        )
    return np.concatenate(parts)
