"""Single files in the original layout, written by inverting the published key map."""

import re

import keras
import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.numpy import save_file

from sd_tf.config import family_of
from sd_tf.weights import CheckpointError, open_checkpoint
from tests import peers

RESNET = (
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
)


def unet_to_original(state, layers=2):
    """diffusers' names → the original's: blocks counted through, samplers numbered behind."""
    result = {}
    for name, value in state.items():
        key = name
        key = key.replace("time_embedding.linear_1", "time_embed.0")
        key = key.replace("time_embedding.linear_2", "time_embed.2")
        key = key.replace("add_embedding.linear_1", "label_emb.0.0")
        key = key.replace("add_embedding.linear_2", "label_emb.0.2")
        key = re.sub(r"^conv_in\.", "input_blocks.0.0.", key)
        key = re.sub(r"^conv_norm_out\.", "out.0.", key)
        key = re.sub(r"^conv_out\.", "out.2.", key)
        if match := re.match(r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", key):
            block = int(match[1]) * (layers + 1) + int(match[3]) + 1
            key = f"input_blocks.{block}.{int(match[2] == 'attentions')}.{match[4]}"
        elif match := re.match(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)", key):
            key = f"input_blocks.{(int(match[1]) + 1) * (layers + 1)}.0.op.{match[2]}"
        elif match := re.match(r"up_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", key):
            block = int(match[1]) * (layers + 1) + int(match[3])
            key = f"output_blocks.{block}.{int(match[2] == 'attentions')}.{match[4]}"
        elif match := re.match(r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.*)", key):
            attends = any(k.startswith(f"up_blocks.{match[1]}.attentions") for k in state)
            block = int(match[1]) * (layers + 1) + layers
            key = f"output_blocks.{block}.{2 if attends else 1}.conv.{match[2]}"
        elif match := re.match(r"mid_block\.(resnets|attentions)\.(\d)\.(.*)", key):
            place = 1 if match[1] == "attentions" else 2 * int(match[2])
            key = f"middle_block.{place}.{match[3]}"
        if ".resnets." in name:
            for ours, theirs in RESNET:
                key = key.replace(f".{ours}.", f".{theirs}.")
        result[key] = value
    return result


def vae_to_original(state, levels=4):
    result = {}
    for name, value in state.items():
        key = re.sub(r"down_blocks\.(\d)\.resnets\.", r"down.\1.block.", name)
        key = re.sub(r"down_blocks\.(\d)\.downsamplers\.0\.", r"down.\1.downsample.", key)
        key = re.sub(
            r"up_blocks\.(\d)\.resnets\.", lambda m: f"up.{levels - 1 - int(m[1])}.block.", key
        )
        key = re.sub(
            r"up_blocks\.(\d)\.upsamplers\.0\.",
            lambda m: f"up.{levels - 1 - int(m[1])}.upsample.",
            key,
        )
        key = re.sub(r"mid_block\.resnets\.(\d)\.", lambda m: f"mid.block_{int(m[1]) + 1}.", key)
        key = key.replace("mid_block.attentions.0.", "mid.attn_1.")
        key = key.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "attn_1" in key:
            for ours, theirs in (
                ("group_norm", "norm"),
                ("to_q", "q"),
                ("to_k", "k"),
                ("to_v", "v"),
                ("to_out.0", "proj_out"),
            ):
                key = key.replace(f".{ours}.", f".{theirs}.")
            if value.ndim == 2:
                value = value[:, :, None, None]
        result[key] = value
    return result


def clip_to_original(state):
    return {
        name if name.startswith("text_") else f"text_model.{name}": value
        for name, value in state.items()
    } | {"text_model.embeddings.position_ids": np.arange(77)[None]}


def clip_to_openclip(state, idle_layer=False):
    """transformers' CLIP → OpenCLIP: q, k and v fused; SD2's file has one layer more."""
    state = {name.removeprefix("text_model."): value for name, value in state.items()}
    result = {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "logit_scale": np.float32(4.6),
    }
    width = result["ln_final.bias"].shape[0]
    projection = state.get("text_projection.weight")
    result["text_projection"] = (
        np.zeros((width, width), "float32") if projection is None else projection.T
    )
    count = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder."))
    for i in range(count + idle_layer):
        theirs, ours = f"transformer.resblocks.{i}.", f"encoder.layers.{min(i, count - 1)}."
        for kind in ("weight", "bias"):
            qkv = [state[f"{ours}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            result[f"{theirs}attn.in_proj_{kind}"] = np.concatenate(qkv)
            for old, new in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                result[f"{theirs}{new}.{kind}"] = state[f"{ours}{old}.{kind}"]
    return result


def numpy_state(module):
    return {name: value.numpy() for name, value in module.state_dict().items()}


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def original_state(pipeline, family):
    state = prefixed("model.diffusion_model.", unet_to_original(numpy_state(pipeline.unet)))
    state |= prefixed("first_stage_model.", vae_to_original(numpy_state(pipeline.vae)))
    if pipeline.text_encoder is None:  # the refiner
        second = clip_to_openclip(numpy_state(pipeline.text_encoder_2))
        state |= prefixed("conditioner.embedders.0.model.", second)
    elif hasattr(pipeline, "text_encoder_2"):
        first, second = map(numpy_state, (pipeline.text_encoder, pipeline.text_encoder_2))
        state |= prefixed("conditioner.embedders.0.transformer.", clip_to_original(first))
        state |= prefixed("conditioner.embedders.1.model.", clip_to_openclip(second))
        state["denoiser.sigmas"] = np.ones(1000, "float32")
    elif family.startswith("sd2"):
        text = clip_to_openclip(numpy_state(pipeline.text_encoder), idle_layer=True)
        state |= prefixed("cond_stage_model.model.", text)
    else:
        text = clip_to_original(numpy_state(pipeline.text_encoder))
        state |= prefixed("cond_stage_model.transformer.", text)
        for name in ("betas", "alphas_cumprod", "sqrt_one_minus_alphas_cumprod"):
            state[name] = np.ones(1000, "float32")
        for name, value in list(state.items()):
            if name.startswith("model.diffusion_model."):
                average = "model_ema." + name.removeprefix("model.").replace(".", "")
                state[average] = value + 1
    return {name: np.ascontiguousarray(value) for name, value in state.items()}


@pytest.fixture(scope="module")
def single_files(small_pipelines, tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            pipeline, folder = small_pipelines(family)
            path = tmp_path_factory.mktemp("single") / f"{family}.safetensors"
            save_file(original_state(pipeline, family), path)
            made[family] = path, folder
        return made[family]

    return make


@pytest.mark.parametrize("family", ["sd1", "sd2-v", "sdxl-base"])
def test_the_inversion_is_what_diffusers_reads(small_pipelines, family):
    """diffusers' own converter takes our inverted names back to its own."""
    pipeline, _ = small_pipelines(family)
    state = {name: torch.from_numpy(v) for name, v in original_state(pipeline, family).items()}
    unet = single_file_utils.convert_ldm_unet_checkpoint(dict(state), dict(pipeline.unet.config))
    vae = single_file_utils.convert_ldm_vae_checkpoint(dict(state), dict(pipeline.vae.config))
    for module, converted in ((pipeline.unet, unet), (pipeline.vae, vae)):
        expected = module.state_dict()
        assert converted.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(converted[name].reshape(value.shape), value), name


@pytest.mark.parametrize("family", peers.FAMILIES)
def test_equals_the_folder(single_files, family):
    """The same configuration and the same variables as from the diffusers folder."""
    path, folder = single_files(family)
    told = family if family.startswith("sd2") else None
    single, reference = open_checkpoint(path, family=told), open_checkpoint(folder)
    assert single.format == "single file"
    assert family_of(single.config) == family
    for name, config in reference.config.components.items():
        ours = single.config.components[name]
        for field in ("channels", "num_heads", "down_depths", "up_depths", "mid_depth", "added"):
            assert getattr(ours, field, None) == getattr(config, field, None), field
        pairs = zip(single.build(name).variables, reference.build(name).variables, strict=True)
        for left, right in pairs:
            np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (left, right)))


def test_equal_outputs(single_files):
    """SD2's family decides what names cannot say; the models then compute the same."""
    path, folder = single_files("sd2-v")
    single, reference = open_checkpoint(path, family="sd2-v"), open_checkpoint(folder)
    assert single.config.schedule.prediction == "v_prediction"
    assert single.config.denoiser.upcast_attention
    assert open_checkpoint(path, family="sd2-base").config.schedule.prediction == "epsilon"
    tokens = single.tokenizer()("a lighthouse!")
    np.testing.assert_array_equal(tokens, reference.tokenizer()("a lighthouse!"))
    context = [np.asarray(c.build("text_encoder")(tokens)["context"]) for c in (single, reference)]
    np.testing.assert_array_equal(*context)
    latents = np.random.default_rng(0).standard_normal((1, 8, 8, 4)).astype("float32")
    inputs = latents, np.array([500]), context[0]
    outputs = [np.asarray(c.build("unet")(*inputs)) for c in (single, reference)]
    np.testing.assert_array_equal(*outputs)


def test_averaged_weights(single_files):
    path, _ = single_files("sd1")
    plain, ema = (open_checkpoint(path, ema=flag).tensors("unet") for flag in (False, True))
    np.testing.assert_array_equal(ema["conv_in.bias"].read(), plain["conv_in.bias"].read() + 1)
    with pytest.raises(CheckpointError, match=r"no averaged weights: 'model_ema\.diffusion_model"):
        open_checkpoint(single_files("sdxl-base")[0], ema=True)


def test_sd2_asks_for_the_prediction(single_files):
    path, _ = single_files("sd2-base")
    with pytest.raises(CheckpointError, match=r"set `family` to sd2-base or sd2-v\."):
        open_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"belongs to the family sd2-base or sd2-v\. Received: `family` 'sd1'"
    ):
        open_checkpoint(path, family="sd1")


def rewritten(source, target, change=lambda state: None, metadata=None):
    from safetensors.numpy import load_file

    state = load_file(source)
    change(state)
    save_file(state, target, metadata)
    return target


def test_v_prediction_marker(single_files, tmp_path):
    path = tmp_path / "v.safetensors"
    rewritten(single_files("sdxl-base")[0], path, lambda s: s.update(v_pred=np.zeros(0, "float32")))
    assert open_checkpoint(path).config.schedule.prediction == "v_prediction"


@pytest.mark.parametrize("family", ["sd1", "sdxl-base"])
def test_v_prediction_in_metadata(single_files, tmp_path, family):
    path = tmp_path / "v.safetensors"
    for told, prediction in (("v", "v_prediction"), ("epsilon", "epsilon")):
        rewritten(single_files(family)[0], path, metadata={"modelspec.prediction_type": told})
        assert open_checkpoint(path).config.schedule.prediction == prediction


@pytest.mark.parametrize(
    ("metadata", "family"),
    [
        ({"modelspec.prediction_type": "v"}, "sd2-v"),
        ({"modelspec.prediction_type": "epsilon"}, "sd2-base"),
        ({"modelspec.architecture": "stable-diffusion-v2-768-v"}, "sd2-v"),
        ({"modelspec.architecture": "stable-diffusion-v2-512"}, "sd2-base"),
    ],
)
def test_metadata_tells_the_family_of_sd2(single_files, tmp_path, metadata, family):
    path = tmp_path / "sd2.safetensors"
    rewritten(single_files("sd2-base")[0], path, metadata=metadata)
    assert family_of(open_checkpoint(path).config) == family
    for told in ("sd2-base", "sd2-v"):
        assert family_of(open_checkpoint(path, family=told).config) == told


def test_sd2_without_the_idle_layer(single_files, tmp_path):
    """diffusers' script writes the 23 layers that are computed."""
    start = "cond_stage_model.model.transformer.resblocks."
    last = {}

    def write_23_layers(state):
        layers = {n: state.pop(n) for n in [*state] if n.startswith(start)}
        for name, value in layers.items():
            if name.startswith(f"{start}0."):
                rest = name.removeprefix(f"{start}0.")
                state |= {f"{start}{i}.{rest}": value + i for i in range(23)}
        last["bias"] = state[f"{start}22.ln_1.bias"]

    path = rewritten(single_files("sd2-base")[0], tmp_path / "23.safetensors", write_23_layers)
    checkpoint = open_checkpoint(path, family="sd2-base")
    assert checkpoint.config.text_encoders["text_encoder"].num_layers == 23
    layer = checkpoint.tensors("text_encoder")["text_model.encoder.layers.22.layer_norm1.bias"]
    np.testing.assert_array_equal(layer.read(), last["bias"])


def test_errors(single_files, tmp_path):
    source, _ = single_files("sd1")
    path = tmp_path / "broken.safetensors"

    rewritten(source, path, lambda s: s.update(ztsnr=np.zeros(0, "float32")))
    with pytest.raises(
        CheckpointError, match=r"1 tensors that belong to no known component.*ztsnr"
    ):
        open_checkpoint(path)

    rewritten(source, path, lambda s: s.pop("model.diffusion_model.out.2.bias"))
    with pytest.raises(CheckpointError, match=r"unet .*1 tensors are missing: conv_out\.bias"):
        open_checkpoint(path).build("unet")

    for name in ("input_blocks.1.0.out_layers.3.weight", "input_blocks.4.0.out_layers.3.weight"):
        rewritten(source, path, lambda s, name=name: s.pop(f"model.diffusion_model.{name}"))
        with pytest.raises(CheckpointError, match=f"is incomplete: it lacks {name} .*resnets.0.c"):
            open_checkpoint(path)

    extra = "model.diffusion_model.input_blocks.1.2.weight"
    rewritten(source, path, lambda s: s.update({extra: np.zeros(3, "float32")}))
    with pytest.raises(CheckpointError, match=r"1 tensors have no place.*input_blocks\.1\.2"):
        open_checkpoint(path).build("unet")

    save_file({"lora_up.weight": np.zeros(3, "float32")}, path)
    with pytest.raises(
        CheckpointError, match=r"not a complete Stable Diffusion.*begin with lora_up"
    ):
        open_checkpoint(path)

    def drop_text(state):
        for name in [n for n in state if n.startswith("cond_stage_model")]:
            del state[name]

    rewritten(source, path, drop_text)
    with pytest.raises(CheckpointError, match=r"a UNet, but no text encoder under a known prefix"):
        open_checkpoint(path)
