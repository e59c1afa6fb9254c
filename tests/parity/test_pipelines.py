"""Whole pictures: prompts in, uint8 out, against the pipelines of diffusers and KerasCV.

The weights are random, and left at `peers`' scale they give pictures of high contrast: standard
deviation 70, one pixel value in eight at 0 or 255. Another prompt, negative prompt or guidance
changes them to a PSNR of 10 to 30 dB, so that 50 dB can come from nothing but agreement.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import diffusers
import keras_cv
import numpy as np
import pytest
import tensorflow as tf
import torch
from PIL import Image

from sd_tf.export import Options, export
from sd_tf.manifest import VERSION_FOLDER, ExportError
from sd_tf.pipeline import Pipeline
from sd_tf.sampling.noise import INITIAL, normal
from sd_tf.tokenizer import VOCABULARY
from sd_tf.weights import open_checkpoint
from sd_tf.weights.kerascv import RELEASES, VAE_FILES
from tests import peers
from tests.parity.test_kerascv import randomize, save_h5

FLOOR = 50.0  # dB
STEPS, GUIDANCE = 6, 7.5
PROMPTS = ["a red bicycle against a wall", "two cats in a hat"]
NEGATIVE = "a blurry photo"

# One export each. 72×88 is a multiple of 8 and not of 16: every level has odd sizes.
FAMILIES = {
    "sd1": {"height": 72, "width": 88},
    "sd2-v": {"height": 64, "width": 96, "guidance_rescale": 0.7},
    "sdxl-base": {"height": 64, "width": 64},
    "inpaint": {"height": 64, "width": 64},
}
SCHEDULERS = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler_ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {"timestep_spacing": "linspace"}),
    "pndm": (diffusers.PNDMScheduler, {"skip_prk_steps": True}),
}
DETERMINISTIC = ["ddim", "euler", "dpmpp_2m", "pndm"]


def psnr(one, other):
    """In dB, of the 255 levels."""
    assert one.shape == other.shape
    error = np.mean(np.square(one.astype("float64") - other))
    return np.inf if error == 0 else 10 * np.log10(255**2 / error)


def check_pictures(ours, theirs, floor=FLOOR):
    assert ours.dtype == np.uint8
    assert all(picture.std() > 5 for picture in theirs), "flat pictures prove nothing"
    worst = min(psnr(*pair) for pair in zip(ours, theirs, strict=True))
    print(f"PSNR {worst:.1f} dB")
    assert worst >= floor


def channels_first(x):
    return torch.from_numpy(np.moveaxis(x, -1, 1).copy())


@dataclass
class Pair:
    theirs: diffusers.DiffusionPipeline
    ours: Pipeline

    @property
    def size(self):
        return {"height": self.ours.manifest.height, "width": self.ours.manifest.width}

    def noise(self, count):
        """The same for every picture: what differs is what the prompts make of it."""
        noise = np.random.default_rng(0).standard_normal(self.ours.manifest.latent_shape)
        return np.stack([noise.astype("float32")] * count)

    def peer(self, sampler, pipeline=None, **arguments):
        """Pictures of diffusers' pipeline, or of one made of its parts."""
        pipeline = pipeline or self.theirs
        make, changes = SCHEDULERS[sampler]
        changes = {"timestep_spacing": "leading", "set_alpha_to_one": False, **changes}
        # Constructors warn of what is not theirs; from_config, made for exchanging, does not.
        pipeline.scheduler = make.from_config({**peers_schedule(self.theirs), **changes})
        pipeline.set_progress_bar_config(disable=True)
        arguments = {"guidance_scale": GUIDANCE, "num_inference_steps": STEPS, **arguments}
        images = pipeline(output_type="np", **arguments).images
        return (255 * images).round().astype("uint8")

    def picture(self):
        """A picture to start from: a gradient, a disc and grain."""
        height, width = self.size.values()
        y, x = np.mgrid[:height, :width]
        disc = np.hypot(y - height / 2, x - width / 3) < height / 4
        planes = [2 * y, 255 * disc, 2 * x] + np.random.default_rng(1).integers(0, 40, (3, 1, 1))
        return Image.fromarray(np.stack(planes, -1).clip(0, 255).astype("uint8"))


def peers_schedule(pipeline):
    kept = ("prediction_type", "steps_offset", *peers.SCHEDULE)
    return {key: pipeline.scheduler.config[key] for key in kept if key in pipeline.scheduler.config}


def exported(checkpoint, folder, **options):
    options = {"max_steps": 8, "verify": "off", **options}
    export(open_checkpoint(checkpoint), folder, Options(**options))
    return folder


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """One family's pipelines; pytest orders the tests so that one export serves them all.

    Blocks of one layer, to save time: `test_families` has the models' whole depth.
    """
    pipeline = peers.random_pipeline(request.param, layers_per_block=1)
    folder = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(folder / "checkpoint")
    target = exported(folder / "checkpoint", folder / "export", **FAMILIES[request.param])
    # Not compiled, which these sizes hardly repay; that XLA computes the same is shown below.
    return Pair(pipeline, Pipeline.load(target, jit_compile=False))


def of(*families):
    return pytest.mark.parametrize("pair", families, indirect=True)


# Against diffusers


def check_text_to_image(pair, sampler, theirs=None, ours=None, **common):
    """Arguments for both, and those that only one of them knows, or knows by that name."""
    noise = pair.noise(len(PROMPTS))
    theirs = {"latents": channels_first(noise), **pair.size, **(theirs or {})}
    ours = {"noise": noise, "num_steps": STEPS, "scheduler": sampler, **(ours or {})}
    reference = pair.peer(sampler, prompt=PROMPTS, **theirs, **common)
    assert psnr(*reference) < 40, "the prompt hardly matters"
    check_pictures(pair.ours(PROMPTS, **ours, **common).images, reference)


@pytest.mark.parametrize("negative", [None, [NEGATIVE, "green"]], ids=["absent", "negative"])
@pytest.mark.parametrize("sampler", DETERMINISTIC)
@of("sd1", "sd2-v", "sdxl-base")
def test_text_to_image(pair, sampler, negative):
    theirs = {"guidance_rescale": pair.ours.manifest.guidance_rescale}
    check_text_to_image(pair, sampler, theirs, negative_prompt=negative)


@of("sd1", "sdxl-base")
def test_empty_negative_prompts(pair):
    """SDXL takes no negative prompt for zeros and encodes an explicit ""; SD1 encodes both."""
    check_text_to_image(pair, "euler", negative_prompt=["", ""])
    arguments = {"num_steps": STEPS, "noise": pair.noise(1)}
    absent, empty = (
        pair.ours(PROMPTS[0], negative_prompt=negative, **arguments).images
        for negative in (None, "")
    )
    assert (psnr(absent, empty) > FLOOR) == (pair.ours.manifest.family == "sd1")


@of("sdxl-base")
def test_sdxl_sizes(pair):
    sizes = {"original_size": (512, 768), "target_size": (1024, 960)}
    theirs, ours = {"crops_coords_top_left": (16, 128)}, {"crop_top_left": (16, 128)}
    check_text_to_image(pair, "euler", theirs, ours, **sizes)
    arguments = {"num_steps": STEPS, "noise": pair.noise(1), "scheduler": "euler"}
    default = pair.ours(PROMPTS[0], **arguments).images
    assert psnr(default, pair.ours(PROMPTS[0], **arguments, **sizes).images) < 40


@of("sd1")
def test_noise_in_every_step(pair, monkeypatch):
    """Seeds in place of noise: the streams of `sampling.noise` are handed to diffusers."""
    seed = 42

    def stream(number):
        return channels_first(normal([seed], number, pair.ours.manifest.latent_shape).numpy())

    fresh = (stream(step + 1) for step in range(STEPS))
    module = sys.modules[diffusers.EulerAncestralDiscreteScheduler.__module__]
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(fresh))
    reference = pair.peer(
        "euler_ancestral", prompt=PROMPTS[0], latents=stream(INITIAL), **pair.size
    )
    result = pair.ours(PROMPTS[0], num_steps=STEPS, scheduler="euler_ancestral", seed=seed)
    check_pictures(result.images, reference)


def pin_noise(monkeypatch, pipeline, noise):
    """Have diffusers take the posterior's mode in place of a sample, and this noise."""
    module = sys.modules[type(pipeline).__module__]
    monkeypatch.setattr(module, "retrieve_latents", lambda output, **_: output.latent_dist.mode())
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: channels_first(noise))


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("sampler", ["ddim", "euler", "dpmpp_2m"])
@of("sd1")
def test_image_to_image(pair, monkeypatch, sampler, strength):
    pipeline = diffusers.StableDiffusionImg2ImgPipeline(
        **pair.theirs.components, requires_safety_checker=False
    )
    noise = pair.noise(1)
    pin_noise(monkeypatch, pipeline, noise)
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": strength}
    common["negative_prompt"] = NEGATIVE
    reference = pair.peer(sampler, pipeline, **common)
    result = pair.ours(**common, num_steps=STEPS, scheduler=sampler, noise=noise)
    check_pictures(result.images, reference)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("sampler", ["ddim", "euler", "dpmpp_2m"])
@of("inpaint")
def test_inpainting(pair, monkeypatch, sampler, strength):
    noise = pair.noise(1)
    pin_noise(monkeypatch, pair.theirs, noise)
    mask = np.zeros(tuple(pair.size.values()), "uint8")
    mask[11:42, 21:61] = 255  # edges inside a latent's 8×8 pixels
    common = {"prompt": PROMPTS[0], "image": pair.picture(), "strength": strength}
    reference = pair.peer(sampler, mask_image=Image.fromarray(mask), **common, **pair.size)
    arguments = {**common, "num_steps": STEPS, "scheduler": sampler, "noise": noise}
    result = pair.ours(mask=mask, **arguments)
    check_pictures(result.images, reference)
    other = pair.ours(mask=255 - mask, **arguments)
    assert psnr(result.images, other.images) < 40, "the mask hardly matters"


@pytest.mark.parametrize("size", [{"height": 60}, {"width": 0}], ids=str)
def test_sizes_that_are_refused(small_pipelines, tmp_path, size):
    (name, value), *_ = size.items()
    with pytest.raises(ExportError, match=rf"The {name} is a positive multiple of 8.*: {value}$"):
        exported(small_pipelines("sd1")[1], tmp_path / "export", **size)
    assert not list(tmp_path.iterdir())


# Against itself: batches, segments, precisions, compiled and not

SHALLOW_UNET = {
    **peers.SD1_UNET,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
VARIANTS = {
    "base": {},
    "batch 3": {"batch_size": 3, "jit_compile_text_encoder": True},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
}
SEEDED = {"num_steps": STEPS, "scheduler": "euler_ancestral"}
FIVE = [*PROMPTS, "", "a boat", "the letter w"]
FIVE_SEEDS = [5, 0, -7, 2**31 - 1, 5]


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """A variant's name → the folder of its export. SD1 of two levels, to save time."""
    folder = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers.UNETS, "sd1", SHALLOW_UNET)
        peers.random_pipeline("sd1", layers_per_block=1).save_pretrained(folder / "checkpoint")

    def make(name):
        target = folder / name
        if not target.exists():
            exported(folder / "checkpoint", target, height=64, width=64, **VARIANTS[name])
        return target

    return make


@pytest.fixture(scope="module")
def base(variants):
    return Pipeline.load(variants("base"))


@pytest.fixture(scope="module")
def five(base):
    pictures = base(FIVE, seed=FIVE_SEEDS, **SEEDED).images
    assert all(picture.std() > 5 for picture in pictures)
    return pictures


def largest_difference(one, other):
    assert one.shape == other.shape
    return np.abs(one.astype(int) - other).max()


def test_one_seed_is_one_picture(variants, five):
    """Whatever the batch, the place in it, and what stands beside it."""
    pipeline = Pipeline.load(variants("batch 3"))
    result = pipeline(FIVE, seed=FIVE_SEEDS, **SEEDED)
    assert result.seeds == FIVE_SEEDS
    assert largest_difference(result.images, five) <= 1
    order = [3, 1, 4, 0]
    moved = pipeline([FIVE[i] for i in order], seed=[FIVE_SEEDS[i] for i in order], **SEEDED)
    assert largest_difference(moved.images, five[order]) <= 1
    assert psnr(five[0], five[1]) < 30


@pytest.mark.parametrize("scheduler", ["pndm", "dpmpp_2m", "euler_ancestral"])
def test_segments_equal_the_single_run(base, scheduler):
    arguments = {"seed": 3, "num_steps": STEPS, "scheduler": scheduler}
    seen, latents = [], []

    def callback(done, calls, latent):
        seen.append((done, calls))
        latents.append(latent)

    result = base(PROMPTS[0], callback=callback, **arguments)
    assert largest_difference(result.images, base(PROMPTS[0], **arguments).images) <= 1
    calls = base.manifest.calls[scheduler][STEPS - 1]
    assert seen == [(i + 1, calls) for i in range(calls)]
    assert np.array_equal(base.decode(latents[-1]), result.images)
    stopped = base(PROMPTS[0], callback=lambda done, *_: done < 2, **arguments)
    assert np.array_equal(stopped.images, base.decode(latents[1]))


def test_compiled_equals_not_compiled(variants, five):
    plain = Pipeline.load(variants("base"), jit_compile=False)
    check_pictures(plain(FIVE, seed=FIVE_SEEDS, **SEEDED).images, five)


def test_compiled_text_encoder(variants):
    loaded = tf.saved_model.load(str(variants("batch 3") / "text_encoder" / VERSION_FOLDER))
    apart = tf.saved_model.load(str(variants("base") / "text_encoder" / VERSION_FOLDER))
    tokens = peers.tokenizer(49407)(FIVE[:3], padding="max_length", return_tensors="np")
    tokens = tokens["input_ids"].astype("int32")
    compiled = loaded.signatures["encode"](
        tokens=tf.constant(tokens), negative_tokens=tf.constant(tokens[::-1])
    )
    for i in range(len(tokens)):
        row, mirrored = (tf.constant(ids[i : i + 1]) for ids in (tokens, tokens[::-1]))
        plain = apart.signatures["encode"](tokens=row, negative_tokens=mirrored)
        for key in plain:
            theirs = plain[key].numpy()[0]
            error = np.abs(compiled[key].numpy()[i] - theirs).max() / np.abs(theirs).max()
            assert error <= 1e-5


@pytest.mark.parametrize(("precision", "floor"), [("bfloat16", 30.0), ("float16", 45.0)])
def test_half_precision(variants, five, precision, floor):
    pipeline = Pipeline.load(variants(precision))
    check_pictures(pipeline(FIVE, seed=FIVE_SEEDS, **SEEDED).images, five, floor)


# Against KerasCV


def kerascv_model(size):
    """The real class at its one, full size; nothing is downloaded."""
    parts = keras_cv.models.stable_diffusion
    model = keras_cv.models.StableDiffusion(size, size, jit_compile=False)
    model._text_encoder = randomize(parts.TextEncoder(77, download_weights=False), 1)
    model._diffusion_model = randomize(
        parts.DiffusionModel(size, size, 77, download_weights=False), 2
    )
    model._decoder = randomize(parts.Decoder(size, size, download_weights=False), 3)
    vocabulary = resources.files("sd_tf") / "data" / VOCABULARY
    model._tokenizer = parts.SimpleTokenizer(bpe_path=str(vocabulary))
    return model


def run_kerascv(folder: Path, size, noise, steps):
    """Its picture, and its weights as files."""
    model = kerascv_model(size)
    images = model.generate_image(
        model.encode_text(PROMPTS[0]),
        negative_prompt=NEGATIVE,
        num_steps=steps,
        unconditional_guidance_scale=GUIDANCE,
        diffusion_noise=noise,
    )
    _, _, files = RELEASES["sd1.4"]
    encoder = keras_cv.models.stable_diffusion.ImageEncoder(download_weights=False)
    save_h5(model.text_encoder, folder / files["text_encoder"])
    save_h5(model.diffusion_model, folder / files["unet"])
    save_h5(model.decoder, folder / VAE_FILES["decoder"])
    save_h5(encoder, folder / VAE_FILES["encoder"])
    return images


def in_new_process(function, *args, **options):
    """Its memory goes back with it: several copies of a full-size model are too many for one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **options).result()


@pytest.mark.full_size
def test_kerascv(tmp_path):
    """KerasCV cuts the decimals off where we round: half the pixels differ by one, 51 dB."""
    size, steps = 128, 3
    noise = np.random.default_rng(4).standard_normal((1, size // 8, size // 8, 4), "float32")
    theirs = in_new_process(run_kerascv, tmp_path, size, noise, steps)
    options = {"height": size, "width": size, "max_steps": steps}
    folder = in_new_process(exported, f"kerascv:{tmp_path}", tmp_path / "export", **options)
    pipeline = Pipeline.load(folder)
    assert pipeline.manifest.default_sampler == "kerascv"
    ours = pipeline(
        PROMPTS[0], NEGATIVE, num_steps=steps, guidance_scale=GUIDANCE, noise=noise
    ).images
    check_pictures(ours, theirs, floor=45.0)
