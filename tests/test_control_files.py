"""ControlNets: their files, and the checkpoints that they fit."""

import json

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_tf.checkpoints import DIT_FOLDER
from sd_tf.cli.main import main
from sd_tf.config.original_names import original_names
from sd_tf.weights import CheckpointError, open_checkpoint, open_controlnet
from tests import peers
from tests.exports import micro_folder, micro_xl_folder

NET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": (1, 2),
    "cross_attention_dim": 16,
    "norm_num_groups": 4,
    "conditioning_embedding_out_channels": (4, 8),
}
XL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 8 + 6 * 256,
    "cross_attention_dim": 32,
    "block_out_channels": (64, 64),
    "attention_head_dim": (1, 1),
    "norm_num_groups": 32,
}
# What a file does not tell: eight heads, 32 groups and four widths of the hint's layers.
RELEASED = {
    "block_out_channels": (32, 64),
    "conditioning_embedding_out_channels": (4, 8, 8, 8),
    "attention_head_dim": 8,
    "norm_num_groups": 32,
}
ORIGINAL = {"conv_in": "input_hint_block.0", "conv_out": "input_hint_block.14"}


def net(**changes):
    return peers.randomized(diffusers.ControlNetModel(**{**NET, **changes}), 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nets") / "lines"
    net().save_pretrained(path)
    return path


def original_file(model, path, prefix="control_model."):
    """Write the layout of the original release, which diffusers reads."""
    state = model.state_dict()
    names = original_names({name.rpartition(".")[0] for name in state})

    def renamed(name):
        module, _, leaf = name.rpartition(".")
        hint = module.removeprefix("controlnet_cond_embedding.")
        if hint in ORIGINAL and hint != module:
            return f"{ORIGINAL[hint]}.{leaf}"
        if hint != module:
            return f"input_hint_block.{2 * (int(hint.removeprefix('blocks.')) + 1)}.{leaf}"
        if module.startswith("controlnet_down_blocks."):
            return f"zero_convs.{module.rpartition('.')[2]}.0.{leaf}"
        return f"{names.get(module, 'middle_block_out.0')}.{leaf}"

    tensors = {prefix + renamed(name): tensor.contiguous() for name, tensor in state.items()}
    assert len(tensors) == len(state)
    save_file(tensors, path)


@pytest.mark.parametrize("prefix", ["control_model.", ""])
def test_original_file(tmp_path, prefix):
    model = net(**RELEASED)
    model.save_pretrained(tmp_path / "folder")
    original_file(model, tmp_path / "lines.safetensors", prefix)
    ours, theirs = (open_controlnet(tmp_path / name) for name in ("lines.safetensors", "folder"))
    assert (ours.name, ours.format) == ("lines", "single file")
    assert ours.config.hint_channels == theirs.config.hint_channels
    assert ours.config.trunk.down_depths == theirs.config.trunk.down_depths
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(
            ours.tensors[name].read().reshape(tensor.shape), tensor.read()
        )
    ours.build()


def test_original_file_is_what_diffusers_reads(tmp_path):
    model = net(**RELEASED)
    model.save_pretrained(tmp_path / "folder")
    original_file(model, tmp_path / "lines.safetensors", "")
    theirs = diffusers.ControlNetModel.from_single_file(
        str(tmp_path / "lines.safetensors"), config=str(tmp_path / "folder")
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("name", "pools"),
    [("shuffle", False), ("control_v11e_sd15_shuffle", True), ("sd15_shuffle_fp16", True)],
)
def test_a_files_name_tells_whether_it_pools(tmp_path, capsys, name, pools):
    path = tmp_path / f"{name}.safetensors"
    original_file(net(**RELEASED), path)
    assert open_controlnet(path).config.pools is pools
    assert main(["weights", str(path)]) == 0
    assert ("it pools" in capsys.readouterr().out) is pools


def test_a_file_with_a_whole_checkpoint(tmp_path):
    original_file(net(**RELEASED), tmp_path / "lines.safetensors")
    net_alone = load_file(tmp_path / "lines.safetensors")
    beside = ["model.diffusion_model.out.0.bias", "first_stage_model.x", "cond_stage_model.x"]
    beside += ["model_ema.decay", "betas", "sqrt_recipm1_alphas_cumprod", "scale_factor"]
    more = {name: torch.zeros(1) for name in beside}
    save_file(net_alone | more, tmp_path / "whole.safetensors")
    whole, alone = (open_controlnet(tmp_path / f"{n}.safetensors") for n in ("whole", "lines"))
    assert whole.config == alone.config and whole.tensors.keys() == alone.tensors.keys()


@pytest.mark.parametrize(
    ("prefix", "name", "message"),
    [
        ("control_model.", "difference", "stored as differences from a UNet.*'difference'"),
        ("", "lora_controlnet", "is a ControlLoRA.*'lora_controlnet'"),
        ("control_model.", "adapter.x", "1 tensors that belong to no ControlNet.*: adapter.x"),
    ],
)
def test_files_that_mean_something_else(tmp_path, prefix, name, message):
    path = tmp_path / "net.safetensors"
    original_file(net(**RELEASED), path, prefix)
    save_file(load_file(path) | {name: torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=message):
        open_controlnet(path)


@pytest.mark.parametrize(
    ("lacking", "other"),
    [
        ("input_blocks.0.0.weight", "conv_in.weight"),
        ("input_blocks.1.0.out_layers.3.weight", "down_blocks.0.resnets.0.conv2.weight"),
        ("controlnet_cond_embedding.conv_in.weight", "input_hint_block.0.weight"),
    ],
)
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_files_that_lack_a_tensor(tmp_path, capsys, layout, lacking, other):
    """Those that tell a size; what else is missing, loading names."""
    model, path = net(**RELEASED), tmp_path / "net.safetensors"
    original_file(model, path) if layout == "original" else save_file(model.state_dict(), path)
    kept = {
        name: tensor
        for name, tensor in load_file(path).items()
        if name.removeprefix("control_model.") not in (lacking, other)
    }
    save_file(kept, path)
    assert main(["weights", str(path)]) == 1
    message = f"would not load: {path} is incomplete: it lacks {lacking} (in the other layout "
    assert f"{message}{other})" in capsys.readouterr().err


def test_a_file_of_sdxl_has_diffusers_names(tmp_path):
    model = net(**XL)
    model.save_pretrained(tmp_path / "folder")
    saved = tmp_path / "folder" / "diffusion_pytorch_model.safetensors"
    ours = open_controlnet(saved.rename(tmp_path / "xl.safetensors"))
    assert ours.config.trunk.kind == "SDXL" and ours.config.trunk.added.pooled_dim == 8
    assert ours.config.trunk.num_heads == (1, 1) and ours.config.hint_channels == (4, 8)
    ours.build()


def test_the_checkpoint_has_it(folder):
    checkpoint = open_checkpoint(micro_folder(), controlnet=[folder, folder])
    assert checkpoint.controlnets == ("lines", "lines")
    assert list(checkpoint.config.controlnets) == ["controlnet", "controlnet_2"]
    assert [file.parent.name for file in checkpoint.files("controlnet_2")] == ["lines"]
    checkpoint.build("controlnet")


def test_nets_that_do_not_fit(folder, tmp_path):
    with pytest.raises(CheckpointError, match="A ControlNet for SD1 does not fit an SDXL UNet"):
        open_checkpoint(micro_xl_folder(), controlnet=[folder])
    net(cross_attention_dim=24).save_pretrained(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"has a context of width 16\. Received: 24"):
        open_checkpoint(micro_folder(), controlnet=[tmp_path / "wide"])
    net(conditioning_embedding_out_channels=(4, 8, 8)).save_pretrained(tmp_path / "deep")
    with pytest.raises(CheckpointError, match=r"has downscale 2\. Received: 4"):
        open_checkpoint(micro_folder(), controlnet=[tmp_path / "deep"])


def test_what_is_no_net(folder, tmp_path):
    with pytest.raises(CheckpointError, match="is not a ControlNet: give a folder whose config"):
        open_controlnet(micro_folder())
    with pytest.raises(CheckpointError, match="No such file or folder"):
        open_controlnet(tmp_path / "nothing")
    save_file({"adapter.body.0.in_conv.weight": torch.zeros(1)}, tmp_path / "t2i.safetensors")
    with pytest.raises(CheckpointError, match=r"or a \.safetensors file that has zero_convs\.\*"):
        open_controlnet(tmp_path / "t2i.safetensors")
    (tmp_path / "old.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="safetensors"):
        open_controlnet(tmp_path / "old.bin")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("SD3ControlNetModel", "a ControlNet for SD3"),
        ("FluxControlNetModel", "a ControlNet for Flux"),
        ("ControlNetUnionModel", "a ControlNet-Union"),
        ("ControlNetXSAdapter", "a ControlNet-XS"),
        ("UNetControlNetXSModel", "a ControlNet-XS"),
        ("T2IAdapter", "a T2I-Adapter"),
    ],
)
def test_nets_of_other_kinds_are_refused_by_name(tmp_path, capsys, name, what):
    assert hasattr(diffusers, name)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(CheckpointError, match=f"is {what}: its config.json says {name}. Read are"):
        open_controlnet(tmp_path)
    assert main(["weights", str(tmp_path)]) == 1
    assert f"would not load: {tmp_path} is {what}" in capsys.readouterr().err


def test_a_folder_of_another_model():
    with pytest.raises(CheckpointError, match=r"is not a ControlNet: .* says UNet2DCondition"):
        open_controlnet(micro_folder() / "unet")


def test_transformers_and_refiners_take_none(folder, small_pipelines, tmp_path):
    with pytest.raises(CheckpointError, match=r"for checkpoints with a UNet\. Received: .* MMDiT"):
        open_checkpoint(DIT_FOLDER, controlnet=[folder])
    pipeline, refiner = small_pipelines("sdxl-refiner")
    diffusers.ControlNetModel.from_unet(pipeline.unet).save_pretrained(tmp_path / "own")
    with pytest.raises(CheckpointError, match="A ControlNet for this UNet has added conditions"):
        open_checkpoint(refiner, controlnet=[tmp_path / "own"])


def test_weights_describes_it(folder, tmp_path, capsys):
    assert main(["weights", str(folder)]) == 0
    assert "for         SD1, a context of 16 channels" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "class_embed_type": "timestep"}))
    assert main(["weights", str(tmp_path)]) == 1
    assert "class_embed_type" in capsys.readouterr().err


def test_editors_take_none(folder, capsys, tmp_path):
    command = ["export", "--checkpoint", "tiny-edit", "--controlnet", str(folder)]
    assert main([*command, "--out", str(tmp_path / "export")]) == 1
    assert "not for checkpoints that edit pictures" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
