"""Conditions: named tensors that the denoiser is given, and the text encoders that make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from keras import ops

from sd_tf.components.emphasis import emphasized, kept
from sd_tf.components.geometry import Geometry
from sd_tf.components.guidance import EDITED
from sd_tf.components.places import Places
from sd_tf.components.spec import Endpoint, Spec
from sd_tf.config import PipelineConfig
from sd_tf.runtime.adapter_places import ADAPTED
from sd_tf.runtime.capabilities import WEIGHTED
from sd_tf.runtime.shapes import Shape


@dataclass(frozen=True)
class Conditions:
    """The denoiser's conditions, by name.

    Each of `model` goes to the denoiser under its own name, and has a twin for the negative prompt,
    whose name begins with `unconditional_`. Those of `latent` are concatenated to the noisy
    latents, in the checkpoint's order of channels.
    """

    model: dict[str, Spec]
    latent: dict[str, Spec]

    @property
    def names(self) -> list[str]:
        return list(self.model)

    @property
    def beside(self) -> list[str]:
        return list(self.latent)

    @property
    def inputs(self) -> dict[str, Spec]:
        """All inputs, twins included."""
        twins = {}
        for name, spec in self.model.items():
            twins |= {name: spec, f"unconditional_{name}": spec}
        return {**twins, **self.latent}


def conditions_of(config: PipelineConfig, geometry: Geometry, shape: Shape) -> Conditions:
    """Return the conditions that the family's denoiser takes."""
    batch, latent_shape = shape.batch_size, geometry.shapes.latent(shape.size)
    length = max(encoder.max_length for encoder in config.text_encoders.values())
    length *= geometry.prompt_chunks
    model = {"context": Spec((batch, length, config.denoiser.context_dim))}
    if (added := config.denoiser.added) is not None:
        model["pooled"] = Spec((batch, added.pooled_dim))
        model["time_ids"] = Spec((batch, added.num_time_ids))
    latents = Spec((batch, *latent_shape))
    mask = Spec((batch, *latent_shape[:2], 1))
    latent = {
        "none": {},
        "image": {EDITED: latents},
        "mask_and_image": {"mask": mask, "masked_image_latent": latents},
    }
    return Conditions(model, latent[config.latent_inputs])


# (chunks of tokens, scales where there are places for adapters) → contexts, pooled texts
Read = Callable[..., tuple[list, list]]


def reader_of(encoders: Sequence) -> Read:
    """Return a function that runs all encoders on chunks (M, 77), or (M, encoders, 77)."""

    def read(tokens):
        per_encoder = ops.unstack(tokens, axis=1) if len(encoders) > 1 else [tokens]
        outputs = [model(part) for model, part in zip(encoders, per_encoder, strict=True)]
        contexts = [ops.cast(o["context"], "float32") for o in outputs]
        pooled = [ops.cast(o["pooled"], "float32") for o in outputs if "pooled" in o]
        return contexts, pooled[:1]

    return read


def text_encoder(
    read: Read,
    places: Places,
    empty_tokens: np.ndarray,
    zero_empty_negative: bool,
    batch_size: int,
    chunks: int = 1,
) -> dict[str, Endpoint]:
    """Declare the endpoints from tokens to conditions.

    Tokens are (N, 77 · chunks), or (N, encoders, 77 · chunks); N = 1 or the batch. `read`, of
    `reader_of`, reads each chunk by itself. The contexts of all chunks are one context; the pooled
    text is that of the first chunk.

    `empty_tokens` (1, 77) or (1, encoders, 77) are the ids of "", which most families take for a
    missing negative prompt; with `zero_empty_negative` its conditions are zeros. Those are also
    what weights give that are all 0. With places for adapters, each endpoint but the default one
    takes their scales, and `ADAPTED` is the default one that takes them.
    """
    length = empty_tokens.shape[-1]

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
        contexts, pooled = read(divided(tokens), **adapters)
        if weights is not None:
            parts = divided(weights)
            parts = ops.unstack(parts, axis=1) if len(contexts) > 1 else [parts]
            contexts = [emphasized(*both) for both in zip(contexts, parts, strict=True)]
        result = {"context": joined(ops.concatenate(contexts, axis=-1))}
        if pooled:
            first = pooled[0][::chunks]
            result["pooled"] = first if weights is None else kept(first, weights)
        return result

    def to_batch(x):
        return ops.broadcast_to(x, (batch_size, *x.shape[1:]))

    def named(conditional, unconditional):
        outputs = {}
        for key, value in conditional.items():
            outputs[key] = to_batch(value)
            outputs[f"unconditional_{key}"] = to_batch(unconditional[key])
        return outputs

    def with_default(tokens, **adapters):
        positive = encode(tokens, adapters)
        if zero_empty_negative:
            return named(positive, {key: ops.zeros_like(x) for key, x in positive.items()})
        empty = np.concatenate([empty_tokens] * chunks, axis=-1)
        return named(positive, encode(ops.convert_to_tensor(empty), adapters))

    def without_adapters(tokens):
        return with_default(tokens, **places.none())

    def with_negative(tokens, negative_tokens, **adapters):
        return named(encode(tokens, adapters), encode(negative_tokens, adapters))

    def with_weights(tokens, negative_tokens, token_weights, negative_token_weights, **adapters):
        return named(
            encode(tokens, adapters, token_weights),
            encode(negative_tokens, adapters, negative_token_weights),
        )

    shape = (None, *empty_tokens.shape[1:-1], length * chunks)
    ids, weights = Spec(shape, "int32"), Spec(shape)
    both = {"tokens": ids, "negative_tokens": ids, **places.inputs}
    adapted = Endpoint(with_default, {"tokens": ids, **places.inputs})
    return {
        "serving_default": Endpoint(without_adapters, {"tokens": ids}),
        **({ADAPTED: adapted} if places.inputs else {}),
        "encode": Endpoint(with_negative, both),
        WEIGHTED: Endpoint(
            with_weights, {**both, "token_weights": weights, "negative_token_weights": weights}
        ),
    }
