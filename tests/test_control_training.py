"""Training a ControlNet: where it begins, the loss against PyTorch's, runs, and measuring."""

import json
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import keras
import numpy as np
import pytest
import torch
from PIL import Image

from sd_tf.checkpoints import TINY_FOLDER
from sd_tf.cli.main import main
from sd_tf.runtime.pictures import to_model
from sd_tf.runtime.shapes import Shapes
from sd_tf.training import control, edit, world
from sd_tf.training.conditions import check_trainable, tokenize_for
from sd_tf.training.control import ControlBatches, ControlOptions, new_net, prepare
from sd_tf.training.evaluate import GROUPS
from sd_tf.training.evaluate_control import (
    ControlEvaluationOptions,
    evaluate,
    judged,
    scenes_of,
)
from sd_tf.training.losses import Denoising, Steered, Steering, freeze
from sd_tf.training.pairs import Pair, WorldOutlines
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.tiny_control import TINY_CONTROL, Unplaced, train
from sd_tf.weights import layout, open_checkpoint, open_controlnet
from tests import micro, peers
from tests.exports import micro_decoder, micro_folder, micro_net, micro_xl_folder

PAIRS = WorldOutlines(8, 16)


def silent(text):
    pass


# Where it begins


def test_it_begins_as_the_unet_and_adds_nothing():
    checkpoint = open_checkpoint(micro_folder())
    net, unet = new_net(checkpoint), checkpoint.tensors("unet")
    found = layout.slots(net)
    np.testing.assert_array_equal(
        found["down_blocks.1.resnets.0.conv1.weight"].stored(),
        unet["down_blocks.1.resnets.0.conv1.weight"].read(),
    )
    first = found["controlnet_cond_embedding.conv_in.weight"].stored()
    assert first.std() > 0.01 and net.control.hint_channels == (16, 32)
    draws = np.random.default_rng(0)
    x, context = draws.standard_normal((1, 8, 8, 4)), draws.standard_normal((1, 77, 16))
    given = x.astype("float32"), np.array([7], "int32"), context.astype("float32")
    maps = net(*given, hint=net.hint(np.ones((1, 16, 16, 3), "float32")))
    assert not any(np.asarray(one).any() for one in maps)
    plain = checkpoint.build("unet")
    steered = Steered(plain, net)(*given, hint=np.ones((1, 16, 16, 3), "float32"))
    np.testing.assert_array_equal(steered, plain(*given))


# The loss


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("family", ["sd1", "sdxl-base"])
def test_loss_and_gradients_equal_pytorchs(family, small_pipelines, tmp_path):
    """Diffusers' models and scheduler, put together in PyTorch, with the same draws."""
    pipeline, folder = small_pipelines(family)
    theirs = diffusers.ControlNetModel.from_unet(
        pipeline.unet, conditioning_embedding_out_channels=(4, 8, 8, 8)
    )
    theirs = peers.randomized(theirs, 3)
    theirs.save_pretrained(tmp_path / "net")
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    net, unet = open_controlnet(tmp_path / "net").build(), freeze(checkpoint.build("unet"))
    vae, *encoders = (freeze(checkpoint.build(name)) for name in ("vae", *config.text_encoders))
    denoising = Denoising(Steered(unet, net), encoders, config, min_snr=None)
    loss = Steering(denoising, vae, config.autoencoder.latent_scale)
    settings = replace(micro.SETTINGS, batch_size=2)
    options = ControlOptions(64, resize=80, dropout=0.5)
    tokenize = tokenize_for(checkpoint.tokenizers())
    batches = ControlBatches(WorldOutlines(9, 64), settings, options, config, tokenize)
    batch = batches(0)
    gradients, value = micro.gradients_of(loss, batch)

    def tensor(name):
        x = torch.from_numpy(batch[name])
        return x.permute(0, 3, 1, 2) if x.ndim == 4 else x.long()

    with torch.no_grad():
        posterior = pipeline.vae.encode(tensor("after")).latent_dist
        latents = posterior.mean + posterior.std * tensor("posterior")
        latents = latents * pipeline.vae.config.scaling_factor
        context, added = told(pipeline, {n: torch.from_numpy(x) for n, x in batch.items()})
    noise, timesteps = tensor("noise"), tensor("timesteps")
    scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    hint = (tensor("before") + 1) / 2
    down, middle = theirs(noisy, timesteps, context, hint, return_dict=False, **added)
    output = pipeline.unet(
        noisy,
        timesteps,
        context,
        **added,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
    ).sample
    expected = torch.mean((output - noise) ** 2)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-4)
    parameters = dict(theirs.named_parameters())
    scale = max(p.grad.abs().max().item() for p in parameters.values())
    assert len(gradients) == len(parameters)
    by_variable = dict(zip((id(v) for v in loss.trainable_variables), gradients, strict=True))
    for path, slot in layout.slots(net).items():
        with keras.StatelessScope([(slot.variable, by_variable[id(slot.variable)])]):
            ours = slot.stored().reshape(parameters[path].shape)
        assert np.abs(ours - parameters[path].grad.numpy()).max() <= 1e-3 * scale, path


def told(pipeline, batch):
    """Return what diffusers' models are told: the context, and what SDXL takes besides."""
    tokens = batch["tokens"].long()
    if "time_ids" not in batch:
        return pipeline.text_encoder(tokens)[0], {}
    states = [
        encoder(tokens[:, i], output_hidden_states=True)
        for i, encoder in enumerate((pipeline.text_encoder, pipeline.text_encoder_2))
    ]
    has_text = batch["has_text"][:, None]
    context = torch.cat([one.hidden_states[-2] for one in states], -1) * has_text[..., None]
    added = {"text_embeds": states[1][0] * has_text, "time_ids": batch["time_ids"]}
    return context, {"added_cond_kwargs": added}


@pytest.mark.parametrize("check", [check_trainable, edit.check_family, control.check_family])
def test_a_checkpoint_is_trained_without_what_was_added(check):
    """None of it is trained or saved."""
    added = {"controlnet": [micro_net()], "preview_decoder": micro_decoder()}
    message = r"open it without controlnet, preview_decoder, and add that to what was trained\."
    with pytest.raises(TrainingError, match=message):
        check(open_checkpoint(micro_folder(), **added).config)
    check(open_checkpoint(micro_folder()).config)


def test_a_net_stands_beside_bfloat16():
    """In mixed precision the frozen models need no float32 weights; the loss is that of float32."""
    losses, checkpoint = [], open_checkpoint(micro_folder())
    for precision in ("float32", "mixed_bfloat16"):
        settings = replace(micro.SETTINGS, precision=precision)
        task = prepare(checkpoint, PAIRS, settings, ControlOptions(16))
        losses.append(float(task.loss(task.batches(0))[0]))
        assert {v.dtype for v in task.net.variables} == {"float32"}
    for name in ("unet", "text_encoder"):
        assert {v.dtype for v in task.models[name].variables} == {"bfloat16"}
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]


# Batches


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_sdxl_is_told_where_a_picture_was_cut(flip):
    """Original size, corner (top, left), size: what is cut out of the larger picture is there.

    diffusers' training of SDXL mirrors pictures first, and then cuts them.
    """
    config = open_checkpoint(micro_xl_folder()).config
    slope = np.arange(20)[:, None] * 12 + np.arange(20)  # no two pixels in a window are the same
    ramp = Image.fromarray(np.repeat(slope.astype("uint8")[..., None], 3, axis=-1))
    pairs = SimpleNamespace(
        pair=lambda index: Pair(ramp, "a", ramp), order=lambda position, seed: (0, 0)
    )
    options = ControlOptions(16, resize=20, dropout=0.0, flip=flip)
    batch = ControlBatches(pairs, micro.SETTINGS, options, config, micro.no_ids)(0)
    whole = np.asarray(ramp)[:, :: -1 if flip else 1]
    assert set(batch["has_text"]) == {1.0}
    corners = batch["time_ids"][:, 2:4].astype(int)
    assert len(np.unique(corners, axis=0)) > 2
    for picture, numbers, (top, left) in zip(
        batch["after"], batch["time_ids"], corners, strict=True
    ):
        cut = whole[top : top + 16, left : left + 16]
        np.testing.assert_array_equal(picture, to_model(cut))
        assert numbers[[0, 1, 4, 5]].tolist() == [20, 20, 16, 16]


def test_dropout_takes_captions_alone():
    batches = ControlBatches(
        PAIRS, micro.SETTINGS, ControlOptions(16, dropout=0.5), micro.CONFIG, micro.no_ids
    )
    without, more = batches.dropped(np.array([0.0, 0.49, 0.5, 0.9]))
    assert without.tolist() == [True, True, False, False] and more == {}


def test_the_middle_of_both_pictures_is_cut_out():
    """As diffusers' script does: the short side is scaled, and nothing is stretched."""
    wide = Image.fromarray(np.tile(np.repeat([0, 90, 180, 250], 8), (16, 1)).astype("uint8"))
    pair = Pair(wide.convert("RGB"), "a", wide.convert("RGB"))
    pairs = SimpleNamespace(pair=lambda index: pair, order=lambda position, seed: (0, 0))
    options = ControlOptions(16, resize=16)
    batch = ControlBatches(pairs, micro.SETTINGS, options, micro.CONFIG, micro.no_ids)(0)
    middle = np.asarray(wide.convert("RGB"))[:, 8:24]
    for name in ("before", "after"):
        np.testing.assert_array_equal(batch[name][0], to_model(middle))


def test_outlines_are_of_the_scenes():
    pair = WorldOutlines(4, 64).pair(2)
    lines, picture = (np.asarray(one).astype(int) for one in (pair.before, pair.after))
    scene = world.sample_scene(2)
    plain = world.draw(replace(scene, things=()), 64).astype(int)
    inside = np.abs(picture - plain).max(-1) > 0
    assert 0 < (lines[..., 0] > 128).sum() < inside.sum()
    assert inside[lines[..., 0] > 0].all(), "lines lie on the things"
    assert (
        "left" not in pair.text and "large" not in pair.text and scene.things[0].shape in pair.text
    )


# The command


def control(out, *flags, data="world:8", folder=micro_folder):
    return main(
        [
            *("train", "controlnet", "--checkpoint", str(folder()), "--data", data),
            *("--out", str(out), "--size", "16", "--steps", "4", "--warm_up", "1"),
            *("--batch_size", "4", "--log_every", "2", "--nojit_compile", *flags),
        ]
    )


@pytest.mark.long
def test_a_run_that_diffusers_loads_and_that_goes_on(tmp_path, capsys):
    """Stopped and resumed, it ends with the same bits."""
    flags = ["--save_every", "2", "--learning_rate", "1e-2"]
    assert control(tmp_path / "run", *flags, "--sample_every", "4") == 0
    assert "8 pairs" in capsys.readouterr().out
    assert (tmp_path / "run" / "000004.png").is_file()
    net = diffusers.ControlNetModel.from_pretrained(tmp_path / "run" / "controlnet")
    ours = open_controlnet(tmp_path / "run" / "controlnet")
    middle = net.controlnet_mid_block.weight.detach().numpy()
    np.testing.assert_array_equal(ours.tensors["controlnet_mid_block.weight"].read(), middle)
    assert np.abs(middle).max() > 0, "it has learnt"
    for state in (tmp_path / "run").glob("state-*4.safetensors"):
        state.unlink()
    (tmp_path / "run" / "controlnet" / "config.json").unlink()
    assert control(tmp_path / "run", *flags, "--sample_every", "4") == 0
    again = open_controlnet(tmp_path / "run" / "controlnet")
    for name, tensor in ours.tensors.items():
        np.testing.assert_array_equal(again.tensors[name].read(), tensor.read())
    assert control(tmp_path / "run", *flags, "--dropout", "0.2", "--sample_every", "4") == 1
    assert "--dropout was 0.1, is 0.2" in capsys.readouterr().err


@pytest.mark.long
def test_a_net_of_sdxl_that_diffusers_loads(tmp_path):
    flags = ["--learning_rate", "1e-2", "--sample_every", "4"]
    assert control(tmp_path / "run", *flags, folder=micro_xl_folder) == 0
    assert (tmp_path / "run" / "000004.png").is_file()
    net = diffusers.ControlNetModel.from_pretrained(tmp_path / "run" / "controlnet")
    assert net.config.addition_embed_type == "text_time"
    assert net.controlnet_mid_block.weight.abs().max() > 0, "it has learnt"


def test_refusals(tmp_path, capsys, small_pipelines):
    assert control(tmp_path / "a", "--dropout", "1.5") == 1
    assert "--dropout must be from 0 to 1. Received: 1.5" in capsys.readouterr().err
    assert control(tmp_path / "b", "--resize", "8") == 1
    assert "must not be less than --size" in capsys.readouterr().err
    for family in ("instruct-pix2pix", "inpaint"):
        _, folder = small_pipelines(family)
        with pytest.raises(TrainingError, match=f"takes noisy latents alone.*Received: {family}"):
            prepare(open_checkpoint(folder), PAIRS, micro.SETTINGS, ControlOptions(16))
    for family in ("sdxl-refiner", "sd3-without-t5"):
        _, folder = small_pipelines(family)
        with pytest.raises(TrainingError, match="is trained for SD1, SD2 and SDXL base"):
            prepare(open_checkpoint(folder), PAIRS, micro.SETTINGS, ControlOptions(16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mid_depth": None}, "beside a UNet with a middle, which diffusers' ControlNets have"),
        (
            {"down_depths": ((0, 0), (1,)), "up_depths": ((1, 1), (0, 0, 0))},
            r"could not be saved\. .* as many resnets at each level\. Received: \[2, 1\]",
        ),
    ],
)
def test_unets_whose_nets_diffusers_would_not_load(changes, message):
    """They are refused before anything is built."""
    checkpoint = open_checkpoint(micro_folder())
    config = replace(checkpoint.config, denoiser=replace(checkpoint.config.denoiser, **changes))
    with pytest.raises(TrainingError, match=message):
        prepare(replace(checkpoint, config=config), PAIRS, micro.SETTINGS, ControlOptions(16))


@pytest.mark.long
def test_the_embedded_nets_recipe(tmp_path):
    """All of it, in small: two stages, whose captions differ, and a net that fits `tiny`."""
    settings = Settings(2, batch_size=4, warm_up=1, jit_compile=False, sample_every=0)
    stages = tuple(replace(stage, settings=settings) for stage in TINY_CONTROL.stages)
    folder = train(tmp_path, silent, replace(TINY_CONTROL, scenes=8, stages=stages))
    net = open_controlnet(folder)
    assert {str(tensor.dtype) for tensor in net.tensors.values()} == {"float16"}
    assert open_checkpoint(TINY_FOLDER, controlnet=[net.source]).controlnets == ("controlnet",)
    log = (tmp_path / "net-2" / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == 2
    plain, related = (Unplaced(8, 64, relations=related) for related in (False, True))
    texts = [(plain.caption(i, 0), related.caption(i, 0)) for i in range(8)]
    assert any(one != other and " and " in one for one, other in texts)


# Measuring


class Artist:
    """An export's stand-in: it draws the scene whose outline it is given, or else another one."""

    def __init__(self, drawings):
        self.manifest = SimpleNamespace(
            shapes=Shapes(((64, 64),), (4,), 8, 4),
            controls=("drawing",),
            checkpoint={},
            suited={},
        )
        self.scenes = {
            world.outline(scene, 64).tobytes(): scene
            for group in GROUPS
            for scene in scenes_of(group, drawings)
        }

    def __call__(self, prompts, control_image, control_scale, **_):
        found = [self.scenes[drawing.tobytes()] for drawing in control_image]
        scenes = found if control_scale else found[1:] + found[:1]
        return SimpleNamespace(images=np.stack([world.draw(scene, 64) for scene in scenes]))


def test_evaluation(tmp_path):
    artist, options = Artist(drawings=4), ControlEvaluationOptions(drawings=4)
    content = evaluate(artist, options, tmp_path, silent)
    for name, record in content["groups"].items():
        assert record["all_right"] == 1.0, name
        assert content["without"][name]["all_right"] < 0.5
    assert (tmp_path / "two-things-held-out.png").is_file()
    artist.manifest.controls = ()
    with pytest.raises(TrainingError, match="measured with one ControlNet"):
        evaluate(artist, options, tmp_path)
    with pytest.raises(TrainingError, match=r"`drawings` must be at least 1\. Received: 0"):
        evaluate(artist, ControlEvaluationOptions(drawings=0), tmp_path)


def test_what_is_judged():
    scene = world.sample_scene(5, things=1)
    (thing,) = scene.things

    def of(**changes):
        found = replace(scene, things=(replace(thing, **changes),))
        return judged(scene, world.Reading(scene.background, found.things))

    assert all(of().values())
    assert not of(x=thing.x + 0.1)["place"] and of(x=thing.x + 0.03)["place"]
    assert not of(shape="moon")["shape"] and not of(colour="black")["colour"]
    nothing = judged(scene, world.Reading(scene.background, ()))
    assert not any(nothing.values())
