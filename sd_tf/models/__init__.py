"""The networks, in Keras 3 and `keras.ops` alone, so that TensorFlow and JAX run the same code."""

from sd_tf.models.classes import MODEL_CLASSES
from sd_tf.models.layers import deferred_variables
from sd_tf.models.storage import stored_as
from sd_tf.models.t5 import T5Encoder
from sd_tf.models.text_encoder import TextEncoder
from sd_tf.models.unet import UNet
from sd_tf.models.vae import VAE

__all__ = [
    "MODEL_CLASSES",
    "VAE",
    "T5Encoder",
    "TextEncoder",
    "UNet",
    "deferred_variables",
    "stored_as",
]
