"""Tables in a TensorFlow graph, by number and by pair of numbers, and a search for texts."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sd_tf.tokenizer.characters import PAGE, PagedTable
from sd_tf.tokenizer.tables import Trie

MISSING = -1


class Pages(tf.Module):
    """A `PagedTable` in a graph."""

    def __init__(self, table: PagedTable):
        super().__init__()
        self.pages, self.values = tf.constant(table.pages), tf.constant(table.values)

    def __call__(self, numbers):
        pages = tf.gather(self.pages, numbers // PAGE)
        return tf.gather(self.values, pages + numbers % PAGE)


class Pairs(tf.Module):
    """A table from pairs of int32 numbers, the first of them not negative, to an int32."""

    def __init__(self, first, second, values, default: int = MISSING):
        super().__init__()
        keys = (np.asarray(first, "int64") << 32) | np.asarray(second, "int64")
        self.table = hash_table(np.append(keys, MISSING), np.append(values, default), default)

    def __call__(self, first, second):
        """Look up numbers; a first one of `MISSING` is in no pair."""
        keys = tf.bitwise.left_shift(tf.cast(first, "int64"), tf.constant(32, "int64"))
        return self.table.lookup(tf.bitwise.bitwise_or(keys, tf.cast(second, "int64")))


def hash_table(keys: Sequence, values: Sequence[int], default: int) -> tf.lookup.StaticHashTable:
    """Return a table with at least one entry: TensorFlow refuses empty ones."""
    dtype = "string" if isinstance(keys[0], str) else "int64"
    initializer = tf.lookup.KeyValueTensorInitializer(
        tf.constant(keys, dtype), tf.constant(values, "int32")
    )
    return tf.lookup.StaticHashTable(initializer, default)


class Finder(tf.Module):
    """Finds a `Trie`'s texts among characters."""

    def __init__(self, trie: Trie):
        super().__init__()
        self.steps = Pairs(trie.states, trie.characters, trie.next_states)
        self.values = tf.constant(trie.values)

    def longest(self, characters, starts, root: int):
        """Find the longest text that begins at each of `starts`, (S,), in `characters`, (T,).

        Returns the positions where one was found, its length and its value, each (found,). A text
        must not reach to the last character.
        """

        def step(states, offset, lengths, values):
            states = self.steps(states, tf.gather(characters, tf.minimum(starts + offset, last)))
            ended = tf.where(states < 0, MISSING, tf.gather(self.values, tf.maximum(states, 0)))
            lengths = tf.where(ended < 0, lengths, offset + 1)
            return states, offset + 1, lengths, tf.where(ended < 0, values, ended)

        last = tf.size(characters) - 1
        begin = tf.fill(tf.shape(starts), root)
        lengths, values = tf.zeros_like(starts), tf.zeros_like(starts)
        _, _, lengths, values = tf.while_loop(
            lambda states, *_: tf.reduce_any(states >= 0), step, [begin, 0, lengths, values]
        )
        return take(lengths > 0, starts, lengths, values)


def leftmost(starts, lengths):
    """Choose from the left matches that do not overlap: (found,) positions → (found,) bool."""

    def double(chosen, following, _):
        # `chosen` are the first 2ⁿ matches, `following` is the one 2ⁿ further on.
        reached = tf.where(chosen, following, count)
        more = chosen | tf.scatter_nd(reached[:, None], tf.ones_like(chosen), [count + 1])
        return more, tf.gather(following, following), tf.reduce_any(more != chosen)

    count = tf.size(starts)
    following = tf.searchsorted(starts, starts + lengths)
    following = tf.concat([following, [count]], 0)
    chosen = tf.range(count + 1) == 0
    chosen, _, _ = tf.while_loop(lambda *args: args[-1], double, [chosen, following, True])
    return chosen[:-1]


def positions(mask):
    """Return where a vector is true, (true,) int32."""
    return tf.cast(tf.where(mask)[:, 0], "int32")


def take(mask, *vectors):
    """Return the elements of vectors of one length for which the mask is true."""
    index = positions(mask)
    return [tf.gather(vector, index) for vector in vectors]


def shifted(vector, first):
    """Return the vector moved on by one element, with `first` in front."""
    return tf.concat([[first], vector], 0)[:-1]


def counted(mask):
    """Return how many elements are true up to each one, itself among them."""
    return tf.cumsum(tf.cast(mask, "int32"))
