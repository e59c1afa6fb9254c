"""ControlNets: their files, the checkpoints that they fit, and the calls that use them."""

import json
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image
from PIL import Image
from safetensors.torch import load_file, save_file

from sd_tf.checkpoints import DIT_FOLDER
from sd_tf.cli.main import main
from sd_tf.config.original_names import original_names
from sd_tf.runtime.call import Call
from sd_tf.runtime.controls import FIRST, GUESS, SCALES, STOP, ControlRecord, calls_of
from sd_tf.runtime.parameter import CallError, Each
from sd_tf.runtime.preprocess import KINDS
from sd_tf.runtime.request import read_request
from sd_tf.weights import CheckpointError, open_checkpoint, open_controlnet
from tests import peers
from tests.exports import micro_folder, micro_xl_folder
from tests.test_call import manifest

# Shares of the steps


@pytest.mark.parametrize("first", [0, 3])
def test_calls_of_a_share(first):
    """Diffusers' own formula, for many numbers of calls and shares."""
    shares = [(0.0, 1.0), (0.1, 0.9), (0.3, 0.7), (1 / 3, 2 / 3), (0.0, 0.01), (0.99, 1.0)]
    for count in (*range(1, 60), 999, 1000):
        for start, end in shares:
            kept = [not (i / count < start or (i + 1) / count > end) for i in range(count)]
            low, high = calls_of(start, end, first, first + count)
            assert [low <= first + i < high for i in range(count)] == kept


# Calls

TWO = manifest(controls=(ControlRecord("canny", False), ControlRecord("depth", False)))
ONE = manifest(controls=(ControlRecord("canny", False),))
LINES, HILLS = (np.full((64, 64, 3), level, "uint8") for level in (10, 200))


def read(by, *prompts, **parameters):
    return read_request(by, Call(list(prompts) or "a", num_steps=8, **parameters))


def test_one_value_is_for_all_nets():
    request = read(TWO, control_image=LINES, control_scale=0.5)
    assert request.shared.control_scale == (0.5, 0.5)
    assert request.shared.control_start == (0.0, 0.0)
    np.testing.assert_array_equal(request.controls[SCALES], np.float32([0.5, 0.5]))
    np.testing.assert_array_equal(request.controls[STOP], [8, 8])
    assert all(picture is LINES for picture in request.shared.control_image)


def test_a_list_has_one_for_each_net():
    request = read(
        TWO, control_image=[LINES, None], control_scale=[0.7, 3], control_end=[0.5, None]
    )
    np.testing.assert_array_equal(request.controls[SCALES], np.float32([0.7, 0]))
    np.testing.assert_array_equal(request.controls[FIRST], [0, 0])
    np.testing.assert_array_equal(request.controls[STOP], [4, 8])
    assert not request.controls[GUESS]


def test_a_net_whose_share_is_empty_is_off():
    """Its picture is not even embedded; whether it has all guess does not depend on that."""
    pooling = replace(TWO, controls=(ControlRecord("shuffle", True), TWO.controls[1]))
    request = read(pooling, control_image=LINES, control_start=[0.1, 0], control_end=[0.2, 1])
    np.testing.assert_array_equal(request.controls[SCALES], [0, 1])
    assert request.controls[GUESS]


def test_what_is_told_of_a_call():
    """Nothing of a net that was not run, and how many pictures there were."""
    request = read(TWO, control_image=[LINES, None], control_scale=[0.7, 3], control_end=0.5)
    told = request.shared.described()
    assert told["control_scale"] == [0.7, None] and told["control_end"] == [0.5, None]
    assert request.shared.picture_counts() == {"control_image": [1, None]}


def test_pictures_for_each_prompt():
    given = Each([[LINES, HILLS], [HILLS, LINES]])
    request = read(TWO, "a", "b", control_image=given)
    assert request.each[1].control_image[0][0, 0, 0] == 200
    both = read(ONE, "a", "b", control_image=np.stack([LINES, HILLS]))
    assert [call.control_image[0][0, 0, 0] for call in both.each] == [10, 200]
    again = read_request(ONE, Call.joined(both.each))
    assert [call.control_image[0][0, 0, 0] for call in again.each] == [10, 200]


def test_no_picture_is_no_control():
    request = read(TWO)
    np.testing.assert_array_equal(request.controls[SCALES], [0, 0])
    for nothing in ([None, None], Each([[None, None]])):
        other = read(TWO, control_image=nothing, control_scale=0.5)
        assert other.shared.alike() == request.shared.alike()
        assert other.shared.picture_counts() == {}
        np.testing.assert_array_equal(other.controls[SCALES], [0, 0])
    assert read(manifest()).controls == {}


def test_a_net_that_pools_guesses():
    pooling = manifest(controls=(ControlRecord("shuffle", True),))
    assert read(pooling, control_image=LINES).controls[GUESS]
    assert read(ONE, control_image=LINES, control_guess=True).controls[GUESS]


@pytest.mark.parametrize(
    ("pictures", "scales", "guesses"),
    [
        ([LINES, HILLS], [1, 1], True),
        ([LINES, None], [1, 1], True),
        ([None, HILLS], [1, 1], False),
        ([LINES, HILLS], [0, 1], False),
        ([LINES, HILLS], [0, 0], False),
    ],
)
def test_the_first_net_that_is_on_decides_whether_all_guess(pictures, scales, guesses):
    both = manifest(controls=(ControlRecord("shuffle", True), ControlRecord("canny", False)))
    given = {"control_image": pictures, "control_scale": scales}
    assert read(both, **given).controls[GUESS] == guesses
    paints = {"image": LINES, "mask": LINES[..., 0]}
    painter = replace(both, latent_inputs="mask_and_image")
    assert read(painter, **given, **paints).controls[GUESS] == guesses
    assert not read(replace(painter, time_ids=6), **given, **paints).controls[GUESS]


def test_pictures_share_a_batch_if_they_use_the_same_nets():
    first, other, both = (
        read(TWO, control_image=pictures).shared.alike()
        for pictures in ([LINES, None], [None, LINES], [HILLS, None])
    )
    assert first == both != other


@pytest.mark.parametrize(
    ("by", "given", "message"),
    [
        (ONE, {"control_scale": 1}, "control_scale goes with control_image: give both"),
        (manifest(), {"control_image": LINES}, "only for exports with ControlNets"),
        (TWO, {"control_image": [LINES]}, r"ControlNets, canny, depth; .*Each.*\. Received: 1"),
        (TWO, {"control_image": LINES, "control_scale": [1, 2, 3]}, r"Received: 3"),
        (ONE, {"control_image": LINES, "control_scale": "x"}, "control_scale is a number"),
        (ONE, {"control_image": LINES, "control_start": 1.5}, "control_start is a number from 0"),
        (
            ONE,
            {"control_image": LINES, "control_start": 0.5, "control_end": 0.5},
            r"control_end is above control_start, 0\.5\. Received: 0\.5",
        ),
        (ONE, {"control_image": LINES[:5]}, r"control_image: A picture is .*\(5, 64, 3\)"),
        (ONE, {"control_image": LINES, "control_guess": 1}, "control_guess is yes or no"),
    ],
)
def test_calls_that_are_refused(by, given, message):
    with pytest.raises(CallError, match=message):
        read(by, **given)


def test_one_call_uses_the_same_nets():
    with pytest.raises(CallError, match="the same ControlNets in all pictures"):
        read(TWO, "a", "b", control_image=Each([[LINES, None], [None, LINES]]))


# Pictures

MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV")
# As the pipelines of ControlNets make it.
PROCESSOR = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)


def odd_picture(number):
    """A picture of an odd size, or of the drawn one, and one of the modes."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(5, 200, 2) if number % 3 else (64, 64)
    levels = rng.integers(0, 256, (height, width, 4), "uint8")
    levels[: height // 2, : width // 3] = rng.integers(0, 256, 4)
    levels[height // 2 :, : width // 3, 3] = 0  # colours that are not seen
    mode = MODES[number % len(MODES)]
    image = Image.fromarray(levels, "RGBA")
    return image.convert(mode) if mode in ("RGBA", "LA") else image.convert("RGB").convert(mode)


def seen(image):
    """What a net is given of a picture, 64x64 px."""
    return read(ONE, control_image=image).shared.control_image[0].astype("float32") / 255


def processed(image):
    return np.moveaxis(PROCESSOR.preprocess(image, 64, 64).numpy()[0], 0, -1)


def test_pictures_are_the_published_processors():
    """Bit for bit, on 54 pictures of many modes and odd sizes."""
    for number in range(54):
        image = odd_picture(number)
        np.testing.assert_array_equal(seen(image), processed(image), err_msg=image.mode)


@pytest.mark.filterwarnings("ignore:Palette images:UserWarning")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGBA", {}),
        ("LA", {}),
        ("P", {"transparency": 3}),
        ("P", {"transparency": bytes(range(256))}),
        ("RGB", {"transparency": (0, 0, 0)}),
        ("RGB", {"format": "JPEG", "exif": {0x0112: 6}}),
        ("CMYK", {"format": "JPEG"}),
        ("RGBA", {"format": "WEBP", "lossless": True}),
    ],
)
def test_files_are_scaled_as_they_are(tmp_path, mode, options):
    """Upright, as diffusers' own reader turns them."""
    image = odd_picture(MODES.index(mode) + 9)
    form, exif = options.pop("format", "PNG"), Image.Exif()
    exif.update(options.pop("exif", {}))
    image.save(tmp_path / "x", form, exif=exif, **options)
    opened = Call.parameters()["control_image"].open_file(tmp_path / "x")
    upright = load_image(str(tmp_path / "x"), lambda image: image)
    assert opened.mode == upright.mode
    np.testing.assert_array_equal(seen(opened), processed(upright))


def test_white_lines_on_nothing_stay_lines():
    image = Image.new("RGBA", (64, 64), (255, 255, 255, 0))
    image.paste("white", (10, 0, 14, 64))
    scaled = seen(image.resize((100, 100)))
    assert scaled[:, 11:13].min() > 0.9 and scaled[:, 30:].max() == 0


def test_16_bits_are_scaled_to_8():
    """The processor clips them, so that nearly all is white."""
    levels = np.random.default_rng(0).integers(0, 256, (50, 70)).astype("uint8")
    deep = Image.fromarray(levels.astype("uint16") * 257)
    np.testing.assert_array_equal(seen(deep), processed(Image.fromarray(levels)))
    assert processed(deep).mean() > 0.95


# Files

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


# Control pictures


@pytest.fixture
def photo(tmp_path):
    y, x = np.mgrid[:48, :64]
    disc = np.hypot(y - 24, x - 24) < 12
    levels = np.stack([200 - 150 * disc, 200 - 150 * disc + x // 2, 200 - 150 * disc], -1).astype(
        "uint8"
    )
    Image.fromarray(levels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def made(photo, *arguments):
    assert main(["control", *arguments, str(photo)]) == 0
    return np.asarray(Image.open(photo.with_name(f"photo-{arguments[0]}.png")))


def test_canny_is_opencvs(photo):
    import cv2

    found = made(photo, "canny", "--low", "50", "--high", "120")
    expected = cv2.Canny(cv2.imread(str(photo))[..., ::-1].copy(), 50, 120)
    np.testing.assert_array_equal(found[..., 0], expected)
    assert found.shape == (48, 64, 3) and set(np.unique(found)) == {0, 255}


def test_scribbles_lie_where_it_is_darker_than_around(photo):
    lines = made(photo, "scribble")[..., 0] > 0
    distance = np.hypot(*(np.mgrid[:48, :64] - np.array([24, 24])[:, None, None])) - 12
    assert lines.any() and np.abs(distance[lines]).mean() < 4


def test_gray_and_tile(photo):
    picture = Image.open(photo)
    np.testing.assert_array_equal(made(photo, "gray")[..., 1], np.asarray(picture.convert("L")))
    tile = made(photo, "tile", "--factor", "8").astype("float32")
    original = np.asarray(picture).astype("float32")
    blocks = [x.reshape(6, 8, 8, 8, 3).mean((1, 3)) for x in (tile, original)]
    assert np.abs(blocks[0] - blocks[1]).mean() < 5 < np.abs(tile - original).mean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gray", "--low", "3"], "--low is for canny. Received: gray"),
        (["canny", "--low", "300"], "--low is a whole number from 0 to 255. Received: 300"),
        (["tile", "--factor", "0"], "--factor is a whole number from 1. Received: 0"),
    ],
)
def test_control_refuses(photo, capsys, arguments, message):
    assert main(["control", *arguments, str(photo)]) == 1
    assert message in capsys.readouterr().err


def test_control_keeps_files(photo, capsys):
    made(photo, "gray")
    assert main(["control", "gray", str(photo)]) == 1
    assert "exists. Choose another --out" in capsys.readouterr().err
    assert main(["control", "gray", str(photo), "--overwrite"]) == 0
    assert list(KINDS) == ["canny", "scribble", "gray", "tile"]
    assert main(["control", "gray", str(photo.with_name("none.png"))]) == 1
    message = f"sd-tf control: No such file or directory: {photo.with_name('none.png')}\n"
    assert capsys.readouterr().err == message
