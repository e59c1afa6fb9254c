"""Unicode's normal form C in a TensorFlow graph, as Unicode Standard Annex 15 defines it."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from sd_tf.export.tokenizer_tables import MISSING, Pages, Pairs, positions, take
from sd_tf.tokenizer.characters import PAGE, Composition, PagedTable
from sd_tf.tokenizer.tables import TEXT_END

ORDER_BITS = 0xFF
IS_SECOND = 1 << 8
PART_SHIFT = 9


class Normalizer(tf.Module):
    """Composes characters, and prepares for lower case the letters that grow there."""

    def __init__(self, composition: Composition, grown: Mapping[int, int], number_count: int):
        """Take numbers below `number_count`; those behind Unicode stay as they are."""
        super().__init__()
        values = composition.part_of << PART_SHIFT | composition.order
        values |= np.where(composition.is_second, IS_SECOND, 0)
        behind = np.zeros(-(-(number_count - len(values)) // PAGE) * PAGE, values.dtype)
        self.properties = Pages(PagedTable.of(np.concatenate([values, behind])))
        self.parts = tf.constant(composition.parts)
        self.composites = Pairs(*composition.pairs.T, composition.composites)
        self.growing = tf.constant(list(grown), "int32")
        self.second = tf.constant(list(grown.values()), "int32")

    def __call__(self, code):
        """Normalize texts that each end with TEXT_END, joined to one vector: (T,) → (T',).

        Behind a letter whose lower case is two code points, the second one is put.
        """
        # A mark that begins the first text stands behind a character, too.
        code = self._compose(self._decompose(tf.concat([[TEXT_END], code], 0)))[1:]
        grows = code[:, None] == self.growing  # (T', growing)
        second = tf.reduce_max(tf.where(grows, self.second, MISSING), 1)
        return _kept(tf.stack([code, second], 1))

    def _decompose(self, code):
        """Replace characters by their parts, and sort each run of marks by combining class."""
        row = tf.bitwise.right_shift(self.properties(code), PART_SHIFT)
        itself = tf.pad(code[:, None], [[0, 0], [0, self.parts.shape[1] - 1]], constant_values=-1)
        parts = tf.where(row[:, None] == 0, itself, tf.gather(self.parts, row))
        code = _kept(parts)
        order = self.properties(code) & ORDER_BITS
        run = tf.cumsum(tf.cast(order == 0, "int32"))
        return tf.gather(code, tf.argsort(run * (ORDER_BITS + 1) + order, stable=True))

    def _compose(self, code):
        """Join characters with those before them.

        A chain is a character that joins none before it, and all up to the next such character.
        Chains are independent, so that each round takes the next character of every chain.
        """
        properties = self.properties(code)
        order = properties & ORDER_BITS
        begins = positions(properties & (ORDER_BITS | IS_SECOND) == 0)
        ends = tf.concat([begins[1:], [tf.size(code)]], 0)

        def join(code, starter, between, at, end):
            """Try `at` on `starter`; `between` is the class of the last mark left between them."""
            one, other = tf.gather(code, starter), tf.gather(code, at)
            rank = tf.gather(order, at)
            joined = self.composites(one, other)
            joins = (joined >= 0) & ((between == 0) | (between < rank))
            code = tf.tensor_scatter_nd_update(
                code,
                tf.concat([starter, at], 0)[:, None],
                tf.concat([tf.where(joins, joined, one), tf.where(joins, MISSING, other)], 0),
            )
            starter = tf.where(~joins & (rank == 0), at, starter)
            between = tf.where(joins, between, rank)
            return code, *take(at + 1 < end, starter, between, at + 1, end)

        lists = take(begins + 1 < ends, begins, tf.zeros_like(begins), begins + 1, ends)
        open_shape = [tf.TensorShape([None])] * 5
        code, *_ = tf.while_loop(
            lambda *args: tf.size(args[-1]) > 0, join, [code, *lists], shape_invariants=open_shape
        )
        return _kept(code)


def _kept(values):
    """Leave out what is missing; rows become one vector."""
    return tf.boolean_mask(values, values != MISSING)
