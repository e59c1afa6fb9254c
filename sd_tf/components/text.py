"""Token ids → what the diffusion model is conditioned on."""

import numpy as np
from keras import ops

from sd_tf.components import Endpoint, Spec
from sd_tf.config import PipelineConfig
from sd_tf.weights import Checkpoint


def text_encoder(
    encoders, empty_tokens, config: PipelineConfig, batch_size: int
) -> dict[str, Endpoint]:
    """tokens (N, 77) or SDXL's (N, 2, 77), N = 1 or B → both contexts (B, 77, D).

    `empty_tokens` (1, 77) or (1, 2, 77): the ids of "", which most families take for a missing
    negative prompt.
    """
    several = len(encoders) > 1

    def encode(tokens):
        per_encoder = ops.unstack(tokens, axis=1) if several else [tokens]
        outputs = [model(part) for model, part in zip(encoders, per_encoder, strict=True)]
        result = {"context": ops.concatenate([o["context"] for o in outputs], axis=-1)}
        pooled = [o["pooled"] for o in outputs if "pooled" in o]
        if pooled:
            result["pooled"] = pooled[0]
        return {key: ops.cast(value, "float32") for key, value in result.items()}

    def to_batch(x):
        return ops.broadcast_to(x, (batch_size, *x.shape[1:]))

    def named(conditional, unconditional):
        outputs = {}
        for key, value in conditional.items():
            outputs[key] = to_batch(value)
            outputs[f"unconditional_{key}"] = to_batch(unconditional[key])
        return outputs

    def with_default(tokens):
        positive = encode(tokens)
        if config.zero_empty_negative:
            return named(positive, {key: ops.zeros_like(x) for key, x in positive.items()})
        return named(positive, encode(ops.convert_to_tensor(empty_tokens)))

    def with_negative(tokens, negative_tokens):
        return named(encode(tokens), encode(negative_tokens))

    ids = Spec((None, *empty_tokens.shape[1:]), "int32")
    return {
        "serving_default": Endpoint(with_default, {"tokens": ids}),
        "encode": Endpoint(with_negative, {"tokens": ids, "negative_tokens": ids}),
    }


def empty_tokens_of(checkpoint: Checkpoint) -> np.ndarray:
    """The ids of "" for one or two text encoders: (1, 77) or (1, 2, 77)."""
    ids = [checkpoint.tokenizer(name)("") for name in checkpoint.config.text_encoders]
    return ids[0] if len(ids) == 1 else np.stack(ids, axis=1)
