"""A tokenizer for random T5 encoders, as T5's own vocabulary does not come with the code."""

import math

from sd_tf.tokenizer.clip import WORD_END, ClipTokenizer
from sd_tf.tokenizer.spiece import Vocabulary
from sd_tf.tokenizer.t5 import EXTRA_IDS, SPACE, SPECIAL, T5Tokenizer, unigram


def words_tokenizer(vocab_size: int, max_length: int) -> T5Tokenizer:
    """Make a tokenizer of T5's kind from CLIP's words, the most frequent first.

    It divides texts as T5's does, into words and parts of words; the ids are not T5's.
    """
    clip = ClipTokenizer.clip().backend
    tokens = sorted(clip.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    ends = [token.removesuffix(WORD_END) for token, _ in tokens if token.endswith(WORD_END)]
    letters = [SPACE, *(token for token, _ in tokens if len(token) == 1)]
    room = vocab_size - len(SPECIAL) - EXTRA_IDS - len(letters)
    pieces = [*[SPACE + word for word in ends if word.isalnum()][:room], *letters]
    scored = [(piece, -math.log(rank)) for rank, piece in enumerate(pieces, 2)]
    special = [(token, 0.0) for token in SPECIAL]
    backend = unigram(Vocabulary([*special, *scored], charsmap=b""))
    return T5Tokenizer(backend, max_length)
