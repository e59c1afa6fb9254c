"""Endpoints of the text encoders, as one component: from tokens to the denoiser's conditions."""

from collections.abc import Callable, Mapping

import numpy as np
from keras import ops

from sd_tf.components.conditions import Texts, conditioner_of
from sd_tf.components.emphasis import emphasized, kept
from sd_tf.components.geometry import Geometry, takes_weights
from sd_tf.components.places import Places
from sd_tf.components.spec import Endpoint, Spec
from sd_tf.config import PipelineConfig, T5EncoderConfig, TextEncoderConfig
from sd_tf.runtime.adapter_places import ADAPTED
from sd_tf.runtime.capabilities import WEIGHTED

# (tokens by input, scales where there are places for adapters) → contexts of CLIP and of T5, pooled
Read = Callable[..., tuple[list, list, list]]
CLIP_TOKENS, T5_TOKENS = TextEncoderConfig.tokens, T5EncoderConfig.tokens
NEGATIVE = "negative_"


def reader_of(encoders: Mapping[str, Callable], config: PipelineConfig) -> Read:
    """Return a function that runs all encoders.

    CLIP's tokens are chunks (M, 77), or (M, encoders, 77); T5's are (N, L).
    """

    def read(**tokens):
        clip = tokens.get(CLIP_TOKENS)
        many = len(config.clip_encoders) > 1
        per_encoder = dict.fromkeys(config.t5_encoders, tokens.get(T5_TOKENS))
        rows = ops.unstack(clip, axis=1) if many else [clip]
        per_encoder |= zip(config.clip_encoders, rows, strict=True)
        outputs = {name: encoders[name](per_encoder[name]) for name in config.text_encoders}

        def given(names, key):
            return [ops.cast(outputs[n][key], "float32") for n in names if key in outputs[n]]

        return (
            given(config.clip_encoders, "context"),
            given(config.t5_encoders, "context"),
            given(config.clip_encoders, "pooled"),
        )

    return read


def text_encoder(
    read: Read,
    places: Places,
    empty_tokens: Mapping[str, np.ndarray],
    config: PipelineConfig,
    geometry: Geometry,
    batch_size: int,
) -> dict[str, Endpoint]:
    """Declare the endpoints from tokens to conditions.

    CLIP's tokens are (N, 77 · chunks), or (N, encoders, 77 · chunks), T5's are (N, L); N = 1 or the
    batch. `read`, of `reader_of`, reads each chunk by itself. The contexts of all chunks are one
    context; the pooled text is that of the first chunk.

    `empty_tokens` are the ids of "", by input, which most families take for a missing negative
    prompt; with the configuration's `zero_empty_negative` its conditions are zeros. Those are also
    what weights give that are all 0. With places for adapters, each endpoint but the default one
    takes their scales, and `ADAPTED` is the default one that takes them.
    """
    chunks, conditioner = geometry.prompt_chunks, conditioner_of(config)
    names = list(empty_tokens)
    length = empty_tokens[CLIP_TOKENS].shape[-1]

    def divided(x):  # (N, …, 77 · chunks) → (N · chunks, …, 77)
        if chunks == 1:
            return x
        between = x.shape[1:-1]
        x = ops.reshape(x, (-1, *between, chunks, length))
        return ops.reshape(ops.moveaxis(x, -2, 1), (-1, *between, length))

    def joined(context):  # (N · chunks, 77, D) → (N, 77 · chunks, D)
        if chunks == 1:
            return context
        return ops.reshape(context, (-1, chunks * length, context.shape[-1]))

    def encode(tokens, adapters, weights=None):
        parts = {**tokens, CLIP_TOKENS: divided(tokens[CLIP_TOKENS])}
        contexts, t5, pooled = read(**parts, **adapters)
        if weights is not None:
            parts = divided(weights)
            parts = ops.unstack(parts, axis=1) if len(contexts) > 1 else [parts]
            contexts = [emphasized(*both) for both in zip(contexts, parts, strict=True)]
        pooled = [one[::chunks] for one in pooled]
        pooled = pooled if weights is None else [kept(one, weights) for one in pooled]
        texts = Texts([joined(context) for context in contexts], t5, pooled)
        return conditioner.conditions(config, texts)

    def to_batch(x):
        return ops.broadcast_to(x, (batch_size, *x.shape[1:]))

    def named(conditional, unconditional):
        outputs = {}
        for key, value in conditional.items():
            outputs[key] = to_batch(value)
            outputs[f"unconditional_{key}"] = to_batch(unconditional[key])
        return outputs

    def taken(inputs, prefix=""):
        return {name: inputs.pop(prefix + name) for name in names}

    def with_default(**inputs):
        positive = encode(taken(inputs), inputs)
        if config.zero_empty_negative:
            return named(positive, {key: ops.zeros_like(x) for key, x in positive.items()})
        if not conditioner.encodes_missing:
            return named(positive, positive)
        empty = {
            **empty_tokens,
            CLIP_TOKENS: np.concatenate([empty_tokens[CLIP_TOKENS]] * chunks, -1),
        }
        empty = {name: ops.convert_to_tensor(ids) for name, ids in empty.items()}
        return named(positive, encode(empty, inputs))

    def without_adapters(**inputs):
        return with_default(**inputs, **places.none())

    def with_negative(**inputs):
        positive, negative = taken(inputs), taken(inputs, NEGATIVE)
        return named(encode(positive, inputs), encode(negative, inputs))

    def with_weights(token_weights, negative_token_weights, **inputs):
        positive, negative = taken(inputs), taken(inputs, NEGATIVE)
        return named(
            encode(positive, inputs, token_weights),
            encode(negative, inputs, negative_token_weights),
        )

    shapes = {name: (None, *ids.shape[1:]) for name, ids in empty_tokens.items()}
    shapes[CLIP_TOKENS] = (*shapes[CLIP_TOKENS][:-1], length * chunks)
    ids = {name: Spec(shape, "int32") for name, shape in shapes.items()}
    negative = {NEGATIVE + name: spec for name, spec in ids.items()}
    both = {**ids, **negative, **places.inputs}
    endpoints = {"serving_default": Endpoint(without_adapters, ids)}
    if places.inputs:
        endpoints[ADAPTED] = Endpoint(with_default, {**ids, **places.inputs})
    endpoints["encode"] = Endpoint(with_negative, both)
    if takes_weights(config):
        weights = Spec(shapes[CLIP_TOKENS])
        more = {"token_weights": weights, "negative_token_weights": weights}
        endpoints[WEIGHTED] = Endpoint(with_weights, {**both, **more})
    return endpoints
