"""Flow matching: levels, walks and starts beside diffusers' schedulers, set as its pipelines do."""

from dataclasses import replace
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from sd_tf.config import SAMPLERS, ConfigError, DynamicShift, SamplerSpec, ScheduleConfig
from sd_tf.config.families import FLUX_SCHEDULE, SD3_SCHEDULE, SD_SCHEDULE
from sd_tf.sampling import tables
from sd_tf.sampling.methods import METHODS
from sd_tf.sampling.packed import pack
from sd_tf.sampling.rows import COLUMNS
from sd_tf.sampling.schedules import abar, flow_sigmas
from tests.walks import WIDTH, assert_same_walk, walk_diffusers, walk_table

DYNAMIC = replace(FLUX_SCHEDULE, shift=3.0, dynamic_shift=DynamicShift())
LINEAR = DynamicShift(base_shift=0.9, max_shift=3.0, exponential=False)
SHIFTS = {
    "1": FLUX_SCHEDULE,
    "3": SD3_SCHEDULE,
    **{
        f"{name}-{patches}": replace(DYNAMIC, dynamic_shift=shift).for_patches(patches)
        for name, shift in (("exponential", DynamicShift()), ("linear", LINEAR))
        for patches in (256, 600, 1024, 4096)
    },
}


def euler_of(schedule: ScheduleConfig, num_steps: int):
    """Return diffusers' scheduler, its steps set as the pipelines of SD3 or Flux set them."""
    dynamic, options = schedule.dynamic_shift, {}
    if dynamic is not None:
        options = {
            "use_dynamic_shifting": True,
            "time_shift_type": "exponential" if dynamic.exponential else "linear",
        }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=schedule.shift, shift_terminal=schedule.shift_terminal, **options
    )
    given = {}
    if dynamic is not None:
        lengths = dynamic.base_patches, dynamic.max_patches
        shifts = dynamic.base_shift, dynamic.max_shift
        given["mu"] = calculate_shift(schedule.patches, *lengths, *shifts)
    if schedule.spacing == "trailing":  # Flux hands in its own
        given["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
        given.setdefault("mu", 0.5)  # for every scheduler, though not every one reads it
    retrieve_timesteps(scheduler, num_steps, "cpu", **given)
    return scheduler


@pytest.mark.parametrize("terminal", [None, 0.02, 0.1])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("spacing", ["linspace", "trailing"])
def test_levels_are_diffusers(spacing, shift, terminal):
    """From sigmas that are handed in, diffusers computes in float32; otherwise it rounds to it."""
    schedule = replace(SHIFTS[shift], spacing=spacing, shift_terminal=terminal)
    error = {"rtol": 1.2e-7} if spacing == "linspace" else {"rtol": 0, "atol": 2e-7}
    for num_steps in range(1 if terminal is None else 2, 101):
        scheduler = euler_of(schedule, num_steps)
        sigmas = scheduler.sigmas.double().numpy()
        assert sigmas[-1] == 0
        steps = tables.steps(schedule, "flow_euler", num_steps)
        np.testing.assert_allclose(steps.sigma, sigmas[:-1], **error)
        timesteps = scheduler.timesteps.double().numpy() / 1000
        np.testing.assert_allclose(steps.rows[:, 0, 0] / 1000, timesteps, **error)
        np.testing.assert_allclose(steps.signal, 1 - steps.sigma, rtol=0, atol=1e-15)
        assert steps.sigma[0] == 1 and np.all(np.diff(steps.sigma) < 0)


@pytest.mark.parametrize("shift", [name for name in SHIFTS if "-" in name])
def test_levels_are_diffusers_formulas_in_float64(shift):
    """The float32 of the pipelines hides no more than rounding."""
    schedule = replace(SHIFTS[shift], shift_terminal=0.1)
    mu = calculate_shift(
        schedule.patches,
        base_shift=schedule.dynamic_shift.base_shift,
        max_shift=schedule.dynamic_shift.max_shift,
    )
    for num_steps in (2, 7, 50):
        scheduler = euler_of(schedule, num_steps)
        shifted = scheduler.time_shift(mu, 1.0, np.linspace(1.0, 1 / num_steps, num_steps))
        expected = scheduler.stretch_shift_to_terminal(shifted)
        np.testing.assert_allclose(flow_sigmas(schedule, num_steps), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    (
        (SD3_SCHEDULE, (1, 0.857692, 0.602151, 0.0089286)),
        (FLUX_SCHEDULE, (1, 0.75, 0.5, 0.25)),  # schnell
        (DYNAMIC.for_patches(4096), (1, 0.904531, 0.759511, 0.512844)),  # dev, 1024 pixels
    ),
)
def test_goldens(schedule, expected):
    steps = tables.steps(schedule, "flow_euler", 4)
    np.testing.assert_allclose(steps.sigma, expected, rtol=1e-5)
    columns = dict(zip(COLUMNS, steps.rows[:, 0].T, strict=True))
    np.testing.assert_allclose(columns["timestep"], 1000 * steps.sigma)
    np.testing.assert_allclose(columns["b0"], np.diff(steps.sigma, append=0.0))
    for name, value in {"input_scale": 1, "p": 0, "q": 1, "a": 1, "c": 0}.items():
        np.testing.assert_allclose(columns[name], value, atol=1e-15)
    assert steps.initial_scale == 1


# Walks

WALKED = {
    "SD3": SD3_SCHEDULE,
    "SD3-dynamic": replace(DYNAMIC, spacing="linspace").for_patches(600),
    "schnell": FLUX_SCHEDULE,
    "dev": DYNAMIC.for_patches(4096),
    "terminal": replace(SD3_SCHEDULE, shift_terminal=0.1),
}


def twice(values):
    """Repeat every value but the first, as Heun's scheduler does."""
    return torch.cat([values[:1], values[1:].repeat_interleave(2)])


def scheduler_of(name, schedule, num_steps):
    """Return diffusers' scheduler for a sampler, and the Euler scheduler at the same levels."""
    euler = euler_of(schedule, num_steps)
    if name == "flow_euler":
        return euler, euler
    if name == "flow_heun":
        scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=schedule.shift)
        scheduler.set_timesteps(num_steps)
        sigmas, timesteps = twice(euler.sigmas[:-1]), twice(euler.timesteps)
        if schedule == SD3_SCHEDULE:  # the others are not among its options
            torch.testing.assert_close(scheduler.sigmas[:-1], sigmas, rtol=0, atol=0)
            torch.testing.assert_close(scheduler.timesteps, timesteps, rtol=0, atol=0)
        scheduler.sigmas, scheduler.timesteps = torch.cat([sigmas, torch.zeros(1)]), timesteps
        return scheduler, euler
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True
    )
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas, scheduler.timesteps = euler.sigmas.double(), euler.timesteps
    return scheduler, euler


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 10, 28, 50])
@pytest.mark.parametrize("schedule", WALKED.values(), ids=list(WALKED))
@pytest.mark.parametrize("name", SD3_SCHEDULE.samplers)
def test_walks_are_diffusers(name, schedule, num_steps, monkeypatch):
    """Text to image, and image to image from the middle."""
    if schedule.shift_terminal is not None and num_steps == 1:
        return  # refused, see below
    steps = tables.steps(schedule, name, num_steps)
    per_step = METHODS[SAMPLERS[name].method].calls_per_step
    assert steps.calls == per_step * num_steps - (per_step - 1)
    latents, unit = np.random.default_rng(num_steps).normal(size=(2, WIDTH))
    noise = np.zeros((steps.calls, WIDTH))
    for begin in {0, 1, 2, num_steps // 2, num_steps - 1} & set(range(num_steps)):
        scheduler, euler = scheduler_of(name, schedule, num_steps)
        row = begin * per_step
        scheduler.set_begin_index(row)
        euler.set_begin_index(begin)
        pair = torch.from_numpy(np.stack([latents, unit])[:, None])
        theirs = euler.scale_noise(pair[0], euler.timesteps[begin : begin + 1], pair[1])[0]
        ours = steps.signal[row] * latents + steps.sigma[row] * unit
        walked = walk_diffusers(monkeypatch, scheduler, theirs, noise, begin=row)
        assert_same_walk(walk_table(steps, ours, noise, row), walked)


@pytest.mark.parametrize(
    "pipeline", [diffusers.StableDiffusion3Img2ImgPipeline, diffusers.FluxImg2ImgPipeline]
)
@pytest.mark.parametrize("name", ["flow_euler", "flow_heun"])
def test_start_row_is_diffusers_get_timesteps(name, pipeline):
    for num_steps in range(1, 51):
        scheduler, _ = scheduler_of(name, SD3_SCHEDULE, num_steps)
        for strength in (0.01, 0.1, 0.29, 0.3, 0.5, 0.57, 0.6, 0.75, 0.8, 0.9, 0.99, 1, 1.0):
            given = SimpleNamespace(scheduler=scheduler)
            timesteps, _ = pipeline.get_timesteps(given, num_steps, strength, "cpu")
            start = tables.start_row(name, num_steps, strength)
            assert start == scheduler.begin_index == len(scheduler.timesteps) - len(timesteps)


def test_a_fraction_of_a_step_is_made():
    """It is left out in β schedules, where nothing may be left."""
    assert tables.start_row("flow_euler", 7, 0.6) == 2
    assert tables.start_row("euler", 7, 0.6) == 3
    assert tables.start_row("flow_heun", 7, 0.6) == 4
    for strength in (0.05, 1e-17):
        assert tables.start_row("flow_euler", 10, strength) == 9
    with pytest.raises(ConfigError, match=r"at least 1, or nothing is left to denoise\. Received"):
        tables.start_row("euler", 10, 0.05)


# Packed


def test_samplers_of_a_flow():
    """The ones that a flow schedule can do are packed; the others have no number."""
    packed = pack(SD3_SCHEDULE, 6)
    assert tuple(packed.numbers) == ("flow_euler", "flow_heun", "flow_dpmpp_2m")
    assert packed.calls_by_sampler()["flow_heun"] == [1, 3, 5, 7, 9, 11]
    for name, number in packed.numbers.items():
        for count in range(1, 7):
            steps = tables.steps(SD3_SCHEDULE, name, count)
            first = packed.starts[number, count - 1]
            rows = packed.rows[first : first + steps.calls]
            assert packed.calls[number, count - 1] == steps.calls
            np.testing.assert_array_equal(rows, steps.rows.astype("float32"))
            assert np.isfinite(rows).all()


@pytest.mark.parametrize("terminal", [None, 0.1])
def test_all_sizes_have_the_same_runs(terminal):
    schedule = replace(DYNAMIC, shift_terminal=terminal)
    small, large = (pack(schedule.for_patches(patches), 5) for patches in (256, 4096))
    for field in ("starts", "calls", "scales"):
        np.testing.assert_array_equal(getattr(small, field), getattr(large, field))
    assert small.rows.shape == large.rows.shape and not np.array_equal(small.rows, large.rows)
    fewest = 1 if terminal is None else 0
    assert small.calls_by_sampler()["flow_euler"] == [fewest, 2, 3, 4, 5]


def test_one_shift_is_for_all_sizes():
    assert SD3_SCHEDULE.for_patches(600) is SD3_SCHEDULE
    assert SD3_SCHEDULE.shift_here == 3
    resolved = DYNAMIC.for_patches(256)
    np.testing.assert_allclose(resolved.shift_here, np.exp(0.5))
    assert resolved.for_patches(4096) == DYNAMIC.for_patches(4096) != resolved


# Refused


@pytest.mark.parametrize(
    ("change", "sampler", "message"),
    (
        (
            {},
            "ddim",
            r"The scheduler of a flow schedule is one of flow_euler, flow_heun, flow_dpmpp_2m\. "
            r"Received: 'ddim'$",
        ),
        ({}, "unipc", r"one of flow_euler, flow_heun, flow_dpmpp_2m\. Received: 'unipc'"),
        ({"prediction": "epsilon"}, "flow_heun", r"the prediction flow\. Received: 'epsilon'"),
        ({"kind": "vp"}, "flow_heun", r"Unknown kind of schedule 'vp'\. Known: beta, flow\."),
        ({"spacing": "leading"}, "flow_heun", r"flow schedule 'leading'\. Known: linspace, trail"),
        ({"shift": 0.0}, "flow_euler", r"A flow's shift must be above 0\. Received: 0\.0"),
        ({"shift_terminal": 1.0}, "flow_euler", r"above 0 and below 1\. Received: 1\.0"),
        (
            {"dynamic_shift": DynamicShift()},
            "flow_euler",
            r"depends on the pictures' size\. Choose the size first, with schedule\.for_patches",
        ),
    ),
)
def test_what_a_flow_does_not_honour_is_refused(change, sampler, message):
    schedule = replace(SD3_SCHEDULE, **change, sampler=sampler)
    with pytest.raises(ConfigError, match=message):
        tables.steps(schedule, sampler, 4)
    with pytest.raises(ConfigError, match=message):
        pack(schedule, 4)


def test_a_flow_does_not_honour_karras(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "wrong", SamplerSpec("dpmpp_2m", "flow", karras=True))
    with pytest.raises(ConfigError, match=r"'wrong' .* a flow schedule does not honour Karras\."):
        tables.steps(SD3_SCHEDULE, "wrong", 4)


def test_a_beta_schedule_refuses_the_samplers_of_a_flow():
    message = r"scheduler of a beta schedule is one of ddim, .*, kerascv-2022\. Received: 'flow_"
    for name in SD3_SCHEDULE.samplers:
        with pytest.raises(ConfigError, match=message) as raised:
            tables.steps(SD_SCHEDULE, name, 4)
        assert str(raised.value).count("flow_") == 1
    assert not set(pack(SD_SCHEDULE, 4).numbers) & set(SD3_SCHEDULE.samplers)


def test_one_step_cannot_be_stretched():
    """diffusers divides zero by zero."""
    schedule = replace(SD3_SCHEDULE, shift_terminal=0.1)
    with pytest.raises(ConfigError, match=r"takes at least 2 steps.* Received: num_steps=1"):
        tables.steps(schedule, "flow_euler", 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        assert euler_of(schedule, 1).sigmas[0].isnan()
    with pytest.raises(ConfigError, match=r"max_steps must be at least 2 .*flow_euler.*eived: 1"):
        pack(schedule, 1)
    assert pack(schedule, 2).calls_by_sampler()["flow_euler"] == [0, 2]


def test_a_dynamic_shift_lies_between_two_sizes():
    with pytest.raises(ConfigError, match=r"base_patches below max_patches\. .*: 256 and 256"):
        DynamicShift(max_patches=256)


def test_a_flow_has_no_abar():
    with pytest.raises(ConfigError, match=r"Only a beta schedule has ᾱ\. Received: a flow sched"):
        abar(SD3_SCHEDULE)
    with pytest.raises(ConfigError, match=r"A beta .* epsilon or v_prediction\. Received: 'flow'"):
        tables.steps(replace(SD_SCHEDULE, prediction="flow"), "ddim", 4)
