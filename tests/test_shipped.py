"""The checkpoints in the package: they draw and edit as they are told, for us and for diffusers."""

from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sd_tf.checkpoints import (
    CONFIG,
    CONTROLNETS,
    DIT,
    DIT_CONFIG,
    DIT_FOLDER,
    EDITOR,
    EDITOR_FOLDER,
    EMBEDDED,
    TINY_FOLDER,
    embedded_controlnet,
)
from sd_tf.cli.main import main
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.psnr import psnr
from sd_tf.training import evaluate, evaluate_control, evaluate_edits, world
from sd_tf.training.world.scene import SIZES
from sd_tf.weights import open_checkpoint

PROMPTS = 15  # of each of the four groups
# Least shares of right pictures; docs/tiny.md has the shares of many more prompts.
FLOORS = {
    "one thing": {
        "count": 0.9,
        "shape": 0.9,
        "colour": 0.9,
        "size": 0.9,
        "background": 0.95,
        "position": 0.9,
    },
    "two things": {
        "count": 0.85,
        "shape": 0.7,
        "colour": 0.85,
        "size": 0.8,
        "background": 0.95,
        "relation": 0.9,
    },
}
EDITS = 60  # of each split
FOLLOWED = {"train": 0.9, "held_out": 0.85}
ALL_RIGHT = {"one thing": 0.85, "two things": 0.6}
STEERED = {"number of things": 0.95, "place": 0.95, "shape": 0.8, "colour": 0.9}
DIT_FLOORS = {  # of two things it may draw a shape wrong
    "one thing, seen": {"shape": 0.85, "colour": 0.9, "size": 0.9, "position": 0.9},
    "one thing, held out": {"shape": 0.8, "colour": 0.9, "size": 0.85, "position": 0.9},
    "two things, seen": {"shape": 0.65, "colour": 0.9, "size": 0.85, "relation": 0.9},
    "two things, held out": {"shape": 0.65, "colour": 0.85, "size": 0.85, "relation": 0.9},
}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped") / "export"
    export(open_checkpoint(TINY_FOLDER), folder, ExportOptions(batch_size=15, verify="off"))
    return Pipeline.load(folder)


def test_it_is_what_the_recipe_makes():
    config = open_checkpoint(TINY_FOLDER).config
    assert (config.denoiser, config.text_encoders["text_encoder"]) == (
        CONFIG.denoiser,
        CONFIG.text_encoders["text_encoder"],
    )
    assert config.schedule == CONFIG.schedule


@pytest.mark.parametrize("name", EMBEDDED)
def test_none_is_too_large(name):
    size = sum(path.stat().st_size for path in EMBEDDED[name].rglob("*") if path.is_file())
    assert size <= 25 * 2**20


@pytest.mark.parametrize("name", CONTROLNETS)
def test_a_net_is_small_and_fits_the_drawer(name):
    folder = embedded_controlnet(name)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 6 * 2**20
    checkpoint = open_checkpoint(TINY_FOLDER, controlnet=[folder])
    assert checkpoint.controlnets == (name,)
    checkpoint.build("controlnet")


def test_the_editor_has_what_the_drawer_has():
    drawer, editor = open_checkpoint(TINY_FOLDER), open_checkpoint(EDITOR_FOLDER)
    schedule = replace(drawer.config.schedule, sampler="euler_ancestral")
    assert editor.config == replace(
        drawer.config,
        denoiser=editor.config.denoiser,
        schedule=schedule,
        latent_inputs="image",
        suited={"guidance_scale": 2.0},
    )
    assert editor.config.denoiser == replace(drawer.config.denoiser, in_channels=8)
    ours, theirs = editor.tensors("vae"), drawer.tensors("vae")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.read(), theirs[name].read())


def test_the_transformer_has_the_latents_of_the_drawer():
    drawer, transformer = open_checkpoint(TINY_FOLDER), open_checkpoint(DIT_FOLDER)
    assert transformer.config == replace(DIT_CONFIG, autoencoder=drawer.config.autoencoder)
    ours, theirs = transformer.tensors("vae"), drawer.tensors("vae")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.read(), theirs[name].read())


@pytest.mark.long
def test_the_bare_command_draws(tmp_path, monkeypatch, capsys):
    """With no export named, the embedded checkpoint is exported, once, and drawn with what suits
    it.
    """
    monkeypatch.chdir(tmp_path)
    prompt = "a large red star on a black background"
    for seed, flags in (("1", []), ("2", ["--nojit_compile"])):
        assert main(["generate", prompt, "--num_steps", "20", "--seed", seed, *flags]) == 0
    assert capsys.readouterr().out.count("exporting the embedded checkpoint tiny") == 1
    for seed in (1, 2):
        path = tmp_path / "out" / f"{seed}.png"
        assert read_parameters(path)[0]["guidance_scale"] == 4.0
        reading = world.read(np.asarray(Image.open(path)))
        assert [(thing.shape, thing.colour) for thing in reading.things] == [("star", "red")]
        assert reading.background == "black"


@pytest.fixture(scope="module")
def editor_export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editor") / "export"
    export(open_checkpoint(EDITOR_FOLDER), folder, ExportOptions(batch_size=15, verify="off"))
    return folder


@pytest.fixture(scope="module")
def editor(editor_export):
    return Pipeline.load(editor_export)


@pytest.mark.long
def test_the_editor_does_what_it_is_told(editor, tmp_path):
    options = evaluate_edits.EditEvaluationOptions(pairs=EDITS)
    content = evaluate_edits.evaluate(editor, options, tmp_path)
    for split, floor in FOLLOWED.items():
        assert content["splits"][split]["followed"] >= floor, split
        assert content["splits"][split]["preserved_db"] >= 25.0, split


@pytest.mark.long
def test_the_bare_command_edits(editor_export, tmp_path, monkeypatch):
    """With a picture and no export named, by the editor; here it has been exported before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / EDITOR).symlink_to(editor_export)
    thing = world.Thing("star", "red", "large", 0.5, 0.5, SIZES["large"])
    scene = world.Scene("black", (thing,), "center", None)
    Image.fromarray(world.draw(scene, 64)).save("scene.png")
    flags = ["--image", "scene.png", "--num_steps", "20", "--seed", "1"]
    assert main(["generate", "make the star green", *flags]) == 0
    path = tmp_path / "out" / "1.png"
    assert read_parameters(path)[0]["guidance_scale"] == 2.0
    reading = world.read(np.asarray(Image.open(path)))
    assert [(thing.shape, thing.colour) for thing in reading.things] == [("star", "green")]
    assert reading.background == "black"


@pytest.mark.long
def test_it_draws_what_it_is_asked_for(pipe, tmp_path):
    options = evaluate.EvaluationOptions(prompts=PROMPTS, negative_prompts=True)
    content = evaluate.evaluate(pipe, options, tmp_path)
    for group, record in content["groups"].items():
        kind, _, _ = group.partition(",")
        for attribute, floor in FLOORS[kind].items():
            assert record["attributes"][attribute] >= floor, (group, attribute)
        assert record["all_right"] >= ALL_RIGHT[kind], group
    assert content["reconstruction_db"] >= 30.0
    for entry in content["negative_prompts"]:
        assert entry["with"] <= 0.25 * entry["without"], entry


@pytest.mark.long
def test_it_follows_drawings(tmp_path):
    """With the net, and without it, when the prompt does not say where things are."""
    checkpoint = open_checkpoint(TINY_FOLDER, controlnet=[embedded_controlnet("drawing")])
    export(checkpoint, tmp_path / "export", ExportOptions(batch_size=15, verify="off"))
    options = evaluate_control.ControlEvaluationOptions(drawings=PROMPTS)
    pipe = Pipeline.load(tmp_path / "export")
    content = evaluate_control.evaluate(pipe, options, tmp_path)
    for group, record in content["groups"].items():
        for attribute, floor in STEERED.items():
            assert record["attributes"][attribute] >= floor, (group, attribute)
        without = content["without"][group]
        assert without["attributes"]["place"] <= 0.4 and without["all_right"] <= 0.3, group
    assert np.mean([record["all_right"] for record in content["groups"].values()]) >= 0.9


@pytest.mark.long
def test_guidance_helps(pipe):
    """It makes things more like their words, so that the oracle can tell what they are."""

    def right(scale):
        options = evaluate.EvaluationOptions(prompts=PROMPTS)
        tally, *_ = evaluate.measure(pipe, "two things, seen", options, scale)
        right, asked = tally.attributes["shape"]
        return right / asked

    assert right(4.0) >= max(right(1.0), FLOORS["two things"]["shape"])


def test_the_same_picture_in_diffusers(pipe):
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(
        TINY_FOLDER, torch_dtype=torch.float32, safety_checker=None
    )
    theirs.set_progress_bar_config(disable=True)
    prompts = ["a large red star on a black background", "a small green ring above a blue heart"]
    noise = np.random.default_rng(0).standard_normal(
        (2, *pipe.manifest.shapes.latent(pipe.manifest.shapes.first.size)), "float32"
    )
    options = {"num_inference_steps": 20, "guidance_scale": 4.0}
    latents = torch.from_numpy(noise.transpose(0, 3, 1, 2))
    expected = theirs(prompts, latents=latents, output_type="np", **options).images
    ours = pipe(prompts, num_steps=20, guidance_scale=4.0, noise=noise).images
    assert psnr(expected * 255.0, ours, peak=255) >= 40.0


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformer") / DIT
    export(open_checkpoint(DIT_FOLDER), folder, ExportOptions(batch_size=15, verify="off"))
    return Pipeline.load(folder)


def test_the_transformer_draws_what_it_is_asked_for(transformer, tmp_path):
    options = evaluate.EvaluationOptions(prompts=PROMPTS)
    content = evaluate.evaluate(transformer, options, tmp_path)
    for group, floors in DIT_FLOORS.items():
        shares = content["groups"][group]["attributes"]
        for attribute, floor in {**floors, "background": 0.95}.items():
            assert shares[attribute] >= floor, (group, attribute)


def test_the_transformers_picture_in_diffusers(transformer):
    theirs = diffusers.StableDiffusion3Pipeline.from_pretrained(
        DIT_FOLDER, torch_dtype=torch.float32, text_encoder_3=None, tokenizer_3=None
    )
    theirs.set_progress_bar_config(disable=True)
    prompts = ["a large red star on a black background", "a small green ring above a blue heart"]
    noise = np.random.default_rng(0).standard_normal((2, 16, 16, 4), "float32")
    options = {"num_inference_steps": 20, "guidance_scale": 1.33}
    latents = torch.from_numpy(noise.transpose(0, 3, 1, 2))
    size = {"height": 64, "width": 64}
    expected = theirs(prompts, latents=latents, output_type="np", **size, **options).images
    ours = transformer(prompts, num_steps=20, noise=noise).images
    assert psnr(expected * 255.0, ours, peak=255) >= 40.0
