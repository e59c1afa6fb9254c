"""Guidance: several predictions of one step, combined into one (in float32).

Those that every step needs are one batch. Others are made only in the steps that ask for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from keras import ops

from sd_tf.components.spec import Spec
from sd_tf.config import PipelineConfig
from sd_tf.runtime.runner import NO_FURTHER_GUIDANCE
from sd_tf.sampling.loop import guide, guide_edit

SCALE, IMAGE_SCALE = "unconditional_guidance_scale", "image_guidance_scale"
# Flux's guidance by a negative prompt, and SD3.5's by a prediction without some blocks.
TRUE_SCALE, SKIP_SCALE = "true_guidance_scale", "skip_layer_guidance_scale"
# Skip-layer guidance is for the model calls i of N with N · first < i < N · last, in percent.
SKIP_FIRST, SKIP_LAST = 1, 20
# The picture that an edit starts from, as latents beside the noisy ones.
EDITED = "conditioning_latent"


@dataclass(frozen=True)
class Part:
    """One part of the denoiser's batch: which prompt and picture it is conditioned on."""

    prompt: bool  # False: conditioned on the negative prompt
    picture: bool = True  # False: zeros replace the picture to edit

    @property
    def prefix(self) -> str:
        """What the names of its conditions begin with."""
        return "" if self.prompt else "unconditional_"


@dataclass(frozen=True)
class Extra:
    """A further prediction, made only in the steps in which `is_wanted`.

    The denoiser is conditioned as the part says; with `skips`, some of its blocks are left out.
    """

    scale: str  # the input that asks for it
    part: Part
    is_wanted: Callable  # (call, calls, scale, *the guidance's scales) → whether to make it
    combine: Callable  # (output so far, the prompt's prediction, this prediction, scale) → output
    skips: bool = False


@dataclass(frozen=True)
class Guidance:
    """A way to guide: the scales it takes as inputs, its parts, and how their outputs combine.

    The last part whose prompt is not the negative one is the prompt's own prediction.
    """

    scales: tuple[str, ...]
    parts: tuple[Part, ...]
    combine: Callable[..., object]  # (outputs of the parts, *scales) → the guided output
    extra: Extra | None = None

    @property
    def inputs(self) -> dict[str, Spec]:
        return dict.fromkeys(self.scales, Spec())

    @property
    def further_inputs(self) -> dict[str, Spec]:
        """The scale of the further prediction; the default endpoint does not take it."""
        return {} if self.extra is None else {self.extra.scale: Spec()}

    def without_extra(self) -> dict:
        """Return the value of `further_inputs` that asks for nothing."""
        names = [] if self.extra is None else [self.extra.scale]
        return {name: ops.convert_to_tensor(NO_FURTHER_GUIDANCE[name]) for name in names}

    def conditions(self, given: Mapping, names: Sequence[str]) -> dict:
        """Concatenate, for every part, the named conditions or their `unconditional_` twins."""
        return {n: _joined([given[part.prefix + n] for part in self.parts]) for n in names}

    def beside(self, given: Mapping, names: Sequence[str]) -> list:
        """Repeat, for every part, the conditions that are concatenated to the latents."""

        def of_part(part, name):
            is_left_out = name == EDITED and not part.picture
            return ops.zeros_like(given[name]) if is_left_out else given[name]

        return [_joined([of_part(part, name) for part in self.parts]) for name in names]

    def expanded(self, x, beside: Sequence):
        """Return the sample for all parts, with what stands beside it: the denoiser's input."""
        return ops.concatenate([_joined([x] * len(self.parts)), *beside], axis=-1)

    def guided(self, x, output, scales: Sequence, more=None):
        """Combine the denoiser's outputs for all parts of the sample x.

        Args:
            more: (x, output so far, the prompt's own prediction) → output; the further prediction.
        """
        output = ops.cast(output, "float32")
        outputs = ops.split(output, len(self.parts)) if len(self.parts) > 1 else [output]
        output = self.combine(outputs, *scales)
        if more is None:
            return output
        own = [one for one, part in zip(outputs, self.parts, strict=True) if part.prompt][-1]
        return more(x, output, own)


def guidance_of(kind: str, config: PipelineConfig, rescale: float) -> Guidance:
    """Choose the guidance of an export: `kind` is classifier_free or none."""
    edits = config.latent_inputs == "image"
    scales = (SCALE, IMAGE_SCALE) if edits else (SCALE,)
    alone = Guidance(scales, (Part(prompt=True),), lambda outputs, *scales: outputs[0])
    if kind == "none":
        return alone
    return _KINDS[config.denoiser.conditioner](config, alone, rescale)


def _for_clip(config: PipelineConfig, alone: Guidance, rescale: float) -> Guidance:
    if config.latent_inputs == "image":
        parts = (Part(prompt=True), Part(prompt=False), Part(prompt=False, picture=False))
        return Guidance(alone.scales, parts, lambda outputs, *scales: guide_edit(*outputs, *scales))
    parts = (Part(prompt=False), Part(prompt=True))
    return Guidance(alone.scales, parts, lambda outputs, scale: guide(*outputs, scale, rescale))


def _for_sd3(config: PipelineConfig, alone: Guidance, rescale: float) -> Guidance:
    """Guide as others do, but not below a scale of 1, which is the prompt's own prediction."""

    def skip_is_wanted(call, calls, scale, guidance):
        begins = 100 * call > SKIP_FIRST * calls
        ends = 100 * call < SKIP_LAST * calls
        asked = ops.logical_and(ops.not_equal(scale, 0.0), guidance > 1.0)
        return ops.logical_and(ops.logical_and(begins, ends), asked)

    skip = Extra(
        SKIP_SCALE,
        Part(prompt=True),
        skip_is_wanted,
        lambda output, own, without, scale: output + scale * (own - without),
        skips=True,
    )
    return Guidance(
        alone.scales,
        (Part(prompt=False), Part(prompt=True)),
        lambda outputs, scale: guide(*outputs, ops.maximum(scale, 1.0)),
        skip if config.denoiser.skip_layers else None,
    )


def _for_flux(config: PipelineConfig, alone: Guidance, rescale: float) -> Guidance:
    """Guide by a negative prompt only where its scale asks for it: models are told a scale."""
    negative = Extra(
        TRUE_SCALE,
        Part(prompt=False),
        lambda call, calls, scale, guidance: scale > 1.0,
        lambda output, own, negative, scale: guide(negative, own, scale),
    )
    return replace(alone, extra=negative)


_KINDS = {"clip": _for_clip, "sd3": _for_sd3, "flux": _for_flux}


def _joined(parts):
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=0)
