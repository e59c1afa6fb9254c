"""Training SDXL: the loss of diffusers' script, its sizes, and what dropped captions become."""

from types import SimpleNamespace

import diffusers
import keras
import numpy as np
import pytest
import torch
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.training.batches import LatentBatches
from sd_tf.training.conditions import time_ids, tokenize_for
from sd_tf.training.data import World, open_source
from sd_tf.training.losses import Denoising, freeze_unused
from sd_tf.training.settings import Averaging, Settings
from sd_tf.training.step import compiled_step
from sd_tf.training.trainer import optimizer_for
from sd_tf.weights import layout, open_checkpoint
from tests.exports import micro_xl_folder

STEPS = 4
SETTINGS = Settings(
    steps=STEPS,
    batch_size=3,
    learning_rate=5e-3,
    warm_up=1,
    averaging=Averaging(None),
    jit_compile=keras.backend.backend() == "jax",
)


def batches(checkpoint, latents, dropout):
    config, source = checkpoint.config, World(6, 16)
    ids = np.array([[64, 48, 0, 3, 16, 16]] * 6, "float32") + np.arange(6)[:, None]
    tokenize = tokenize_for(checkpoint.tokenizers())
    return LatentBatches(
        source, SETTINGS, latents, config, tokenize, dropout, time_ids=ids.astype("float32")
    )


@pytest.mark.backend
@pytest.mark.jax
def test_losses_equal_pytorchs():
    """UNet and both text encoders learn, from two texts, the pooled one and the sizes."""
    checkpoint = open_checkpoint(micro_xl_folder())
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(micro_xl_folder())
    names = ("unet", "text_encoder", "text_encoder_2")
    models = {name: checkpoint.build(name) for name in names}
    unet, *encoders = models.values()
    for encoder in encoders:
        freeze_unused(encoder)
    loss = Denoising(unet, encoders, checkpoint.config, min_snr=None)
    optimizer = optimizer_for(SETTINGS, loss.trainable_variables)
    update = compiled_step(loss, optimizer, None, SETTINGS)
    latents = np.random.default_rng(0).standard_normal((6, 8, 8, 4), "float32")
    make = batches(checkpoint, latents, dropout=0.0)

    decays, others, count = [], [], 0
    theirs = {name: getattr(pipeline, name) for name in names}
    for name, model in models.items():
        parameters = dict(theirs[name].named_parameters())
        for path, slot in layout.slots(model).items():
            parameter = parameters.get(path, parameters.get(path.removeprefix("text_model.")))
            if slot.variable.trainable:
                decaying = optimizer._use_weight_decay(slot.variable)
                (decays if decaying else others).append(parameter)
                count += 1
    assert count == len(loss.trainable_variables)
    scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    adam = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, SETTINGS.beta_2),
    )
    rate = optimizer_for(SETTINGS, [])._learning_rate
    pairs = []
    for step in range(STEPS):
        batch = make(step)
        x = {name: torch.from_numpy(value) for name, value in batch.items()}
        latents, noise = (x[name].permute(0, 3, 1, 2) for name in ("latents", "noise"))
        one = pipeline.text_encoder(x["tokens"][:, 0].long(), output_hidden_states=True)
        two = pipeline.text_encoder_2(x["tokens"][:, 1].long(), output_hidden_states=True)
        context = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], -1)
        added = {"text_embeds": two[0], "time_ids": x["time_ids"]}
        timesteps = x["timesteps"].long()
        noisy = scheduler.add_noise(latents, noise, timesteps)
        output = pipeline.unet(noisy, timesteps, context, added_cond_kwargs=added).sample
        value = torch.mean((output - noise) ** 2)
        value.backward()
        torch.nn.utils.clip_grad_norm_(decays + others, SETTINGS.clip_norm)
        for group in adam.param_groups:
            group["eps"] = optimizer.epsilon / (1 - SETTINGS.beta_2 ** (step + 1)) ** 0.5
            group["lr"] = float(rate(step))
        adam.step(), adam.zero_grad()
        pairs.append((float(update(batch)["loss"]), value.item()))
    ours, expected = np.array(pairs).T
    np.testing.assert_allclose(ours, expected, rtol=1e-3)
    assert np.abs(np.diff(ours)).min() > 1e-4


def test_a_dropped_caption_is_zeros():
    """As at inference, where SDXL takes zeros for a missing negative prompt."""
    checkpoint = open_checkpoint(micro_xl_folder())
    make = batches(checkpoint, np.zeros((6, 8, 8, 4), "float32"), dropout=0.5)
    batch = make(0)
    assert set(batch["has_text"]) == {0.0, 1.0}
    encoders = [checkpoint.build(name) for name in checkpoint.config.text_encoders]
    loss = Denoising(checkpoint.build("unet"), encoders, checkpoint.config)
    told = {name: np.array(value) for name, value in loss.conditions(batch).items()}
    assert told.keys() == {"context", "pooled", "time_ids"}
    for has_text, context, pooled in zip(
        batch["has_text"], told["context"], told["pooled"], strict=True
    ):
        assert context.any() == pooled.any() == bool(has_text)


def test_sizes_are_those_of_diffusers_script(tmp_path):
    """Its transforms: Resize the shorter side, CenterCrop; the corner is (top, left)."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir(), cache.mkdir()
    shapes = {"a": (40, 20), "b": (16, 16), "c": (30, 50)}  # width, height
    for name, shape in shapes.items():
        Image.new("RGB", shape).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text("a cat")
    source = open_source(data, 16)
    config = SimpleNamespace(denoiser=SimpleNamespace(num_time_ids=6))
    found = time_ids(config, source, cache)
    expected = [[20, 40, 0, 8, 16, 16], [16, 16, 0, 0, 16, 16], [50, 30, 6, 0, 16, 16]]
    # 50 of 30: scaled to 27 × 16, whose middle begins at round(5.5) = 6.
    np.testing.assert_array_equal(found, np.array(expected, "float32"))
    (data / "a.png").unlink()  # the sizes are kept
    np.testing.assert_array_equal(time_ids(config, open_source(data, 16), cache), found)


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True])
def test_the_command(tmp_path, lora):
    """Whole: a sample sheet, and a checkpoint or an adapter that diffusers loads."""
    flags = ["--lora_rank", "2", "--train_text_encoder"] if lora else []
    command = (
        f"train text_to_image --checkpoint {micro_xl_folder()} --data world:6 --out {tmp_path} "
        f"--steps 2 --batch_size 2 --warm_up 1 --sample_every 2 --size 16 --nojit_compile"
    )
    assert main([*command.split(), *flags]) == 0
    assert (tmp_path / "000002.png").is_file()
    if lora:
        pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(micro_xl_folder())
        pipeline.load_lora_weights(tmp_path)
        assert pipeline.get_list_adapters().keys() == {"unet", "text_encoder", "text_encoder_2"}
    else:
        diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path / "checkpoint")
