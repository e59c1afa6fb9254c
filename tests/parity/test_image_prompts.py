"""Pictures as prompts against diffusers' `load_ip_adapter`, and the vision encoder's own parts."""

import diffusers
import keras
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPImageProcessorPil

from sd_tf.models import MODEL_CLASSES
from sd_tf.runtime.pictures import middle, to_vision
from sd_tf.weights import layout
from sd_tf.weights.image_prompts import open_image_adapter, open_vision_encoder
from tests import peer_image_prompts as prompts
from tests import peers
from tests.peer_pipelines import (
    NEGATIVE,
    PROMPTS,
    STEPS,
    Pair,
    channels_first,
    check_pictures,
    drawer,
    pin_noise,
    psnr,
)

SIZES = {"sd1": {"height": 64, "width": 96}, "sdxl-base": {"height": 64, "width": 64}}
SIZES["inpaint"] = SIZES["sdxl-base"]
# Largest differences of an adapter's layers, as a share of the reference's largest value.
TOLERANCES = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 4e-3}


class Shown(Pair):
    """Also the files of adapters; diffusers loads those of a call anew."""

    def __init__(self, theirs, ours, folder):
        super().__init__(theirs, ours)
        self.folder = folder

    def load(self, kinds, scales):
        self.theirs.unload_ip_adapter()
        self.theirs.register_modules(image_encoder=None, feature_extractor=None)
        self.theirs.load_ip_adapter(
            str(self.folder), subfolder="models", weight_name=[f"{k}.safetensors" for k in kinds]
        )
        self.theirs.set_ip_adapter_scale(scales)

    def looks(self):
        """Pictures of several forms; the first one is that of `picture`."""
        rng = np.random.default_rng(7)
        stripes = np.kron(rng.integers(0, 256, (5, 9, 3)), np.ones((17, 11, 1)))
        return [self.picture(), Image.fromarray(stripes.astype("uint8")), self.picture().rotate(90)]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    family, kinds = request.param
    pipeline = peers.random_pipeline(family, layers_per_block=1)
    folder = tmp_path_factory.mktemp(family)
    pipeline.save_pretrained(folder / "checkpoint")
    (folder / "models").mkdir()
    prompts.vision_encoder().save_pretrained(folder / "models" / "image_encoder")
    for seed, kind in enumerate(kinds):
        prompts.save(folder / "models" / f"{kind}.safetensors", kind, pipeline.unet, seed)
    opening = {"ip_adapter": [folder / "models" / f"{kind}.safetensors" for kind in kinds]}
    return Shown(pipeline, drawer(folder, opening, image_prompts=3, **SIZES[family]), folder)


SD1 = ("sd1", ("base", "plus", "full-face"))
XL = ("sdxl-base", ("base", "plus"))
PAINTING = ("inpaint", ("plus",))


def of(*pairs):
    if keras.backend.backend() == "jax":
        pairs = [pair for pair in pairs if pair == XL]
    return pytest.mark.parametrize("pair", pairs, indirect=True, ids=[name for name, _ in pairs])


def both(pair, kinds, pictures, scale, theirs=None, ours=None, sampler="euler", **common):
    """Return diffusers' pictures and ours, with the adapters of these kinds."""
    scales = scale if isinstance(scale, list) else [scale] * len(kinds)
    pair.load(kinds, scales if len(kinds) > 1 else scales[0])
    given = [one if isinstance(one, list) else [one] for one in pictures]
    reference = pair.peer(sampler, ip_adapter_image=given, **(theirs or {}), **common)
    by_name = dict(zip(kinds, zip(pictures, scales, strict=True), strict=True))
    names = pair.ours.manifest.image_prompts.names
    result = pair.ours(
        num_steps=STEPS,
        scheduler=sampler,
        image_prompt=[by_name.get(name, (None, None))[0] for name in names],
        image_prompt_scale=[by_name.get(name, (None, None))[1] for name in names],
        **(ours or {}),
        **common,
    )
    return reference, result.images


def text_to_image(pair, kinds, pictures, scale, **common):
    noise = pair.noise(len(PROMPTS))
    theirs = {"latents": channels_first(noise), **pair.size}
    return both(pair, kinds, pictures, scale, theirs, {"noise": noise}, prompt=PROMPTS, **common)


def plain(pair, **more):
    noise = pair.noise(len(PROMPTS))
    return pair.ours(PROMPTS, noise=noise, num_steps=STEPS, scheduler="euler", **more).images


def check_one(pair, kind):
    looks = pair.looks()
    reference, pictures = text_to_image(
        pair, [kind], looks[:1], 0.8, negative_prompt=[NEGATIVE] * 2
    )
    check_pictures(pictures, reference)
    other, _ = text_to_image(pair, [kind], looks[1:2], 0.8, negative_prompt=[NEGATIVE] * 2)
    assert psnr(reference, other) < 40, "the picture hardly matters"


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("kind", ["base", "plus"])
@of(SD1, XL)
def test_text_to_image(pair, kind):
    check_one(pair, kind)


@of(SD1)
def test_full_face(pair):
    """None of that kind was published for SDXL."""
    check_one(pair, "full-face")


@pytest.mark.backend(long=True)
@of(SD1, XL)
def test_several_adapters_and_pictures(pair):
    looks = pair.looks()
    reference, pictures = text_to_image(pair, ["base", "plus"], [looks, looks[0]], [0.5, 1.2])
    check_pictures(pictures, reference)


@of(SD1)
def test_without_a_picture_it_is_the_plain_one(pair):
    off = {"image_prompt": pair.looks()[0], "image_prompt_scale": 0.0}
    np.testing.assert_array_equal(plain(pair, **off), plain(pair))


@of(SD1)
def test_image_to_image(pair, monkeypatch):
    kind = diffusers.StableDiffusionImg2ImgPipeline
    noise = pair.noise(1)
    theirs = pair.theirs
    pair.theirs = kind(**theirs.components, requires_safety_checker=False)
    pin_noise(monkeypatch, pair.theirs, noise)
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": 0.5}
    reference, pictures = both(
        pair, ["plus"], pair.looks()[1:2], 1.0, ours={"noise": noise}, sampler="ddim", **common
    )
    pair.theirs = theirs
    check_pictures(pictures, reference)


@of(PAINTING)
def test_inpainting(pair, monkeypatch):
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.theirs, noise)
    mask = np.zeros(tuple(pair.size.values()), "uint8")
    mask[11:42, 21:61] = 255
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": 1.0}
    reference, pictures = both(
        pair,
        ["plus"],
        pair.looks()[1:2],
        1.0,
        {"mask_image": Image.fromarray(mask), **pair.size},
        {"mask": mask, "noise": noise},
        "ddim",
        **common,
    )
    check_pictures(pictures, reference)


# Parts


@pytest.mark.backend
def test_vision_encoder(tmp_path):
    theirs = prompts.vision_encoder()
    theirs.save_pretrained(tmp_path)
    opened = open_vision_encoder(tmp_path)
    assert opened.config.num_tokens == 17
    ours = layout.load(opened.config, opened.tensors, "float32", "test")
    assert isinstance(ours, MODEL_CLASSES[type(opened.config)])
    pixels = np.random.default_rng(0).standard_normal((2, 32, 32, 3)).astype("float32")
    with torch.no_grad():
        expected = theirs(channels_first(pixels), output_hidden_states=True)
    found = ours(pixels)
    for mine, other in (
        (found["embedding"], expected.image_embeds),
        (found["tokens"], expected.hidden_states[-2]),
    ):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(mine), other.numpy(), atol=1e-4)


@pytest.fixture(scope="module", params=["base", "plus", "full-face"])
def layers(request, tmp_path_factory):
    """An adapter, and a UNet of diffusers that has loaded it."""
    unet = diffusers.UNet2DConditionModel(**{**peers.SD1_UNET, "layers_per_block": 1})
    path = tmp_path_factory.mktemp("layers") / f"{request.param}.safetensors"
    prompts.save(path, request.param, unet)
    halves = {part: {} for part in ("image_proj", "ip_adapter")}
    for name, tensor in load_file(path).items():
        part, _, rest = name.partition(".")
        halves[part][rest] = tensor
    unet._load_ip_adapter_weights([halves])
    return open_image_adapter(path), unet


def check_near(ours, theirs, precision):
    ours = keras.ops.convert_to_numpy(keras.ops.cast(ours, "float32"))
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= TOLERANCES[precision] * np.abs(theirs).max()


@pytest.mark.backend
@pytest.mark.parametrize("precision", TOLERANCES)
def test_projections(layers, precision):
    """Diffusers' `ImageProjection`, `IPAdapterPlusImageProjection` and the one for full face.

    The second row has no picture, in place of which base adapters project zeros.
    """
    opened, unet = layers
    ours = layout.load(opened.config.projection, opened.projection, precision, "test")
    rng = np.random.default_rng(0)
    encoded = {
        "embedding": rng.standard_normal((2, prompts.EMBED)).astype("float32"),
        "tokens": rng.standard_normal((2, 17, prompts.WIDTH)).astype("float32"),
    }
    given = np.array([1, 0], "float32")
    if opened.config.projection.kind == "linear":
        taken = encoded["embedding"] * given[:, None]
    else:
        taken = encoded["tokens"]
    (theirs,) = unet.encoder_hid_proj.image_projection_layers
    with torch.no_grad():
        expected = theirs(torch.from_numpy(taken)).numpy()
    computed = {name: keras.ops.cast(value, precision) for name, value in encoded.items()}
    check_near(ours(computed, given=keras.ops.convert_to_tensor(given)), expected, precision)


@pytest.mark.backend
@pytest.mark.parametrize("precision", TOLERANCES)
def test_keys_and_values(layers, precision):
    """Those of diffusers' attention processors, on the way down, up and in the middle."""
    opened, unet = layers
    ours = layout.load(opened.config.attention, opened.attention, precision, "test")
    tokens = np.random.default_rng(1).standard_normal((2, 5, 128)).astype("float32")
    pairs = ours(keras.ops.convert_to_tensor(tokens))
    processors = [one for name, one in unet.attn_processors.items() if "attn2" in name]
    for pair, theirs in zip(pairs, processors, strict=True):
        for mine, layer in zip(pair, (theirs.to_k_ip[0], theirs.to_v_ip[0]), strict=True):
            with torch.no_grad():
                check_near(mine, layer(torch.from_numpy(tokens)).numpy(), precision)


MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "PA")


def odd_picture(number):
    """A picture of an odd size and one of the modes, with grain and edges."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(5, 400, 2)
    levels = rng.integers(0, 256, (height, width, 4), "uint8")
    levels[: height // 2, : width // 3, :3] = rng.integers(0, 256, 3)
    image = Image.fromarray(levels, "RGBA")
    mode = MODES[number % len(MODES)]
    if mode == "PA":
        return image.convert("LA").convert("PA")
    return image.convert("RGB" if mode not in ("RGBA", "LA") else "RGBA").convert(mode)


def test_preprocessing_is_the_published_processors():
    """Bit for bit, on 50 pictures of many modes and odd sizes."""
    processor = CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size=224)
    for number in range(50):
        image = odd_picture(number)
        expected = processor(image, return_tensors="np").pixel_values[0]
        ours = to_vision(middle(image, 224))
        np.testing.assert_array_equal(ours, np.moveaxis(expected, 0, -1), err_msg=image.mode)
