"""Widen a text-to-image checkpoint's UNet, so that it takes a picture beside the noise."""

from dataclasses import replace

import numpy as np

from sd_tf.config import family_of
from sd_tf.files.tensors import StoredTensor
from sd_tf.training.settings import TrainingError
from sd_tf.weights import Checkpoint

KERNEL = "conv_in.weight"  # in the checkpoint's layout (out, in, 3, 3)


def with_picture_input(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with input channels for a picture, whose weights are zeros.

    A checkpoint that has these channels is returned as it is.
    """
    config = checkpoint.config
    if config.latent_inputs == "image":
        return checkpoint
    if config.latent_inputs != "none":
        raise TrainingError(
            f"Training to edit starts from a text-to-image or an InstructPix2Pix checkpoint. "
            f"Received: {family_of(config)}"
        )
    channels = config.denoiser.in_channels + config.autoencoder.latent_channels

    def tensors():
        found = dict(checkpoint.tensors("unet"))
        found[KERNEL] = _widened(found[KERNEL], channels)
        return found

    return replace(
        checkpoint,
        config=replace(
            config,
            denoiser=replace(config.denoiser, in_channels=channels),
            latent_inputs="image",
            suited={},  # which were for drawing, not for edits
        ).check(),
        readers={**checkpoint.readers, "unet": tensors},
    )


def _widened(kernel: StoredTensor, channels: int) -> StoredTensor:
    out, known, *window = kernel.shape

    def read():
        value = kernel.read()
        return np.concatenate([value, np.zeros((out, channels - known, *window), value.dtype)], 1)

    return StoredTensor((out, channels, *window), kernel.dtype, read, kernel.file)
