"""The one table from a component's configuration to the class of its model."""

from sd_tf.config import AutoencoderConfig, TextEncoderConfig, UNetConfig
from sd_tf.models.text_encoder import TextEncoder
from sd_tf.models.unet import UNet
from sd_tf.models.vae import VAE

MODEL_CLASSES = {TextEncoderConfig: TextEncoder, UNetConfig: UNet, AutoencoderConfig: VAE}
