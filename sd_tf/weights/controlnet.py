"""An opened ControlNet, and checkpoints that ControlNets are added to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import keras

from sd_tf.config import ConfigError, ControlNetConfig
from sd_tf.config.image_prompts import numbered
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.weights import layout
from sd_tf.weights.checkpoint import Checkpoint

SIZES = 6  # numbers of SDXL's size conditioning; no refiner has a ControlNet


@dataclass(frozen=True)
class ControlNetCheckpoint:
    """An opened ControlNet: its configuration and its tensors under diffusers' names."""

    name: str  # what exports call it: without the folders that lead to it
    source: str
    format: str
    config: ControlNetConfig
    tensors: Mapping[str, StoredTensor]

    def build(self, dtype: str = "float32") -> keras.layers.Layer:
        """Build the model and load its weights, strictly and one tensor at a time."""
        return layout.load(self.config, self.tensors, dtype, self.source)


def with_controlnets(checkpoint: Checkpoint, nets: Sequence[ControlNetCheckpoint]) -> Checkpoint:
    """Return the checkpoint with nets that steer its denoiser.

    Raises:
        CheckpointError: a net is for another kind of checkpoint.
    """
    parts = {numbered(net.config.component, number): net for number, net in enumerate(nets)}
    for net in nets:
        try:
            replace(checkpoint.config, controlnets={"controlnet": net.config}).check()
        except ConfigError as error:
            raise CheckpointError(
                f"{net.source} does not fit {checkpoint.source}: {error}"
            ) from error
    controlnets = {part: net.config for part, net in parts.items()}
    return replace(
        checkpoint.with_parts({part: net.tensors for part, net in parts.items()}),
        config=replace(checkpoint.config, controlnets=controlnets),
        controlnets=tuple(net.name for net in nets),
    )
