"""Conditions: named tensors that the denoiser is given, and how they are made of texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras import ops

from sd_tf.components.geometry import Geometry
from sd_tf.components.guidance import EDITED
from sd_tf.components.spec import Spec
from sd_tf.config import PipelineConfig
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


@dataclass(frozen=True)
class Texts:
    """What the text encoders give, each list in the encoders' order."""

    clip: Sequence  # contexts (N, 77 · chunks, D)
    t5: Sequence  # contexts (N, L, D)
    pooled: Sequence  # (N, P)


@dataclass(frozen=True)
class Conditioner:
    """A way to make a denoiser's conditions of texts."""

    length: Callable[[PipelineConfig, int], int]  # (…, chunks of a prompt) → tokens of the context
    conditions: Callable[[PipelineConfig, Texts], dict]
    encodes_missing: bool = True  # a negative prompt that is missing is encoded as ""
    # (…, chunks) → how many equal tokens each token of the context stands for; None: one
    counts: Callable[[PipelineConfig, int], tuple[int, ...] | None] = lambda config, chunks: None


def _of_clip(config: PipelineConfig, texts: Texts) -> dict:
    """Put the contexts side by side; the one text that is pooled is a condition, too."""
    context = {"context": ops.concatenate(texts.clip, axis=-1)}
    return context if config.denoiser.pooled_dim is None else {**context, "pooled": texts.pooled[0]}


def _of_sd3(config: PipelineConfig, texts: Texts) -> dict:
    """Let T5's tokens follow CLIP's, which are filled up with zeros to their width.

    In place of T5's, one token of zeros stands for all.
    """
    clip = ops.concatenate(texts.clip, axis=-1)
    width = config.denoiser.context_dim
    parts = [ops.pad(clip, ((0, 0), (0, 0), (0, width - clip.shape[-1]))), *texts.t5]
    if config.zero_tokens:
        parts.append(ops.zeros_like(parts[0][:, :1]))
    return {
        "context": ops.concatenate(parts, axis=1),
        "pooled": ops.concatenate(texts.pooled, axis=-1),
    }


def _of_flux(config: PipelineConfig, texts: Texts) -> dict:
    """Take T5's context, and CLIP's pooled text."""
    return {"context": texts.t5[0], "pooled": texts.pooled[0]}


def _clip_length(config: PipelineConfig, chunks: int) -> int:
    return chunks * max(encoder.max_length for encoder in config.clip_encoders.values())


def _sd3_length(config: PipelineConfig, chunks: int) -> int:
    return _clip_length(config, chunks) + _t5_length(config) + (config.zero_tokens > 0)


def _sd3_counts(config: PipelineConfig, chunks: int) -> tuple[int, ...] | None:
    if not config.zero_tokens:
        return None
    return (*[1] * _clip_length(config, chunks), config.zero_tokens)


def _t5_length(config: PipelineConfig) -> int:
    return sum(encoder.max_length for encoder in config.t5_encoders.values())


CONDITIONERS = {
    "clip": Conditioner(_clip_length, _of_clip),
    "sd3": Conditioner(_sd3_length, _of_sd3, counts=_sd3_counts),
    "flux": Conditioner(lambda config, chunks: _t5_length(config), _of_flux, encodes_missing=False),
}


def conditioner_of(config: PipelineConfig) -> Conditioner:
    return CONDITIONERS[config.denoiser.conditioner]


def conditions_of(config: PipelineConfig, geometry: Geometry, shape: Shape) -> Conditions:
    """Return the conditions that the family's denoiser takes."""
    batch, latent_shape = shape.batch_size, geometry.shapes.latent(shape.size)
    denoiser = config.denoiser
    length = conditioner_of(config).length(config, geometry.prompt_chunks)
    model = {"context": Spec((batch, length, denoiser.context_dim))}
    if denoiser.pooled_dim is not None:
        model["pooled"] = Spec((batch, denoiser.pooled_dim))
    if denoiser.num_time_ids:
        model["time_ids"] = Spec((batch, denoiser.num_time_ids))
    latents = Spec((batch, *latent_shape))
    mask = Spec((batch, *latent_shape[:2], 1))
    latent = {
        "none": {},
        "image": {EDITED: latents},
        "mask_and_image": {"mask": mask, "masked_image_latent": latents},
    }
    return Conditions(model, latent[config.latent_inputs])
