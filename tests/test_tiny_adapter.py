"""The embedded adapters: their pictures, their files, and the command that trains them."""

from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
from safetensors.numpy import load_file

from sd_tf.checkpoints import ADAPTERS, TINY_FOLDER, embedded_adapter
from sd_tf.cli.arguments import scaled_path
from sd_tf.cli.main import main
from sd_tf.files.tensors import CheckpointError
from sd_tf.training import tiny_adapter, world
from sd_tf.training.data import World
from sd_tf.training.settings import TrainingError
from sd_tf.training.tiny_adapter import RECIPES, Moons, Outlined
from sd_tf.training.world.draw import coverage

MOST_BYTES = 300 * 1024


def test_outlines_have_the_backgrounds_middle():
    filled, hollow = World(40, 64), Outlined(40, 64)
    for index in range(40):
        scene = filled.scene(index)
        assert hollow.caption(index, 0) == filled.caption(index, 0)
        background = world.draw(replace(scene, things=()), 64)
        for thing in scene.things:
            if thing.shape != "ring":
                place = int(thing.y * 64), int(thing.x * 64)
                assert (hollow.picture(index)[place] == background[place]).all()
                assert (filled.picture(index)[place] != background[place]).any()


def test_half_of_the_scenes_have_a_moon():
    moons = Moons(10, 64)
    for index in range(10):
        shapes = [thing.shape for thing in moons.scene(index).things]
        assert shapes.count("moon") == (index + 1) % 2
        assert ("moon" in moons.caption(index, 0)) == ("moon" in shapes)
    _, covered = coverage("moon", 32, 32, 20, 64)
    assert covered[20, 2] == 1.0 and covered[20, 30] == 0.0  # a crescent, open to the right


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_files(name):
    """Small enough, of half precision, and loaded by diffusers."""
    assert RECIPES.keys() == set(ADAPTERS)
    file = embedded_adapter(f"tiny:{name}")
    assert file == embedded_adapter(name) and file.stat().st_size <= MOST_BYTES
    assert {value.dtype for value in load_file(file).values()} == {np.dtype("float16")}
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(TINY_FOLDER)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    assert "unet" in pipeline.get_list_adapters()


def test_what_is_not_embedded():
    with pytest.raises(CheckpointError, match=r"tiny:outline, tiny:moon\. Received: 'tiny:sun'"):
        embedded_adapter("tiny:sun")
    with pytest.raises(TrainingError, match=r"The adapters are outline, moon\. Received: 'sun'"):
        tiny_adapter.train("sun", Path("unused"))


@pytest.mark.long
def test_training_one_anew(tmp_path):
    few = replace(
        RECIPES["moon"].settings, steps=2, batch_size=2, warm_up=1, sample_every=0, log_every=1
    )
    recipe = replace(RECIPES["moon"], settings=replace(few, jit_compile=False), scenes=2)
    found = load_file(tiny_adapter.train("moon", tmp_path, recipe=recipe))
    shipped = load_file(embedded_adapter("moon"))
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in shipped.items()}


def test_commands_know_the_embedded_adapters_names(capsys):
    message = "The embedded adapters are tiny:outline, tiny:moon. Received: 'tiny:sun'"
    assert main(["weights", "tiny:sun"]) == 1
    assert message in capsys.readouterr().err
    for flag in ("--lora=tiny:sun@0.5", "--lora=tiny:sun"):
        with pytest.raises(SystemExit):
            main(["export", flag])
        assert message in capsys.readouterr().err
    assert scaled_path("tiny:moon@0.5") == (embedded_adapter("moon"), 0.5)
    assert scaled_path("a@b") == ("a@b", 1.0)
