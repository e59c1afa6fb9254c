"""The one table from a component's configuration to the class of its model."""

from sd_tf.config import (
    AutoencoderConfig,
    ControlNetConfig,
    FluxConfig,
    ImageAttentionConfig,
    ImageProjectionConfig,
    MMDiTConfig,
    SmallDecoderConfig,
    T5EncoderConfig,
    TextEncoderConfig,
    UNetConfig,
    VisionEncoderConfig,
)
from sd_tf.models.controlnet import ControlNet
from sd_tf.models.flux import Flux
from sd_tf.models.image_prompts import ImageAttention, ImageProjection
from sd_tf.models.mmdit import MMDiT
from sd_tf.models.small_decoder import SmallDecoder
from sd_tf.models.t5 import T5Encoder
from sd_tf.models.text_encoder import TextEncoder
from sd_tf.models.unet import UNet
from sd_tf.models.vae import VAE
from sd_tf.models.vision_encoder import VisionEncoder

MODEL_CLASSES = {
    TextEncoderConfig: TextEncoder,
    T5EncoderConfig: T5Encoder,
    UNetConfig: UNet,
    MMDiTConfig: MMDiT,
    FluxConfig: Flux,
    AutoencoderConfig: VAE,
    SmallDecoderConfig: SmallDecoder,
    ControlNetConfig: ControlNet,
    VisionEncoderConfig: VisionEncoder,
    ImageProjectionConfig: ImageProjection,
    ImageAttentionConfig: ImageAttention,
}
