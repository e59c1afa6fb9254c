"""Names and shapes of SD3's, SD3.5's and Flux's releases, without memory, against the makers'."""

import math

import diffusers
import pytest
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from sd_tf.config import FAMILIES
from sd_tf.weights import layout
from tests import peers
from tests.parity.test_full_size import CLIP_L, OPENCLIP_G, VAE

pytestmark = pytest.mark.full_size

# The published configurations, as far as they set tensors' names and shapes.
SD3_MEDIUM = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}
SD35_MEDIUM = {
    **SD3_MEDIUM,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
SD35_LARGE = {
    **SD3_MEDIUM,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
NO_QUANT = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}


def mmdit(config):
    return lambda: diffusers.SD3Transformer2DModel(**config)


def flux(**config):
    return lambda: diffusers.FluxTransformer2DModel(**config)


def t5():
    return T5EncoderModel(T5Config(**peers.T5_XXL))


def vae():
    return diffusers.AutoencoderKL(**VAE, **NO_QUANT)


def first_clip(kind, **config):
    return lambda: kind(CLIPTextConfig(**CLIP_L, **config))


def second_clip():
    return CLIPTextModelWithProjection(CLIPTextConfig(**OPENCLIP_G))


PROJECTED = first_clip(CLIPTextModelWithProjection, projection_dim=768)
# Family, component → its maker's module, the number of its tensors and of its numbers.
PEERS = {
    ("sd3-medium", "transformer"): (mmdit(SD3_MEDIUM), 683, 2_028_328_000 + 56_623_104),
    ("sd3.5-medium", "transformer"): (mmdit(SD35_MEDIUM), 909, 2_243_171_520 + 226_492_416),
    ("sd3.5-large", "transformer"): (mmdit(SD35_LARGE), 1227, 8_056_627_520 + 89_653_248),
    ("flux-schnell", "transformer"): (flux(), 1156, 11_891_178_560),
    ("flux-dev", "transformer"): (flux(guidance_embeds=True), 1160, 11_901_408_320),
    ("sd3-medium", "text_encoder"): (PROJECTED, 197, 123_650_304),
    ("sd3-medium", "text_encoder_2"): (second_clip, 517, 694_659_840),
    ("sd3-medium", "text_encoder_3"): (t5, 219, 4_762_310_656),
    ("sd3-medium", "vae"): (vae, 244, 83_819_683),
    ("flux-dev", "text_encoder"): (first_clip(CLIPTextModel), 196, 123_060_480),
    ("flux-dev", "text_encoder_2"): (t5, 219, 4_762_310_656),
    ("flux-dev", "vae"): (vae, 244, 83_819_683),
}


@pytest.mark.parametrize(("family", "component"), PEERS)
def test_names_and_shapes(family, component):
    make, count, size = PEERS[family, component]
    with torch.device("meta"):
        state = make().state_dict()
    state.pop("encoder.embed_tokens.weight", None)  # T5's table again
    expected = {name: tuple(value.shape) for name, value in state.items()}
    if "embeddings.token_embedding.weight" in expected:
        expected = {f"text_model.{name}": shape for name, shape in expected.items()}
    model = layout.abstract_model(FAMILIES[family].components[component])
    found = {name: slot.shape for name, slot in layout.slots(model).items()}
    assert found == expected
    assert (len(found), sum(map(math.prod, found.values()))) == (count, size)
