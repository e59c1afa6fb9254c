"""Model calls that reuse the deep features of an earlier one, in place of computing them."""

from collections.abc import Callable
from dataclasses import dataclass

from keras import ops

from sd_tf.components.geometry import Geometry
from sd_tf.components.guidance import guidance_of
from sd_tf.components.spec import Spec
from sd_tf.config import PipelineConfig
from sd_tf.runtime.reuse import FEATURES, NO_REUSE, REUSE, ReuseRecord
from sd_tf.runtime.shapes import Shape, Shapes


def reuse_of(config: PipelineConfig, geometry: Geometry) -> ReuseRecord:
    """Describe what the loop of a pipeline keeps."""
    if geometry.reuse == 1:
        return NO_REUSE
    guidance = guidance_of(geometry.guidance, config, geometry.guidance_rescale)
    channels = config.denoiser.feature_channels
    if config.controlnets:  # what they add to the shallow layers is kept, too
        channels += config.denoiser.shallow_skips * config.denoiser.channels[0]
    return ReuseRecord(geometry.reuse, len(guidance.parts), channels)


@dataclass(frozen=True, eq=False)
class LoopReuse:
    """A UNet in a loop, whose deep layers run in some of the model calls only."""

    record: ReuseRecord = NO_REUSE
    unet: object = None
    keeping: Callable | None = None  # the denoiser that also returns its deep features

    @property
    def inputs(self) -> dict[str, Spec]:
        """The loop's further input; none without reuse. 0 reuses as little as 1: nothing."""
        return {} if self.record == NO_REUSE else {REUSE: Spec(dtype="int32")}

    def state(self, shape: Shape, shapes: Shapes) -> dict[str, Spec]:
        """The further part of a segment's state: one value, or none without reuse."""
        if self.record == NO_REUSE:
            return {}
        return {FEATURES: Spec(self.record.shape(shape, shapes))}

    def predict(self, is_fresh, whole: Callable, shallow: Callable, kept):
        """Run the whole UNet or its shallow layers; return the output and what is kept then.

        Args:
            whole: () → (output, features), and what ControlNets added or None.
            shallow: (features, what ControlNets added to its skip connections) → output.
        """

        def fresh():
            (output, features), added = whole()
            maps = [features, *([] if added is None else added[: len(bounds)])]
            together = ops.concatenate([ops.cast(one, "float32") for one in maps], axis=-1)
            return output, ops.reshape(together, kept.shape)

        def reused():
            parts, batch, *size = kept.shape
            together = ops.cast(ops.reshape(kept, (parts * batch, *size)), self.unet.compute_dtype)
            if not bounds:
                return shallow(together, None), kept
            features, *added = ops.split(together, bounds, axis=-1)
            return shallow(features, added), kept

        config = self.unet.config
        bounds = list(range(config.feature_channels, self.record.channels, config.channels[0]))
        return ops.cond(is_fresh, fresh, reused)
