"""Small random pipelines of SD3 and Flux, of diffusers' own classes."""

import functools
import tempfile
from pathlib import Path

import diffusers
import torch
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5EncoderModel,
    T5TokenizerFast,
)

from sd_tf.config import T5EncoderConfig
from tests import peers
from tests.t5_tokenizers import small_t5

# Pipeline → the family that it belongs to.
FAMILIES = {
    "sd3": "sd3-medium",
    "sd3-without-t5": "sd3-medium",
    "sd3.5": "sd3.5-medium",
    "flux-schnell": "flux-schnell",
    "flux-dev": "flux-dev",
}
NO_T5 = {"text_encoder_3": None, "tokenizer_3": None}  # what diffusers is told to leave out
# Heads are as wide as the releases', as a single file does not tell their number.
SD3 = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "caption_projection_dim": 128,
    "joint_attention_dim": 224,
    "pooled_projection_dim": 128,
    "pos_embed_max_size": 12,
    "sample_size": 8,
}
# Skip-layer guidance leaves out blocks 7 to 9.
SD35 = {**SD3, "num_layers": 11, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
FLUX = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "joint_attention_dim": 224,
    "pooled_projection_dim": 64,
}
T5 = T5EncoderConfig(
    hidden_size=224, intermediate_size=96, num_layers=2, num_heads=3, head_dim=16, vocab_size=608
)
VAE = {
    **peers.VAE,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": True,
}
SD3_SCALE = {"scaling_factor": 1.5305, "shift_factor": 0.0609}
FLUX_SCALE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
FIRST_CLIP = {"hidden_size": 64, "num_attention_heads": 1}


@functools.cache
def t5_tokenizer() -> T5TokenizerFast:
    with tempfile.TemporaryDirectory() as folder:
        small_t5(Path(folder) / "spiece").save(folder)
        return T5TokenizerFast.from_pretrained(folder)


def random_pipeline(name: str) -> diffusers.DiffusionPipeline:
    """A pipeline at a hundredth of its size or less, every parameter and table random."""
    return _flux(name) if name.startswith("flux") else _sd3(name)


def _sd3(name):
    transformer = diffusers.SD3Transformer2DModel(**(SD35 if name == "sd3.5" else SD3))
    _randomize_positions(transformer)
    second = peers.text_config("gelu")
    has_t5 = name != "sd3-without-t5"
    return diffusers.StableDiffusion3Pipeline(
        transformer=peers.randomized(transformer, 1),
        vae=_vae(SD3_SCALE),
        text_encoder=peers.randomized(
            CLIPTextModelWithProjection(peers.text_config(**FIRST_CLIP)), 3
        ),
        tokenizer=peers.tokenizer(49407),
        text_encoder_2=peers.randomized(CLIPTextModelWithProjection(second), 4),
        tokenizer_2=peers.tokenizer(0),
        text_encoder_3=_t5() if has_t5 else None,
        tokenizer_3=t5_tokenizer() if has_t5 else None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _flux(name):
    is_dev = name == "flux-dev"
    transformer = diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=is_dev)
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if is_dev else {"shift": 1.0}
    return diffusers.FluxPipeline(
        transformer=peers.randomized(transformer, 1),
        vae=_vae(FLUX_SCALE),
        text_encoder=peers.randomized(CLIPTextModel(peers.text_config(**FIRST_CLIP)), 3),
        tokenizer=peers.tokenizer(49407),
        text_encoder_2=_t5(),
        tokenizer_2=t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**shift),
    )


def _vae(scale):
    return peers.randomized(diffusers.AutoencoderKL(**VAE, **scale), 2)


def _t5():
    return peers.randomized(T5EncoderModel(peers.t5_config(T5)), 5)


def _randomize_positions(transformer):
    """Make the table of positions random, which is a buffer, so that it must be read."""
    table = transformer.pos_embed.pos_embed
    table.copy_(0.5 * torch.randn(table.shape, generator=torch.Generator().manual_seed(6)))
