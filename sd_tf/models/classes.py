"""The one table from a component's configuration to the class of its model."""

from sd_tf.config import (
    AutoencoderConfig,
    ControlNetConfig,
    FluxConfig,
    MMDiTConfig,
    T5EncoderConfig,
    TextEncoderConfig,
    UNetConfig,
)
from sd_tf.models.controlnet import ControlNet
from sd_tf.models.flux import Flux
from sd_tf.models.mmdit import MMDiT
from sd_tf.models.t5 import T5Encoder
from sd_tf.models.text_encoder import TextEncoder
from sd_tf.models.unet import UNet
from sd_tf.models.vae import VAE

MODEL_CLASSES = {
    TextEncoderConfig: TextEncoder,
    T5EncoderConfig: T5Encoder,
    UNetConfig: UNet,
    MMDiTConfig: MMDiT,
    FluxConfig: Flux,
    AutoencoderConfig: VAE,
    ControlNetConfig: ControlNet,
}
