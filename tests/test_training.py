"""The trainer: its arithmetic against PyTorch and diffusers, its runs against themselves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr
from safetensors.numpy import load_file, save_file

from sd_tf.config import END_TOKEN, FAMILIES
from sd_tf.sampling.schedules import abar
from sd_tf.training import trainer
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.ema import Average
from sd_tf.training.hosts import Host
from sd_tf.training.initial_weights import initialize
from sd_tf.training.losses import Denoising, Reading
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Averaging, Settings, TrainingError
from sd_tf.training.step import compiled_step
from sd_tf.training.trainer import Progress, Run, alone_in, optimizer_for, states
from sd_tf.weights import layout, open_checkpoint
from tests import micro
from tests.exports import micro_export, micro_folder, pipeline_of

ROOT = Path(__file__).parent.parent


# Losses and gradients


@pytest.mark.parametrize(
    "prediction", [pytest.param("epsilon", marks=pytest.mark.backend(long=True)), "v_prediction"]
)
def test_loss_and_gradients_equal_pytorchs(small_pipelines, prediction):
    pipeline, folder = small_pipelines("sd1")
    checkpoint = open_checkpoint(folder)
    schedule = replace(checkpoint.config.schedule, prediction=prediction)
    unet, encoder = checkpoint.build("unet"), checkpoint.build("text_encoder")
    loss = Denoising(unet, [encoder], replace(checkpoint.config, schedule=schedule), min_snr=None)
    batch = micro.latent_batch(checkpoint.config, size=3)
    gradients, value = micro.gradients_of(loss, batch)

    def tensor(name):
        x = torch.from_numpy(batch[name])
        return x.permute(0, 3, 1, 2) if x.ndim == 4 else x.long()

    latents, noise, timesteps = tensor("latents"), tensor("noise"), tensor("timesteps")
    noisy = pipeline.scheduler.add_noise(latents, noise, timesteps)
    context = pipeline.text_encoder(tensor("tokens"))[0]
    output = pipeline.unet(noisy, timesteps, context).sample
    signal_share = pipeline.scheduler.alphas_cumprod[timesteps][:, None, None, None]
    target = noise
    if prediction == "v_prediction":
        target = signal_share.sqrt() * noise - (1 - signal_share).sqrt() * latents
    theirs = torch.mean((output - target) ** 2)
    pipeline.unet.zero_grad(), pipeline.text_encoder.zero_grad()
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-4)

    stored = {"unet": pipeline.unet, "text_encoder": pipeline.text_encoder}
    by_variable = dict(zip((id(v) for v in loss.trainable_variables), gradients, strict=True))
    compared = 0
    for name, model in (("unet", unet), ("text_encoder", encoder)):
        parameters = dict(stored[name].named_parameters())
        scale = max(p.grad.abs().max().item() for p in parameters.values() if p.grad is not None)
        for path, slot in layout.slots(model).items():
            parameter = parameters.get(path, parameters.get(path.removeprefix("text_model.")))
            with keras.StatelessScope([(slot.variable, by_variable[id(slot.variable)])]):
                ours = slot.stored().reshape(parameter.shape)
            error = np.abs(ours - parameter.grad.numpy()).max()
            assert error <= 1e-3 * scale, path
            compared += 1
    assert compared == len(loss.trainable_variables)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weights(small_pipelines, prediction):
    pipeline, _ = small_pipelines("sd1")
    snr = compute_snr(pipeline.scheduler, torch.arange(1000)).numpy()
    schedule = replace(FAMILIES["sd1"].schedule, prediction=prediction)
    config = replace(micro.CONFIG, schedule=schedule)
    weight = Denoising(micro.build("unet"), [micro.build("text_encoder")], config).weight
    divisor = snr + 1 if prediction == "v_prediction" else snr
    np.testing.assert_allclose(weight, np.minimum(snr, 5.0) / divisor, rtol=1e-3)
    np.testing.assert_allclose(abar(schedule), pipeline.scheduler.alphas_cumprod, rtol=1e-5)


@pytest.mark.backend(long=True)
def test_reading_is_pytorchs_cross_entropy():
    """Over what stands from a caption's end on; and the text encoder learns from it."""
    rng = np.random.default_rng(0)
    loss = Reading(micro.build("text_encoder"), (3, 5))
    for variable in loss.layer.variables:
        variable.assign(rng.standard_normal(variable.shape, "float32"))
    tokens = rng.integers(0, 1000, (4, 77)).astype("int32")
    ends = [5, 20, 76, 1]
    for row, end in zip(tokens, ends, strict=True):
        row[end:] = END_TOKEN
    batch = {"tokens": tokens, "answers": np.array([[0, 4], [2, 0], [1, 1], [0, 2]], "int32")}
    value, figures = loss(batch)

    context = np.array(loss.text_encoder(tokens)["context"])
    pooled = np.stack([row[end:].mean(axis=0) for row, end in zip(context, ends, strict=True)])
    logits = torch.from_numpy(pooled @ np.array(loss.layer.kernel) + np.array(loss.layer.bias))
    answers = torch.from_numpy(batch["answers"]).long()
    parts = [(logits[:, :3], answers[:, 0]), (logits[:, 3:], answers[:, 1])]
    expected = sum(torch.nn.functional.cross_entropy(*part) for part in parts)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
    right = np.all([(part.argmax(1) == answer).numpy() for part, answer in parts], axis=0).mean()
    assert float(figures["all_right"]) == right

    gradients, _ = micro.gradients_of(loss, batch)
    assert len(gradients) == len(loss.trainable_variables)
    assert all(np.abs(np.array(gradient)).max() > 0 for gradient in gradients[-2:])


def test_initial_blocks_are_identities():
    """A new UNet predicts zeros; every parameter but the closed ones is different from zero."""
    unet = micro.build("unet")
    batch = micro.latent_batch(micro.CONFIG, size=2)
    context = np.ones((2, 77, micro.CONFIG.denoiser.context_dim), "float32")
    assert np.all(np.asarray(unet(batch["latents"], batch["timesteps"], context)) == 0)
    encoder = micro.build("text_encoder")
    initialize(encoder, "text_encoder", 0, token_ids=[5, 7])
    table = np.asarray(encoder.text_model.embeddings.token_embedding.embeddings)
    assert sorted(set(np.nonzero(table)[0])) == [5, 7]


# Updates


@pytest.mark.backend
def test_accumulation_is_the_whole_batch():
    batch = micro.toy_batch(0)
    results = []
    for accumulate in (1, 2, 4):
        settings = replace(micro.SETTINGS, accumulate=accumulate)
        loss = micro.Toy()
        optimizer = optimizer_for(settings, loss.trainable_variables)
        run = compiled_step(loss, optimizer, None, settings)
        figures = [run(batch) for _ in range(3)]
        results.append((figures[-1]["loss"], np.array(loss.matrix), np.array(loss.vector)))
    assert np.abs(results[0][1] - 1).max() > 1e-3
    for got in results[1:]:
        for value, expected in zip(got, results[0], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.backend
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_average_follows_its_formula(start):
    variable = keras.Variable(np.zeros(1, "float32"))
    average = Average([variable], Averaging(start, half_life=4.0), steps=40)
    expected = 0.0
    for step in range(40):
        variable.assign(np.array([np.sin(step)], "float32"))
        average.update(np.int32(step))
        age = max(step - round(start * 40), 0)
        keep = 0.5 ** (1 / min(4.0, max(age / 10, 1e-3))) if age else 0.0
        expected = keep * expected + (1 - keep) * np.sin(step)
        assert float(np.asarray(average.variables[0])[0]) == pytest.approx(expected, abs=1e-5)


def test_learning_rate_warms_up_and_falls_as_a_cosine():
    settings = Settings(steps=1100, warm_up=100, learning_rate=2.0, final_learning_rate=0.1)
    rate = optimizer_for(settings, [])._learning_rate
    assert float(rate(50)) == pytest.approx(1.0)
    assert float(rate(100)) == pytest.approx(2.0)
    for step in (350, 600, 1100):
        cosine = 0.5 * (1 + np.cos(np.pi * (step - 100) / 1000))
        assert float(rate(step)) == pytest.approx(2.0 * (0.9 * cosine + 0.1), rel=1e-5)


def test_norms_biases_and_embeddings_do_not_decay():
    loss = micro.denoising()
    optimizer = optimizer_for(replace(micro.SETTINGS, weight_decay=0.1), loss.trainable_variables)
    optimizer.build(loss.trainable_variables)
    decays = {id(v) for v in loss.trainable_variables if optimizer._use_weight_decay(v)}
    for model in (loss.denoiser, *loss.text_encoders):
        for path, slot in layout.slots(model).items():
            matrix = len(slot.variable.shape) > 1 and "embedding.weight" not in path
            assert (id(slot.variable) in decays) == matrix, path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"`steps` must be at least 1\. Received: 0"),
        ({"batch_size": 6, "accumulate": 4}, r"`accumulate` must divide .*Received: 6 / 4"),
        ({"learning_rate": 0.0}, r"`learning_rate` must be above 0\. Received: 0\.0"),
        ({"warm_up": 12}, r"`warm_up` must be below the number of steps, 12\. Received: 12"),
        ({"warm_up": -1}, r"`warm_up` must not be below 0\. Received: -1"),
        ({"weight_decay": -0.1}, r"`weight_decay` must not be below 0\. Received: -0\.1"),
        ({"seed": -1}, r"`seed` must not be below 0\. Received: -1"),
        ({"sample_every": -1}, r"`sample_every` must not be below 0\. Received: -1"),
        ({"beta_2": 1.0}, r"`beta_2` must be from 0 to below 1\. Received: 1\.0"),
        ({"precision": "int8"}, r"one of float32, mixed_bfloat16\. Received: int8"),
        ({"averaging": Averaging(1.0)}, r"from 0 to below 1\. Received: 1\.0"),
        ({"averaging": Averaging(0.99)}, r"leave it one of the 12 steps\. Received: 0\.99"),
        ({"averaging": Averaging(0.0, 0.0)}, r"half-life must be above 0 steps\. Received: 0\.0"),
    ],
)
def test_settings_that_cannot_be_meant(change, message):
    with pytest.raises(TrainingError, match=message):
        replace(micro.SETTINGS, **change).check()


# Runs


def check_same_state(*folders):
    one, other = (load_file(states(folder)[-1]) for folder in folders)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.long
def test_killed_run_equals_one_that_was_not(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.micro"]
    subprocess.run([*command, str(whole)], check=True, env=environment)

    process = subprocess.Popen([*command, str(killed), "0.3"], env=environment)
    deadline = time.monotonic() + 300
    while not states(killed) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert states(killed)
    result = subprocess.run(
        [*command, str(killed)], check=True, env=environment, capture_output=True, text=True
    )
    assert "resumed at step" in result.stdout
    check_same_state(whole, killed)


def toy_run(folder, batches=micro.toy_batch, depends_on=None, **settings):
    settings = replace(micro.SETTINGS, **settings)
    return Run(
        *(micro.Toy(), batches, settings, folder, lambda text: None), depends_on=depends_on or {}
    )


def test_a_run_of_something_else_is_not_continued(tmp_path):
    """What differs is named, with its old and its new value."""
    begun = {"data": {"rows": 8, "names": "a1"}, "checkpoint": {"weights": {"unet": ["b2"]}}}
    toy_run(tmp_path, depends_on=begun).train()
    (state,) = states(tmp_path)[-1:]
    for settings, depends_on, difference in (
        ({"learning_rate": 0.5}, begun, "`learning_rate` was 0.01, is 0.5"),
        ({"averaging": Averaging(None)}, begun, "`averaging.start` was 0.0, is null; "),
        ({"seed": 1}, {**begun, "hosts": 2}, "`seed` was 0, is 1; `hosts` was null, is 2"),
        (
            {},
            {"data": {"rows": 9, "names": "a1"}, "checkpoint": {"weights": {"unet": ["c3"]}}},
            '`data.rows` was 8, is 9; `checkpoint.weights.unet` was ["b2"], is ["c3"]',
        ),
    ):
        message = f"{state} was made from something else: {difference}"
        with pytest.raises(TrainingError, match=re.escape(message)):
            toy_run(tmp_path, depends_on=depends_on, **settings).train()
    save_file({"00000": np.zeros(1)}, tmp_path / "state.safetensors", {"step": "4"})
    with pytest.raises(TrainingError, match=r"state.safetensors does not say what it depends on"):
        toy_run(tmp_path, depends_on=begun).train()


class StopError(Exception):
    pass


def stopped_at(stop):
    def batches(step):
        if step == stop:
            raise StopError
        return micro.toy_batch(step)

    return batches


def test_what_changes_no_update_may_change_on_the_way(tmp_path):
    toy_run(tmp_path / "whole").train()
    with pytest.raises(StopError):
        toy_run(tmp_path / "parts", stopped_at(10)).train()
    changed = {"log_every": 1, "save_every": 3, "sample_every": 2, "gradient_checkpointing": True}
    run = toy_run(tmp_path / "parts", **changed)
    assert run.resume() == 8
    run.train()
    check_same_state(tmp_path / "whole", tmp_path / "parts")
    assert toy_run(tmp_path / "parts", accumulate=2).resume() == 12


def test_the_last_two_states_are_kept(tmp_path):
    """Either continues the run, and a damaged one is named."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    toy_run(whole, save_every=3).train()
    names = ["state-00000009.safetensors", "state-00000012.safetensors"]
    assert [path.name for path in states(whole)] == names
    shutil.copytree(whole, other)
    content = states(other)[-1].read_bytes()
    states(other)[-1].write_bytes(content[:-100])
    with pytest.raises(TrainingError, match=rf"{names[1]} is damaged: .*Delete it, to continue"):
        toy_run(other).train()
    states(other)[-1].unlink()
    run = toy_run(other)
    assert run.resume() == 9
    run.train()
    check_same_state(whole, other)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    """However seldom the loss is looked at, the last good state stays the last."""

    def batches(step):
        return {"x": micro.toy_batch(step)["x"] * np.float32(np.nan if step == 5 else 1)}

    seldom = {"log_every": 100, "averaging": Averaging(None)}
    with pytest.raises(TrainingError) as caught:
        toy_run(tmp_path, batches, **seldom).train()
    (state,) = states(tmp_path)
    assert state.name == "state-00000004.safetensors"
    assert re.search(
        rf"state at step 8 is not saved: .+ not finite\. Lower `learning_rate`\. The last good one "
        rf"is {re.escape(str(state))}\.",
        str(caught.value),
    )
    run = toy_run(tmp_path, **seldom)
    assert run.resume() == 4
    run.train()
    toy_run(tmp_path / "whole", **seldom).train()
    check_same_state(tmp_path / "whole", tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    def batches(step):
        return {"x": micro.toy_batch(step)["x"] * np.float32(np.nan)}

    run = Run(micro.Toy(), batches, micro.SETTINGS, tmp_path, report=lambda text: None)
    with pytest.raises(TrainingError, match=r"The loss is nan at step 4\. Lower `learning_rate`"):
        run.train()


def test_averaged_weights_are_put_back_after_a_sample(tmp_path):
    seen = []
    settings = replace(micro.SETTINGS, sample_every=4)
    run = Run(micro.Toy(), micro.toy_batch, settings, tmp_path)
    bias = run.loss.vector
    place = [v is bias for v in run.average.followed].index(True)
    run.sample = lambda step: seen.append((np.array(bias), np.array(run.average.variables[place])))
    run.train()
    assert len(seen) == 3
    for averaged, last in seen:  # exchanged while the sample is drawn
        assert not np.array_equal(averaged, last)
    np.testing.assert_array_equal(np.array(bias), seen[-1][0])  # in the end they stay in place


@pytest.mark.long
def test_several_devices_train_as_one(tmp_path):
    results = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        environment = {
            **os.environ,
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.micro", str(folder)]
        result = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
        assert f"{count} devices" in result.stdout.decode()
        results.append(load_file(states(folder)[-1]))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_samples_are_the_pictures_of_an_export():
    """The models in training are drawn with by the same components as an export's."""
    checkpoint = open_checkpoint(micro_folder())
    models = {name: checkpoint.build(name) for name in checkpoint.config.components}
    painter = Painter(checkpoint.config, models, tokenize_for(checkpoint.tokenizers()))
    prompts = ["a cat", "a dog"]
    drawn = painter.draw(prompts, num_steps=2, guidance_scale=4.0)
    pipe = pipeline_of(micro_export())
    expected = pipe(prompts, num_steps=2, guidance_scale=4.0, seed=0).images
    assert np.abs(drawn.astype(int) - expected).max() <= 1


def test_one_process_trains_in_a_folder(tmp_path):
    with (
        alone_in(tmp_path / "run"),
        pytest.raises(TrainingError, match=r"Another process trains in .*run\. Choose another"),
        alone_in(tmp_path / "run"),
    ):
        pytest.fail("it was let in")


def test_the_time_of_samples_is_no_training_time(tmp_path, monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    monkeypatch.setattr(trainer, "time", clock)
    settings = Settings(steps=8, batch_size=3, learning_rate=0.1)
    run = SimpleNamespace(folder=tmp_path, settings=settings, report=print, host=Host())
    with Progress(run, 0) as progress:
        for step in range(1, 5):
            progress.add({"loss": 1.0})
            now[0] += 1.0
            if step == 2:
                with progress.paused():
                    now[0] += 100.0
        progress.tell(4)
    [line] = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["examples_per_second"] == 3.0
    with pytest.raises(RuntimeError, match="closed"):
        progress.board.write(5, {"loss": 1.0})
