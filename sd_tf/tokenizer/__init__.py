"""Turn text into token ids, the same ids as transformers."""

from sd_tf.tokenizer.clip import ClipTokenizer, TokenizerError
from sd_tf.tokenizer.open import Tokenizer, open_tokenizer
from sd_tf.tokenizer.t5 import T5Tokenizer

__all__ = ["ClipTokenizer", "T5Tokenizer", "Tokenizer", "TokenizerError", "open_tokenizer"]
