"""A text-to-image checkpoint made ready to see a picture beside the noise."""

from dataclasses import replace

import numpy as np

from sd_tf.training.settings import TrainingError
from sd_tf.weights import Checkpoint
from sd_tf.weights.tensors import StoredTensor

KERNEL = "conv_in.weight"  # in the checkpoint's layout (out, in, 3, 3)


def with_picture_input(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights; the first convolution's kernel has zeros for the new channels, its bias
    stays. A checkpoint that has them already is given back.
    """
    config = checkpoint.config
    if config.latent_inputs == "image":
        return checkpoint
    if config.latent_inputs != "none":
        raise TrainingError(
            f"Editing is learnt from a text-to-image checkpoint or an InstructPix2Pix one. "
            f"Received: {config.family}"
        )
    channels = config.unet.in_channels + config.vae.latent_channels

    def tensors():
        found = dict(checkpoint.tensors("unet"))
        found[KERNEL] = _widened(found[KERNEL], channels)
        return found

    return replace(
        checkpoint,
        config=replace(config, unet=replace(config.unet, in_channels=channels)).check(),
        readers={**checkpoint.readers, "unet": tensors},
    )


def _widened(kernel: StoredTensor, channels: int) -> StoredTensor:
    out, known, *window = kernel.shape

    def read():
        value = kernel.read()
        return np.concatenate([value, np.zeros((out, channels - known, *window), value.dtype)], 1)

    return StoredTensor((out, channels, *window), kernel.dtype, read, kernel.file)
