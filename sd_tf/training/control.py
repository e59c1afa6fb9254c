"""ControlNets to be trained: at first a copy of the UNet's way down, which adds nothing."""

from dataclasses import replace

import numpy as np

from sd_tf.config import ControlNetConfig, PipelineConfig
from sd_tf.models.controlnet import ControlNet
from sd_tf.training.initial_weights import initialize
from sd_tf.weights import Checkpoint, layout

NAME = ControlNetConfig.component
HINT_CHANNELS = (16, 32, 96, 256)  # as many of them as the autoencoder has levels
ZEROS = ("controlnet_down_blocks.", "controlnet_mid_block.", "controlnet_cond_embedding.conv_out.")


def net_config(config: PipelineConfig) -> ControlNetConfig:
    """Return the configuration of a ControlNet for a checkpoint's UNet."""
    channels = config.autoencoder.latent_channels
    trunk = replace(
        config.denoiser,
        in_channels=channels,
        out_channels=channels,
        up_depths=(),
        guidance_embed_dim=None,
    )
    return ControlNetConfig(trunk, HINT_CHANNELS[: len(config.autoencoder.channels)])


def new_net(checkpoint: Checkpoint, precision: str = "float32", seed: int = 0) -> ControlNet:
    """Build a net with the UNet's weights; its picture's layers are random, its last ones zeros."""
    config = net_config(checkpoint.config)
    net = ControlNet(config, dtype=precision)
    initialize(net, NAME, seed)
    unet = checkpoint.tensors(checkpoint.config.denoiser.component)
    for path, slot in layout.slots(net).items():
        if path.startswith(ZEROS):
            slot.fill(lambda slot=slot: np.zeros(slot.shape, "float32"))
        elif path in unet:
            inputs = slot.shape[1] if path == "conv_in.weight" else None  # not what stands beside
            slot.fill(lambda path=path, inputs=inputs: _first(unet[path].read(), inputs))
    return net


def _first(kernel: np.ndarray, inputs: int | None) -> np.ndarray:
    return kernel if inputs is None else kernel[:, :inputs]
