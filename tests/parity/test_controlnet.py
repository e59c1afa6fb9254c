"""ControlNets against diffusers', every parameter random, the zero convolutions too."""

import json

import diffusers
import numpy as np
import pytest
import torch

from sd_tf.bench.peers.random_checkpoint import randomized
from sd_tf.cli.main import main
from sd_tf.weights import layout
from sd_tf.weights.diffusers_controlnet import read_controlnet
from sd_tf.weights.open import open_controlnet
from tests.peer_pipelines import channels_first

TOLERANCE = 1e-4  # of the reference's largest value
SIZES = [(8, 8), (12, 20)]  # latent height and width
BATCH, WIDTH, POOLED = 2, 24, 16
COMMON = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "layers_per_block": 2,
    "cross_attention_dim": WIDTH,
    "norm_num_groups": 8,
    "conditioning_embedding_out_channels": (8, 12, 16, 24),
}
NETS = {
    "SD1": {"attention_head_dim": 4},
    "SD2": {
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "controlnet_conditioning_channel_order": "bgr",
    },
    "SDXL": {
        "num_attention_heads": (2, 4),
        "use_linear_projection": True,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": POOLED + 6 * 8,
    },
}


@pytest.fixture(params=NETS)
def net(request, tmp_path):
    """Diffusers' module, and the folder that it saved itself to."""
    theirs = randomized(diffusers.ControlNetModel(**{**COMMON, **NETS[request.param]}), 1)
    with torch.no_grad():  # or the picture would fade in its eight layers
        theirs.controlnet_cond_embedding.conv_out.weight.mul_(30.0)
    theirs.save_pretrained(tmp_path / "net")
    return request.param, theirs, tmp_path / "net"


def relative_error(ours, theirs):
    theirs = np.moveaxis(theirs.numpy(), 1, -1)
    assert tuple(ours.shape) == theirs.shape
    return np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()


@pytest.mark.backend
@pytest.mark.parametrize("size", SIZES)
def test_what_it_adds(net, size):
    name, theirs, folder = net
    ours = open_controlnet(folder).build()
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((BATCH, *shape)).astype("float32")

    height, width = size
    latents, context = normal(height, width, 4), normal(77, WIDTH)
    pictures = rng.random((BATCH, 8 * height, 8 * width, 3), "float32")
    timesteps = np.array([801.0, 13.0], "float32")
    added = {}
    if name == "SDXL":
        added = {"pooled": normal(POOLED), "time_ids": rng.integers(0, 900, (BATCH, 6))}
        added["time_ids"] = added["time_ids"].astype("float32")
    with torch.no_grad():
        skips, middle = theirs(
            channels_first(latents),
            torch.from_numpy(timesteps),
            torch.from_numpy(context),
            channels_first(pictures),
            added_cond_kwargs={
                {"pooled": "text_embeds"}.get(key, key): torch.from_numpy(value)
                for key, value in added.items()
            },
            return_dict=False,
        )
    mine = ours(latents, timesteps, context, ours.hint(pictures), **added)
    assert len(mine) == 7
    for our, their in zip(mine, [*skips, middle], strict=True):
        assert relative_error(our, their) <= TOLERANCE
    shapes = ours.shapes(latents.shape)
    assert [tuple(our.shape) for our in mine] == shapes
    other = ours(latents, timesteps, context, ours.hint(1.0 - pictures), **added)
    assert np.abs(np.asarray(other[-2] - mine[-2])).max() > 0.01, "the picture matters"


RELEASES = {
    "SD1": ({"cross_attention_dim": 768}, 361_279_120, 340),
    "SD2": (
        {
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
        },
        364_228_240,
        340,
    ),
    "SDXL": (
        {
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": 2048,
            "attention_head_dim": (5, 10, 20),
            "transformer_layers_per_block": (1, 2, 10),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        1_251_014_160,
        844,
    ),
}


@pytest.mark.parametrize("name", RELEASES)
def test_names_and_shapes_at_full_size(name):
    settings, parameters, tensors = RELEASES[name]
    with torch.device("meta"):
        theirs = diffusers.ControlNetModel(**settings)
    expected = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    config = read_controlnet({**theirs.config, "_class_name": "ControlNetModel"}, "a test")
    slots = layout.slots(layout.abstract_model(config))
    assert {key: slot.shape for key, slot in slots.items()} == expected
    assert len(expected) == tensors and config.trunk.kind == name
    assert sum(tensor.numel() for tensor in theirs.state_dict().values()) == parameters


def test_weights_tells_what_it_is(net, capsys):
    name, theirs, folder = net
    assert main(["weights", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"for         {name}, a context of {WIDTH} channels" in printed
    count, size = len(theirs.state_dict()), sum(p.numel() for p in theirs.parameters())
    assert " ".join(["controlnet", str(count), f"{size:,}", "float32"]) in " ".join(printed.split())
    assert f"({'blue, green, red' if name == 'SD2' else 'red, green, blue'})" in printed
    assert "loads: every tensor has its place, every place its tensor" in printed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("conditioning_channels", 1, "conditioning_channels=1 is not supported; supported: 3."),
        (
            "controlnet_conditioning_channel_order",
            "grb",
            "='grb' is not supported; supported: 'rgb'",
        ),
        ("class_embed_type", "timestep", "class_embed_type='timestep' is not supported"),
        ("transformer_layers_per_block", 3, "would not load: controlnet: "),
        ("_class_name", "UNet2DConditionModel", "is not a diffusers folder"),
    ],
)
def test_what_does_not_load(net, capsys, field, value, message):
    _, _, folder = net
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert main(["weights", str(folder)]) == 1
    assert message in capsys.readouterr().err


def test_options_are_for_checkpoints(net, capsys):
    assert main(["weights", str(net[2]), "--family", "sd1"]) == 1
    assert "net is a ControlNet, and the option family is for a checkpoint." in (
        capsys.readouterr().err
    )
