"""Byte-pair encoding in a TensorFlow graph."""

import tensorflow as tf

from sd_tf.export.tokenizer_tables import Pairs, counted, positions, shifted, take
from sd_tf.tokenizer.tables import Merges

NO_RANK = 2**31 - 1


class BytePairs(tf.Module):
    """Splits words into tokens, all words at once."""

    def __init__(self, byte_ids, merges: Merges):
        super().__init__()
        self.byte_ids = tf.constant(byte_ids)
        self.ranks = Pairs(merges.left, merges.right, range(len(merges.merged)), NO_RANK)
        self.merged = tf.constant([*merges.merged, 0], "int32")

    def __call__(self, words):
        """Return ids and, for each, its word's index: (W,) not empty → (tokens,), (tokens,)."""
        lengths = tf.strings.length(words)
        data = tf.io.decode_raw(tf.strings.reduce_join(words), tf.uint8)  # (bytes,)
        is_last = tf.scatter_nd(
            (tf.cumsum(lengths) - 1)[:, None], tf.ones_like(lengths), [tf.size(data)]
        )
        word = tf.cumsum(is_last, exclusive=True)
        ids = tf.gather(self.byte_ids, tf.cast(data, "int32") + 256 * is_last)
        count = tf.size(words)
        ids, word, _ = tf.while_loop(
            lambda *args: args[-1],
            lambda ids, word, _: self._merge(ids, word, count),
            [ids, word, True],
            shape_invariants=[tf.TensorShape([None]), tf.TensorShape([None]), tf.TensorShape([])],
        )
        return ids, word

    def _merge(self, ids, word, count):
        """Merge in each word all pairs of its lowest rank.

        No merge makes a pair of that rank or a lower one, so that this is one pair at a time.
        """
        left = tf.where(word[:-1] == word[1:], ids[:-1], -1)
        rank = self.ranks(left, ids[1:])  # of each pair
        lowest = tf.math.unsorted_segment_min(rank, word[:-1], count)
        merges = (rank < NO_RANK) & (rank == tf.gather(lowest, word[:-1]))
        # Pairs that overlap are of one symbol, as in "aaa": from the left, every second merges.
        begins = merges & ~shifted(merges, False)
        begin = tf.concat([[0], positions(begins)], 0)
        place = tf.range(tf.size(merges)) - tf.gather(begin, counted(begins))
        merges &= place % 2 == 0
        merged = tf.gather(self.merged, tf.where(merges, rank, 0))
        ids = tf.concat([tf.where(merges, merged, ids[:-1]), ids[-1:]], 0)
        stays = tf.concat([[True], ~merges], 0)
        return *take(stays, ids, word), tf.reduce_any(merges)
