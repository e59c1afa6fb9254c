"""Training an adapter: PEFT's loss step by step, exact resumption, a file that diffusers loads."""

from dataclasses import replace

import diffusers
import keras
import numpy as np
import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from sd_tf.adapters.adapter import DIFFUSERS_FILE
from sd_tf.checkpoints import make_random
from sd_tf.cli.main import main
from sd_tf.models.branches import branches
from sd_tf.training.lora import Adapted, Lora
from sd_tf.training.losses import Denoising, recomputed
from sd_tf.training.settings import Averaging, LoraOptions, Settings
from sd_tf.training.step import compiled_step
from sd_tf.training.trainer import optimizer_for, states
from sd_tf.weights import open_checkpoint
from tests import micro
from tests.exports import micro_folder

STEPS = 20
SETTINGS = Settings(
    steps=STEPS,
    batch_size=3,
    learning_rate=2e-2,
    warm_up=2,
    averaging=Averaging(None),
    jit_compile=keras.backend.backend() == "jax",
)


def tensor(x):
    x = torch.from_numpy(x)
    return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x


def peft_model(pipeline, lora, component):
    """Diffusers' model with PEFT's adapter, whose weights are ours."""
    options = lora.options
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.rank if options.alpha is None else options.alpha,
        target_modules=list(options.targets(component)),
    )
    model = getattr(pipeline, component).requires_grad_(False)
    model.add_adapter(config)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ours = {
        name.removeprefix(f"{component}.").removeprefix("text_model."): slot.stored()
        for name, slot in lora.slots.items()
        if name.startswith(f"{component}.")
    }
    assert {n.replace(".default", "").removeprefix("text_model.") for n in parameters} == set(ours)
    for name, parameter in parameters.items():
        value = ours[name.replace(".default", "").removeprefix("text_model.")]
        parameter.data = torch.from_numpy(value.copy())
    return model, list(parameters.values())


@pytest.mark.backend
@pytest.mark.jax
def test_losses_equal_pefts():
    """20 steps with the same draws: UNet and text encoder, an alpha that is not the rank.

    The UNet's blocks are computed again for the gradients, which must not lose the branches.
    """
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(micro_folder())
    checkpoint = open_checkpoint(micro_folder())
    models = {name: checkpoint.build(name) for name in ("unet", "text_encoder")}
    lora = Lora(models, LoraOptions(rank=4, alpha=2.0, conv=True), seed=0)
    recomputed(models["unet"])
    loss = Adapted(
        Denoising(models["unet"], [models["text_encoder"]], checkpoint.config, None), lora
    )
    assert [v.path for v in loss.trainable_variables] == [v.path for v in lora.variables]
    optimizer = optimizer_for(SETTINGS, loss.trainable_variables)
    update = compiled_step(loss, optimizer, None, SETTINGS)

    unet, trained = peft_model(pipeline, lora, "unet")
    encoder, more = peft_model(pipeline, lora, "text_encoder")
    trained += more
    scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    theirs = torch.optim.AdamW(trained, betas=(0.9, SETTINGS.beta_2), weight_decay=0.01)
    rate = optimizer_for(SETTINGS, [])._learning_rate
    pairs = []
    for step in range(STEPS):
        batch = micro.latent_batch(checkpoint.config, size=3, step=step % 2)
        ours = float(update(batch)["loss"])
        latents, noise = tensor(batch["latents"]), tensor(batch["noise"])
        timesteps = tensor(batch["timesteps"]).long()
        context = encoder(tensor(batch["tokens"]).long())[0]
        noisy = scheduler.add_noise(latents, noise, timesteps)
        value = torch.mean((unet(noisy, timesteps, context).sample - noise) ** 2)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, SETTINGS.clip_norm)
        for group in theirs.param_groups:
            # Keras adds epsilon to the root of the moment before its bias is corrected.
            group["eps"] = optimizer.epsilon / (1 - SETTINGS.beta_2 ** (step + 1)) ** 0.5
            group["lr"] = float(rate(step))
        theirs.step(), theirs.zero_grad()
        pairs.append((ours, value.item()))
    ours, theirs = np.array(pairs).T
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert ours[-2:].sum() < 0.95 * ours[:2].sum()


def fill(lora):
    """Give every branch a say."""
    draws = np.random.default_rng(1)
    for variable in lora.variables:
        variable.assign(draws.standard_normal(variable.shape, "float32") * 0.1)


def test_a_first_branch_says_nothing():
    """A as PEFT draws it: uniform, of variance 1 / (3 · inputs); B zeros; equal seeds, equal A."""
    models = {"unet": micro.build("unet")}
    lora = Lora(models, LoraOptions(rank=64, conv=True), seed=0)
    for layer, branch in lora.branches.items():
        inputs = int(np.prod(layer.kernel.shape[:-1]))
        a = np.array(branch.a)
        assert np.abs(a).max() <= inputs**-0.5
        assert a.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
        assert not np.array(branch.b).any() and branch.scale == 1.0
    again, other = (Lora(models, lora.options, seed).variables for seed in (0, 1))
    np.testing.assert_array_equal(np.array(again[0]), np.array(lora.variables[0]))
    assert not np.array_equal(np.array(other[0]), np.array(lora.variables[0]))
    assert not models["unet"].trainable_variables


def test_diffusers_loads_the_file(tmp_path):
    """Its UNet and text encoder predict what ours do, with the right alpha."""
    checkpoint = open_checkpoint(micro_folder())
    models = {name: checkpoint.build(name) for name in ("unet", "text_encoder")}
    lora = Lora(models, LoraOptions(rank=4, alpha=2.0, conv=True), seed=0)
    fill(lora)
    lora.save(tmp_path / DIFFUSERS_FILE, None, "micro", {"unet": ["ab"]})
    batch = micro.latent_batch(checkpoint.config, size=2)
    plain = models["text_encoder"](batch["tokens"])["context"]
    with branches(lora.branches):
        context = models["text_encoder"](batch["tokens"])["context"]
        ours = models["unet"](batch["latents"], batch["timesteps"], context)

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(micro_folder())
    pipeline.load_lora_weights(tmp_path, weight_name=DIFFUSERS_FILE)
    with torch.no_grad():
        theirs_context = pipeline.text_encoder(tensor(batch["tokens"]).long())[0]
        theirs = pipeline.unet(
            tensor(batch["latents"]), tensor(batch["timesteps"]), theirs_context
        ).sample.permute(0, 2, 3, 1)
    assert np.abs(np.array(context) - np.array(plain)).max() > 0.01
    for mine, other in ((context, theirs_context), (ours, theirs)):
        other = other.numpy()
        assert np.abs(np.array(mine) - other).max() <= 1e-4 * np.abs(other).max()
    config = pipeline.unet.peft_config["default_0"]
    assert (config.r, config.lora_alpha) == (4, 2.0)
    assert config.base_model_name_or_path == "micro"
    with safe_open(tmp_path / DIFFUSERS_FILE, "numpy") as file:
        assert file.metadata()["base_weights"] == '{"unet": ["ab"]}'


def tune(folder, *more, command="text_to_image"):
    return main(
        f"train {command} --checkpoint {micro_folder()} --data world:8 --out {folder} --steps 8 "
        f"--batch_size 2 --warm_up 1 --log_every 4 --save_every 4 --size 16 --nojit_compile "
        f"--lora_rank 2".split()
        + list(more)
    )


@pytest.mark.long
def test_a_run_holds_the_adapter_alone_and_resumes_exactly(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert tune(whole, "--sample_every", "8", "--save_dtype", "float16") == 0
    assert (whole / "000008.png").is_file() and not (whole / "checkpoint").exists()
    tensors = load_file(whole / DIFFUSERS_FILE)
    assert {value.dtype for value in tensors.values()} == {np.dtype("float16")}
    assert np.abs(tensors["unet.mid_block.attentions.0.proj_in.lora_B.weight"]).max() > 0
    last = load_file(states(whole)[-1])
    # Each matrix, its two moments and its average; and the optimizer's count of steps.
    assert len(last) == 4 * len(tensors) + 1
    assert sum(value.size for value in last.values()) == 4 * sum(map(np.size, tensors.values())) + 1
    parts.mkdir()
    (parts / states(whole)[0].name).write_bytes(states(whole)[0].read_bytes())
    assert tune(parts, "--save_dtype", "float16") == 0
    again = load_file(states(parts)[-1])
    for name, value in last.items():
        np.testing.assert_array_equal(again[name], value)

    assert tune(whole, "--lora_alpha", "4", "--lora_conv") == 1
    error = capsys.readouterr().err
    assert "--lora_alpha was null, is 4.0; --lora_conv was false, is true" in error


@pytest.mark.long
def test_an_editor_learns_by_an_adapter(tmp_path):
    denoiser = replace(micro.CONFIG.denoiser, in_channels=8)
    config = replace(micro.CONFIG, denoiser=denoiser, latent_inputs="image").check()
    make_random(config, tmp_path / "editor")
    flags = ["--checkpoint", str(tmp_path / "editor"), "--steps", "2", "--precompute"]
    assert tune(tmp_path / "run", *flags, command="instruct_pix2pix") == 0
    tensors = load_file(tmp_path / "run" / DIFFUSERS_FILE)
    assert all(name.startswith("unet.") for name in tensors)
    assert all(value.any() for name, value in tensors.items() if "lora_B" in name)


def test_refusals(tmp_path, capsys):
    for flags, message in (
        (["--lora_rank", "0"], "--lora_rank must be at least 1. Received: 0"),
        (["--lora_alpha", "0"], "--lora_alpha must be above 0. Received: 0.0"),
    ):
        assert tune(tmp_path / "a", *flags) == 1
        assert message in capsys.readouterr().err
    assert tune(tmp_path / "b", command="instruct_pix2pix") == 1
    error = capsys.readouterr().err
    assert "trained on a checkpoint that edits already" in error
    assert "Leave --lora_rank out" in error and "Received: sd1" in error
    flags = "--checkpoint x --data world:1 --out x --steps 900 --lora_conv".split()
    assert main(["train", "text_to_image", *flags]) == 1
    assert "--lora_alpha and --lora_conv go with --lora_rank" in capsys.readouterr().err
