"""Exports against themselves: batches, segments, precisions, compiled and not; and against KerasCV.

The weights are random, as in `test_pipelines`, which has the comparison with diffusers.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path

import keras_cv
import numpy as np
import pytest
import tensorflow as tf

from sd_tf.config.rewrites import REWRITES
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.manifest import VERSION_FOLDER, ExportError
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.tokenizer.clip import VOCABULARY
from sd_tf.weights import open_checkpoint
from sd_tf.weights.kerascv import RELEASES, VAE_FILES
from tests import peers
from tests.exports import micro_folder
from tests.parity.test_kerascv import random_model, save_h5
from tests.peer_pipelines import GUIDANCE, NEGATIVE, PROMPTS, STEPS, check_pictures, psnr


def exported(checkpoint, folder, **options):
    options = {"max_steps": 8, "verify": "off", **options}
    export(open_checkpoint(checkpoint), folder, ExportOptions(**options))
    return folder


@pytest.mark.parametrize("size", [{"height": 60}, {"width": 0}], ids=str)
def test_sizes_that_are_refused(small_pipelines, tmp_path, size):
    (name, value), *_ = size.items()
    with pytest.raises(ExportError, match=rf"The {name} is a positive multiple of 8.*: {value}$"):
        exported(small_pipelines("sd1")[1], tmp_path / "export", **size)
    assert not list(tmp_path.iterdir())


VARIANTS = {
    "base": {"disabled_rewrites": REWRITES},
    "batch 3": {"batch_size": 3, "jit_compile_text_encoder": True, "disabled_rewrites": REWRITES},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
}
SEEDED = {"num_steps": STEPS, "scheduler": "euler_ancestral"}
FIVE = [*PROMPTS, "", "a boat", "the letter w"]
FIVE_SEEDS = [5, 0, -7, 2**31 - 1, 5]


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """A variant's name → the folder of its export, of the smallest checkpoint."""
    folder = tmp_path_factory.mktemp("variants")

    def make(name):
        target = folder / name
        if not target.exists():
            exported(micro_folder(), target, height=16, width=16, **VARIANTS[name])
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
    calls = base.manifest.model_calls(scheduler, STEPS)
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
@pytest.mark.long
def test_half_precision(variants, five, precision, floor):
    pipeline = Pipeline.load(variants(precision))
    check_pictures(pipeline(FIVE, seed=FIVE_SEEDS, **SEEDED).images, five, floor)


# Against KerasCV


def kerascv_model(size):
    """The real class at its one, full size; nothing is downloaded."""
    parts = keras_cv.models.stable_diffusion
    model = keras_cv.models.StableDiffusion(size, size, jit_compile=False)
    model._text_encoder = random_model(parts.TextEncoder, 77, seed=1)
    model._diffusion_model = random_model(parts.DiffusionModel, size, size, 77, seed=2)
    model._decoder = random_model(parts.Decoder, size, size, seed=3)
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


@pytest.mark.long
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
