"""Learning to edit: surgery, dropout, the loss against PyTorch's, runs that diffusers loads."""

from dataclasses import replace

import diffusers
import keras
import numpy as np
import pytest
import torch
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.config import FAMILIES, family_of
from sd_tf.models.attention import SpatialTransformer
from sd_tf.models.layers import ResnetBlock
from sd_tf.training.batches import spread_timesteps
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.edit import (
    EditBatches,
    EditOptions,
    PrecomputedBatches,
    dropped,
    precompute,
    prepare,
    prepared,
)
from sd_tf.training.hosts import Host
from sd_tf.training.losses import Denoising, Editing, freeze, recomputed
from sd_tf.training.pairs import WorldPairs
from sd_tf.training.picture_input import with_picture_input
from sd_tf.training.settings import Averaging, Settings, TrainingError
from sd_tf.training.trainer import Run
from sd_tf.weights import layout, open_checkpoint
from tests import micro
from tests.commands import on_two_hosts
from tests.exports import micro_folder

PAIRS = WorldPairs(8, 16)
OPTIONS = EditOptions(size=16, flip=0.0)


# Ready to see a picture


def test_surgery(small_pipelines):
    """What was there stays, the bias too; what is new has no say yet."""
    pipeline, folder = small_pipelines("sd1")
    ready = with_picture_input(open_checkpoint(folder))
    assert family_of(ready.config) == "instruct-pix2pix"
    before, after = open_checkpoint(folder).tensors("unet"), ready.tensors("unet")
    assert before.keys() == after.keys()
    kernel = after["conv_in.weight"].read()
    assert kernel.shape == after["conv_in.weight"].shape == (32, 8, 3, 3)
    np.testing.assert_array_equal(kernel[:, :4], before["conv_in.weight"].read())
    assert not kernel[:, 4:].any()
    np.testing.assert_array_equal(
        after["conv_in.bias"].read(), pipeline.unet.conv_in.bias.detach().numpy()
    )
    draws = np.random.default_rng(0)
    x = draws.standard_normal((1, 8, 8, 8), "float32")
    context = draws.standard_normal((1, 77, 128), "float32")
    timesteps = np.array([7], "int32")
    alone = open_checkpoint(folder).build("unet")(x[..., :4], timesteps, context)
    np.testing.assert_allclose(ready.build("unet")(x, timesteps, context), alone, atol=1e-5)
    assert with_picture_input(ready) is ready
    with_default = replace(open_checkpoint(folder).config, suited={"guidance_scale": 4.0})
    drawing = replace(open_checkpoint(folder), config=with_default)
    assert with_picture_input(drawing).config.suited == {}
    inpainting = replace(ready, config=FAMILIES["inpaint"])
    with pytest.raises(
        TrainingError, match=r"or an InstructPix2Pix checkpoint\. Received: inpaint"
    ):
        with_picture_input(inpainting)


# Batches


def test_dropout_by_the_table():
    """One number decides: [0, p) text, [p, 2p) both, [2p, 3p) picture."""
    r = np.array([0.0, 0.0499, 0.05, 0.0999, 0.1, 0.1499, 0.1501, 0.999])
    text, picture = dropped(r, 0.05)
    assert text.tolist() == [True, True, True, True, False, False, False, False]
    assert picture.tolist() == [False, False, True, True, True, True, False, False]


def test_dropout_as_often_as_it_should(monkeypatch):
    batches = EditBatches(
        PAIRS, replace(micro.SETTINGS, batch_size=64), OPTIONS, micro.CONFIG, micro.no_ids
    )
    seen = []
    monkeypatch.setattr(batches, "inputs", lambda _, text, __: seen.append(text) or {})
    pictures = np.concatenate([batches(step)["has_picture"] for step in range(150)]) == 0
    text = np.concatenate(seen)
    for found, share in ((text & ~pictures, 0.05), (text & pictures, 0.05), (pictures, 0.1)):
        spread = (share * (1 - share) / len(text)) ** 0.5
        assert abs(found.mean() - share) < 5 * spread


def test_pairs_are_cut_and_mirrored_alike():
    """Both pictures hold the same numbers here, so that they stay the same."""
    levels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), "uint8")

    class Same(WorldPairs):
        def pair(self, index):
            pair = super().pair(index)
            return replace(pair, before=Image.fromarray(levels), after=Image.fromarray(levels))

    options = EditOptions(size=16, resize=24, flip=0.5)
    batches = EditBatches(Same(8, 16), micro.SETTINGS, options, micro.CONFIG, micro.no_ids)
    corners = set()
    for step in range(12):
        batch = batches(step)
        np.testing.assert_array_equal(batch["before"], batch["after"])
        corners |= {tuple(picture[0, 0]) for picture in batch["before"]}
    assert len(corners) > 24
    again = EditBatches(Same(8, 16), micro.SETTINGS, options, micro.CONFIG, micro.no_ids)(11)
    np.testing.assert_array_equal(again["before"], batch["before"])


def test_only_the_noisiest_timesteps(monkeypatch):
    given = (PAIRS, replace(micro.SETTINGS, batch_size=8))
    batches = EditBatches(*given, replace(OPTIONS, first_timestep=600), micro.CONFIG, micro.no_ids)
    monkeypatch.setattr(batches, "inputs", lambda *_: {})
    timesteps = np.concatenate([batches(step)["timesteps"] for step in range(400)])
    assert timesteps.min() == 600 and timesteps.max() == 999
    for first in (-1, 1000):
        with pytest.raises(TrainingError, match=rf"must be from 0 to 999, the .*Received: {first}"):
            EditBatches(*given, replace(OPTIONS, first_timestep=first), micro.CONFIG, micro.no_ids)


def test_what_prepared_gives():
    levels = np.arange(4 * 4 * 3, dtype="uint8").reshape(4, 4, 3)
    picture = Image.fromarray(levels)
    np.testing.assert_array_equal(prepared(picture, 4, 4, (0.3, 0.7), False), levels)
    np.testing.assert_array_equal(prepared(picture, 2, 4, (1.0, 0.0), False), levels[:2, 2:])
    np.testing.assert_array_equal(prepared(picture, 4, 4, (0, 0), True), levels[:, ::-1])
    large = Image.new("RGB", (50, 20), (9, 8, 7))
    assert (prepared(large, 8, 12, (0.5, 0.5), False) == (9, 8, 7)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.4}, r"`dropout` must be from 0 to 1/3\. Received: 0\.4"),
        ({"flip": -1.0}, r"`flip` must be from 0 to 1\. Received: -1\.0"),
        ({"resize": 8}, r"must not be less than `size`\. Received: size=16, resize=8"),
        (
            {"precompute": True, "flip": 0.5},
            r"`precompute` needs a `flip` of 0 .*Received: flip=0\.5",
        ),
        ({"precompute": True, "resize": 20}, r"no `resize`\. Received: flip=0\.0, resize=20"),
    ],
)
def test_options_that_cannot_be_meant(changes, message):
    with pytest.raises(TrainingError, match=message):
        replace(OPTIONS, **changes).check()


# The loss


def editing(checkpoint, vae=True):
    encoders = [freeze(checkpoint.build("text_encoder"))] if vae else []
    denoising = Denoising(checkpoint.build("unet"), encoders, checkpoint.config, min_snr=None)
    scale = checkpoint.config.autoencoder.latent_scale
    return Editing(denoising, freeze(checkpoint.build("vae")) if vae else None, scale)


@pytest.mark.backend(long=True)
def test_loss_and_gradients_equal_pytorchs(small_pipelines):
    """Diffusers' models and scheduler, put together in PyTorch, with the same draws."""
    pipeline, folder = small_pipelines("instruct-pix2pix")
    checkpoint = open_checkpoint(folder)
    loss = editing(checkpoint)
    settings = replace(micro.SETTINGS, batch_size=3)
    tokenize = tokenize_for(checkpoint.tokenizers())
    options = EditOptions(size=64, flip=0.5, dropout=0.3)
    batch = EditBatches(WorldPairs(9, 64), settings, options, checkpoint.config, tokenize)(0)
    batch["has_picture"] = np.array([1, 0, 1], "float32")
    gradients, value = micro.gradients_of(loss, batch)

    def tensor(name):
        x = torch.from_numpy(batch[name])
        return x.permute(0, 3, 1, 2) if x.ndim == 4 else x.long()

    with torch.no_grad():
        before = pipeline.vae.encode(tensor("before")).latent_dist.mode()
        posterior = pipeline.vae.encode(tensor("after")).latent_dist
        latents = posterior.mean + posterior.std * tensor("posterior")
        latents = latents * pipeline.vae.config.scaling_factor
        context = pipeline.text_encoder(tensor("tokens"))[0]
    before = before * tensor("has_picture")[:, None, None, None]
    noise, timesteps = tensor("noise"), tensor("timesteps")
    noisy = pipeline.scheduler.add_noise(latents, noise, timesteps)
    output = pipeline.unet(torch.cat([noisy, before], 1), timesteps, context).sample
    theirs = torch.mean((output - noise) ** 2)
    pipeline.unet.zero_grad()
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-4)

    parameters = dict(pipeline.unet.named_parameters())
    scale = max(p.grad.abs().max().item() for p in parameters.values())
    assert len(gradients) == len(parameters)
    by_variable = dict(zip((id(v) for v in loss.trainable_variables), gradients, strict=True))
    for path, slot in layout.slots(loss.denoising.denoiser).items():
        with keras.StatelessScope([(slot.variable, by_variable[id(slot.variable)])]):
            ours = slot.stored().reshape(parameters[path].shape)
        assert np.abs(ours - parameters[path].grad.numpy()).max() <= 1e-3 * scale, path


def precomputed(folder, checkpoint, vae, encoder, pairs=PAIRS):
    tokenizer, begun = checkpoint.tokenizer(), {"data": pairs.record()}
    precompute(pairs, 16, vae, encoder, tokenizer, folder, begun, lambda text: None)


def test_precomputed_is_the_same(tmp_path):
    """Latents and text states from files give the loss that pictures and words give."""
    checkpoint = with_picture_input(open_checkpoint(micro_folder()))
    tokenize, config = tokenize_for(checkpoint.tokenizers()), checkpoint.config
    vae, encoder = checkpoint.build("vae"), checkpoint.build("text_encoder")
    settings = replace(micro.SETTINGS, batch_size=8)
    given = (PAIRS, settings, replace(OPTIONS, dropout=0.2), config, tokenize)
    precomputed(tmp_path / "cache", checkpoint, vae, encoder)
    pictures, files = EditBatches(*given), PrecomputedBatches(*given, tmp_path / "cache")
    losses = editing(checkpoint), editing(checkpoint, vae=False)
    for step in range(3):
        values = [
            float(loss(b(step))[0]) for loss, b in zip(losses, (pictures, files), strict=True)
        ]
        assert values[1] == pytest.approx(values[0], rel=1e-3)  # float16 in the files
    changed = replace(PAIRS, count=9)
    message = rf"{tmp_path}/cache was made from something else: `data\.count` was 8, is 9\. Choose"
    with pytest.raises(TrainingError, match=message):
        precomputed(tmp_path / "cache", checkpoint, vae, encoder, changed)


def test_precomputed_latents_beside_a_text_encoder_that_learns(tmp_path):
    checkpoint = with_picture_input(open_checkpoint(micro_folder()))
    tokenize, config = tokenize_for(checkpoint.tokenizers()), checkpoint.config
    vae = checkpoint.build("vae")
    learns = replace(OPTIONS, dropout=0.2, precompute=True, train_text_encoder=True).check()
    given = (PAIRS, replace(micro.SETTINGS, batch_size=8), learns, config, tokenize)
    precomputed(tmp_path / "cache", checkpoint, vae, None)
    pictures, files = EditBatches(*given), PrecomputedBatches(*given, tmp_path / "cache")
    for step in range(3):
        np.testing.assert_array_equal(pictures(step)["tokens"], files(step)["tokens"])
    encoder = checkpoint.build("text_encoder")
    with pytest.raises(TrainingError, match=r'`text_states` was null, is "float32"\. Choose'):
        precomputed(tmp_path / "cache", checkpoint, vae, encoder)


@pytest.mark.backend(long=True)
def test_gradient_checkpointing_changes_no_gradient():
    checkpoint = with_picture_input(open_checkpoint(micro_folder()))
    loss = editing(checkpoint, vae=False)
    draws = np.random.default_rng(0)
    latents = ("mode", "mean", "deviation", "noise", "posterior")
    batch = {name: draws.standard_normal((4, 8, 8, 4), "float32") for name in latents}
    batch["context"] = draws.standard_normal((4, 77, 16), "float32")
    batch |= {"timesteps": np.arange(4, dtype="int32"), "has_picture": np.ones(4, "float32")}
    before, value = micro.gradients_of(loss, batch)
    recomputed(loss.denoising.denoiser)
    after, again = micro.gradients_of(loss, batch)
    assert again == pytest.approx(value, rel=1e-6)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(np.array(other), np.array(one), rtol=1e-4, atol=1e-6)
    if keras.backend.backend() == "jax":
        import jax

        def value_of(values):
            with keras.StatelessScope(list(zip(loss.trainable_variables, values, strict=True))):
                return loss(batch)[0]

        text = str(jax.make_jaxpr(jax.grad(value_of))([v.value for v in loss.trainable_variables]))
        blocks = sum(isinstance(layer, ResnetBlock | SpatialTransformer) for layer in loss._layers)
        assert text.count("checkpoint[") >= blocks


def test_spread_timesteps_are_uniform():
    draws = np.random.default_rng(0)
    found = np.concatenate([spread_timesteps(draws, 10, range(1000)) for _ in range(2000)])
    assert found.min() == 0 and found.max() == 999
    counts = np.bincount(found // 100, minlength=10)
    assert (counts == 2000).all()
    assert abs(np.corrcoef(found.reshape(-1, 10)[:, 0], found.reshape(-1, 10)[:, 1])[0, 1]) < 0.2


# The command


def arguments(out, *flags, data="world:8"):
    common = ["--size", "16", "--steps", "4", "--warm_up", "1", "--batch_size", "4"]
    return [
        *("train", "instruct_pix2pix", "--checkpoint", str(micro_folder()), "--data", data),
        *("--out", str(out), *common, "--log_every", "2", *flags),
    ]


def instruct(*given, **options):
    return main(arguments(*given, **options))


@pytest.mark.long
def test_a_run_that_diffusers_loads(tmp_path, capsys):
    late = ["--ema_start", "0.5", "--sample_every", "4", "--save_every", "2", "--precompute"]
    late += ["--nojit_compile"]
    assert instruct(tmp_path / "run", *late, "--scheduler", "euler_ancestral") == 0
    assert "8 pairs" in capsys.readouterr().out
    assert (tmp_path / "run" / "000004.png").is_file()
    assert (tmp_path / "run" / "precomputed" / "mode.npy").is_file()
    folder = tmp_path / "run" / "checkpoint"
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, safety_checker=None)
    assert type(pipeline) is diffusers.StableDiffusionInstructPix2PixPipeline
    assert type(pipeline.scheduler) is diffusers.EulerAncestralDiscreteScheduler
    kernel = pipeline.unet.conv_in.weight.detach().numpy()
    assert kernel.shape[1] == 8 and np.abs(kernel[:, 4:]).max() > 0
    trained = open_checkpoint(folder)
    assert trained.config.latent_inputs == "image"
    before = open_checkpoint(micro_folder()).tensors("text_encoder")
    for name, tensor in trained.tensors("text_encoder").items():
        np.testing.assert_array_equal(tensor.read(), before[name].read())

    def refused(*flags, **options):
        assert instruct(tmp_path / "run", *late, *flags, **options) == 1
        return capsys.readouterr().err

    assert "--dropout was 0.05, is 0.1. Give what the run was" in refused("--dropout", "0.1")
    assert (
        "precomputed was made from something else: `data.count` was 8, is 9. Choose another "
        in (refused(data="world:9"))
    )


@pytest.mark.long
def test_several_hosts_learn_as_one(tmp_path):
    """Each has every other pair, and both end with what one would learn from both their batches."""
    flags = ["--noaverage", "--gradient_checkpointing"]
    on_two_hosts(*arguments(tmp_path / "both", *flags)[1:])

    settings = Settings(4, batch_size=4, warm_up=1, averaging=Averaging(None), jit_compile=False)
    settings = replace(settings, gradient_checkpointing=True)
    checkpoint = open_checkpoint(micro_folder())
    task = prepare(checkpoint, PAIRS, settings, OPTIONS, tmp_path, lambda text: None)
    given = (settings, OPTIONS, task.config, tokenize_for(checkpoint.tokenizers()))
    every = [Host(number, 2) for number in range(2)]
    parts = [EditBatches(replace(PAIRS, host=host), *given, host) for host in every]

    def batches(step):
        one, other = (part(step) for part in parts)
        return {name: np.concatenate([value, other[name]]) for name, value in one.items()}

    Run(task.loss, batches, settings, tmp_path / "one", lambda text: None).train()
    before = with_picture_input(checkpoint).tensors("unet")
    both = open_checkpoint(tmp_path / "both" / "checkpoint").tensors("unet")
    for name, slot in layout.slots(task.models["unet"]).items():
        start, expected = before[name].read(), slot.stored()
        found = both[name].read().reshape(expected.shape)
        way = np.linalg.norm(expected - start.reshape(expected.shape))
        assert np.linalg.norm(found - expected) <= 0.02 * way, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hosts", "2"], "--coordinator, --hosts and --host go together"),
        (["--hosts", "2", "--host", "0", "--coordinator", "x:1"], "train together on JAX"),
    ],
)
def test_hosts_that_cannot_be_meant(flags, message, tmp_path, capsys):
    assert instruct(tmp_path, *flags) == 1
    assert message in capsys.readouterr().err


def test_refusals(tmp_path, capsys):
    assert instruct(tmp_path / "a", data=str(tmp_path / "none")) == 1
    assert "are read from a parquet file or a folder of them" in capsys.readouterr().err
    assert instruct(tmp_path / "b", "--precompute", "--flip", "0.5") == 1
    assert "Precomputed latents are those of unchanged pictures" in capsys.readouterr().err
    assert instruct(tmp_path / "c", "--dropout", "0.5") == 1
    assert "must be from 0 to 1/3. Received: 0.5" in capsys.readouterr().err
    assert instruct(tmp_path / "d", "--size", "15") == 1
    assert "--size is a positive multiple of 2. Received: 15" in capsys.readouterr().err
