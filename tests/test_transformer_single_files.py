"""Single files of SD3 and Flux in the original layout, against diffusers' own converters."""

import inspect

import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from sd_tf.cli.main import main
from sd_tf.config import FluxConfig, family_of
from sd_tf.files.tensors import InFile, StoredTensor
from sd_tf.weights import CheckpointError, open_checkpoint
from sd_tf.weights.single_file_transformers import recognize
from tests import peer_transformers
from tests.test_single_file import numpy_state, prefixed, rewritten, vae_to_original
from tests.test_weights import assert_same, variables

CLIP_L, CLIP_G, T5 = (
    f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g", "t5xxl")
)
PROJECTION = "text_projection.weight"
MLP = {"fc1": "net.0.proj", "fc2": "net.2", "0": "net.0.proj", "2": "net.2"}


def halves_swapped(value):
    return np.concatenate(np.split(value, 2)[::-1])


class Inverted(dict):
    """A transformer's state, of which modules are taken by diffusers' names and given others."""

    def __init__(self, state):
        super().__init__()
        self.state = dict(state)

    def take(self, module, *theirs, leaf="weight", swap=False):
        """Move a module, or several that are fused to one, with its bias if it has one."""
        for end in ("weight", "bias"):
            values = [self.state.pop(f"{name}.{end}", None) for name in theirs]
            if values[0] is not None:
                value = np.concatenate(values)
                name = leaf if end == "weight" else end
                self[f"{module}.{name}"] = halves_swapped(value) if swap else value

    def finished(self):
        left = list(self.state)
        assert not left
        return dict(self)


def sd3_to_original(state):
    last = max(int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks."))
    state = Inverted(state)
    state["pos_embed"] = state.state.pop("pos_embed.pos_embed")
    state.take("x_embedder.proj", "pos_embed.proj")
    state.take("context_embedder", "context_embedder")
    for theirs, ours in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder")):
        for number, layer in ((0, 1), (2, 2)):
            state.take(f"{theirs}.mlp.{number}", f"time_text_embed.{ours}.linear_{layer}")
    for i in range(last + 1):
        block, ours = f"joint_blocks.{i}", f"transformer_blocks.{i}"
        x, context = f"{block}.x_block", f"{block}.context_block"
        state.take(f"{x}.adaLN_modulation.1", f"{ours}.norm1.linear")
        state.take(f"{context}.adaLN_modulation.1", f"{ours}.norm1_context.linear", swap=i == last)
        for attn in ("attn", "attn2"):
            state.take(f"{x}.{attn}.qkv", *(f"{ours}.{attn}.to_{part}" for part in "qkv"))
            state.take(f"{x}.{attn}.proj", f"{ours}.{attn}.to_out.0")
            for part in "qk":
                state.take(f"{x}.{attn}.ln_{part}", f"{ours}.{attn}.norm_{part}")
        state.take(f"{context}.attn.qkv", *(f"{ours}.attn.add_{part}_proj" for part in "qkv"))
        state.take(f"{context}.attn.proj", f"{ours}.attn.to_add_out")
        for part in "qk":
            state.take(f"{context}.attn.ln_{part}", f"{ours}.attn.norm_added_{part}")
        for number in ("fc1", "fc2"):
            state.take(f"{x}.mlp.{number}", f"{ours}.ff.{MLP[number]}")
            state.take(f"{context}.mlp.{number}", f"{ours}.ff_context.{MLP[number]}")
    state.take("final_layer.linear", "proj_out")
    state.take("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    return state.finished()


def flux_to_original(state):
    state = Inverted(state)
    state.take("img_in", "x_embedder")
    state.take("txt_in", "context_embedder")
    for theirs, ours in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance")):
        for place, layer in (("in", 1), ("out", 2)):
            embedder = f"time_text_embed.{ours}_embedder"
            state.take(f"{theirs}_in.{place}_layer", f"{embedder}.linear_{layer}")
    for i in range(peer_transformers.FLUX["num_layers"]):
        block, ours = f"double_blocks.{i}", f"transformer_blocks.{i}"
        for side, norm, ff, out, added, qkv in (
            ("img", "norm1", "ff", "to_out.0", "", "to_{}"),
            ("txt", "norm1_context", "ff_context", "to_add_out", "added_", "add_{}_proj"),
        ):
            state.take(f"{block}.{side}_mod.lin", f"{ours}.{norm}.linear")
            fused = (f"{ours}.attn.{qkv.format(part)}" for part in "qkv")
            state.take(f"{block}.{side}_attn.qkv", *fused)
            for name, part in (("query", "q"), ("key", "k")):
                rms = f"{block}.{side}_attn.norm.{name}_norm"
                state.take(rms, f"{ours}.attn.norm_{added}{part}", leaf="scale")
            state.take(f"{block}.{side}_attn.proj", f"{ours}.attn.{out}")
            for number in "02":
                state.take(f"{block}.{side}_mlp.{number}", f"{ours}.{ff}.{MLP[number]}")
    for i in range(peer_transformers.FLUX["num_single_layers"]):
        block, ours = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        state.take(f"{block}.modulation.lin", f"{ours}.norm.linear")
        parts = (f"{ours}.attn.to_{part}" for part in "qkv")
        state.take(f"{block}.linear1", *parts, f"{ours}.proj_mlp")
        for name, part in (("query", "q"), ("key", "k")):
            state.take(f"{block}.norm.{name}_norm", f"{ours}.attn.norm_{part}", leaf="scale")
        state.take(f"{block}.linear2", f"{ours}.proj_out")
    state.take("final_layer.linear", "proj_out")
    state.take("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    return state.finished()


def transformer_to_original(pipeline):
    state = numpy_state(pipeline.transformer)
    is_flux = type(pipeline).__name__ == "FluxPipeline"
    return flux_to_original(state) if is_flux else sd3_to_original(state)


def clip_to_original(state):
    return {
        name if name.startswith("text_") else f"text_model.{name}": value
        for name, value in state.items()
    }


def original_state(pipeline):
    """All parts in one file, as tools that join them write it."""
    is_flux = type(pipeline).__name__ == "FluxPipeline"
    state = prefixed("model.diffusion_model.", transformer_to_original(pipeline))
    vae = vae_to_original(numpy_state(pipeline.vae))
    state |= prefixed("vae." if is_flux else "first_stage_model.", vae)
    # CLIP-L's projection is in some files and never used.
    state |= prefixed(CLIP_L, clip_to_original(numpy_state(pipeline.text_encoder)))
    state["text_encoders.clip_l.logit_scale"] = np.float32(4.6)
    if not is_flux:
        second = clip_to_original(numpy_state(pipeline.text_encoder_2))
        state |= prefixed(CLIP_G, second | {"text_model.embeddings.position_ids": np.arange(77)})
    t5 = pipeline.text_encoder_2 if is_flux else pipeline.text_encoder_3
    if t5 is not None:
        table = {"encoder.embed_tokens.weight"}
        state |= prefixed(T5, {k: v for k, v in numpy_state(t5).items() if k not in table})
        state["text_encoders.t5xxl.logit_scale"] = np.float32(4.6)
    return {name: np.ascontiguousarray(value) for name, value in state.items()}


@pytest.fixture(scope="module")
def single_files(small_pipelines, tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            pipeline, folder = small_pipelines(name)
            path = tmp_path_factory.mktemp("single") / f"{name}.safetensors"
            save_file(original_state(pipeline), path)
            made[name] = path, folder
        return made[name]

    return make


def converter_of(pipeline):
    """diffusers' converter; Flux's has its width as a constant, which is put to the pipeline's."""
    if type(pipeline).__name__ != "FluxPipeline":
        return single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers
    width = pipeline.transformer.inner_dim
    source = inspect.getsource(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers)
    assert source.count("inner_dim = 3072") == 1
    names = dict(vars(single_file_utils))
    exec(source.replace("inner_dim = 3072", f"inner_dim = {width}"), names)
    return names["convert_flux_transformer_checkpoint_to_diffusers"]


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
@pytest.mark.parametrize("name", ["sd3", "sd3.5", "flux-schnell", "flux-dev"])
def test_a_random_file_is_read_as_diffusers_converts_it(small_pipelines, tmp_path, name, prefix):
    """A file that no model wrote: every tensor random, in the original layout."""
    pipeline, _ = small_pipelines(name)
    rng = np.random.default_rng(3)
    state = {
        prefix + key: rng.standard_normal(value.shape).astype("float32")
        for key, value in transformer_to_original(pipeline).items()
    }
    tensors = {
        key: StoredTensor(value.shape, "float32", lambda value=value: value)
        for key, value in state.items()
    }
    file = recognize(tensors, tmp_path)
    ours = file.tensors(file.config())["transformer"]
    converted = converter_of(pipeline)({k: torch.from_numpy(v) for k, v in state.items()})
    assert_same(
        {key: tensor.read() for key, tensor in ours.items()},
        {key: value.numpy() for key, value in converted.items()},
    )
    for key, tensor in ours.items():
        assert tensor.shape == tensor.read().shape, key
    assert converted.keys() == pipeline.transformer.state_dict().keys()


@pytest.mark.parametrize("name", peer_transformers.FAMILIES)
def test_equals_the_folder(single_files, name, tmp_path):
    """The same configuration and the same variables as from the diffusers folder."""
    path, folder = single_files(name)
    single, reference = open_checkpoint(path), open_checkpoint(folder)
    assert single.format == "single file"
    assert family_of(single.config) == peer_transformers.FAMILIES[name]
    assert single.config.zero_tokens == reference.config.zero_tokens
    ours, theirs = single.config.denoiser, reference.config.denoiser
    assert {**vars(ours), "sample_size": 0} == {**vars(theirs), "sample_size": 0}
    for part, config in reference.config.components.items():
        found = variables(single, part)
        expected = variables(reference, part)
        if part == "text_encoder" and PROJECTION in expected:
            expected[PROJECTION] = np.eye(config.projection_dim, dtype="float32")
        assert_same(found, expected)
    for encoder, config in single.config.t5_encoders.items():
        assert config == reference.config.text_encoders[encoder]
        with pytest.raises(
            CheckpointError, match=r"a T5, and none comes .* Give `t5_tokenizer`, a"
        ):
            single.tokenizer(encoder)
        tokenizer = folder / encoder.replace("text_encoder", "tokenizer")
        told = open_checkpoint(path, t5_tokenizer=tokenizer, max_sequence_length=20)
        ids = told.tokenizer(encoder)("a cat")
        np.testing.assert_array_equal(ids, reference.tokenizer(encoder)("a cat")[:, :20])


def test_lazy(single_files, monkeypatch):
    """Opening reads no tensor; reading one reads its own rows of a fused one."""
    read, call = [], InFile.__call__

    def counted(self):
        read.append(self.shape)
        return call(self)

    monkeypatch.setattr(InFile, "__call__", counted)
    checkpoint = open_checkpoint(single_files("flux-dev")[0])
    tensors = checkpoint.tensors("transformer")
    assert not read
    tensors["transformer_blocks.0.attn.to_k.weight"].read()
    assert read == [(256, 256)], "a third of (768, 256)"


def test_without_t5(single_files, tmp_path):
    path, folder = single_files("sd3")
    checkpoint = open_checkpoint(path, without=["text_encoder_3"], max_sequence_length=77)
    assert checkpoint.config.zero_tokens == 77
    assert "text_encoder_3" not in checkpoint.readers
    with pytest.raises(CheckpointError, match=r"`without` leaves .*Received: text_encoder_2 for /"):
        open_checkpoint(single_files("flux-dev")[0], without=["text_encoder_2"])
    tokenizer = {"t5_tokenizer": folder / "tokenizer_3"}
    with pytest.raises(
        CheckpointError, match=r"is for a T5 text encoder\. Received: .*which has none"
    ):
        open_checkpoint(path, without=["text_encoder_3"], **tokenizer)


def test_numbers_of_eight_bits(single_files, tmp_path):
    """Files of T5 in 8 bits are common; each number is one of bfloat16, too."""
    state = {name: torch.from_numpy(v) for name, v in load_file(single_files("sd3")[0]).items()}
    names = [name for name in state if name.startswith(T5)]
    state |= {name: state[name].to(torch.float8_e4m3fn) for name in names}
    path = tmp_path / "eight.safetensors"
    save_torch(state, path)
    checkpoint = open_checkpoint(path)
    dtypes = {tensor.dtype for tensor in checkpoint.tensors("text_encoder_3").values()}
    assert dtypes == {"float8_e4m3fn"}
    found = variables(checkpoint, "text_encoder_3")
    expected = {name.removeprefix(T5): state[name].float().numpy() for name in names}
    assert_same(found, expected)


# What is missing, and what is refused


def only(*prefixes):
    def drop(state):
        for name in [name for name in state if not name.startswith(prefixes)]:
            del state[name]

    return drop


@pytest.mark.parametrize(
    ("name", "kept", "missing"),
    [
        ("sd3.5", ("model.", "first_"), "text_encoder, text_encoder_2"),
        ("sd3", ("model.", CLIP_L, CLIP_G), "vae"),
        ("flux-dev", ("model.",), "text_encoder, text_encoder_2, vae"),
        ("flux-schnell", ("model.", "vae.", CLIP_L), "text_encoder_2"),
    ],
)
def test_missing_parts(single_files, tmp_path, capsys, name, kept, missing):
    """They are refused, but told apart: most releases are of the transformer alone."""
    path = rewritten(single_files(name)[0], tmp_path / "part.safetensors", only(*kept))
    message = f"{path} lacks {missing}, without which it draws nothing: open the same release as a"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(message)
    checkpoint = open_checkpoint(path, incomplete=True)
    assert checkpoint.missing == tuple(missing.split(", "))
    assert checkpoint.build("transformer") is not None
    with pytest.raises(CheckpointError, match=r"does not hold it"):
        checkpoint.build(checkpoint.missing[0])
    assert main(["weights", str(path)]) == 1
    captured = capsys.readouterr()
    assert f"family      {peer_transformers.FAMILIES[name]}" in captured.out
    assert captured.err == f"would not load: {caught.value}\n"
    count = sum(tensor.size for tensor in checkpoint.tensors("transformer").values())
    assert f"{count:,}" in captured.out
    for part in checkpoint.missing:
        assert f"{part:<15}  missing\n" in captured.out


BLOCKS = {"sd3": "joint_blocks.0.x_block", "flux-dev": "double_blocks.0"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sd3", {"model.other": 3}, r"1 tensors that belong to no known component.*model\.other"),
        ("sd3", {"text_encoders.t5xxl.scaled_fp8": 3}, r"to no known comp.*t5xxl\.scaled_fp8"),
        ("sd3", {T5 + "encoder.block.0.layer.0.SelfAttention.q.scale_weight": 3},
         r"text_encoder_3 .*1 tensors have no place.*scale_weight"),
        ("sd3", {"model.diffusion_model.joint_blocks.0.x_block.extra.weight": 3},
         r"1 tensors have no place in the model: joint_blocks\.0\.x_block\.extra\.weight"),
        ("flux-dev", {"model.diffusion_model.single_blocks.1.linear1.bias": None},
         r"4 tensors are missing: single_transformer_blocks\.1\.attn\.to_k\.bias"),
        ("flux-dev", {"model.diffusion_model.img_in.weight": None},
         r"lacks a tensor of its transformer: img_in\.weight"),
        ("sd3", {"model.diffusion_model.pos_embed": None}, r"lacks a tensor of .*: pos_embed"),
        ("sd3", {T5 + "shared.weight": None}, r"lacks a tensor of its text_encoder_3: shared"),
        ("sd3", {CLIP_G + PROJECTION: None}, r"lacks a tensor of its text_encoder_2: text_proj"),
        ("flux-dev", {"model.diffusion_model.double_blocks.0.img_attn.norm.query_norm.scale": 64},
         r"has heads of 128 channels, whose division .*Received: 64\. Open a diffusers folder"),
    ],
)  # fmt: skip
def test_errors(single_files, tmp_path, name, change, message):
    def apply(state):
        for key, size in change.items():
            if size is None:
                del state[key]
            else:
                state[key] = np.zeros(size, "float32")

    path = rewritten(single_files(name)[0], tmp_path / "broken.safetensors", apply)
    with pytest.raises(CheckpointError, match=message):
        checkpoint = open_checkpoint(path)
        for part in checkpoint.config.components:
            checkpoint.build(part)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sd3", {"ema": True}, r"`ema` is for files with a UNet\. Received: "),
        ("sd3", {"family": "sd1"}, r"belongs to the family sd3-medium\. Received: `family` 'sd1'"),
        ("sd3", {"max_sequence_length": 600}, r"`max_sequence_length` is 1…512\. Received: 600"),
    ],
)
def test_options_that_are_refused(single_files, name, options, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(single_files(name)[0], **options)


def test_scheduler(single_files):
    config = open_checkpoint(single_files("flux-dev")[0], scheduler="flow_heun").config
    assert config.schedule.sampler == "flow_heun"
    assert isinstance(config.denoiser, FluxConfig) and config.schedule.dynamic_shift is not None
