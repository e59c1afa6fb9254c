"""CLIP's tokenizer as core TensorFlow operations, to be a part of a SavedModel.

Any program that runs TensorFlow's own graphs can then take texts; TensorFlow Serving needs neither
our code nor `tokenizers`. Ids equal those of `ClipTokenizer` and of transformers' `CLIPTokenizer`,
whichever Unicode their library knows, except for the following:

- Bytes that are not UTF-8 are read as U+FFFD, one for each that Python's `errors="replace"` would
  give. Those two take Python's texts, which cannot hold such bytes.
- A text of more than `MOST_CHARACTERS` characters is refused, because the time for one long word
  grows faster than the word.
- Nothing is logged when the end of a text is cut off.
- `tables_of` refuses tokenizers with other rules than CLIP's, and added tokens that take the white
  space around them, contain some, or match whole words only. Those are rules beyond its tables.
- transformers 4 has a second, slow class, which cleans texts in its own way. Its ids differ from
  those of the fast class, which these are.

The texts of a batch are one vector of characters, in which each text ends with a character of its
own, TEXT_END. Special tokens are replaced by such characters, too. Steps that few texts need, such
as composing accents, are in branches, and take no time otherwise.
"""

import tensorflow as tf

from sd_tf.export.tokenizer_bpe import BytePairs
from sd_tf.export.tokenizer_chunks import Expansion, divided
from sd_tf.export.tokenizer_nfc import Normalizer
from sd_tf.export.tokenizer_tables import (
    MISSING,
    Finder,
    Pages,
    counted,
    hash_table,
    leftmost,
    positions,
    shifted,
    take,
)
from sd_tf.runtime.parameters import MOST_CHARACTERS
from sd_tf.tokenizer.characters import NUMBER, SPACE
from sd_tf.tokenizer.clip import TokenizerError
from sd_tf.tokenizer.tables import (
    CLASS_BITS,
    FIRST_TOKEN,
    IRREGULAR,
    LOWER_SHIFT,
    NORMALIZED,
    PHRASE,
    RAW,
    STARTS,
    TEXT_END,
    WHOLE,
    TokenizerTables,
)


class GraphTokenizer(tf.Module):
    """Texts → int32 ids of a fixed length: start token, text, end token, padding.

    Long texts fill several chunks, each with its own start, end and padding.
    """

    def __init__(self, tables: TokenizerTables, max_length: int, chunks: int = 1):
        super().__init__()
        if max_length < 2:
            raise TokenizerError(
                f"`max_length` must be at least 2, for the start and the end token. "
                f"Received: {max_length}"
            )
        self.max_length, self.chunks = max_length, chunks
        self.start_id, self.end_id, self.pad_id = tables.start_id, tables.end_id, tables.pad_id
        self.finds_normalized = tables.finds_normalized
        self.properties = Pages(tables.properties)
        self.finder = Finder(tables.trie)
        self.normalizer = Normalizer(
            tables.composition, tables.grown, FIRST_TOKEN + len(tables.token_ids)
        )
        self.token_ids = tf.constant(tables.token_ids)
        self.words = hash_table([*tables.words, ""], [*tables.word_ids, MISSING], MISSING)
        self.byte_pairs = BytePairs(tables.byte_ids, tables.merges)
        self.expansion = Expansion(tables.vectors) if tables.vectors else None
        # Traced once, however many signatures use it.
        spec = tf.TensorSpec([None], "string", "texts")
        self.tokenize = tf.function(self._tokenize, autograph=False).get_concrete_function(spec)

    def __call__(self, texts):
        """Encode texts: string (N,) → int32 (N, max_length · chunks)."""
        return self.tokenize(texts)

    def _tokenize(self, texts):
        with tf.device("CPU"):  # many small operations on few numbers
            code, properties = self._find_tokens(self._decode(texts), RAW)
            code, properties = self._normalize(code, properties)
            words, row = self._split(code, properties)
            ids, lengths = self._encode(words, row, tf.size(texts))
            room = self.max_length - 2
            if self.expansion is None:
                chunks = divided(ids, lengths, room, self.chunks, self.pad_id)
            else:
                ids, lengths, vector = self.expansion(ids, lengths)
                chunks = divided(ids, lengths, room, self.chunks, self.pad_id, vector)
            return self._framed(*chunks)

    def _decode(self, texts):
        """Join the characters of all texts, each text ended by TEXT_END: (N,) → (T,)."""
        decoded = tf.strings.unicode_decode(texts + " ", "UTF-8")  # the space makes room for it
        ends = tf.cast(decoded.row_splits[1:], "int32") - 1
        lengths = ends - tf.cast(decoded.row_splits[:-1], "int32")
        rule = f"A text must have at most {MOST_CHARACTERS} characters. Received one with"
        check = tf.debugging.Assert(
            tf.reduce_all(lengths <= MOST_CHARACTERS), [rule, tf.reduce_max(lengths)]
        )
        with tf.control_dependencies([check]):
            ending = tf.fill(tf.shape(ends), TEXT_END)
        return tf.tensor_scatter_nd_update(decoded.flat_values, ends[:, None], ending)

    def _find_tokens(self, code, root):
        """Put a token's number and spaces in place of its text; return the properties, too."""

        def replace():
            found = self.finder.longest(code, positions(begins), root)
            start, length, value = take(leftmost(*found[:2]), *found)
            edge = tf.concat([start, start + length], 0)
            change = tf.concat([tf.ones_like(start), -tf.ones_like(start)], 0)
            is_covered = tf.cumsum(tf.scatter_nd(edge[:, None], change, tf.shape(code))) > 0
            spaced = tf.where(is_covered, ord(" "), code)
            replaced = tf.tensor_scatter_nd_update(spaced, start[:, None], FIRST_TOKEN + value)
            return replaced, self.properties(replaced)

        properties = self.properties(code)
        begins = properties & STARTS[root] != 0
        return tf.cond(tf.reduce_any(begins), replace, lambda: (code, properties))

    def _normalize(self, code, properties):
        """Compose characters (NFC), turn them into lower case, and find the remaining tokens."""

        def compose():
            composed = self.normalizer(code)
            return composed, self.properties(composed)

        code, properties = tf.cond(
            tf.reduce_any(properties & IRREGULAR != 0), compose, lambda: (code, properties)
        )
        code += tf.bitwise.right_shift(properties, LOWER_SHIFT)
        return self._find_tokens(code, NORMALIZED) if self.finds_normalized else (code, properties)

    def _split(self, code, properties):
        """Split texts into words → their characters, ragged (W, …), and their rows (W,)."""
        kind = properties & CLASS_BITS
        is_inside = kind != SPACE
        begins = is_inside & ((kind != shifted(kind, SPACE)) | (kind >= NUMBER))
        may_phrase = properties & STARTS[PHRASE] != 0
        begins = tf.cond(
            tf.reduce_any(may_phrase),
            lambda: self._split_phrases(code, begins, is_inside, may_phrase),
            lambda: begins,
        )
        row = tf.gather(counted(code == TEXT_END), positions(begins))
        code, begins = take(is_inside, code, begins)
        splits = tf.concat([positions(begins), [tf.size(code)]], 0)
        return tf.RaggedTensor.from_row_splits(code, splits, validate=False), row

    def _split_phrases(self, code, begins, is_inside, may_phrase):
        """Correct the beginnings of words in and behind contractions and tokens' names.

        A phrase counts where a word begins, or else where another phrase ends that counts.
        """
        start, length, value = self.finder.longest(code, positions(may_phrase), PHRASE)
        is_first = shifted(start + length, MISSING) != start  # of a chain of phrases
        at_word = tf.gather(begins, start)
        before = tf.boolean_mask(counted(at_word) - tf.cast(at_word, "int32"), is_first)
        before_chain = tf.gather(before, counted(is_first) - 1)
        start, length, value = take(counted(at_word) > before_chain, start, length, value)
        # No word begins inside a contraction, and one may begin behind every phrase.
        whole, whole_length = take(value == WHOLE, start, length)
        inner = tf.concat([whole + 1, tf.boolean_mask(whole + 2, whole_length == 3)], 0)
        begins = tf.tensor_scatter_nd_update(begins, inner[:, None], tf.zeros_like(inner, "bool"))
        behind = start + length
        return tf.tensor_scatter_nd_update(begins, behind[:, None], tf.gather(is_inside, behind))

    def _encode(self, words, row, count):
        """Encode words, ragged (W, …) → ids (tokens,), and how many each of `count` rows has."""
        first = tf.gather(words.flat_values, words.row_splits[:-1])
        strings = tf.strings.unicode_encode(words, "UTF-8")
        token = tf.gather(self.token_ids, tf.maximum(first - FIRST_TOKEN, 0))
        ids = tf.where(first < FIRST_TOKEN, self.words.lookup(strings), token)
        # Every word has an id at least, so that words further on than the last id do not matter.
        lengths = tf.math.unsorted_segment_sum(tf.ones_like(row), row, count)
        place = tf.range(tf.size(row)) - tf.gather(tf.cumsum(lengths, exclusive=True), row)
        is_split = (ids == MISSING) & (place < self.chunks * (self.max_length - 2))

        def split():
            split_ids, word = self.byte_pairs(tf.boolean_mask(strings, is_split))
            split_counts = tf.math.bincount(word)
            counts = tf.tensor_scatter_nd_update(
                tf.ones_like(ids), positions(is_split)[:, None], split_counts
            )
            # The ids of whole words go where they belong, the others fill the gaps in turn.
            is_whole, at = ~is_split, tf.cumsum(counts, exclusive=True)
            whole, whole_at = take(is_whole, tf.maximum(ids, 0), at)
            merged = tf.fill([tf.reduce_sum(counts)], MISSING)
            merged = tf.tensor_scatter_nd_update(merged, whole_at[:, None], whole)
            gaps = positions(merged == MISSING)
            merged = tf.tensor_scatter_nd_update(merged, gaps[:, None], split_ids)
            return merged, tf.math.unsorted_segment_sum(counts, row, count)

        return tf.cond(tf.reduce_any(is_split), split, lambda: (ids, lengths))

    def _framed(self, rows, lengths):
        """Put each chunk's ids between start and end token → (N, max_length · chunks).

        Args:
            rows: the chunks' ids and padding, (N · chunks, max_length - 2).
            lengths: the number of each chunk's ids, (N · chunks,).
        """
        start = tf.fill([tf.size(lengths), 1], self.start_id)
        rows = tf.concat([start, rows, tf.fill(tf.shape(start), self.pad_id)], 1)
        rows = tf.where(tf.range(self.max_length) == lengths[:, None] + 1, self.end_id, rows)
        return tf.reshape(rows, [-1, self.max_length * self.chunks])
