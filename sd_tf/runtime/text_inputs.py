"""The text encoder's inputs for the prompts of a batch."""

from collections.abc import Sequence

import numpy as np

from sd_tf.runtime.manifest import Manifest
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.prompts import tokenize


def text_inputs(
    manifest: Manifest,
    tokenizers: Sequence[ClipTokenizer],
    prompts: Sequence[str],
    negative_prompts: Sequence[str] | None = None,
    weighted: bool = False,
) -> dict[str, np.ndarray]:
    """Tokenize prompts for an export's text encoders; log a warning for what is cut off.

    Args:
        tokenizers: one for each text encoder.
        negative_prompts: None: what the checkpoint takes for a missing negative prompt.
        weighted: read weights in the prompts, and return them, too.
    """

    def encoded(texts):
        found = [tokenize(one, texts, manifest.prompt_chunks, weighted) for one in tokenizers]
        return [
            parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
            for parts in zip(*found, strict=True)
        ]

    tokens, weights = encoded(prompts)
    inputs = {"tokens": tokens}
    if negative_prompts is not None:
        inputs["negative_tokens"], negative_weights = encoded(negative_prompts)
    elif weighted:
        inputs["negative_tokens"], negative_weights = encoded([""] * len(prompts))
        if manifest.zero_empty_negative:
            negative_weights = np.zeros_like(negative_weights)
    if weighted:
        inputs |= {"token_weights": weights, "negative_token_weights": negative_weights}
    return inputs
