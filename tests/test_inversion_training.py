"""Textual inversion in training: PyTorch's gradients, and a file that diffusers loads."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from sd_tf.cli.main import main
from sd_tf.training.inversion import FILE, Inversion, InversionOptions, with_placeholder
from sd_tf.training.losses import Denoising
from sd_tf.training.trainer import states
from sd_tf.weights import open_checkpoint
from tests import micro
from tests.exports import micro_folder, micro_xl_folder

TOKEN = "<cat>"
OPTIONS = InversionOptions(TOKEN, "cat", num_vectors=2)
TEXTS = ["a <cat> on a mat", "two <cat> <cat>", "a dog"]


@pytest.mark.backend
def test_gradients_equal_pytorchs(tmp_path):
    """Only the new rows have any, and they begin as the initializer's."""
    checkpoint = with_placeholder(open_checkpoint(micro_folder()), OPTIONS, tmp_path)
    unet, encoder = checkpoint.build("unet"), checkpoint.build("text_encoder")
    unet.trainable = False
    inversion = Inversion({"text_encoder": encoder}, OPTIONS)
    rows = inversion.learnt["text_encoder"].rows
    loss = Denoising(unet, [encoder], checkpoint.config, min_snr=None)
    assert [v.path for v in loss.trainable_variables] == [rows.path]

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(micro_folder())
    table = pipeline.text_encoder.get_input_embeddings().weight
    first = table[pipeline.tokenizer.convert_tokens_to_ids("cat</w>")].detach().numpy()
    np.testing.assert_array_equal(np.array(rows), np.stack([first, first]))
    values = np.random.default_rng(0).standard_normal(rows.shape, "float32")
    rows.assign(values)
    inversion.save(tmp_path / FILE)
    pipeline.load_textual_inversion(tmp_path, weight_name=FILE)

    batch = micro.latent_batch(checkpoint.config, size=3)
    batch["tokens"] = checkpoint.tokenizer()(TEXTS)
    [gradient], value = micro.gradients_of(loss, batch)
    texts = [pipeline.maybe_convert_prompt(text, pipeline.tokenizer) for text in TEXTS]
    ids = pipeline.tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
    np.testing.assert_array_equal(batch["tokens"], ids)
    context = pipeline.text_encoder(ids)[0]
    latents, noise = (
        torch.from_numpy(batch[name]).permute(0, 3, 1, 2) for name in ("latents", "noise")
    )
    timesteps = torch.from_numpy(batch["timesteps"]).long()
    noisy = pipeline.scheduler.add_noise(latents, noise, timesteps)
    theirs = torch.mean((pipeline.unet(noisy, timesteps, context).sample - noise) ** 2)
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-4)
    expected = pipeline.text_encoder.get_input_embeddings().weight.grad[-2:].numpy()
    np.testing.assert_allclose(np.array(gradient), expected, atol=1e-3 * np.abs(expected).max())


def learn(folder, data, *more, checkpoint=None):
    checkpoint = checkpoint or micro_folder()
    return main(
        f"train text_to_image --checkpoint {checkpoint} --data {data} --out {folder} --steps 2 "
        f"--batch_size 2 --warm_up 1 --sample_every 2 --size 16 --nojit_compile".split()
        + list(more)
    )


@pytest.fixture
def captioned(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    draws = np.random.default_rng(0)
    for name in "ab":
        picture = draws.integers(0, 256, (16, 16, 3), "uint8")
        diffusers.utils.numpy_to_pil(picture[None] / 255.0)[0].save(data / f"{name}.png")
        (data / f"{name}.txt").write_text("a photo of <Cat>")
    return data


CAT = ("--placeholder_token", TOKEN, "--initializer_token", "cat")


@pytest.mark.parametrize("is_xl", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_command(tmp_path, captioned, is_xl):
    checkpoint = micro_xl_folder() if is_xl else micro_folder()
    run = tmp_path / "run"
    assert learn(run, captioned, *CAT, "--num_vectors", "3", checkpoint=checkpoint) == 0
    assert (run / "000002.png").is_file() and not (run / "checkpoint").exists()
    found, before = load_file(run / FILE), load_file(run / "initial_embeds.safetensors")
    assert found.keys() == ({"clip_l", "clip_g"} if is_xl else {TOKEN})
    for name, rows in found.items():
        assert rows.shape == (3, 16) and rows.dtype == np.float32
        assert np.abs(rows - before[name]).max() > 0
    sizes = [value.size for value in load_file(states(run)[-1]).values()]
    assert sum(sizes) == 4 * sum(rows.size for rows in found.values()) + 1
    opened = open_checkpoint(checkpoint, embeddings=[f"{TOKEN}={run / FILE}"])
    assert opened.tokenizer()("<cat>")[0, 1:4].tolist() == [49408, 49409, 49410]


def test_refusals(tmp_path, captioned, capsys):
    def error(*flags, data=captioned):
        assert learn(tmp_path / "run", data, *flags) == 1
        return capsys.readouterr().err

    assert "--initializer_token go together" in error("--placeholder_token", TOKEN)
    assert "and --num_vectors with them" in error("--num_vectors", "2")
    assert "--num_vectors must be at least 1. Received: 0" in error(*CAT, "--num_vectors", "0")
    assert "neither with --lora_rank nor with" in error(*CAT, "--lora_rank", "2")
    assert "No caption has the --placeholder_token '<cat>'" in error(*CAT, data="world:4")
    two = ("--placeholder_token", TOKEN, "--initializer_token", "lighthouse keeper")
    assert "one token of the checkpoint. Received: 'lighthouse keeper', which is 2" in error(*two)
