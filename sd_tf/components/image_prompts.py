"""Pictures as prompts: what makes tokens of them, and what the loop makes of the tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras import ops

from sd_tf.components.guidance import Part
from sd_tf.components.spec import Endpoint, Spec, as_is
from sd_tf.config import PipelineConfig
from sd_tf.config.image_prompts import places
from sd_tf.runtime.image_prompts import (
    GIVEN,
    NO_IMAGE_PROMPTS,
    SCALES,
    ImageAdapterRecord,
    ImagePrompts,
    shown_of,
    tokens_of,
)
from sd_tf.runtime.shapes import Shape

PICTURES = "pictures"  # the denoiser's argument
HIDDEN = -1e9  # added to the scores of tokens in places that no picture takes


def image_prompts_of(config: PipelineConfig, names: Sequence[str], most: int) -> ImagePrompts:
    """Describe what an export of the pipeline takes; `names` are those of its adapters."""
    known = config.image_prompts
    if known is None:
        return NO_IMAGE_PROMPTS
    adapters = tuple(
        ImageAdapterRecord(name, adapter.projection.tokens(known.encoder))
        for name, adapter in zip(names, known.adapters, strict=True)
    )
    return ImagePrompts(adapters, most, known.encoder.image_size, config.denoiser.context_dim)


def vision_encoder(encoder, projections: Sequence, shape: Shape, shared=as_is):
    """Declare the endpoint from normalized pictures (B, S, S, 3) to each adapter's tokens.

    Where `given` is 0, they are those of no picture: what guidance compares with.
    """
    size = encoder.config.image_size
    encode = shared(encoder, open_batch=True)
    projects = [shared(projection, open_batch=True) for projection in projections]

    def run(pictures, given):
        encoded = encode(pictures * given[:, None, None, None])
        return {
            tokens_of(number): ops.cast(project(encoded, given=given), "float32")
            for number, project in enumerate(projects)
        }

    batch = shape.batch_size
    inputs = {PICTURES: Spec((batch, size, size, 3)), GIVEN: Spec((batch,))}
    return {"serving_default": Endpoint(run, inputs)}


@dataclass(frozen=True, eq=False)
class LoopImagePrompts:
    """The adapters' layers in a loop, in the order of their inputs."""

    attentions: Sequence = ()  # of `models.image_prompts.ImageAttention`
    prompts: ImagePrompts = NO_IMAGE_PROMPTS
    # How many attentions of the denoiser are on the way down, on the way up and in the middle.
    counts: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, config: PipelineConfig, attentions: Sequence, most: int) -> "LoopImagePrompts":
        if not attentions:
            return cls()
        prompts = image_prompts_of(config, [""] * len(attentions), most)
        return cls(attentions, prompts, tuple(map(len, places(config.denoiser))))

    def inputs(self, shape: Shape) -> dict[str, Spec]:
        """The loop's further inputs; none without adapters."""
        found, batch = {}, shape.batch_size
        for number, adapter in enumerate(self.prompts.adapters):
            tokens = Spec((batch, self.prompts.most * adapter.tokens, self.prompts.width))
            found[tokens_of(number)] = found[f"unconditional_{tokens_of(number)}"] = tokens
            found[shown_of(number)] = Spec((batch, self.prompts.most))
        return {**found, SCALES: Spec((len(self.attentions),))} if found else {}

    def keys(self, inputs: Mapping, parts: Sequence[Part], shared) -> list | None:
        """Return what the denoiser takes as `pictures`, which no step changes; None: nothing.

        Args:
            parts: those of the denoiser's batch.
        """
        if not self.attentions:
            return None
        by_adapter = []
        for number, attention in enumerate(self.attentions):
            names = [part.prefix + tokens_of(number) for part in parts]
            pairs = shared(attention)(ops.concatenate([inputs[name] for name in names], axis=0))
            mask = self._mask(inputs[shown_of(number)], number, len(parts))
            scale = inputs[SCALES][number]
            by_adapter.append([(k, v * ops.cast(scale, v.dtype), mask) for k, v in pairs])
        of_places = list(zip(*by_adapter, strict=True))
        down, up, _ = self.counts
        return [*of_places[:down], *of_places[down + up :], *of_places[down : down + up]]

    def _mask(self, shown, number: int, parts: int):
        """Return what is added to the scores (parts · B, 1, 1, tokens)."""
        hidden = HIDDEN * (1.0 - ops.concatenate([shown] * parts, axis=0))
        hidden = ops.repeat(hidden, self.prompts.adapters[number].tokens, axis=1)
        return hidden[:, None, None, :]
