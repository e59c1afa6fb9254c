"""KerasCV's diffusion model with a checkpoint's weights, against diffusers'."""

import diffusers
import numpy as np
import pytest
import torch
from transformers import CLIPTextModel

from sd_tf.bench.peers import agreement
from sd_tf.bench.peers.engines import kerascv
from sd_tf.weights import open_checkpoint
from tests import peers

pytestmark = pytest.mark.full_size


@pytest.mark.long
def test_kerascv_diffusion_model(tmp_path):
    small = peers.random_pipeline("sd1")
    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    small.unet = peers.randomized(unet, 1)
    small.text_encoder = CLIPTextModel(peers.text_config(hidden_size=768, num_attention_heads=12))
    small.save_pretrained(tmp_path)
    rng = np.random.default_rng(2)
    latents = rng.standard_normal((2, 16, 16, 4), "float32")
    context = rng.standard_normal((2, 77, 768), "float32")
    with torch.no_grad():
        nchw = torch.from_numpy(np.moveaxis(latents, -1, 1))
        theirs = unet(nchw, torch.tensor(501), torch.from_numpy(context)).sample.numpy()
    theirs = np.moveaxis(theirs, 1, -1)
    del unet
    small.unet = None
    model = kerascv.diffusion_model(open_checkpoint(tmp_path), 128, 128)
    embed = kerascv.keras_cv.models.StableDiffusion._get_timestep_embedding
    embedding = np.asarray(embed(None, 501, 2))
    inputs = {"latent": latents, "timestep_embedding": embedding, "context": context}
    # KerasCV's epsilons and gelu are a little different.
    assert agreement.decibels(theirs, np.asarray(model(inputs))) > 60
