"""Turn text into token ids, the same ids as transformers."""

from sd_tf.tokenizer.clip import ClipTokenizer, TokenizerError

__all__ = ["ClipTokenizer", "TokenizerError"]
