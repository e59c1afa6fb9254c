"""Diffusers folders read and written, and every way in which a checkpoint can be wrong."""

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import diffusers
import keras
import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from sd_tf.checkpoints import TINY_FOLDER
from sd_tf.cli.main import main
from sd_tf.config import FAMILIES, ConfigError, family_of, has_named_sizes, suited_to
from sd_tf.errors import SdTfError
from sd_tf.files.tensors import open_safetensors
from sd_tf.tokenizer.clip import TokenizerError
from sd_tf.weights import CheckpointError, layout, open_checkpoint, save_folder
from tests import peers

VAE_FILE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(small_pipelines, tmp_path):
    """A copy of the small SD1 folder, to be broken."""
    _, source = small_pipelines("sd1")
    return shutil.copytree(source, tmp_path / "sd1")


def variables(checkpoint, component):
    return {name: slot.stored() for name, slot in layout.slots(checkpoint.build(component)).items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(path, change):
    state = load_file(path)
    change(state)
    save_file(state, path)


# What is read


def test_fp16_files(folder, small_pipelines):
    pipeline, _ = small_pipelines("sd1")
    half = open_safetensors(folder / VAE_FILE)
    save_file(
        {name: tensor.read().astype("float16") for name, tensor in half.items()},
        folder / "vae/diffusion_pytorch_model.fp16.safetensors",
    )
    plain = open_checkpoint(folder).tensors("vae")["decoder.conv_in.bias"]
    assert plain.dtype == "float32", "the plain file comes first"
    (folder / VAE_FILE).unlink()
    for variant in (None, "fp16"):
        checkpoint = open_checkpoint(folder, variant=variant)
        assert checkpoint.tensors("vae")["decoder.conv_in.bias"].dtype == "float16"
    loaded = variables(checkpoint, "vae")["decoder.conv_in.bias"]
    assert loaded.dtype == np.float32
    expected = pipeline.vae.decoder.conv_in.bias.detach().half().float().numpy()
    np.testing.assert_array_equal(loaded, expected)
    with pytest.raises(
        CheckpointError, match=r"no 'non_ema' weights; set `variant` to one of .*fp16"
    ):
        open_checkpoint(folder, variant="non_ema").build("vae")


def test_components_without_the_variant_take_their_default(folder):
    unet = folder / "unet/diffusion_pytorch_model.safetensors"
    shutil.copy(unet, unet.with_suffix(".non_ema.safetensors"))
    edit_tensors(unet, lambda s: s.update({"conv_in.bias": s["conv_in.bias"] + 1}))
    checkpoint = open_checkpoint(folder, variant="non_ema")
    plain, chosen = (
        c.tensors("unet")["conv_in.bias"] for c in (open_checkpoint(folder), checkpoint)
    )
    np.testing.assert_array_equal(plain.read(), chosen.read() + 1)
    assert checkpoint.tensors("vae").keys() == open_checkpoint(folder).tensors("vae").keys()


def test_bfloat16_files(folder, small_pipelines):
    from safetensors.torch import save_file as save_torch

    pipeline, _ = small_pipelines("sd1")
    state = {name: value.bfloat16() for name, value in pipeline.vae.state_dict().items()}
    save_torch(state, folder / VAE_FILE)
    model = open_checkpoint(folder).build("vae", "bfloat16")
    for name, slot in layout.slots(model).items():
        stored = torch.from_numpy(slot.stored().astype("float32")).bfloat16()
        assert torch.equal(stored, state[name]), name


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_sharded(folder, small_pipelines, variant):
    pipeline, source = small_pipelines("sd1")
    shutil.rmtree(folder / "unet")
    shutil.rmtree(folder / "text_encoder")
    pipeline.unet.save_pretrained(folder / "unet", max_shard_size="2MB", variant=variant)
    pipeline.text_encoder.save_pretrained(
        folder / "text_encoder", max_shard_size="2MB", variant=variant
    )
    for name in ("unet", "text_encoder"):
        assert len(list((folder / name).glob("*.safetensors"))) > 1
        assert_same(
            variables(open_checkpoint(folder), name), variables(open_checkpoint(source), name)
        )


def test_old_names(folder, small_pipelines):
    """Attention of the VAE as it was called before 2023, with the buffer of that time."""
    _, source = small_pipelines("sd1")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(state):
        for name in [n for n in state if ".attentions." in n]:
            for new, former in old.items():
                if f".{new}." in name:
                    state[name.replace(new, former)] = state.pop(name)

    edit_tensors(folder / VAE_FILE, rename)
    edit_tensors(
        folder / "text_encoder/model.safetensors",
        lambda s: s.update({"embeddings.position_ids": np.arange(77)[None]}),
    )
    for name in ("vae", "text_encoder"):
        assert_same(
            variables(open_checkpoint(folder), name), variables(open_checkpoint(source), name)
        )


def test_matrices_stored_as_convolutions(folder, small_pipelines):
    _, source = small_pipelines("sd1")

    def reshape(state):
        for name, value in state.items():
            if name.endswith("proj_in.weight"):
                state[name] = value.reshape(value.shape[:2])
            if name.endswith("attn1.to_q.weight"):
                state[name] = value[:, :, None, None]

    edit_tensors(folder / "unet/diffusion_pytorch_model.safetensors", reshape)
    assert_same(
        variables(open_checkpoint(folder), "unet"), variables(open_checkpoint(source), "unet")
    )


@pytest.mark.parametrize("family", peers.FAMILIES)
def test_config_of_every_family(small_pipelines, family):
    pipeline, folder = small_pipelines(family)
    config = open_checkpoint(folder).config
    assert family_of(config) == family
    assert not has_named_sizes(config)
    assert (
        config.schedule.sampler
        == {
            diffusers.DDIMScheduler: "ddim",
            diffusers.EulerDiscreteScheduler: "euler",
            diffusers.PNDMScheduler: "pndm",
        }[type(pipeline.scheduler)]
    )


def test_absent_fields_of_sdxl_are_on(small_pipelines, tmp_path):
    folder = shutil.copytree(small_pipelines("sdxl-base")[1], tmp_path / "sdxl")
    files = {"model_index.json": "force_zeros_for_empty_prompt", "vae/config.json": "force_upcast"}
    for file, name in files.items():
        edit_json(folder / file, **{name: False})
    config = open_checkpoint(folder).config
    assert not config.zero_empty_negative and not config.autoencoder.force_upcast
    for file, name in files.items():
        path = folder / file
        content = json.loads(path.read_text())
        del content[name]
        path.write_text(json.dumps(content))
    config = open_checkpoint(folder).config
    assert config.zero_empty_negative and config.autoencoder.force_upcast
    theirs = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert theirs.config.force_zeros_for_empty_prompt and theirs.vae.config.force_upcast


def test_schedulers(folder):
    path = folder / "scheduler/scheduler_config.json"
    common = {**peers.SCHEDULE, "steps_offset": 1}
    for scheduler, name in (
        (diffusers.EulerDiscreteScheduler(**common), "euler_linspace"),
        (diffusers.EulerDiscreteScheduler(**common, timestep_spacing="trailing"), "euler_trailing"),
        (
            diffusers.EulerAncestralDiscreteScheduler(**common, timestep_spacing="trailing"),
            "euler_ancestral_trailing",
        ),
        (diffusers.DPMSolverMultistepScheduler(**common), "dpmpp_2m"),
        (
            diffusers.DPMSolverMultistepScheduler(**common, use_karras_sigmas=True),
            "dpmpp_2m_karras",
        ),
        (
            diffusers.DPMSolverMultistepScheduler(**common, algorithm_type="sde-dpmsolver++"),
            "dpmpp_2m_sde",
        ),
        (diffusers.HeunDiscreteScheduler(**common), "heun"),
        (diffusers.UniPCMultistepScheduler(**common), "unipc"),
        (diffusers.LMSDiscreteScheduler(**common), "lms"),
        (diffusers.LCMScheduler(), "lcm"),
        (diffusers.DDIMScheduler(**common), "ddim"),  # SD1's pipelines set clip_sample to False
    ):
        scheduler.save_pretrained(path.parent)
        assert open_checkpoint(folder).config.schedule.sampler == name
    for scheduler, message in (
        (diffusers.DEISMultistepScheduler(**common), r"'DEISMultistepScheduler' is unknown"),
        (
            diffusers.EulerDiscreteScheduler(**common, use_karras_sigmas=True),
            r"timestep_spacing='linspace' and use_karras_sigmas=True is not supported",
        ),
        (
            diffusers.DDIMScheduler(**common, rescale_betas_zero_snr=True, clip_sample=False),
            r"rescale_betas_zero_snr=True",
        ),
        (diffusers.PNDMScheduler(**common), r"skip_prk_steps=False"),
        (
            diffusers.DPMSolverMultistepScheduler(
                **common, algorithm_type="dpmsolver", final_sigmas_type="sigma_min"
            ),
            r"algorithm_type='dpmsolver' is not supported",
        ),
        (
            diffusers.DPMSolverMultistepScheduler(
                **common, algorithm_type="sde-dpmsolver++", solver_order=3
            ),
            r"solver_order=3 is not supported; supported: 2",
        ),
        (
            diffusers.UniPCMultistepScheduler(**common, timestep_spacing="trailing"),
            r"UniPC.* with timestep_spacing='trailing' and use_karras_sigmas=False is not sup",
        ),
        (
            diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
            r"stochastic_sampling=True is not supported; supported: False",
        ),
        (
            diffusers.DDIMScheduler(**common, prediction_type="sample", clip_sample=False),
            r"prediction_type='sample'",
        ),
    ):
        scheduler.save_pretrained(path.parent)
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(folder)
    diffusers.DEISMultistepScheduler(**common).save_pretrained(path.parent)
    assert open_checkpoint(folder, scheduler="ddim").config.schedule.sampler == "ddim"
    with pytest.raises(CheckpointError, match=r"Unknown scheduler 'dpm_fast'. Known: ddim"):
        open_checkpoint(folder, scheduler="dpm_fast")


def test_fields_of_a_pipelines_first_release(folder):
    """diffusers' pipelines mend them in memory, and leave the files as they are."""
    schedule = {**peers.SCHEDULE, "_class_name": "DDIMScheduler", "set_alpha_to_one": False}
    del schedule["steps_offset"]
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(schedule))
    edit_json(folder / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    for version, size in (("0.6.0.dev0", 64), ("0.8.1", 64), ("0.9.0", 32), ("0.10.0", 32)):
        edit_json(folder / "unet/config.json", sample_size=32, _diffusers_version=version)
        config = open_checkpoint(folder).config
        theirs = diffusers.DiffusionPipeline.from_pretrained(folder)
        assert config.denoiser.sample_size == size == theirs.unet.config.sample_size
        assert config.schedule.steps_offset == theirs.scheduler.config.steps_offset == 1
        assert theirs.scheduler.config.clip_sample is False
    edit_json(folder / "unet/config.json", _diffusers_version="0.6.0")
    edit_json(folder / "model_index.json", _class_name="StableDiffusionInstructPix2PixPipeline")
    with pytest.raises(ConfigError, match=r"clip_sample=True is not supported; supported: False"):
        open_checkpoint(folder)
    edit_json(folder / "scheduler/scheduler_config.json", clip_sample=False)
    config = open_checkpoint(folder).config
    assert (config.schedule.steps_offset, config.denoiser.sample_size) == (0, 32)


def test_a_unet_saved_from_an_average(folder):
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    average = EMAModel(unet.parameters(), model_cls=type(unet), model_config=unet.config)
    before = open_checkpoint(folder).config
    average.save_pretrained(folder / "unet")
    assert "optimization_step" in json.loads((folder / "unet/config.json").read_text())
    assert open_checkpoint(folder).config == before


def test_cosxl_edit_is_refused(small_pipelines, tmp_path):
    folder = shutil.copytree(small_pipelines("sdxl-instruct-pix2pix")[1], tmp_path / "sdxl")
    edit_json(folder / "model_index.json", is_cosxl_edit=True)
    message = r"model_index\.json: is_cosxl_edit=True is not supported: its UNet takes the picture"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_tokenizer_that_is_named_must_be_there(folder):
    """Without it SD2's padding would be another, and so would its pictures."""
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(TokenizerError, match=r"Missing: .*tokenizer/vocab\.json"):
        open_checkpoint(folder).tokenizer()


def test_a_folder_without_a_tokenizer(folder):
    edit_json(folder / "model_index.json", tokenizer=[None, None])
    assert open_checkpoint(folder).tokenizer().pad_token_id == 49407  # the folder is there
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(CheckpointError, match=r"names no tokenizer, .* how prompts are padded"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "sd2-v"}, "`family` is for single files. Received: "),
        ({"ema": True}, "`ema` is for single files. Received: "),
        ({"revision": "main"}, "`revision` is for the Hub. Received: "),
    ],
)
def test_options_that_a_folder_does_not_take(folder, options, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, **options)
    with pytest.raises(CheckpointError, match=r"`\w+` is for .* Received: kerascv:sd1\.4"):
        open_checkpoint("kerascv:sd1.4", **options)


def test_folders_of_kerascv(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kcv_diffusion_model.h5").touch()
    assert open_checkpoint("kerascv:~/mine").format == "KerasCV sd1.4"
    with pytest.raises(ConfigError, match=r"flow_euler"):
        open_checkpoint("kerascv:~/mine", scheduler="flow_euler")


# What is written


@pytest.mark.parametrize("family", peers.FAMILIES)
def test_saved_folder_is_loaded_by_diffusers(small_pipelines, tmp_path, family):
    pipeline, source = small_pipelines(family)
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    save_folder(
        tmp_path,
        config,
        {name: checkpoint.build(name) for name in config.components},
        checkpoint.tokenizers(),
    )
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded) is type(pipeline)
    for name in config.components:
        theirs, ours = (getattr(p, name).state_dict() for p in (pipeline, loaded))
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            assert torch.equal(value, ours[key]), key
    assert type(loaded.scheduler) is type(pipeline.scheduler)
    for key in ("prediction_type", "timestep_spacing", "beta_start", "steps_offset"):
        assert loaded.scheduler.config[key] == pipeline.scheduler.config[key]
    name = "tokenizer" if loaded.tokenizer is not None else "tokenizer_2"
    ids = [
        getattr(p, name)("hello! it's", padding="max_length", max_length=77).input_ids
        for p in (pipeline, loaded)
    ]
    assert ids[0] == ids[1]
    for file in (tmp_path / "vae").iterdir():
        assert file.stat().st_mode & 0o666 == (tmp_path / "vae").stat().st_mode & 0o666, file
    again = open_checkpoint(tmp_path)
    assert again.config == config
    for component in config.components:
        assert_same(variables(again, component), variables(checkpoint, component))


def test_defaults_of_a_call(small_pipelines, tmp_path):
    """A folder keeps them, and they do not disturb diffusers, to which they mean nothing."""
    pipeline, source = small_pipelines("sd1")
    own = {"num_steps": 4, "guidance_scale": 1.5, "image_guidance_scale": 0.5, "strength": 1}
    checkpoint = open_checkpoint(source)
    assert suited_to(checkpoint.config) == {}
    config = replace(checkpoint.config, suited=own)
    models = {name: checkpoint.build(name) for name in config.components}
    save_folder(tmp_path, config, models, checkpoint.tokenizers())
    assert suited_to(open_checkpoint(tmp_path).config) == own
    assert type(diffusers.DiffusionPipeline.from_pretrained(tmp_path)) is type(pipeline)
    flux = replace(FAMILIES["flux-schnell"], suited={"guidance_scale": 2.0})
    assert suited_to(flux) == {"num_steps": 4, "guidance_scale": 2.0, "strength": 0.6}


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ([4], r"_call_defaults has numbers by parameters' names. Received: \[4\]"),
        ({"seed": 1}, "own for num_steps, guidance_scale, .*strength. Received: 'seed'"),
        ({"num_steps": 0}, "0 cannot be the default of num_steps"),
        ({"num_steps": 2.5}, "2.5 cannot be the default of num_steps"),
        ({"guidance_scale": "4"}, "'4' cannot be the default of guidance_scale"),
        ({"guidance_scale": float("nan")}, "nan cannot be the default of guidance_scale"),
        ({"strength": True}, "True cannot be the default of strength"),
        ({"strength": 1.5}, "1.5 cannot be the default of strength"),
    ],
)
def test_defaults_that_no_call_takes(tmp_path, defaults, message):
    shutil.copytree(TINY_FOLDER, tmp_path / "tiny")
    path = tmp_path / "tiny/model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "_call_defaults": defaults}))
    with pytest.raises(SdTfError, match=message):
        open_checkpoint(tmp_path / "tiny")


def test_save_wants_every_part(small_pipelines, tmp_path):
    checkpoint = open_checkpoint(small_pipelines("sd1")[1])
    with pytest.raises(CheckpointError, match=r"text_encoder, unet, vae. Received: none"):
        save_folder(tmp_path, checkpoint.config, {}, {})
    models = {name: checkpoint.build(name) for name in checkpoint.config.components}
    with pytest.raises(
        CheckpointError, match=r"tokenizers must have one for each of text_encoder.*none"
    ):
        save_folder(tmp_path, checkpoint.config, models, {})


# What is refused


def broken(folder, match, error=CheckpointError, component="vae", **options):
    with pytest.raises(error, match=match):
        open_checkpoint(folder, **options).build(component)


def test_missing_surplus_and_misshapen_tensors(folder):
    path = folder / VAE_FILE
    name = "decoder.conv_in.bias"
    value = load_file(path)[name]
    edit_tensors(path, lambda s: s.pop(name))
    broken(folder, r"vae of .* 1 tensors are missing: decoder\.conv_in\.bias")
    edit_tensors(path, lambda s: s.update({name: value, "decoder.extra": value}))
    broken(folder, r"1 tensors have no place in the model: decoder\.extra")
    edit_tensors(path, lambda s: s.update({name: value[:-1]}) or s.pop("decoder.extra"))
    broken(folder, r"1 tensors have the wrong shape: decoder\.conv_in\.bias is \[95\],.*\[96\]")


def test_truncated_and_corrupt_files(folder):
    path = folder / VAE_FILE
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    broken(folder, rf"is truncated: .*Its size is {len(content) - 100} bytes; download it again")
    path.write_bytes(content[:5])
    broken(folder, r"is truncated: ")
    path.write_bytes(content[:20] + b"\xff\xff" + content[22:])
    broken(folder, r"is corrupt: ")
    path.write_bytes(b"<html>this is an error page</html>")
    broken(folder, r"is corrupt: ")


def test_unreadable_dtype(folder):
    path = folder / VAE_FILE
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"F32"', b'"I16"', 1))
    broken(folder, r"is corrupt|dtype I16; supported are F64, F32, F16, BF16")


@pytest.mark.parametrize("suffix", [".bin", ".ckpt", ".pt"])
def test_pickles(folder, tmp_path, suffix):
    message = rf"weights\{suffix} is a pickle.*convert it.*'weights\.safetensors'"
    path = tmp_path / f"weights{suffix}"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)  # also where there is none: the answer is the same
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
    (folder / VAE_FILE).unlink()
    (folder / f"vae/diffusion_pytorch_model{suffix}").write_bytes(b"")
    broken(folder, rf"vae/diffusion_pytorch_model\{suffix} is a pickle")


def convert(error, folder):
    """Run the command in the message as it stands."""
    _, flag, code = shlex.split(str(error).partition("convert it: ")[2])
    subprocess.run([sys.executable, flag, code], cwd=folder, check=True)


def test_the_advised_conversion_works(small_pipelines, tmp_path, monkeypatch):
    pipeline, _ = small_pipelines("sd1")
    bias = pipeline.vae.decoder.conv_in.bias.detach()
    state = {"decoder.conv_in.bias": bias, "tied": bias, "step": 3}
    torch.save({"state_dict": state}, tmp_path / "weights.ckpt")
    message = (
        "for more than tensors, such as a training's callbacks, weights_only=False lets it run"
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / "weights.ckpt")
    convert(caught.value, tmp_path)
    converted = load_file(tmp_path / "weights.safetensors")
    for name in ("decoder.conv_in.bias", "tied"):
        np.testing.assert_array_equal(converted[name], state[name])


@pytest.mark.parametrize(
    ("variant", "shards"),
    [
        (None, ["pytorch_model.bin"]),
        ("fp16", ["pytorch_model.fp16.bin"]),
        (None, ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]),
    ],
    ids=["plain", "fp16", "sharded"],
)
def test_the_advised_conversion_of_a_component_is_read(folder, variant, shards):
    part = folder / "text_encoder"
    state = {n: torch.from_numpy(v) for n, v in load_file(part / "model.safetensors").items()}
    (part / "model.safetensors").unlink()
    names = sorted(state)
    for number, shard in enumerate(shards):
        torch.save({name: state[name] for name in names[number :: len(shards)]}, part / shard)
    if len(shards) > 1:
        (part / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).tensors("text_encoder")
    convert(caught.value, part)
    tensors = open_checkpoint(folder, variant=variant).tensors("text_encoder")
    [name] = [name for name in state if name.endswith("final_layer_norm.bias")]
    stored = tensors["text_model.final_layer_norm.bias"]
    np.testing.assert_array_equal(stored.read(), state[name])
    assert len(tensors) == len([name for name in names if not name.endswith(".position_ids")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_are_read_alone(tmp_path, monkeypatch, dtype):
    whole = torch.arange(60.0).reshape(5, 4, 3).to(dtype)
    save_torch_file({"before": torch.zeros(7), "fused": whole}, tmp_path / "x.safetensors")
    fused, counts = open_safetensors(tmp_path / "x.safetensors")["fused"], []
    read = np.fromfile

    def counted(file, dtype, count, **where):
        counts.append(count)
        return read(file, dtype, count, **where)

    monkeypatch.setattr(np, "fromfile", counted)
    for start, stop in ((0, 2), (2, 5), (3, 3)):
        part = fused.rows(start, stop)
        assert part.shape == (stop - start, 4, 3)
        np.testing.assert_array_equal(part.read(), whole[start:stop].float().numpy())
    swapped = fused.rows(0, 4).with_halves_swapped().rows(1, 3)
    np.testing.assert_array_equal(swapped.read(), whole[[3, 0]].float().numpy())
    assert counts == [24, 36, 0, 48]


def test_index_errors(folder, tmp_path):
    index = folder / "model_index.json"
    original = index.read_text()
    for changes, message in (
        ({"_class_name": "PixArtAlphaPipeline"}, r"class 'PixArtAlphaPipeline' is not supported"),
        ({"unet": ["diffusers", "SD3Transformer2DModel"]}, r"unet is a SD3Transformer2DModel"),
        ({"text_encoder": ["transformers", "T5EncoderModel"]}, r"text_encoder is a T5EncoderModel"),
        ({"prior": ["diffusers", "PriorTransformer"]}, r"component 'prior' .* is not supported"),
        (
            {"../../unet": ["diffusers", "UNet2DConditionModel"]},
            r"outside its folder: '\.\.",
        ),
        ({"vae": [None, None]}, r"names no vae"),
        ({"text_encoder": [None, None]}, r"names no text encoder"),
    ):
        edit_json(index, **changes)
        broken(folder, message)
        index.write_text(original)
    index.write_text("[1]")
    broken(folder, r"must hold a JSON object. Received: list")
    index.write_text("{")
    broken(folder, r"model_index\.json is not valid JSON")
    index.unlink()
    broken(folder, r"is not a diffusers folder: it has no model_index\.json")


def test_shard_index_errors(folder, small_pipelines):
    pipeline, _ = small_pipelines("sd1")
    shutil.rmtree(folder / "unet")
    pipeline.unet.save_pretrained(folder / "unet", max_shard_size="2MB")
    path = folder / "unet/diffusion_pytorch_model.safetensors.index.json"
    index = json.loads(path.read_text())
    weights = index["weight_map"]
    for changed, message in (
        ({**weights, "conv_in.bias": "../../elsewhere.safetensors"}, r"points outside its folder"),
        ({**weights, "conv_in.other": weights["conv_in.bias"]}, r"do not hold: conv_in\.other"),
        ({n: f for n, f in weights.items() if n != "conv_in.bias"}, r"not name: conv_in\.bias"),
        ({}, r"has no weight_map"),
        ({**weights, "conv_in.bias": "gone.safetensors"}, r"No such file: .*gone\.safetensors"),
    ):
        path.write_text(json.dumps({**index, "weight_map": changed}))
        broken(folder, message, component="unet")


def test_absent_files(folder, tmp_path):
    for path, message in (
        ("unet/config.json", r"No such file: .*unet/config\.json"),
        ("scheduler/scheduler_config.json", r"No such file: .*scheduler_config\.json"),
        (
            VAE_FILE,
            r"vae has no weights: expected diffusion_pytorch_model\.safetensors. Found",
        ),
    ):
        content = (folder / path).read_bytes()
        (folder / path).unlink()
        broken(folder, message)
        (folder / path).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"No such file or folder: .*nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(CheckpointError, match=r"must be \.safetensors. Received: \.gguf"):
        open_checkpoint(tmp_path / "weights.gguf")
    with pytest.raises(
        CheckpointError, match=r"has the components text_encoder.*Received: 'unet_2'"
    ):
        open_checkpoint(folder).build("unet_2")


UNSUPPORTED = [
    ("unet", {"class_embed_type": "timestep"}, r"class_embed_type='timestep' is not supported"),
    ("unet", {"conv_in_kernel": 5}, r"conv_in_kernel=5 is not supported; supported: 3"),
    ("unet", {"encoder_hid_dim_type": "ip_image_proj"}, r"encoder_hid_dim_type='ip_image_proj'"),
    ("unet", {"down_block_types": ["AttnDownBlock2D"] * 4}, r"down_block_types='AttnDownBlock2D'"),
    ("unet", {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, r"mid_block_type='UNetMid"),
    ("unet", {"cross_attention_dim": [128, 128, 64, 64]}, r"must be the same at all levels"),
    ("unet", {"cross_attention_dim": 64}, r"context_dim=64.*text encoders give 128"),
    ("unet", {"use_motion_module": True}, r"field use_motion_module=True is not supported"),
    ("unet", {"addition_embed_type": "image"}, r"addition_embed_type='image'"),
    ("unet", {"addition_embed_type": "text_time"}, r"needs a text encoder with a projection"),
    ("unet", {"in_channels": 7}, r"one of 4, 8, 9\. Received: in_channels=7"),
    (
        "unet",
        {"layers_per_block": [2, 2]},
        r"unet/config\.json: layers_per_block must be one number, or a list of 4, one a level\. "
        r"Received: \[2, 2\]",
    ),
    ("vae", {"latents_mean": [0.1]}, r"latents_mean=\[0\.1\] is not supported"),
    ("vae", {"act_fn": "relu"}, r"act_fn='relu' is not supported; supported: 'silu', 'swish'"),
    ("text_encoder", {"hidden_act": "relu"}, r"hidden_act='relu' is not supported"),
    ("text_encoder", {"rope_theta": 1e4}, r"field rope_theta=10000\.0 is not supported"),
]


@pytest.mark.parametrize(("component", "changes", "message"), UNSUPPORTED)
def test_unsupported_fields_are_named(folder, component, changes, message):
    edit_json(folder / component / "config.json", **changes)
    broken(folder, message, error=ConfigError)


def test_tokenizer_that_outgrew_the_text_encoder(folder):
    (folder / "tokenizer/added_tokens.json").write_text(json.dumps({"<toy>": 49408}))
    (folder / "tokenizer/tokenizer.json").unlink()
    vocab = peers.tokenizer(49407).get_vocab()
    (folder / "tokenizer/vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer/merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CheckpointError, match=r"has 49409 tokens.*embeddings for 49408"):
        open_checkpoint(folder).tokenizer()


# The command


def test_describe(small_pipelines, capsys):
    _, folder = small_pipelines("sdxl-base")
    assert main(["weights", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "diffusers folder" in printed and "sdxl-base (with sizes of its own)" in printed
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.config.components:
        model = checkpoint.build(name)
        parameters = sum(int(np.prod(v.shape)) for v in model.variables)
        line = next(line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert line.split()[1:4] == [str(len(model.variables)), f"{parameters:,}", "float32"]
    assert "padded with '!'" in printed
    assert "loads: every tensor has its place" in printed
    keras.backend.clear_session()


def test_describe_what_is_broken(folder, capsys, tmp_path):
    edit_tensors(folder / VAE_FILE, lambda s: s.pop("encoder.conv_in.bias"))
    unet = folder / "unet/diffusion_pytorch_model.safetensors"
    unet.write_bytes(unet.read_bytes()[:-1])
    assert main(["weights", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "would not load: vae: 1 tensors are missing: encoder.conv_in.bias" in captured.err
    assert "would not load: unet: " in captured.err and "is truncated" in captured.err
    assert "loads:" not in captured.out
    assert main(["weights", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("would not load: No such file or folder")
