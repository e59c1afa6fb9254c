"""Guidance: several predictions of one step in one batch, combined into one (in float32)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keras import ops

from sd_tf.components.spec import Spec
from sd_tf.sampling.loop import guide, guide_edit

SCALE, IMAGE_SCALE = "unconditional_guidance_scale", "image_guidance_scale"
# The picture that an edit starts from, as latents beside the noisy ones.
EDITED = "conditioning_latent"


@dataclass(frozen=True)
class Part:
    """One part of the denoiser's batch: which prompt and picture it is conditioned on."""

    prompt: bool  # False: conditioned on the negative prompt
    picture: bool = True  # False: zeros replace the picture to edit


@dataclass(frozen=True)
class Guidance:
    """A way to guide: the scales it takes as inputs, its parts, and how their outputs combine."""

    scales: tuple[str, ...]
    parts: tuple[Part, ...]
    combine: Callable[..., object]  # (outputs of the parts, *scales) → the guided output

    @property
    def inputs(self) -> dict[str, Spec]:
        return dict.fromkeys(self.scales, Spec())

    def conditions(self, given: Mapping, names: Sequence[str]) -> dict:
        """Concatenate, for every part, the named conditions or their `unconditional_` twins."""
        prefixes = ["" if part.prompt else "unconditional_" for part in self.parts]
        return {name: _joined([given[prefix + name] for prefix in prefixes]) for name in names}

    def beside(self, given: Mapping, names: Sequence[str]) -> list:
        """Repeat, for every part, the conditions that are concatenated to the latents."""

        def of_part(part, name):
            is_left_out = name == EDITED and not part.picture
            return ops.zeros_like(given[name]) if is_left_out else given[name]

        return [_joined([of_part(part, name) for part in self.parts]) for name in names]

    def predict(self, model: Callable, x, beside: Sequence, scales: Sequence):
        """Run the denoiser once for all parts of the sample x, and combine its outputs."""
        x = ops.concatenate([_joined([x] * len(self.parts)), *beside], axis=-1)
        output = ops.cast(model(x), "float32")
        if len(self.parts) == 1:
            return output
        return self.combine(ops.split(output, len(self.parts)), *scales)


def guidance_of(kind: str, latent_inputs: str, rescale: float) -> Guidance:
    """Choose the guidance of an export: `kind` is classifier_free or none."""
    edits = latent_inputs == "image"
    scales = (SCALE, IMAGE_SCALE) if edits else (SCALE,)
    if kind == "none":
        return Guidance(scales, (Part(prompt=True),), lambda outputs, *scales: outputs[0])
    if edits:
        parts = (Part(prompt=True), Part(prompt=False), Part(prompt=False, picture=False))
        return Guidance(scales, parts, lambda outputs, *scales: guide_edit(*outputs, *scales))
    return Guidance(
        scales,
        (Part(prompt=False), Part(prompt=True)),
        lambda outputs, scale: guide(*outputs, scale, rescale),
    )


def _joined(parts):
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=0)
