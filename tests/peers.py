"""What nobody here wrote: diffusers' and transformers' models, small and random."""

import functools
import tempfile

import diffusers
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
)

from sd_tf.bench.peers import random_checkpoint
from sd_tf.config import T5EncoderConfig
from sd_tf.tokenizer.clip import ClipTokenizer

# Small models: several threads wait for each other, ten times as long beside other tests.
torch.set_num_threads(1)

FAMILIES = (
    "sd1",
    "sd2-base",
    "sd2-v",
    "sdxl-base",
    "sdxl-refiner",
    "instruct-pix2pix",
    "sdxl-instruct-pix2pix",
    "inpaint",
)

SD1_UNET = {
    "block_out_channels": (32, 64, 96, 96),
    "attention_head_dim": 8,
    "cross_attention_dim": 128,
    "sample_size": 8,
}
SD2_UNET = {
    "block_out_channels": (64, 128, 128, 192),
    "attention_head_dim": (1, 2, 2, 3),
    "use_linear_projection": True,
    "cross_attention_dim": 128,
    "sample_size": 8,
}
SDXL_UNET = {
    "block_out_channels": (64, 128, 192),
    "attention_head_dim": (1, 2, 3),
    "use_linear_projection": True,
    "cross_attention_dim": 192,
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 3),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 64 + 6 * 32,
}
REFINER_UNET = {
    **SDXL_UNET,
    "block_out_channels": (64, 128, 192, 192),
    "attention_head_dim": (1, 2, 3, 3),
    "cross_attention_dim": 128,
    "down_block_types": (
        "DownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    ),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 2,
    "projection_class_embeddings_input_dim": 64 + 5 * 32,
}
UNETS = {
    "sd1": SD1_UNET,
    "sd2-base": SD2_UNET,
    "sd2-v": {**SD2_UNET, "upcast_attention": True},
    "sdxl-base": SDXL_UNET,
    "sdxl-refiner": REFINER_UNET,
    "instruct-pix2pix": {**SD1_UNET, "in_channels": 8},
    "sdxl-instruct-pix2pix": {**SDXL_UNET, "in_channels": 8},
    "inpaint": {**SD1_UNET, "in_channels": 9},
    "sd2-inpaint": {**SD2_UNET, "in_channels": 9},
    "sdxl-inpaint": {**SDXL_UNET, "in_channels": 9},
}
VAE = {
    "block_out_channels": (32, 64, 64, 96),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 64,
    "force_upcast": False,
}
CLIP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
CLIP |= {"num_attention_heads": 2, "projection_dim": 64}
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULE |= {"steps_offset": 1}


T5 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
T5_XXL = {**T5, "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "d_kv": 64}

randomized = functools.partial(random_checkpoint.randomized, spread=0.2)


def text_config(activation="quick_gelu", **changes) -> CLIPTextConfig:
    return CLIPTextConfig(**{**CLIP, "hidden_act": activation, "pad_token_id": 1, **changes})


def t5_config(config: T5EncoderConfig, **changes) -> T5Config:
    """Return transformers' configuration of the same encoder."""
    sizes = {
        "d_model": config.hidden_size,
        "d_ff": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    return T5Config(**{**T5, **sizes, **changes})


@functools.cache
def tokenizer(pad_token_id: int) -> CLIPTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        ClipTokenizer.clip(pad_token_id).save(folder)
        return CLIPTokenizer.from_pretrained(folder)


def random_pipeline(family: str, layers_per_block: int = 2) -> diffusers.DiffusionPipeline:
    """A pipeline of the family's own class, at a hundredth of its size."""
    depth = {"layers_per_block": layers_per_block}
    unet = randomized(diffusers.UNet2DConditionModel(**{**UNETS[family], **depth}), 1)
    vae = randomized(diffusers.AutoencoderKL(**{**VAE, **depth}), 2)
    if family.startswith("sdxl"):
        return _random_xl(family, unet, vae)
    is_sd2 = family.startswith("sd2")
    pipeline_class = {
        "instruct-pix2pix": diffusers.StableDiffusionInstructPix2PixPipeline,
        "inpaint": diffusers.StableDiffusionInpaintPipeline,
        "sd2-inpaint": diffusers.StableDiffusionInpaintPipeline,
    }.get(family, diffusers.StableDiffusionPipeline)
    if family == "sd2-v":
        scheduler = diffusers.DDIMScheduler(
            **SCHEDULE,
            prediction_type="v_prediction",
            clip_sample=False,
            set_alpha_to_one=False,
        )
    else:
        scheduler = diffusers.PNDMScheduler(**SCHEDULE, skip_prk_steps=True)
    text = text_config("gelu" if is_sd2 else "quick_gelu")
    return pipeline_class(
        vae=vae,
        text_encoder=randomized(CLIPTextModel(text), 3),
        tokenizer=tokenizer(0 if is_sd2 else 49407),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _random_xl(family, unet, vae):
    second = randomized(CLIPTextModelWithProjection(text_config("gelu")), 4)
    common = {
        "vae": vae,
        "text_encoder_2": second,
        "tokenizer_2": tokenizer(0),
        "unet": unet,
        "scheduler": diffusers.EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="leading"),
        "add_watermarker": False,
    }
    if family == "sdxl-refiner":
        return diffusers.StableDiffusionXLImg2ImgPipeline(
            text_encoder=None,
            tokenizer=None,
            requires_aesthetics_score=True,
            force_zeros_for_empty_prompt=False,
            **common,
        )
    first = text_config(hidden_size=64, num_attention_heads=1)
    pipeline_class = {
        "sdxl-instruct-pix2pix": diffusers.StableDiffusionXLInstructPix2PixPipeline,
        "sdxl-inpaint": diffusers.StableDiffusionXLInpaintPipeline,
    }.get(family, diffusers.StableDiffusionXLPipeline)
    return pipeline_class(
        text_encoder=randomized(CLIPTextModel(first), 3),
        tokenizer=tokenizer(49407),
        **common,
    )
