"""The model code: Keras 3, `keras.ops` only, the same on TensorFlow and JAX."""

from sd_tf.config import TextEncoderConfig, UNetConfig, VAEConfig
from sd_tf.models.layers import deferred_variables
from sd_tf.models.text_encoder import TextEncoder
from sd_tf.models.unet import UNet
from sd_tf.models.vae import VAE

__all__ = ["MODEL_CLASSES", "VAE", "TextEncoder", "UNet", "deferred_variables"]

MODEL_CLASSES = {TextEncoderConfig: TextEncoder, UNetConfig: UNet, VAEConfig: VAE}
