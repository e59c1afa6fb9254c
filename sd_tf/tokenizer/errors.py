"""The error of tokenizers."""

from sd_tf.errors import SdTfError


class TokenizerError(SdTfError):
    """Tokenizer files that are missing, or that do not describe a CLIP or T5 tokenizer."""
