"""The commands of `sd-tf train`, small and whole."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from sd_tf.checkpoints import make_random
from sd_tf.cli.main import main
from sd_tf.cli.train_run import picture_size
from sd_tf.config import FAMILIES
from sd_tf.runtime.shapes import Shapes
from sd_tf.training import edit, evaluate, finetune, tiny, world
from sd_tf.training.batches import LatentBatches
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.data import World
from sd_tf.training.edit import EditOptions
from sd_tf.training.evaluate import GROUPS, EvaluationOptions
from sd_tf.training.finetune import FinetuneOptions
from sd_tf.training.hosts import Host
from sd_tf.training.latents import CACHE, FILE, cached_latents
from sd_tf.training.losses import Denoising, freeze
from sd_tf.training.pairs import WorldPairs
from sd_tf.training.settings import Averaging, Settings, TrainingError
from sd_tf.training.trainer import Run
from sd_tf.weights import layout, open_checkpoint
from tests import micro
from tests.commands import on_two_hosts
from tests.exports import micro_folder

OPTIONS = EvaluationOptions(prompts=20)


class Artist:
    """In place of a pipeline: draws what `paint` makes of the prompt's own request."""

    def __init__(self, paint):
        self.paint = paint
        self.manifest = SimpleNamespace(
            shapes=Shapes(((64, 64),), (1,), 8, 4),
            checkpoint="artist",
            default_sampler="ddim",
            components={},
            suited={},
        )
        self.asked = {
            prompt: (ask, split, things)
            for split, things in GROUPS.values()
            for prompt, ask in world.prompts(OPTIONS.prompts, split, things)
        }

    def __call__(self, prompts, **_):
        pictures = [self.paint(*self.asked[p]) if p in self.asked else blank() for p in prompts]
        return SimpleNamespace(images=np.stack(pictures))


def blank():
    return np.zeros((64, 64, 3), "uint8")


def obedient(ask, split, things):
    """The first scene that has what is asked, drawn."""
    wanted = {(t.shape, t.colour, t.size) for t in ask.things}
    for index in range(10**6):
        scene = world.sample_scene(index, 7, split, things)
        if {(t.shape, t.colour, t.size) for t in scene.things} == wanted:
            scene = replace(scene, background=ask.background)
            if (scene.position, scene.relation) == (ask.position, ask.relation):
                return world.draw(scene)
    raise AssertionError(ask)


def test_evaluation_of_true_scenes_and_of_nothing(tmp_path):
    one = Artist(
        lambda ask, split, things: obedient(ask, split, things) if things == 1 else blank()
    )
    content = evaluate.evaluate(one, OPTIONS, tmp_path, report=lambda text: None)
    for name, (_, things) in GROUPS.items():
        assert content["groups"][name]["all_right"] == (1.0 if things == 1 else 0.0), name
        assert content["groups"][name]["pictures"] == OPTIONS.prompts
    attributes = content["groups"]["one thing, seen"]["attributes"]
    assert attributes.keys() == {"count", "shape", "colour", "size", "position", "background"}
    assert json.loads((tmp_path / "evaluation.json").read_text()) == json.loads(json.dumps(content))
    right = np.asarray(Image.open(tmp_path / "one-thing-seen.png"))
    wrong = np.asarray(Image.open(tmp_path / "two-things-seen.png"))
    frame = np.array(evaluate.WRONG)
    assert not (right == frame).all(-1).any()
    assert (wrong == frame).all(-1).any()


def test_evaluation_refuses(tmp_path):
    artist = Artist(lambda *_: blank())
    with pytest.raises(TrainingError, match=r"`prompts` must be at least 1\. Received: 0"):
        evaluate.evaluate(artist, EvaluationOptions(prompts=0), tmp_path)
    artist.manifest.shapes = Shapes(((64, 128),), (1,), 8, 4)
    with pytest.raises(
        TrainingError, match=r"reads square pictures only\. The export's are 128×64"
    ):
        evaluate.evaluate(artist, OPTIONS, tmp_path)


@pytest.mark.long
def test_tiny_recipe_end_to_end(tmp_path):
    """Stages of each kind, a few steps each; the checkpoint it leaves is exported and evaluated."""
    few = {"steps": 4, "warm_up": 1, "log_every": 2, "save_every": 2, "sample_every": 4}
    few["jit_compile"] = False
    _, _, of_one_thing, reads, _, of_everything = tiny.TINY.denoiser
    assert of_one_thing.things == 1 and of_one_thing.complete
    recipe = tiny.Recipe(
        micro.CONFIG,
        scenes=12,
        autoencoder=replace(tiny.TINY.autoencoder, **few),
        denoiser=tuple(
            replace(phase, settings=replace(phase.settings, **few, batch_size=4))
            for phase in (of_one_thing, reads, of_everything)
        ),
    )
    said = []
    folder = tiny.train(recipe, tmp_path / "run", said.append)
    for phase in ("denoiser-1", "denoiser-3"):
        assert (tmp_path / "run" / phase / "000004.png").is_file()
    assert any(line.startswith("step 4/4: loss") and "min left" in line for line in said)
    checkpoint = open_checkpoint(folder)
    assert {t.dtype for t in checkpoint.tensors("unet").values()} == {"float16"}
    latents = np.load(tmp_path / "run" / "autoencoder" / CACHE / FILE).astype("float32")
    assert latents.std() * checkpoint.config.autoencoder.scaling_factor == pytest.approx(
        1.0, abs=1e-2
    )

    again = []
    tiny.train(recipe, tmp_path / "run", again.append)
    assert sum(line.startswith("resumed at step 4") for line in again) == 4
    assert not any(line.startswith("step ") for line in again)


@pytest.fixture
def captioned(tmp_path):
    """Six pictures, one of them broken."""
    folder = tmp_path / "data"
    folder.mkdir()
    for index in range(6):
        scene = world.sample_scene(index, 0, "train")
        caption, _ = world.describe(scene, index, 0)
        Image.fromarray(world.draw(scene, 64)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(caption)
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:60])
    return folder


def tune(folder, data, *more):
    return main(
        f"train text_to_image --checkpoint {folder} --data {data} --out {data}-run --steps 4 "
        f"--batch_size 2 --warm_up 1 --log_every 2 --sample_every 4 --size 16".split()
        + list(more)
    )


def test_training_without_tensorboard(tmp_path, captioned, capsys, monkeypatch):
    """It is told before the first update, not when the first figures are to be written."""
    folder = tmp_path / "checkpoint"
    make_random(micro.CONFIG, folder)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.v2", None)
    assert tune(folder, captioned, "--on_error", "skip") == 1
    out, err = capsys.readouterr()
    assert "is not installed: pip install 'sd_tf[train]'" in err and "step " not in out


@pytest.mark.long
def test_text_to_image(tmp_path, captioned, capsys):
    folder = tmp_path / "checkpoint"
    make_random(micro.CONFIG, folder)
    assert tune(folder, captioned) == 1
    assert "3.png: the picture is damaged" in capsys.readouterr().err
    assert tune(folder, captioned, "--on_error", "skip") == 0
    out = capsys.readouterr().out
    assert "5 examples, 1 skipped" in out
    assert "skipped " in out and "3.png: the picture is damaged" in out
    run = tmp_path / "data-run"
    assert (run / "000004.png").is_file()
    before, after = open_checkpoint(folder), open_checkpoint(run / "checkpoint")
    assert after.config == before.config

    def same(component, name):
        return np.array_equal(
            before.tensors(component)[name].read(), after.tensors(component)[name].read()
        )

    assert same("vae", "decoder.conv_in.weight")
    assert same("text_encoder", "text_model.final_layer_norm.weight")  # not trained by default
    assert not same("unet", "conv_in.weight")

    with_prior = ("--prior_data", "world:4", "--on_error", "skip", "--nojit_compile")
    assert tune(folder, captioned, *with_prior, "--out", str(tmp_path / "prior")) == 0
    assert "encoding 4 pictures" in capsys.readouterr().out
    assert tune(folder, captioned, *with_prior, "--out", str(run)) == 1
    error = capsys.readouterr().err
    assert "`prior_data.count` was null, is 4" in error and "--prior_weight was null" in error
    assert tune(folder, captioned, *with_prior, "--prior_weight", "-1") == 1
    assert "--prior_weight must not be below 0. Received: -1.0" in capsys.readouterr().err

    def refused(data, *more, checkpoint=folder):
        """The run is not continued with anything else."""
        assert tune(checkpoint, data, *more, "--out", str(run), "--on_error", "skip") == 1
        return capsys.readouterr().err

    error = refused(captioned, "--caption_dropout", "0.2", "--nomin_snr")
    assert "--caption_dropout was 0.1, is 0.2; --min_snr was 5.0, is null. Give what " in error
    captioned = captioned.rename(tmp_path / "moved")  # the same data at another place
    few = ("--out", str(run), "--on_error", "skip", "--log_every", "1", "--save_every", "1")
    assert tune(folder, captioned, *few, "--nojit_compile") == 0
    assert "resumed at step 4" in capsys.readouterr().out
    (captioned / "5.txt").write_text("a cat")
    error = refused(captioned)
    assert f"{run}/latents was made from something else: `data.captions` was " in error
    error = refused(captioned, checkpoint=run / "checkpoint")
    assert "`checkpoint.weights.unet` was [" in error


@pytest.mark.long
def test_text_to_image_on_several_hosts(tmp_path):
    """Each has every other example, and both end with what one would learn from both parts."""
    folder, both = micro_folder(), tmp_path / "both"
    few = "--size 16 --steps 4 --warm_up 1 --batch_size 4 --log_every 2 --noaverage".split()
    command = ["text_to_image", "--checkpoint", str(folder), "--data", "world:8"]
    said = on_two_hosts(*command, "--out", str(both), *few)
    assert all("encoding 4 pictures" in text for text in said)

    checkpoint = open_checkpoint(folder)
    config, every = checkpoint.config, [Host(number, 2) for number in range(2)]
    settings = Settings(4, batch_size=4, warm_up=1, averaging=Averaging(None), jit_compile=False)
    vae, unet = checkpoint.build("vae"), checkpoint.build("unet")
    whole = cached_latents(vae, World(8, 16), tmp_path / "latents", {}, lambda text: None)
    parts = []
    for host in every:
        latents = np.load(both / host.named(CACHE) / FILE)
        np.testing.assert_allclose(latents, host.part(whole), atol=1e-2)
        source, tokenize = World(8, 16, host=host), tokenize_for(checkpoint.tokenizers())
        given = (source, settings, latents, config, tokenize)
        parts.append(LatentBatches(*given, host=host))

    def batches(step):
        one, other = (part(step) for part in parts)
        return {name: np.concatenate([value, other[name]]) for name, value in one.items()}

    text_encoder = freeze(checkpoint.build("text_encoder"))
    loss = Denoising(unet, [text_encoder], config)
    Run(loss, batches, settings, tmp_path / "one", lambda text: None).train()
    before = checkpoint.tensors("unet")
    found = open_checkpoint(both / "checkpoint").tensors("unet")
    for name, slot in layout.slots(unet).items():
        expected = slot.stored()
        start, end = (tensors[name].read().reshape(expected.shape) for tensors in (before, found))
        way = np.linalg.norm(expected - start)
        assert np.linalg.norm(end - expected) <= 0.02 * way, name


def test_text_to_image_refuses(tmp_path, captioned, small_pipelines, capsys):
    _, folder = small_pipelines("sdxl-refiner")
    assert tune(folder, "world:4") == 1
    error = capsys.readouterr().err
    assert "takes a checkpoint of SD1, SD2, SDXL base or SD3" in error
    assert "Received: sdxl-refiner" in error
    assert tune(folder, "world:0") == 1
    assert (
        "an example or more for each host. Received: world:0 for 1 host" in capsys.readouterr().err
    )
    assert tune(tmp_path / "absent", captioned) == 1
    assert "No such file or folder" in capsys.readouterr().err
    _, folder = small_pipelines("sd1")
    assert tune(folder, captioned, "--size", "0") == 1
    assert "--size is a positive multiple of 8. Received: 0" in capsys.readouterr().err
    assert tune(folder, captioned, "--prior_weight", "2") == 1
    assert "--prior_weight goes with --prior_data." in capsys.readouterr().err
    for flag in ("--ema_start", "--ema_half_life"):
        assert tune(folder, captioned, "--noaverage", flag, "0.5") == 1
        assert "do not go with --noaverage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"batch_size": 5}, {}, r"all 2 hosts and must be a multiple of .* Received: 5"),
        ({"batch_size": 6}, {}, r"all 4 devices and must be a multiple of .* Received: 6"),
        (
            {"batch_size": 8, "accumulate": 4},
            {},
            r"Each of the `accumulate` parts of a batch is divided evenly among 4 .*: 8 / 4",
        ),
        ({"sample_every": 2}, {}, r"on several, `sample_every` must be 0\. Received: 2"),
        ({}, {"first_timestep": 1000}, r"must be from 0 to 999, the noisiest\. Received: 1000"),
    ],
)
def test_a_refusal_comes_before_the_pictures_are_encoded(
    tmp_path, monkeypatch, change, options, message
):
    monkeypatch.setattr("sd_tf.training.batches.device_count", lambda: 4)
    for module in (finetune, edit):
        monkeypatch.setattr(module, "this_host", lambda: Host(0, 2))
    checkpoint = open_checkpoint(micro_folder())
    settings = replace(micro.SETTINGS, **{"batch_size": 8, **change})
    with pytest.raises(TrainingError, match=message):
        given = (World(4, 16), settings, FinetuneOptions(**options), tmp_path, pytest.fail, None)
        finetune.prepare(checkpoint, *given)
    edits = EditOptions(16, flip=0.0, precompute=True, **options)
    with pytest.raises(TrainingError, match=message):
        edit.prepare(checkpoint, WorldPairs(4, 16), settings, edits, tmp_path, pytest.fail)


@pytest.mark.parametrize("share", [-0.1, 10.0])
def test_a_share_of_dropped_captions(share):
    with pytest.raises(TrainingError, match=f"must be from 0 to 1. Received: {share}"):
        FinetuneOptions(caption_dropout=share).check()


@pytest.mark.parametrize(
    ("size", "message"),
    [(520, "a positive multiple of 16. Received: 520"), (3088, "at most 3072: .* Received: 3088")],
)
def test_sizes_that_a_transformer_has_no_patches_for(size, message):
    with pytest.raises(TrainingError, match=message):
        picture_size(Namespace(size=size), FAMILIES["sd3-medium"])
