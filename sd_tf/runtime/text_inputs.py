"""The text encoders' inputs for the prompts of a batch."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from sd_tf.config import T5EncoderConfig, TextEncoderConfig
from sd_tf.runtime.manifest import Manifest
from sd_tf.tokenizer.open import Tokenizer
from sd_tf.tokenizer.prompts import tokenize
from sd_tf.tokenizer.t5 import T5Tokenizer


def text_inputs(
    manifest: Manifest,
    tokenizers: Sequence[Tokenizer],
    prompts: Sequence[str],
    negative_prompts: Sequence[str] | None = None,
    weighted: bool = False,
) -> dict[str, np.ndarray]:
    """Tokenize prompts for an export's text encoders; log a warning for what is cut off.

    The ids of all CLIP encoders are one input, (N, 77 · chunks) or (N, encoders, 77 · chunks), and
    those of T5 another, (N, L). Negative prompts have inputs of their own.

    Args:
        tokenizers: one for each text encoder.
        negative_prompts: None: what the checkpoint takes for a missing negative prompt.
        weighted: read weights in the prompts, and return them, too.
    """
    encoded = partial(ids_and_weights, tokenizers, chunks=manifest.prompt_chunks, weighted=weighted)
    inputs, weights = encoded(prompts)
    negative, negative_weights = {}, None
    if negative_prompts is not None:
        negative, negative_weights = encoded(negative_prompts)
    elif weighted:
        negative, negative_weights = encoded([""] * len(prompts))
        if manifest.zero_empty_negative:
            negative_weights = np.zeros_like(negative_weights)
    inputs |= {f"negative_{name}": ids for name, ids in negative.items()}
    if weighted:
        inputs |= {"token_weights": weights, "negative_token_weights": negative_weights}
    return inputs


def ids_and_weights(
    tokenizers: Sequence[Tokenizer], texts: Sequence[str], chunks: int = 1, weighted: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return texts' ids by the text encoders' inputs, and if `weighted` the weights of CLIP's."""
    clips = [one for one in tokenizers if not isinstance(one, T5Tokenizer)]
    t5s = [one for one in tokenizers if isinstance(one, T5Tokenizer)]
    if weighted and t5s:
        raise ValueError("Weights are for pipelines whose text encoders are all CLIP.")
    found = [tokenize(one, texts, chunks, weighted) for one in clips]
    ids = {TextEncoderConfig.tokens: [each for each, _ in found]}
    ids[T5EncoderConfig.tokens] = [one(texts) for one in t5s]
    joined = {name: _joined(parts) for name, parts in ids.items() if parts}
    return joined, _joined([weights for _, weights in found]) if weighted else None


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Stack the arrays of several text encoders: (N, L), or (N, encoders, L)."""
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
