"""Noise levels of β schedules and of flow matching, and what follows from them."""

from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from keras_cv.src.models.stable_diffusion import constants as kerascv_constants

from sd_tf.config import SAMPLERS, ConfigError, ScheduleConfig
from sd_tf.config.families import SD_SCHEDULE
from sd_tf.sampling import schedules, tables
from sd_tf.sampling.methods import METHODS
from sd_tf.sampling.packed import pack
from sd_tf.sampling.rows import COLUMNS
from sd_tf.sampling.schedules import Level, abar, convert, level_at
from tests.walks import WIDTH, assert_same_walk, walk_diffusers, walk_table

FLOW = ScheduleConfig(kind="flow", prediction="flow", sampler="euler_linspace", shift=3.0)
STEP_COUNTS = (1, 2, 3, 4, 5, 10, 28, 50)


def test_noise_schedule():
    values = abar(SD_SCHEDULE)
    assert values.shape == (1000,) and values.dtype == np.float64
    np.testing.assert_allclose(values[[0, 999]], [0.99915, 0.00466010], rtol=2e-6)
    np.testing.assert_allclose(values, kerascv_constants._ALPHAS_CUMPROD, rtol=1e-5)


# Predictions


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_predictions_of_a_beta_schedule_are_diffusers(prediction):
    scheduler = diffusers.DDIMScheduler(
        beta_start=SD_SCHEDULE.beta_start,
        beta_end=SD_SCHEDULE.beta_end,
        beta_schedule=SD_SCHEDULE.beta_schedule,
        prediction_type=prediction,
        clip_sample=False,
    )
    scheduler.set_timesteps(10)
    x, output = np.random.default_rng(0).normal(size=(2, WIDTH))
    for t in scheduler.timesteps:
        step = scheduler.step(torch.from_numpy(output), t, torch.from_numpy(x))
        level = level_at(SD_SCHEDULE, np.array(float(t)))
        p, q = convert(prediction, level, x0=1.0)
        x0 = p * x + q * output
        np.testing.assert_allclose(x0, step.pred_original_sample, rtol=1e-5, atol=1e-5)
        p, q = convert(prediction, level, epsilon=1.0)
        again = level.signal * x0 + level.noise * (p * x + q * output)
        np.testing.assert_allclose(again, x, rtol=1e-9)


@pytest.mark.parametrize("sigma", [1.0, 0.7, 0.1])
def test_a_flow_is_noise_less_data(sigma):
    x0, noise = np.random.default_rng(0).normal(size=(2, WIDTH))
    level = Level(1.0 - sigma, sigma)
    x, output = level.signal * x0 + level.noise * noise, noise - x0
    for wanted, expected in (({"x0": 1.0}, x0), ({"epsilon": 1.0}, noise)):
        p, q = convert("flow", level, **wanted)
        np.testing.assert_allclose(p * x + q * output, expected, atol=1e-12)


# Flow matching


@pytest.mark.parametrize(
    ("sampler", "shift", "expected"),
    (
        ("euler_linspace", 3.0, (1, 0.857692, 0.602151, 0.0089286)),  # SD3
        ("euler_trailing", 1.0, (1, 0.75, 0.5, 0.25)),  # Flux.1 schnell
        ("euler_trailing", np.exp(1.15), (1, 0.904531, 0.759511, 0.512844)),  # dev, 1024 pixels
    ),
)
def test_flow_goldens(sampler, shift, expected):
    steps = tables.steps(replace(FLOW, shift=float(shift)), sampler, 4)
    np.testing.assert_allclose(steps.sigma, expected, rtol=1e-5)
    np.testing.assert_allclose(steps.signal, 1 - steps.sigma, atol=1e-15)
    columns = dict(zip(COLUMNS, steps.rows[:, 0].T, strict=True))
    np.testing.assert_allclose(columns["timestep"], 1000 * steps.sigma)
    np.testing.assert_allclose(columns["b0"], np.diff(steps.sigma, append=0.0))
    for name, value in {"input_scale": 1, "p": 0, "q": 1, "a": 1, "c": 0}.items():
        np.testing.assert_allclose(columns[name], value, atol=1e-15)
    assert steps.initial_scale == 1


def flow_scheduler(spec, schedule, num_steps, nudge):
    """Return diffusers' scheduler for a method, and the Euler scheduler whose levels it takes."""
    euler = diffusers.FlowMatchEulerDiscreteScheduler(shift=schedule.shift)
    if spec.spacing == "trailing":  # Flux's pipeline hands in its own
        euler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps))
    else:
        euler.set_timesteps(num_steps)
    if spec.method == "euler":
        return euler, euler
    if spec.method == "heun":
        scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=schedule.shift)
        scheduler.set_timesteps(num_steps)
        return scheduler, euler
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    scheduler = {
        "dpmpp_2m": diffusers.DPMSolverMultistepScheduler(**flow),
        "dpmpp_2m_sde": diffusers.DPMSolverMultistepScheduler(
            **flow, algorithm_type="sde-dpmsolver++"
        ),
        "unipc": diffusers.UniPCMultistepScheduler(**flow),
        # Its step along an ε prediction is the step along any slope.
        "lms": diffusers.LMSDiscreteScheduler(),
    }[spec.method]
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas, scheduler.timesteps = euler.sigmas.double(), euler.timesteps
    scheduler.sigmas[0] -= nudge
    if spec.method == "lms":
        scheduler.scale_model_input = lambda x, t: x
        scheduler.is_scale_input_called = True
    return scheduler, euler


FLOW_SAMPLERS = [
    name
    for name, spec in SAMPLERS.items()
    if "flow" in METHODS[spec.method].kinds and spec.spacing != "leading" and not spec.karras
]


@pytest.mark.parametrize("num_steps", STEP_COUNTS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("name", FLOW_SAMPLERS)
def test_flow_is_diffusers(name, shift, num_steps, monkeypatch):
    """Text-to-image, and image-to-image from the middle."""
    schedule, spec = replace(FLOW, shift=shift), SAMPLERS[name]
    # diffusers' UniPC cannot take the logarithm of a signal of zero.
    nudge = 1e-6 if spec.method == "unipc" else 0.0
    space = schedules.FLOW_SPACINGS[spec.spacing]
    nudged = {spec.spacing: lambda *given: space(*given) - nudge * np.eye(1, given[1])[0]}
    monkeypatch.setattr(schedules, "FLOW_SPACINGS", nudged)
    steps = tables.steps(schedule, name, num_steps)
    per_step = METHODS[spec.method].calls_per_step
    rng = np.random.default_rng(num_steps)
    latents, unit = rng.normal(size=(2, WIDTH))
    noise = rng.normal(size=(steps.calls, WIDTH))
    for begin in {0, 1, 2, num_steps // 2, num_steps - 1} & set(range(num_steps)):
        scheduler, euler = flow_scheduler(spec, schedule, num_steps, nudge)
        row = begin * per_step
        scheduler.set_begin_index(row)
        euler.set_begin_index(begin)
        pair = torch.from_numpy(np.stack([latents, unit])[:, None])
        theirs = euler.scale_noise(pair[0], euler.timesteps[begin : begin + 1], pair[1])[0]
        ours = steps.signal[row] * latents + steps.sigma[row] * unit
        options = {"order": lambda k: min(k + 1, 4)} if spec.method == "lms" else {}
        walked = walk_diffusers(monkeypatch, scheduler, theirs, noise, begin=row, **options)
        assert_same_walk(walk_table(steps, ours, noise, row), walked)


def test_flow_samplers():
    """The ones that a flow schedule can do are packed; the others have no number."""
    packed = pack(FLOW, 6)
    assert list(packed.numbers) == FLOW_SAMPLERS
    assert packed.calls_by_sampler()["heun"] == [1, 3, 5, 7, 9, 11]
    for name, number in packed.numbers.items():
        for count in range(1, 7):
            steps, first = tables.steps(FLOW, name, count), packed.starts[number, count - 1]
            rows = packed.rows[first : first + packed.calls[number, count - 1]]
            np.testing.assert_array_equal(rows, steps.rows.astype("float32"))
            assert np.isfinite(rows).all()


@pytest.mark.parametrize(
    ("change", "sampler", "message"),
    (
        ({}, "ddim", r"'ddim' cannot be used: the method ddim does not honour flow schedules;"),
        ({}, "euler", r"a flow schedule honours the spacing linspace or trailing, not leading"),
        (
            {},
            "dpmpp_2m_karras",
            r"_karras' .*: a flow schedule does not honour Karras\.",
        ),
        ({"prediction": "epsilon"}, "heun", r"A flow .* the prediction flow\. Received: 'epsilon'"),
        ({"kind": "vp"}, "heun", r"Unknown kind of schedule 'vp'\. Known: beta, flow\."),
    ),
)
def test_what_a_flow_does_not_honour_is_refused(change, sampler, message):
    schedule = replace(FLOW, **change, sampler=sampler)
    with pytest.raises(ConfigError, match=message):
        tables.steps(schedule, sampler, 4)
    with pytest.raises(ConfigError, match=message):
        pack(schedule, 4)


def test_a_flow_has_no_abar():
    with pytest.raises(ConfigError, match=r"Only a beta schedule has ᾱ\. Received: a flow sched"):
        abar(FLOW)
    with pytest.raises(ConfigError, match=r"A beta .* epsilon or v_prediction\. Received: 'flow'"):
        tables.steps(replace(SD_SCHEDULE, prediction="flow"), "ddim", 4)
