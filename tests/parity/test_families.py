"""Every family's models against diffusers' and transformers', on weights that those saved."""

from dataclasses import replace

import diffusers
import keras
import numpy as np
import pytest
import torch

from sd_tf.components.build import component
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.models import TextEncoder
from sd_tf.weights import layout, open_checkpoint
from tests import peers

pytestmark = pytest.mark.backend

TOLERANCE = 1e-4  # of the reference's largest value
SIZES = [(8, 8), (16, 8)]  # latent height and width
FAMILIES, TRANSFORMERS = peers.FAMILIES, ("sd3-without-t5", "flux-schnell")
if keras.backend.backend() == "jax":  # those of other families differ in their numbers of channels
    SIZES, FAMILIES = SIZES[1:], ("sd1", "sd2-base", "sdxl-base")


def close(ours, theirs, tolerance=TOLERANCE):
    ours, theirs = np.asarray(ours, "float32"), np.asarray(theirs, "float32")
    assert ours.shape == theirs.shape
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error <= tolerance, f"relative error {error:.2e}"


def to_torch(x):
    return torch.from_numpy(np.ascontiguousarray(x))


def channels_first(x):
    return to_torch(np.moveaxis(x, -1, 1))


def channels_last(x):
    return np.moveaxis(x.numpy(), 1, -1)


@pytest.fixture(params=FAMILIES)
def pair(request, small_pipelines):
    pipeline, folder = small_pipelines(request.param)
    return pipeline, open_checkpoint(folder)


PROMPTS = ["a caterpillar smoking a hookah", "", "word " * 100]


def unet_inputs(unet, height, width, batch=2):
    """Inputs in our layout, as our keywords."""
    rng = np.random.default_rng(height * 100 + width)

    def normal(*shape):
        return rng.standard_normal(shape).astype("float32")

    inputs = {
        "latents": normal(batch, height, width, unet.in_channels),
        "timesteps": np.array([961, 21][:batch], "int32"),
        "context": normal(batch, 77, unet.context_dim),
    }
    if unet.added is not None:
        ids = [[64, 128, 0, 4, 64, 64], [1024, 1024, 8, 0, 512, 768]][:batch]
        inputs["pooled"] = normal(batch, unet.added.pooled_dim)
        inputs["time_ids"] = np.array(ids, "float32")[:, : unet.added.num_time_ids]
    if unet.guidance_embed_dim is not None:
        inputs["guidance"] = np.array([8.0, 1.5][:batch], "float32")
    return inputs


def run_peer_unet(module, inputs):
    added = None
    if "pooled" in inputs:
        added = {
            "text_embeds": to_torch(inputs["pooled"]),
            "time_ids": to_torch(inputs["time_ids"]),
        }
    guidance = None
    if "guidance" in inputs:
        guidance = diffusers.LatentConsistencyModelPipeline.get_guidance_scale_embedding(
            None, to_torch(inputs["guidance"]) - 1, module.config.time_cond_proj_dim
        )
    with torch.no_grad():
        return channels_last(
            module(
                channels_first(inputs["latents"]),
                to_torch(inputs["timesteps"]),
                to_torch(inputs["context"]),
                added_cond_kwargs=added,
                timestep_cond=guidance,
            ).sample
        )


def test_text_encoders(pair):
    pipeline, checkpoint = pair
    for name in checkpoint.config.text_encoders:
        module = getattr(pipeline, name)
        tokens = checkpoint.tokenizer(name)(PROMPTS)
        with torch.no_grad():
            theirs = module(to_torch(tokens), output_hidden_states=True)
        ours = checkpoint.build(name)(tokens)
        if pipeline.__class__.__name__.startswith("StableDiffusionXL"):
            close(ours["context"], theirs.hidden_states[-2])
        else:
            close(ours["context"], theirs.last_hidden_state)
        if "pooled" in ours:
            close(ours["pooled"], theirs.text_embeds)
    assert "pooled" in ours or "text_encoder_2" not in checkpoint.config.text_encoders


@pytest.mark.parametrize("pair", TRANSFORMERS, indirect=True)
def test_clip_encoders_of_transformers(pair):
    """SD3 takes the layer before the last, and projected texts; Flux the text as it is pooled."""
    pipeline, checkpoint = pair
    is_flux = checkpoint.config.denoiser.conditioner == "flux"
    for name in checkpoint.config.clip_encoders:
        tokens = checkpoint.tokenizer(name)(PROMPTS)
        with torch.no_grad():
            theirs = getattr(pipeline, name)(to_torch(tokens), output_hidden_states=True)
        ours = checkpoint.build(name)(tokens)
        close(ours["pooled"], theirs.pooler_output if is_flux else theirs.text_embeds)
        if not is_flux:
            close(ours["context"], theirs.hidden_states[-2])


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_every_hidden_layer(small_pipelines, layer):
    """The last layer's states or an earlier one's, and then the final norm."""
    pipeline, folder = small_pipelines("sd1")
    checkpoint = open_checkpoint(folder)
    tokens = checkpoint.tokenizer()(PROMPTS)
    config = replace(checkpoint.config.text_encoders["text_encoder"], context_layer=layer)
    model = layout.load(config, checkpoint.tensors("text_encoder"), "float32", "test")
    encoder = pipeline.text_encoder
    with torch.no_grad():
        states = encoder(to_torch(tokens), output_hidden_states=True).hidden_states
        theirs = encoder.final_layer_norm(states[-layer])
    close(model(tokens)["context"], theirs)


@pytest.mark.parametrize("eos", [2, 49407])
def test_pooled_position_with_added_tokens(eos):
    """Behind a textual-inversion token the highest id is not the end of the text."""
    from transformers import CLIPTextModelWithProjection

    from sd_tf.weights.diffusers_config import read_text_encoder

    theirs = peers.text_config("gelu", eos_token_id=eos, vocab_size=49410)
    module = peers.randomized(CLIPTextModelWithProjection(theirs), 5)
    config = read_text_encoder(theirs.to_dict(), "config.json", projected=True, penultimate=False)
    model = TextEncoder(config)
    state = module.state_dict()
    for name, slot in layout.slots(model).items():
        slot.fill(state[name].numpy)
    tokens = np.full((2, 77), 49407, "int32")
    tokens[:, 0] = 49406
    tokens[0, 1:4] = 49409, 320, 530
    tokens[1, 1:3] = 320, 49408
    with torch.no_grad():
        close(model(tokens)["pooled"], module(to_torch(tokens)).text_embeds)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_unet(pair, size):
    pipeline, checkpoint = pair
    inputs = unet_inputs(checkpoint.config.denoiser, *size)
    close(checkpoint.build("unet")(**inputs), run_peer_unet(pipeline.unet, inputs))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", [*FAMILIES, *TRANSFORMERS], indirect=True)
def test_vae(pair, size):
    pipeline, checkpoint = pair
    rng = np.random.default_rng(size)
    vae = checkpoint.build("vae")
    channels = checkpoint.config.autoencoder.latent_channels
    latents = rng.standard_normal((2, *size, channels)).astype("float32")
    images = rng.uniform(-1, 1, (2, 8 * size[0], 8 * size[1], 3)).astype("float32")
    with torch.no_grad():
        decoded = pipeline.vae.decode(channels_first(latents)).sample
        posterior = pipeline.vae.encode(channels_first(images)).latent_dist
    close(vae.decode(latents), channels_last(decoded))
    mean, log_variance = vae.encode(images)
    close(mean, channels_last(posterior.mean))
    close(log_variance, channels_last(posterior.logvar))


DISTILLED = {
    "no middle block": {**peers.SD1_UNET, "mid_block_type": None},
    "a plain middle block": {**peers.SD1_UNET, "mid_block_type": "UNetMidBlock2D"},
    "one resnet a level, three levels": {
        **peers.SD1_UNET,
        "block_out_channels": (32, 64, 96),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D",) * 3,
        "up_block_types": ("CrossAttnUpBlock2D",) * 3,
    },
    "uneven depths": {
        **peers.SDXL_UNET,
        "transformer_layers_per_block": (1, (2, 1), (1, 3)),
        "reverse_transformer_layers_per_block": ((3, 1, 1), (2, 1, 1), 1),
    },
    "guidance embedding": {**peers.SD1_UNET, "time_cond_proj_dim": 32},
}


@pytest.mark.parametrize("changes", DISTILLED.values(), ids=DISTILLED)
def test_distilled_unets(tmp_path, changes):
    from diffusers import UNet2DConditionModel

    from sd_tf.weights.diffusers import open_component
    from sd_tf.weights.diffusers_unet import read_unet, write_unet

    module = peers.randomized(UNet2DConditionModel(**changes), 6)
    module.save_pretrained(tmp_path / "unet")
    config = read_unet(dict(module.config), "config.json", pooled_dim=64)
    assert read_unet(write_unet(config), "again", pooled_dim=64) == config
    model = layout.load(
        config, open_component(tmp_path / "unet", "unet", config, None), "float32", "test"
    )
    inputs = unet_inputs(config, 16, 8)
    close(model(**inputs), run_peer_unet(module, inputs))


@pytest.mark.backend(long=True)
def test_a_step_that_is_told_the_guidance_scale(small_pipelines, tmp_path):
    """LCM's denoiser in our loop; of one step, as each further one adds noise."""
    import diffusers

    sd1, _ = small_pipelines("sd1")
    told = {**peers.SD1_UNET, "time_cond_proj_dim": 32}
    theirs = diffusers.LatentConsistencyModelPipeline(
        vae=sd1.vae,
        text_encoder=sd1.text_encoder,
        tokenizer=sd1.tokenizer,
        unet=peers.randomized(diffusers.UNet2DConditionModel(**told), 7),
        scheduler=diffusers.LCMScheduler(**peers.SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    theirs.set_progress_bar_config(disable=True)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config, model = checkpoint.config, checkpoint.build("unet")
    assert (config.denoiser.guidance_embed_dim, config.schedule.sampler) == (32, "lcm")
    geometry = geometry_of(config, Fixed(batch_size=2, guidance="none", max_steps=4))
    part = component(
        "diffusion_model", config, geometry, "float32", np.zeros((1, 77), "int32"), lambda *_: model
    )
    rng = np.random.default_rng(8)
    noise = rng.standard_normal((2, *geometry.shapes.latent(geometry.shapes.first.size))).astype(
        "float32"
    )
    context = rng.standard_normal((2, 77, config.denoiser.context_dim)).astype("float32")
    found = []
    for scale in (1.0, 8.5):
        ours = part.endpoints(geometry.shapes.first)["from_noise"].function(
            noise=noise,
            context=context,
            unconditional_context=context,
            num_steps=np.int32(1),
            scheduler=np.int32(part.default_scheduler),
            unconditional_guidance_scale=np.float32(scale),
        )["latent"]
        expected = theirs(
            prompt_embeds=to_torch(context),
            latents=channels_first(noise),
            num_inference_steps=1,
            guidance_scale=scale,
            output_type="latent",
        ).images
        close(keras.ops.convert_to_numpy(ours), channels_last(expected))
        found.append(expected)
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.backend(long=True))]
)
def test_half_precision(small_pipelines, dtype):
    """Variables and activations in half precision; norms, softmax and the sinusoid stay float32."""
    pipeline, folder = small_pipelines("sdxl-base")
    checkpoint = open_checkpoint(folder)
    tolerance = {"bfloat16": 0.06, "float16": 0.01}[dtype]
    unet = checkpoint.build("unet", dtype)
    assert {variable.dtype for variable in unet.variables} == {dtype}
    inputs = unet_inputs(checkpoint.config.denoiser, 8, 8)
    outputs = unet(**inputs)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    outputs = keras.ops.convert_to_numpy(keras.ops.cast(outputs, "float32"))
    close(outputs, run_peer_unet(pipeline.unet, inputs), tolerance)

    tokens = checkpoint.tokenizer("text_encoder_2")(PROMPTS)
    ours = checkpoint.build("text_encoder_2", dtype)(tokens)
    with torch.no_grad():
        theirs = pipeline.text_encoder_2(to_torch(tokens)).text_embeds
    pooled = keras.ops.convert_to_numpy(keras.ops.cast(ours["pooled"], "float32"))
    close(pooled, theirs, tolerance)
