"""Conditions: named tensors that the denoiser is given, and the text encoders that make them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from keras import ops

from sd_tf.components.guidance import EDITED
from sd_tf.components.spec import Endpoint, Spec
from sd_tf.config import PipelineConfig
from sd_tf.runtime.shapes import Shape, Shapes


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


def conditions_of(config: PipelineConfig, shapes: Shapes, shape: Shape) -> Conditions:
    """Return the conditions that the family's denoiser takes."""
    batch, latent_shape = shape.batch_size, shapes.latent(shape.size)
    length = max(encoder.max_length for encoder in config.text_encoders.values())
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


def text_encoder(
    encoders: Sequence, empty_tokens: np.ndarray, zero_empty_negative: bool, batch_size: int
) -> dict[str, Endpoint]:
    """Declare the endpoints from tokens (N, 77), or (N, encoders, 77), to conditions; N = 1 or B.

    `empty_tokens` (1, 77) or (1, encoders, 77) are the ids of "", which most families take for a
    missing negative prompt; with `zero_empty_negative` its conditions are zeros.
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
        if zero_empty_negative:
            return named(positive, {key: ops.zeros_like(x) for key, x in positive.items()})
        return named(positive, encode(ops.convert_to_tensor(empty_tokens)))

    def with_negative(tokens, negative_tokens):
        return named(encode(tokens), encode(negative_tokens))

    ids = Spec((None, *empty_tokens.shape[1:]), "int32")
    return {
        "serving_default": Endpoint(with_default, {"tokens": ids}),
        "encode": Endpoint(with_negative, {"tokens": ids, "negative_tokens": ids}),
    }
