"""The configuration of a pipeline: frozen dataclasses, and the named families.

`sd_tf.weights.diffusers` reads them from a diffusers folder's JSON files.
"""

from sd_tf.config.autoencoder import AutoencoderConfig, LatentScale
from sd_tf.config.controlnet import ControlNetConfig
from sd_tf.config.errors import ConfigError
from sd_tf.config.families import (
    FAMILIES,
    family_of,
    has_named_sizes,
    suited_to,
    with_kerascv_numerics,
)
from sd_tf.config.flux import FluxConfig
from sd_tf.config.image_prompts import (
    ImageAdapterConfig,
    ImageAttentionConfig,
    ImageProjectionConfig,
    ImagePromptsConfig,
    VisionEncoderConfig,
)
from sd_tf.config.mmdit import MMDiTConfig
from sd_tf.config.pipeline import (
    AUTOENCODER,
    LATENT_INPUTS,
    DenoiserConfig,
    PipelineConfig,
    TextConfig,
    latent_inputs_of,
)
from sd_tf.config.schedule import (
    SAMPLERS,
    SCALED_LINEAR,
    DynamicShift,
    SamplerSpec,
    ScheduleConfig,
)
from sd_tf.config.small_decoder import DECODER, PREVIEW_DECODER, SmallDecoderConfig
from sd_tf.config.storage import FLOAT16, INT8, STORAGES, storage_text
from sd_tf.config.text import END_TOKEN, START_TOKEN, T5EncoderConfig, TextEncoderConfig
from sd_tf.config.unet import AddedConditioning, UNetConfig

__all__ = [
    "AUTOENCODER",
    "DECODER",
    "END_TOKEN",
    "FAMILIES",
    "FLOAT16",
    "INT8",
    "LATENT_INPUTS",
    "PREVIEW_DECODER",
    "SAMPLERS",
    "SCALED_LINEAR",
    "START_TOKEN",
    "STORAGES",
    "AddedConditioning",
    "AutoencoderConfig",
    "ConfigError",
    "ControlNetConfig",
    "DenoiserConfig",
    "DynamicShift",
    "FluxConfig",
    "ImageAdapterConfig",
    "ImageAttentionConfig",
    "ImageProjectionConfig",
    "ImagePromptsConfig",
    "LatentScale",
    "MMDiTConfig",
    "PipelineConfig",
    "SamplerSpec",
    "ScheduleConfig",
    "SmallDecoderConfig",
    "T5EncoderConfig",
    "TextConfig",
    "TextEncoderConfig",
    "UNetConfig",
    "VisionEncoderConfig",
    "family_of",
    "has_named_sizes",
    "latent_inputs_of",
    "storage_text",
    "suited_to",
    "with_kerascv_numerics",
]
