"""The transformer denoisers against diffusers', every parameter random."""

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel, SD3Transformer2DModel

from sd_tf.config import FluxConfig, MMDiTConfig
from sd_tf.files.tensors import StoredTensor
from sd_tf.weights import layout

pytestmark = pytest.mark.backend

TOLERANCE = 1e-4  # of the reference's largest value
SIZES = [(8, 8), (12, 20)]  # latent height and width
BATCH, TEXTS = 2, 13

MMDITS = {
    "sd3": MMDiTConfig(
        num_layers=3, num_heads=4, head_dim=8, context_dim=40, pooled_dim=24, max_patches=12
    ),
    "sd3.5": MMDiTConfig(
        num_layers=3,
        num_heads=4,
        head_dim=8,
        context_dim=40,
        pooled_dim=24,
        max_patches=12,
        dual_layers=(0, 1),
        qk_norm=True,
    ),
}
FLUXES = {
    name: FluxConfig(
        num_layers=2,
        num_single_layers=2,
        num_heads=2,
        head_dim=16,
        context_dim=40,
        pooled_dim=24,
        rope_axes=(4, 6, 6),
        guidance_embeds=name == "flux-dev",
    )
    for name in ("flux-schnell", "flux-dev")
}


def peer_of(config) -> torch.nn.Module:
    """Return diffusers' model for a configuration, with every parameter and buffer random."""
    common = {
        "num_layers": config.num_layers,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.context_dim,
        "pooled_projection_dim": config.pooled_dim,
        "in_channels": config.in_channels,
    }
    if isinstance(config, MMDiTConfig):
        module = SD3Transformer2DModel(
            **common,
            sample_size=config.sample_size,
            patch_size=config.patch_size,
            caption_projection_dim=config.hidden_size,
            out_channels=config.out_channels,
            pos_embed_max_size=config.max_patches,
            dual_attention_layers=config.dual_layers,
            qk_norm="rms_norm" if config.qk_norm else None,
        )
    else:
        module = FluxTransformer2DModel(
            **common,
            patch_size=1,
            num_single_layers=config.num_single_layers,
            guidance_embeds=config.guidance_embeds,
            axes_dims_rope=config.rope_axes,
        )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            width = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / width**0.5)
    return module.eval()


def loaded(module, config, dtype="float32"):
    tensors = {
        name: StoredTensor(tuple(x.shape), "float32", lambda x=x: x.numpy())
        for name, x in module.state_dict().items()
    }
    return layout.load(config, tensors, dtype, "a test's model")


def inputs_of(config, height, width):
    rng = np.random.default_rng(height * 100 + width)

    def normal(*shape):
        return rng.standard_normal(shape).astype("float32")

    inputs = {
        "latents": normal(BATCH, height, width, config.latent_channels),
        "timesteps": np.array([857.692, 8.9286], "float32"),
        "context": normal(BATCH, TEXTS, config.context_dim),
        "pooled": normal(BATCH, config.pooled_dim),
    }
    if config.is_told_guidance:
        inputs["guidance"] = np.array([3.5, 1.25], "float32")
    return inputs


def run_peer(module, inputs, **more):
    """Call diffusers' model on our inputs; return its output in our layout."""
    latents, timesteps, context, pooled = (
        torch.from_numpy(inputs[name]) for name in ("latents", "timesteps", "context", "pooled")
    )
    latents = latents.permute(0, 3, 1, 2)
    height, width = latents.shape[2:]
    with torch.no_grad():
        if isinstance(module, SD3Transformer2DModel):
            output = module(latents, context, pooled, timesteps, return_dict=False, **more)[0]
            return output.permute(0, 2, 3, 1).numpy()
        packed = FluxPipeline._pack_latents(latents, *latents.shape)
        ids = FluxPipeline._prepare_latent_image_ids(
            BATCH, height // 2, width // 2, "cpu", torch.float32
        )
        guidance = inputs.get("guidance")
        output = module(
            packed,
            encoder_hidden_states=context,
            pooled_projections=pooled,
            timestep=timesteps / 1000,
            guidance=None if guidance is None else torch.from_numpy(guidance),
            img_ids=ids,
            txt_ids=torch.zeros(TEXTS, 3),
            return_dict=False,
        )[0]
        output = FluxPipeline._unpack_latents(output, height * 8, width * 8, 8)
        return output.permute(0, 2, 3, 1).numpy()


def relative_error(ours, theirs):
    ours = np.asarray(ours, "float32")
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*MMDITS, *FLUXES])
def test_predictions(name, size):
    config = {**MMDITS, **FLUXES}[name]
    module = peer_of(config)
    inputs = inputs_of(config, *size)
    assert relative_error(loaded(module, config)(**inputs), run_peer(module, inputs)) <= TOLERANCE


def test_skipped_blocks():
    config = MMDITS["sd3.5"]
    module = peer_of(config)
    inputs = inputs_of(config, *SIZES[1])
    theirs = run_peer(module, inputs, skip_layers=[1])
    ours = loaded(module, config)(**inputs, skipped=(1,))
    assert relative_error(ours, theirs) <= TOLERANCE
    assert relative_error(ours, run_peer(module, inputs)) > 0.01


@pytest.mark.parametrize("name", [*MMDITS, *FLUXES])
def test_bfloat16(name):
    """In bfloat16 the models stay close to diffusers' in float32."""
    config = {**MMDITS, **FLUXES}[name]
    module = peer_of(config)
    inputs = inputs_of(config, *SIZES[0])
    error = relative_error(loaded(module, config, "bfloat16")(**inputs), run_peer(module, inputs))
    assert error < 0.05


def test_too_large_a_picture():
    config = MMDITS["sd3"]
    inputs = inputs_of(config, 32, 8)
    with pytest.raises(ValueError, match=r"positions for 12 patches a side. Received: 16 x 4"):
        loaded(peer_of(config), config)(**inputs)
