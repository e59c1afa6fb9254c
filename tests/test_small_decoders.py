"""Small decoders: what is opened and refused, exports with one, and training."""

import json
import shutil

import diffusers
import keras
import numpy as np
import pytest
import torch
from PIL import Image

from sd_tf.checkpoints import EDITOR, TINY, TINY_FOLDER, embedded_decoder
from sd_tf.cli.main import main
from sd_tf.config import DECODER, PREVIEW_DECODER, SmallDecoderConfig
from sd_tf.export import ExportOptions, embedded, export
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.pictures import to_model
from sd_tf.runtime.psnr import psnr
from sd_tf.serving.client import Client
from sd_tf.serving.tf_serving.predict import ModelServer, load
from sd_tf.training.batches import PictureBatches
from sd_tf.training.data import World
from sd_tf.training.losses import Decoding, freeze
from sd_tf.training.settings import TrainingError
from sd_tf.training.small_decoder import SmallDecoderOptions
from sd_tf.weights import CheckpointError, open_checkpoint, open_small_decoder
from tests import commands, micro
from tests.exports import (
    check_equal,
    micro_decoder,
    micro_export,
    micro_folder,
    pipeline_of,
    previewing_export,
)
from tests.fronts import previews, running_front
from tests.serving_server import grpc_server, http_server

CALL = {"num_steps": 2, "seed": 3}


# Files


def with_config(folder, **changes):
    """A copy of the decoder's folder whose configuration says something else."""
    folder.mkdir()
    for file in micro_decoder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "is not a small decoder: give a folder whose config"),
        ({"decoder_block_out_channels": [8, 16]}, "has one number, as often as .*Received: "),
        ({"upsample_fn": "bilinear"}, "upsample_fn='bilinear' is not supported"),
        ({"act_fn": "tanh"}, "act_fn='tanh' is not supported; supported: 'relu'"),
        ({"more": 1}, "the field more=1 is not supported"),
        ({"latent_channels": 16}, "small decoder for this autoencoder has latent_channels 4"),
        (
            {"decoder_block_out_channels": [8] * 3, "num_decoder_blocks": [1] * 3},
            r"does not fit .*has downscale 2\. Received: 4",
        ),
    ],
)
def test_folders_that_are_refused(tmp_path, changes, message):
    folder = with_config(tmp_path / "small", **changes)
    with pytest.raises((CheckpointError, ValueError), match=message):
        open_checkpoint(micro_folder(), preview_decoder=folder)


def test_a_tensor_too_few(tmp_path):
    folder = with_config(tmp_path / "small", num_decoder_blocks=[2, 1])
    opened = open_checkpoint(micro_folder(), decoder=folder)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.\d"):
        opened.build(DECODER)


def test_what_is_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="No such file or folder"):
        open_small_decoder(tmp_path / "none")


def test_weights_describes_it(tmp_path, capsys):
    assert main(["weights", str(micro_decoder())]) == 0
    shown = capsys.readouterr().out
    assert "latents of 4 channels, 2 px a side" in shown and "loads: every tensor" in shown
    assert main(["weights", str(with_config(tmp_path / "x", num_decoder_blocks=[1, 2]))]) == 1
    assert main(["weights", "tiny:preview"]) == 0
    assert main(["weights", "tiny:none"]) == 1
    assert "tiny:outline" in capsys.readouterr().err


# Exports


def test_previews_are_the_small_decoder_s():
    manifest = Manifest.read(previewing_export())
    assert [*manifest.components][-1] == PREVIEW_DECODER
    assert manifest.verification[PREVIEW_DECODER]["saved_model"]["psnr_db"] >= 60
    [part] = manifest.components[PREVIEW_DECODER].checkpoint["sha256"]
    assert part == PREVIEW_DECODER
    pipe, seen = pipeline_of(previewing_export()), []
    images = pipe("a star", **CALL, callback=lambda *state: seen.append(state[2])).images
    np.testing.assert_array_equal(images, pipeline_of(micro_export())("a star", **CALL).images)
    np.testing.assert_array_equal(pipe.decode(seen[-1])[:1], images)
    drawn = open_small_decoder(micro_decoder()).build().decode(seen[-1])
    expected = 255 * np.clip(np.asarray(drawn) / 2 + 0.5, 0, 1)
    assert np.abs(pipe.preview(seen[-1]) - expected).max() <= 0.51  # rounded
    plain = pipeline_of(micro_export())
    np.testing.assert_array_equal(plain.preview(seen[-1]), plain.decode(seen[-1]))


def test_a_small_decoder_draws(tmp_path):
    """In place of the autoencoder's, in an export whose other parts stay."""
    shutil.copytree(micro_export(), tmp_path / "x")
    options = ExportOptions(
        batch_size=2, height=16, width=16, max_steps=2, components=(DECODER,), verify="fast"
    )
    export(open_checkpoint(micro_folder(), decoder=micro_decoder()), tmp_path / "x", options)
    manifest = Manifest.read(tmp_path / "x")
    assert set(manifest.components[DECODER].checkpoint["sha256"]) == {DECODER}
    assert set(manifest.components["image_encoder"].checkpoint["sha256"]) == {"vae"}
    images = pipeline_of(tmp_path / "x")("a star", **CALL).images
    previewing, seen = pipeline_of(previewing_export()), []
    previewing("a star", **CALL, callback=lambda *state: seen.append(state[2]))
    np.testing.assert_array_equal(images, previewing.preview(seen[-1])[:1])


def test_a_server_s_previews():
    with running_front(previewing_export(), num_steps=2) as front:
        [preview] = previews(front, "a star", **CALL, scheduler="ddim", previews=1)
    pipe, seen = pipeline_of(previewing_export()), []
    pipe("a star", **CALL, scheduler="ddim", callback=lambda *state: seen.append(state[2]))
    check_equal(preview, pipe.preview(seen[0])[0])


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_client_s_previews(scheme):
    """Of TensorFlow Serving's API; of the version that the small decoder has, too."""
    folder = previewing_export()
    loaded = load(folder, Manifest.read(folder).parts)
    models = {name: {1: servable, 2: servable} for name, servable in loaded.items()}
    del models[PREVIEW_DECODER][2]
    server = {"grpc": grpc_server, "http": http_server}[scheme](ModelServer(models))
    pipe, seen, shown = pipeline_of(folder), [], []
    with (
        server as address,
        Client(f"{scheme}://{address}", folder, jit_compile=False) as client,
    ):

        def callback(done, calls, latents):
            seen.append(latents)
            shown.append(client.preview(latents))

        client("a star", **CALL, callback=callback)
    assert len(shown) == CALL["num_steps"] + 1  # PNDM calls the model once more
    for latents, preview in zip(seen, shown, strict=True):
        check_equal(preview, pipe.preview(latents))
        assert np.abs(preview.astype(int) - pipe.decode(latents)).max() > 1


@pytest.mark.parametrize("target", ["demo", "serve"])
def test_the_export_that_make_serves_has_it(target):
    """That of `make demo`, too, which `make serve` finds."""
    [command] = commands.of_make(target, "export")
    assert command[command.index("--preview_decoder") + 1] == "tiny:preview"
    assert command[command.index("--out") + 1] == "exports/tiny"


def test_the_export_that_is_made_on_first_use_has_it(tmp_path, monkeypatch):
    """`sd-tf generate` and `benchmark` make it, where a server may find it."""
    asked = []

    def made(checkpoint, folder, options):
        asked.append(checkpoint.config)
        shutil.copytree(previewing_export(), folder)

    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    monkeypatch.setattr(embedded, "export", made)
    for name in (TINY, EDITOR):
        embedded.embedded_export(name, print)
    assert [[*config.small_decoders] for config in asked] == [[PREVIEW_DECODER], []]


def test_the_embedded_one_decodes_tiny_s_latents():
    checkpoint = open_checkpoint(TINY_FOLDER, preview_decoder=embedded_decoder("tiny:preview"))
    vae, small = checkpoint.build("vae"), checkpoint.build(PREVIEW_DECODER)
    pictures = np.stack([World(8, 64, seed=9).picture(index) for index in range(8)])
    latents, _ = vae.encode(to_model(pictures))
    found = small.decode(checkpoint.config.autoencoder.latent_scale.apply(latents))
    assert psnr(np.asarray(vae.decode(latents)), np.asarray(found), peak=2) >= 27


# Training


@pytest.mark.backend
def test_the_loss_equals_pytorchs():
    """diffusers' modules on the same pictures and draws."""
    checkpoint = open_checkpoint(micro_folder())
    scale = checkpoint.config.autoencoder.latent_scale
    theirs = diffusers.AutoencoderTiny.from_pretrained(micro_decoder())
    vae = diffusers.AutoencoderKL.from_pretrained(micro_folder() / "vae")
    batch = PictureBatches(World(8, 16), 4, 0, (8, 8, 4))(0)
    images, noise = (torch.from_numpy(np.moveaxis(x, -1, 1)) for x in batch.values())
    posterior = vae.encode(images).latent_dist
    latents = (posterior.mean + posterior.std * noise) * vae.config.scaling_factor
    error = theirs.decode(latents.detach()).sample - images
    loss = error.abs().mean() + error.square().mean()
    loss.backward()
    loss = loss.detach()

    ours = open_small_decoder(micro_decoder()).build()
    gradients, found = micro.gradients_of(
        Decoding(ours, freeze(checkpoint.build("vae")), scale), batch
    )
    assert found == pytest.approx(float(loss), rel=1e-5)
    expected = theirs.decoder.layers[0].weight.grad.numpy()
    first = np.transpose(np.asarray(gradients[0]), (3, 2, 0, 1))
    assert np.abs(first - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_command(tmp_path, capsys):
    command = ["train", "small_decoder", "--checkpoint", str(micro_folder()), "--data", "world:8"]
    command += ["--out", str(tmp_path / "run"), "--steps=3", "--batch_size=2", "--sample_every=2"]
    command += ["--learning_rate=1e-3", "--channels=8", "--blocks=1,0", "--warm_up=1"]
    command += ["--nojit_compile"]
    assert main([*command, "--save_dtype=float16"]) == 0
    folder = tmp_path / "run" / "small_decoder"
    assert f"saved {folder}" in capsys.readouterr().out
    assert Image.open(tmp_path / "run" / "000002.png").width >= 2 * 16
    theirs = diffusers.AutoencoderTiny.from_pretrained(folder)
    latents = np.random.default_rng(0).standard_normal((1, 8, 8, 4), "float32")
    with torch.no_grad():
        decoded = theirs.decode(torch.from_numpy(np.moveaxis(latents, -1, 1))).sample.numpy()
    ours = keras.ops.convert_to_numpy(open_small_decoder(folder).build().decode(latents))
    np.testing.assert_allclose(np.moveaxis(ours, -1, 1), decoded, atol=1e-5)
    for flag in ("--first_timestep=1", "--gradient_checkpointing", "--caption_column=text"):
        with pytest.raises(SystemExit):
            main([*command, flag])
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": (3, 1)}, r"a number for each of the autoencoder's 3 levels.*Received: 3, 1"),
        ({"blocks": (3, -1, 0)}, "0 or more"),
        ({"channels": 0}, "`channels` is at least 1"),
    ],
)
def test_sizes_that_are_refused(options, message):
    autoencoder = open_checkpoint("sd_tf/checkpoints/tiny").config.autoencoder
    with pytest.raises(TrainingError, match=message):
        SmallDecoderOptions(**options).config(autoencoder)


def test_the_size_by_itself():
    autoencoder = open_checkpoint("sd_tf/checkpoints/tiny").config.autoencoder
    found = SmallDecoderOptions().config(autoencoder)
    assert found == SmallDecoderConfig(channels=64, blocks=(3, 3, 1))
