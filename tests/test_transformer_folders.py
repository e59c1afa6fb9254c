"""Diffusers folders of SD3 and Flux: read, written, and what is refused of them."""

import json
import shutil
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch

from sd_tf.cli.main import main
from sd_tf.config import ConfigError, family_of
from sd_tf.tokenizer.errors import TokenizerError
from sd_tf.weights import CheckpointError, layout, open_checkpoint, save_folder
from sd_tf.weights.diffusers_save import write_folder
from sd_tf.weights.diffusers_transformers import read_flux, read_mmdit, read_t5
from tests import peer_transformers
from tests.test_weights import assert_same, edit_json, edit_tensors, variables

T5_FILE = "text_encoder_3/model.safetensors"


@pytest.fixture(params=peer_transformers.FAMILIES)
def opened(request, small_pipelines):
    """A pipeline, its folder, and the checkpoint that is read from it."""
    pipeline, folder = small_pipelines(request.param)
    return request.param, pipeline, folder, open_checkpoint(folder)


@pytest.fixture
def folder(small_pipelines, tmp_path):
    """A copy of the small SD3 folder, to be broken."""
    return shutil.copytree(small_pipelines("sd3")[1], tmp_path / "sd3")


# What is read


def test_config(opened):
    name, pipeline, _, checkpoint = opened
    config = checkpoint.config
    assert family_of(config) == peer_transformers.FAMILIES[name]
    is_flux = name.startswith("flux")
    t5 = "text_encoder_2" if is_flux else "text_encoder_3"
    length = 512 if is_flux else 256
    if name == "sd3-without-t5":
        assert config.zero_tokens == 256 and not config.t5_encoders
    else:
        assert config.zero_tokens == 0
        assert config.text_encoders[t5] == replace(peer_transformers.T5, max_length=length)
    for encoder in config.clip_encoders.values():
        assert encoder.context_layer == (1 if is_flux else 2)
        assert encoder.context_norm == encoder.pools_unprojected == is_flux
    vae, theirs = config.autoencoder, pipeline.vae.config
    assert (vae.scaling_factor, vae.shift_factor) == (theirs.scaling_factor, theirs.shift_factor)
    assert vae.latent_channels == 16 and not vae.quant_conv and not vae.post_quant_conv
    assert theirs.force_upcast and not vae.force_upcast, "their pipelines ignore it"
    assert config.schedule.spacing == ("trailing" if is_flux else "linspace")
    assert config.schedule.sampler == "flow_euler"
    assert (config.schedule.dynamic_shift is not None) == (name == "flux-dev")


def test_every_tensor_is_read(opened):
    _, pipeline, _, checkpoint = opened
    for name in checkpoint.config.components:
        theirs = getattr(pipeline, name).state_dict()
        theirs = {key.removeprefix("text_model."): value for key, value in theirs.items()}
        theirs.pop("encoder.embed_tokens.weight", None)  # T5's table again
        ours = variables(checkpoint, name)
        ours = {key.removeprefix("text_model."): value for key, value in ours.items()}
        assert_same(ours, {key: value.numpy() for key, value in theirs.items()})


def test_tokenizers(opened):
    _, pipeline, _, checkpoint = opened
    prompt = "a lighthouse! at dusk"
    for name, encoder in checkpoint.config.text_encoders.items():
        theirs = getattr(pipeline, name.replace("text_encoder", "tokenizer"))
        ids = theirs(prompt, padding="max_length", max_length=encoder.max_length).input_ids
        np.testing.assert_array_equal(checkpoint.tokenizer(name)(prompt), [ids])


def test_absent_fields_are_the_classes_defaults(tmp_path):
    """A file with no field at all is the class without an argument."""
    with torch.device("meta"):
        for module, read in (
            (diffusers.SD3Transformer2DModel(), read_mmdit),
            (diffusers.FluxTransformer2DModel(), read_flux),
        ):
            model = layout.abstract_model(read({}, "config.json"))
            assert {name: slot.shape for name, slot in layout.slots(model).items()} == {
                name: tuple(value.shape) for name, value in module.state_dict().items()
            }
    assert read_mmdit({"out_channels": None, "in_channels": 4}, "config.json").out_channels == 4
    assert read_flux({"in_channels": 32}, "config.json").out_channels == 32


@pytest.mark.parametrize(
    ("layers", "dual", "skipped"),
    [(24, range(13), (7, 8, 9)), (10, (0,), (7, 8, 9)), (9, (0,), ()), (24, (), ())],
)
def test_blocks_of_skip_layer_guidance(layers, dual, skipped):
    raw = {"num_layers": layers, "dual_attention_layers": list(dual)}
    assert read_mmdit(raw, "config.json").skip_layers == skipped


@pytest.mark.parametrize("variant", ["fp16", "bf16"])
def test_shards_of_a_variant(small_pipelines, folder, variant):
    pipeline, source = small_pipelines("sd3")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[variant]
    for name in ("transformer", "text_encoder_3"):
        shutil.rmtree(folder / name)
        module = getattr(pipeline, name)
        half = type(module).from_pretrained(source / name, dtype=dtype)
        half.save_pretrained(folder / name, variant=variant, max_shard_size="500KB")
        assert len(list((folder / name).glob("*.safetensors"))) > 1
        for opening in ({}, {"variant": variant}):
            checkpoint = open_checkpoint(folder, **opening)
            dtypes = {tensor.dtype for tensor in checkpoint.tensors(name).values()}
            assert str(dtype).removeprefix("torch.") in dtypes
        if name == "transformer":
            expected = {key: value.float().numpy() for key, value in half.state_dict().items()}
            assert_same(variables(checkpoint, name), expected)


def test_both_names_of_the_table_of_t5(folder):
    reference = variables(open_checkpoint(folder), "text_encoder_3")
    name, alias = "shared.weight", "encoder.embed_tokens.weight"
    edit_tensors(folder / T5_FILE, lambda s: s.update({alias: s[name].copy()}))
    assert_same(variables(open_checkpoint(folder), "text_encoder_3"), reference)
    edit_tensors(folder / T5_FILE, lambda s: s.pop(name))
    assert_same(variables(open_checkpoint(folder), "text_encoder_3"), reference)


# Options


def test_without_t5(folder):
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / part)  # which may not have been downloaded
    config = open_checkpoint(folder, without=["text_encoder_3"]).config
    assert config.zero_tokens == 256
    assert list(config.text_encoders) == ["text_encoder", "text_encoder_2"]
    shorter = open_checkpoint(folder, without=["text_encoder_3"], max_sequence_length=77)
    assert shorter.config.zero_tokens == 77
    with pytest.raises(CheckpointError, match=r"No such file: .*text_encoder_3/config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("family", ["sd3", "flux-dev"])
def test_length_of_prompts(small_pipelines, family):
    _, folder = small_pipelines(family)
    checkpoint = open_checkpoint(folder, max_sequence_length=33)
    [(name, encoder)] = checkpoint.config.t5_encoders.items()
    assert encoder.max_length == 33
    assert checkpoint.tokenizer(name)("a cat").shape == (1, 33)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("sd3", {"without": ["text_encoder"]}, r"SD3, a T5, in place .*Received: text_encoder for a"
                                               r" StableDiffusion3Pipeline"),
        ("flux-dev", {"without": ["text_encoder_2"]}, r"Received: text_encoder_2 for a FluxPipel"),
        ("sd1", {"without": ["text_encoder_3"]}, r"nothing stands for any other .*for a StableDif"),
        ("sd1", {"max_sequence_length": 256}, r"is for SD3 and Flux, which have a T5 "
                                              r"text encoder\. Received: 256 for a StableDiff"),
        ("sd3", {"max_sequence_length": 513}, r"`max_sequence_length` is 1…512\. Received: 513"),
        ("sd3", {"max_sequence_length": 0}, r"`max_sequence_length` is 1…512\. Received: 0"),
        ("sd3", {"t5_tokenizer": "t5"}, r"`t5_tokenizer` is for single files\. Received: "),
        ("sd3", {"embeddings": ["cat.safetensors"]}, r"are for SD1, SD2 and SDXL\. Received: .*"
                                                     r"which is sd3-medium"),
    ],
)  # fmt: skip
def test_options_that_are_refused(small_pipelines, family, options, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(small_pipelines(family)[1], **options)


# What is written


def test_saved_folder_is_loaded_by_diffusers(opened, tmp_path):
    name, pipeline, _, checkpoint = opened
    config = checkpoint.config
    save_folder(
        tmp_path,
        config,
        {part: checkpoint.build(part) for part in config.components},
        {part: checkpoint.tokenizer(part) for part in config.text_encoders},
    )
    absent = dict.fromkeys(("text_encoder_3", "tokenizer_3")) if name == "sd3-without-t5" else {}
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path, **absent)
    assert type(loaded) is type(pipeline)
    for part in config.components:
        theirs, ours = (getattr(p, part).state_dict() for p in (pipeline, loaded))
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            assert torch.equal(value, ours[key]), key
    for part in config.text_encoders:
        tokenizer = part.replace("text_encoder", "tokenizer")
        padded = {"padding": "max_length", "max_length": 77}
        theirs, ours = (getattr(p, tokenizer)("a cat!", **padded) for p in (pipeline, loaded))
        assert ours.input_ids == theirs.input_ids
    for part, keys in {
        "vae": ("scaling_factor", "shift_factor", "latent_channels", "use_quant_conv"),
        "scheduler": ("shift", "use_dynamic_shifting"),
    }.items():
        theirs, ours = (getattr(p, part).config for p in (pipeline, loaded))
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]
    again = open_checkpoint(tmp_path)
    assert again.config == config
    for part in config.components:
        assert_same(variables(again, part), variables(checkpoint, part))


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "StableDiffusion3InpaintPipeline"}, r"it blends a masked picture into ev.*"
                                                             r"name StableDiffusion3Pipeline as"),
        ({"_class_name": "FluxInpaintPipeline"}, r"not supported for transformers; if .*FluxPipe"),
        ({"_class_name": "FluxFillPipeline"}, r"FluxFillPipeline is not supported: its transformer "
                                              r"takes a mask and a masked picture beside the"),
        ({"_class_name": "FluxControlPipeline"}, r"takes a picture of edges or depths beside"),
        ({"_class_name": "FluxKontextPipeline"}, r"takes the tokens of a picture beside"),
        ({"_class_name": "FluxPipeline"}, r"text_encoder is a CLIPTextModelWithProjection, suppor"),
        ({"transformer": ["diffusers", "FluxTransformer2DModel"]}, r"transformer is a FluxTransfo"),
        ({"text_encoder": ["transformers", "CLIPTextModel"]}, r"text_encoder is a CLIPTextModel,"),
        ({"text_encoder_2": [None, None]}, r"names no text_encoder_2\."),
        ({"transformer": [None, None]}, r"names no transformer\."),
        ({"unet": ["diffusers", "UNet2DConditionModel"]}, r"component 'unet' .* is not supported"),
        ({"tokenizer_3": ["transformers", "CLIPTokenizer"]}, r"tokenizer_3 is a CLIPTokenizer, su"),
    ],
)  # fmt: skip
def test_index_errors(folder, changes, message):
    edit_json(folder / "model_index.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_what_takes_no_part_is_ignored(folder):
    """An image encoder is for an IP-Adapter alone, which no call gives."""
    vision = ["transformers", "SiglipVisionModel"]
    edit_json(folder / "model_index.json", image_encoder=vision, feature_extractor=vision)
    assert list(open_checkpoint(folder).config.components)[-2:] == ["transformer", "vae"]


@pytest.mark.parametrize(
    ("component", "changes", "message"),
    [
        ("transformer", {"qk_norm": "layer_norm"}, r"qk_norm='layer_norm' is not supported; supp"),
        ("transformer", {"caption_projection_dim": 64}, r"caption_projection_dim=64 is not .*: 12"),
        ("transformer", {"num_extra": 3}, r"the field num_extra=3 is not supported; ignoring it"),
        ("transformer", {"in_channels": 33}, r"must be 16\. Pictures, masks or .*Received: in_cha"),
        ("transformer", {"joint_attention_dim": 96}, r"context_dim=96 \(joint_attention_dim\), bu"),
        ("transformer", {"pooled_projection_dim": 64}, r"pooled_projection_dim, 64\. Received: 64"),
        ("text_encoder_3", {"d_model": 64}, r"as wide as its context: 224 .*Received: 64"),
        ("text_encoder_3", {"feed_forward_proj": "relu"}, r"feed_forward_proj='relu' is not suppo"),
        ("text_encoder_3", {"model_type": "umt5"}, r"model_type='umt5' is not supported"),
        ("text_encoder_3", {"rope_theta": 5}, r"the field rope_theta=5 is not supported"),
        ("scheduler", {"invert_sigmas": True}, r"invert_sigmas=True is not supported"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_named(folder, component, changes, message):
    file = "scheduler_config.json" if component == "scheduler" else "config.json"
    edit_json(folder / component / file, **changes)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("read", "raw", "message"),
    [
        (read_flux, {"patch_size": 2}, r"patch_size=2 is not supported; supported: 1"),
        (read_flux, {"axes_dims_rope": [16, 56]}, r"three even numbers that sum to .* \[16, 56\]"),
        (read_flux, {"axes_dims_rope": [15, 57, 56]}, r"Received: \[15, 57, 56\] and 128"),
        (read_flux, {"attention_head_dim": 64}, r"Received: \[16, 56, 56\] and 64"),
        (read_mmdit, {"num_attention_heads": 3}, r"caption_projection_dim=1152 is .*supported: 19"),
        (lambda raw, where: read_t5(raw, where, 256), {}, r"feed_forward_proj='relu'"),
    ],
)  # fmt: skip
def test_readers_refuse(read, raw, message):
    with pytest.raises(ConfigError, match=message):
        read(raw, "config.json")


def test_a_tokenizer_that_is_named_must_be_there(folder):
    shutil.rmtree(folder / "tokenizer_3")
    with pytest.raises(TokenizerError, match=r"must hold tokenizer\.json or spiece\.model"):
        open_checkpoint(folder).tokenizer("text_encoder_3")


def test_a_shifted_autoencoder_of_a_unet(small_pipelines, tmp_path):
    """Pipelines with a UNet do not shift latents."""
    folder = shutil.copytree(small_pipelines("sd1")[1], tmp_path / "sd1")
    edit_json(folder / "vae/config.json", shift_factor=0.06)
    with pytest.raises(ConfigError, match=r"shift_factor=0\.06 is not supported; supported: None"):
        open_checkpoint(folder)


# The command


def test_describe(opened, capsys):
    name, _, folder, checkpoint = opened
    assert main(["weights", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"{peer_transformers.FAMILIES[name]} (with sizes of its own)" in printed
    assert "prediction  flow, sampler flow_euler" in printed
    for part in checkpoint.config.components:
        tensors = checkpoint.tensors(part)
        line = next(line for line in printed.splitlines() if line.startswith(f"{part} "))
        count = sum(tensor.size for tensor in tensors.values())
        assert line.split()[1:4] == [str(len(tensors)), f"{count:,}", "float32"]
    assert ("256 zeros stand in place" in printed) == (name == "sd3-without-t5")
    assert ("padded with '<pad>'" in printed) == bool(checkpoint.config.t5_encoders)
    assert "loads: every tensor has its place" in printed


def test_describe_with_options(small_pipelines, capsys):
    _, folder = small_pipelines("sd3")
    arguments = ["--without", "text_encoder_3", "--max_sequence_length", "20"]
    assert main(["weights", str(folder), *arguments]) == 0
    assert "text_encoder_3 is left out: 20 zeros stand" in capsys.readouterr().out


def test_nothing_is_written_if_diffusers_has_no_scheduler(opened, tmp_path):
    config = opened[3].config
    config = replace(config, schedule=replace(config.schedule, sampler="flow_dpmpp_2m"))
    models, tokenizers = dict.fromkeys(config.components), dict.fromkeys(config.text_encoders)
    with pytest.raises(ConfigError, match="diffusers has no scheduler that walks"):
        write_folder(tmp_path / "saved", config, models, tokenizers)
    assert not (tmp_path / "saved").exists()


def test_index_names_what_is_absent(opened, tmp_path):
    """The index that is written differs from diffusers' own in nothing but versions."""
    _, _, folder, checkpoint = opened
    config = checkpoint.config
    models = {part: checkpoint.build(part) for part in config.components}
    tokenizers = {part: checkpoint.tokenizer(part) for part in config.text_encoders}
    save_folder(tmp_path, config, models, tokenizers)
    ours, theirs = (
        json.loads((path / "model_index.json").read_text()) for path in (tmp_path, folder)
    )
    for index in (ours, theirs):
        index.pop("_diffusers_version")
        for key, value in index.items():
            if key.startswith("tokenizer") and value[1]:
                value[1] = value[1].removesuffix("Fast")
    assert ours == theirs
