"""Tokens of several vectors, and the chunks of long texts, in a TensorFlow graph.

The ids of a batch's texts are one vector here, with the number of ids of each text.
"""

import tensorflow as tf

from sd_tf.export.tokenizer_tables import MISSING, counted, hash_table
from sd_tf.tokenizer.added import Vectors


class Expansion(tf.Module):
    """Puts all vectors in the place of each token of several, as `tokenizer.added` does."""

    def __init__(self, vectors: Vectors):
        super().__init__()
        counts = [len(ids) for ids in vectors.values()]
        self.number = hash_table([*vectors], range(len(vectors)), MISSING)
        self.counts = tf.constant(counts)
        self.begins = tf.cumsum(self.counts, exclusive=True)
        self.ids = tf.constant([one for ids in vectors.values() for one in ids], "int32")

    def __call__(self, ids, lengths):
        """Return ids, lengths, and each id's place among the vectors of its token: (T',)."""
        number = self.number.lookup(tf.cast(ids, "int64"))
        return tf.cond(
            tf.reduce_any(number >= 0),
            lambda: self._expanded(ids, lengths, number),
            lambda: (ids, lengths, tf.zeros_like(ids)),
        )

    def _expanded(self, ids, lengths, number):
        rows, total = tf.size(lengths), tf.size(ids)
        # A text's last id has none behind it.
        ends = tf.boolean_mask(tf.cumsum(lengths), lengths > 0) - 1
        following = tf.concat([ids[1:], [MISSING]], 0)
        following = tf.tensor_scatter_nd_update(
            following, ends[:, None], tf.fill(tf.shape(ends), MISSING)
        )
        begin = tf.gather(self.begins, tf.maximum(number, 0))
        expands = (number >= 0) & (following != tf.gather(self.ids, begin + 1))
        counts = tf.where(expands, tf.gather(self.counts, tf.maximum(number, 0)), 1)
        # Each new id's token, and its place among the vectors of that token.
        first = tf.cumsum(counts, exclusive=True)
        places = tf.range(tf.reduce_sum(counts))
        is_first = tf.scatter_nd(first[:, None], tf.ones_like(first), tf.shape(places)) > 0
        token = counted(is_first) - 1
        vector = places - tf.gather(first, token)
        found = tf.gather(self.ids, tf.gather(begin, token) + vector)
        ids = tf.where(tf.gather(expands, token), found, tf.gather(ids, token))
        text = tf.searchsorted(tf.cumsum(lengths), tf.range(total), side="right")
        return ids, tf.math.unsorted_segment_sum(counts, text, rows), vector


def divided(ids, lengths, room: int, chunks: int, padding: int, vector=None):
    """Divide each text into chunks of at most `room` ids; what does not fit is left out.

    Args:
        vector: each id's place among the vectors of its token. Those of one token move on into the
            next chunk together, if there is one and a chunk holds them.

    Returns:
        The chunks' ids and padding, (N · chunks, room), and their numbers of ids, (N · chunks,).
    """

    def padded(values, default):
        ragged = tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
        return ragged.to_tensor(default, shape=[None, room * chunks])

    rows, shape = padded(ids, padding), [tf.size(lengths) * chunks, room]
    if vector is None or chunks == 1:
        lengths = tf.reshape(lengths[:, None] - room * tf.range(chunks), [-1])
        return tf.reshape(rows, shape), tf.clip_by_value(lengths, 0, room)
    vector = padded(vector, 0)
    begin, found, counts = tf.zeros_like(lengths), [], []
    for number in range(chunks):
        end = begin + room
        if number < chunks - 1:
            first = end - tf.gather(vector, end, batch_dims=1)
            end = tf.where(first > begin, first, end)
        place = tf.range(room)
        count = tf.clip_by_value(lengths, begin, end) - begin
        chunk = tf.gather(rows, begin[:, None] + place, batch_dims=1)
        found.append(tf.where(place < count[:, None], chunk, padding))
        counts.append(count)
        begin = end
    return tf.reshape(tf.stack(found, 1), shape), tf.reshape(tf.stack(counts, 1), [-1])
