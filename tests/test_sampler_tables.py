"""Every table walked beside its original: diffusers' own schedulers, KerasCV's own loop."""

from dataclasses import replace
from types import SimpleNamespace

import diffusers
import keras_cv
import numpy as np
import pytest
import torch

from sd_tf.config import SAMPLERS, ConfigError, SamplerSpec
from sd_tf.config.families import SD3_SCHEDULE, SD_SCHEDULE
from sd_tf.sampling import rows, tables
from sd_tf.sampling.methods import METHODS
from sd_tf.sampling.schedules import abar
from tests.walks import WIDTH, assert_same_walk, model, walk_diffusers, walk_table

MULTISTEP = diffusers.DPMSolverMultistepScheduler
DIFFUSERS = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}),
    "pndm": (diffusers.PNDMScheduler, {"skip_prk_steps": True}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler_ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {}),
    "dpmpp_2m": (MULTISTEP, {}),
    "dpmpp_2m_sde": (MULTISTEP, {"algorithm_type": "sde-dpmsolver++"}),
    "unipc": (diffusers.UniPCMultistepScheduler, {}),
    "lms": (diffusers.LMSDiscreteScheduler, {}),
    "lcm": (diffusers.LCMScheduler, {}),
}
SHARED = [name for name in SD_SCHEDULE.samplers if SAMPLERS[name].method in DIFFUSERS]
PREDICTIONS = ("epsilon", "v_prediction")
STEP_COUNTS = (1, 2, 3, 4, 5, 10, 20, 25, 30, 45, 50, 100)
# np.arange(1000, 0, -1000 / N) has N + 1 elements here, the last of them rounding to timestep -1.
OVERLONG_TRAILING = (61, 103, 121, 122)


def accepted(name, num_steps):
    return name != "lcm" or num_steps <= 50


def scheduler_for(spec, schedule=SD_SCHEDULE):
    make, options = DIFFUSERS[spec.method]
    if spec.method in ("ddim", "pndm"):
        options = {**options, "set_alpha_to_one": schedule.set_alpha_to_one}
    if spec.karras:
        options = {**options, "use_karras_sigmas": True}
    return make(
        beta_start=schedule.beta_start,
        beta_end=schedule.beta_end,
        beta_schedule=schedule.beta_schedule,
        prediction_type=schedule.prediction,
        steps_offset=schedule.steps_offset,
        timestep_spacing=spec.spacing,
        **options,
    )


def starts(steps, scheduler, num_steps, seed, begin=None):
    """Return both walks' first x and the noise of every row.

    `begin` None: text-to-image, from scaled noise; else image-to-image from that row.
    """
    scheduler.set_timesteps(num_steps)
    rng = np.random.default_rng(seed)
    unit, latents = rng.normal(size=(2, WIDTH))
    noise = rng.normal(size=(steps.calls + 1, WIDTH))
    if begin is None:
        return unit * steps.initial_scale, unit * float(scheduler.init_noise_sigma), noise
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    pair = torch.from_numpy(np.stack([latents, unit])[:, None])
    theirs = scheduler.add_noise(*pair, scheduler.timesteps[begin : begin + 1])[0]
    return steps.signal[begin] * latents + steps.sigma[begin] * unit, theirs, noise


def check_walk(monkeypatch, name, schedule, num_steps, begin=None):
    spec = SAMPLERS[name]
    scheduler = scheduler_for(spec, schedule)
    steps = tables.steps(schedule, name, num_steps)
    x, their_x, noise = starts(steps, scheduler, num_steps, num_steps, begin)
    # Left alone, diffusers' LMS takes its order from the row, not from the history it has.
    options = {"order": lambda k: min(k + 1, 4)} if spec.method == "lms" else {}
    theirs = walk_diffusers(monkeypatch, scheduler, their_x, noise, begin=begin or 0, **options)
    assert_same_walk(walk_table(steps, x, noise, begin or 0), theirs)


@pytest.mark.parametrize("num_steps", STEP_COUNTS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SHARED)
def test_text_to_image_is_diffusers(name, prediction, num_steps, monkeypatch):
    schedule = replace(SD_SCHEDULE, prediction=prediction)
    if accepted(name, num_steps):
        check_walk(monkeypatch, name, schedule, num_steps)
        return
    with pytest.raises(ValueError, match=r"cannot be larger|is smaller than"):
        scheduler_for(SAMPLERS[name]).set_timesteps(num_steps)
    with pytest.raises(ConfigError, match=r"lcm takes at most 50 steps.*num_steps=100"):
        tables.steps(schedule, name, num_steps)


@pytest.mark.parametrize("num_steps", (2, 3, 5, 10, 25, 50))
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SHARED)
def test_image_to_image_is_diffusers(name, prediction, num_steps, monkeypatch):
    schedule = replace(SD_SCHEDULE, prediction=prediction)
    calls_per_step = METHODS[SAMPLERS[name].method].calls_per_step
    for begin in {0, 1, 2, 3, num_steps // 2, num_steps - 1} & set(range(num_steps)):
        check_walk(monkeypatch, name, schedule, num_steps, begin * calls_per_step)


UNNAMED = [
    (method, spacing, karras)
    for method, rule in METHODS.items()
    if method in DIFFUSERS
    for spacing in rule.spacings
    if spacing != "flow"
    for karras in (False, True)[: 1 + rule.karras]
    if SamplerSpec(method, spacing, karras) not in SAMPLERS.values()
]


@pytest.mark.parametrize(("method", "spacing", "karras"), UNNAMED)
def test_what_a_method_honours_is_diffusers_without_a_name_too(
    method, spacing, karras, monkeypatch
):
    monkeypatch.setitem(SAMPLERS, "unnamed", SamplerSpec(method, spacing, karras))
    for num_steps in (1, 2, 5, 20, 50):
        check_walk(monkeypatch, "unnamed", SD_SCHEDULE, num_steps)
    check_walk(monkeypatch, "unnamed", SD_SCHEDULE, 10, begin=4)


@pytest.mark.parametrize(
    "change",
    (
        {"beta_schedule": "linear"},
        {"steps_offset": 0},
        {"set_alpha_to_one": True},
        {"steps_offset": 0, "set_alpha_to_one": True},
        {"beta_start": 0.0001, "beta_end": 0.02},
    ),
    ids=str,
)
@pytest.mark.parametrize("name", SHARED)
def test_other_schedules_are_diffusers(name, change, monkeypatch):
    for num_steps in (4, 30):
        check_walk(monkeypatch, name, replace(SD_SCHEDULE, **change), num_steps)


@pytest.mark.parametrize("name", SHARED)
def test_every_step_count_visits_diffusers_timesteps(name):
    scheduler = scheduler_for(SAMPLERS[name])
    for num_steps in filter(lambda n: accepted(name, n), range(1, 151)):
        scheduler.set_timesteps(num_steps)
        theirs = scheduler.timesteps.double().numpy()
        if SAMPLERS[name].spacing == "trailing" and num_steps in OVERLONG_TRAILING:
            assert theirs[-1] == -1
            theirs = theirs[:-1]
        steps = tables.steps(SD_SCHEDULE, name, num_steps)
        np.testing.assert_allclose(steps.rows[:, 0, 0], theirs, rtol=1e-7, atol=0)
        np.testing.assert_allclose(steps.initial_scale, scheduler.init_noise_sigma, rtol=1e-6)


@pytest.mark.parametrize("begin", (5, 10, 15))
def test_lms_from_the_middle_rises_in_order(begin, monkeypatch):
    """For Gaussian data of variance s², x(σ) = x √(s² + σ²) / √(s² + σ_begin²) exactly."""
    variance, training_sigmas = 0.25, np.sqrt(1 / abar(SD_SCHEDULE) - 1)

    def gaussian(x, t):
        sigma = np.interp(t, np.arange(1000), training_sigmas)
        return sigma * np.sqrt(sigma**2 + 1) * x / (variance + sigma**2)

    steps = tables.steps(SD_SCHEDULE, "lms", 20)
    x, noise = np.full(WIDTH, 1 + steps.sigma[begin]), np.zeros((21, WIDTH))
    walked = walk_table(steps, x, noise, begin, gaussian)
    exact = x * np.sqrt(variance / (variance + steps.sigma[begin] ** 2))
    np.testing.assert_allclose(walked[-1], exact, rtol=0.01)
    scheduler = scheduler_for(SAMPLERS["lms"])
    scheduler.set_timesteps(20)
    scheduler.set_begin_index(begin)
    theirs = walk_diffusers(monkeypatch, scheduler, x, noise, gaussian, begin)
    assert np.all(np.abs(theirs[-1] / exact - 1) > 0.05)


@pytest.mark.parametrize("name", ["ddim", "heun"])
def test_start_row_is_diffusers_get_timesteps(name):
    img2img = diffusers.StableDiffusionImg2ImgPipeline
    for num_steps in STEP_COUNTS:
        scheduler = scheduler_for(SAMPLERS[name])
        scheduler.set_timesteps(num_steps)
        for strength in (0.1, 0.29, 0.3, 0.5, 0.57, 0.75, 0.8, 0.99, 1, 1.0):
            if int(num_steps * strength) >= 1:
                pipeline = SimpleNamespace(scheduler=scheduler)
                timesteps, _ = img2img.get_timesteps(pipeline, num_steps, strength, "cpu")
                skipped = len(scheduler.timesteps) - len(timesteps)
                assert tables.start_row(name, num_steps, strength) == skipped


def test_heun_corrects_no_step_that_was_not_made():
    """Its odd rows leave the sample alone when a walk starts there."""
    steps = tables.steps(SD_SCHEDULE, "heun", 10)
    assert steps.calls == 19
    columns = [rows.COLUMNS.index(name) for name in ("a", "b0", "b1", "c")]
    assert np.all(steps.rows[1::2, 0, columns] == [1, 0, 0, 0])
    np.testing.assert_array_equal(steps.sigma[1::2], steps.sigma[2::2])


# KerasCV


class KerasCV:
    """keras_cv's own pipeline around the synthetic model, in float32, without weights."""

    def __init__(self):
        self.pipeline = keras_cv.models.StableDiffusion(128, 128, jit_compile=False)
        self.pipeline._diffusion_model = SimpleNamespace(predict_on_batch=self.predict)
        self.pipeline._decoder = SimpleNamespace(predict_on_batch=self.decode)
        self.pipeline._get_unconditional_context = lambda: np.full((1, 77, 768), -0.5, "float32")
        self.context = np.full((1, 77, 768), 0.5, "float32")

    def predict(self, inputs):
        latent, embedding = np.asarray(inputs["latent"]), np.asarray(inputs["timestep_embedding"])
        steering = 0.1 * inputs["context"][0, 0, 0] * np.roll(latent, 1, axis=-2)
        return 0.2 * latent[..., ::-1] + embedding[0, ::80] + steering

    def decode(self, latent):
        self.latent = np.asarray(latent)
        return self.latent

    def guided(self, scale):
        """The same model as the table's loop sees it: (x, t) → raw output after guidance."""

        def model(x, t):
            embedding = self.pipeline._get_timestep_embedding(t, 1)
            unconditional, conditional = (
                self.predict({"latent": x, "timestep_embedding": embedding, "context": context})
                for context in (self.pipeline._get_unconditional_context(), self.context)
            )
            return unconditional + scale * (conditional - unconditional)

        return model


@pytest.fixture(scope="module")
def kerascv():
    return KerasCV()


@pytest.mark.parametrize("num_steps", STEP_COUNTS)
def test_kerascv_is_its_own_loop(num_steps, kerascv):
    noise = np.random.default_rng(num_steps).normal(size=(1, 16, 16, 4))
    kerascv.pipeline.generate_image(
        kerascv.context,
        num_steps=num_steps,
        unconditional_guidance_scale=7.5,
        diffusion_noise=noise.astype("float32"),
    )
    steps = tables.steps(SD_SCHEDULE, "kerascv", num_steps)
    ours = walk_table(steps, noise, np.zeros(num_steps), model=kerascv.guided(7.5))[-1]
    scale = np.abs(kerascv.latent).max()
    np.testing.assert_allclose(ours / scale, kerascv.latent / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_steps", STEP_COUNTS)
def test_kerascv_2022_pairs_every_alpha_with_its_own_predecessor(num_steps, kerascv):
    """The loop of 2022 and 2023, on the alphas of today's: they differ in the timesteps alone."""
    timesteps = np.arange(1, 1000, 1000 // num_steps)
    alphas, alphas_prev = kerascv.pipeline._get_initial_alphas(timesteps)
    start = x = np.random.default_rng(1).normal(size=WIDTH)
    for t, a_t, a_prev in list(zip(timesteps, alphas, alphas_prev, strict=True))[::-1]:
        eps = model(x, t)
        x = (
            np.sqrt(a_prev) * (x - np.sqrt(1 - a_t) * eps) / np.sqrt(a_t)
            + np.sqrt(1 - a_prev) * eps
        )
    steps = tables.steps(SD_SCHEDULE, "kerascv-2022", num_steps)
    assert steps.calls == len(timesteps)
    ours = walk_table(steps, start, np.zeros(steps.calls))[-1]
    np.testing.assert_allclose(ours, x, rtol=0, atol=1e-5 * np.abs(x).max())


# Goldens and shape


@pytest.mark.parametrize(
    ("num_steps", "timesteps", "sigmas", "initial_scale"),
    (
        (25, (961, 921, 881), (11.6760, 9.3381), 11.7188),
        (20, (951, 901, 851), (11.0283,), 11.0736),
    ),
)
def test_euler_leading(num_steps, timesteps, sigmas, initial_scale):
    steps = tables.steps(SD_SCHEDULE, "euler", num_steps)
    assert tuple(steps.rows[: len(timesteps), 0, 0]) == timesteps
    assert steps.rows[-1, 0, 0] == 1
    np.testing.assert_allclose(steps.sigma[: len(sigmas)], sigmas, rtol=1e-5)
    np.testing.assert_allclose(steps.sigma[-1], 0.0413, atol=5e-5)
    np.testing.assert_allclose(steps.initial_scale, initial_scale, atol=5e-5)
    assert np.all(steps.signal == 1)


@pytest.mark.parametrize(
    ("num_steps", "first", "calls"),
    ((50, 981, 50), (25, 961, 25), (10, 901, 10), (30, 991, 31), (45, 991, 46)),
)
def test_kerascv_2022_timesteps(num_steps, first, calls):
    steps = tables.steps(SD_SCHEDULE, "kerascv-2022", num_steps)
    assert steps.calls == calls
    assert (steps.rows[0, 0, 0], steps.rows[-1, 0, 0]) == (first, 1)
    assert steps.initial_scale == 1


def test_kerascv_timesteps():
    assert tuple(tables.steps(SD_SCHEDULE, "kerascv", 4).rows[:, 0, 0]) == (999, 666, 333, 0)
    assert tuple(tables.steps(SD_SCHEDULE, "kerascv", 1).rows[:, 0, 0]) == (0,)


def test_pndm_visits_its_second_timestep_twice():
    steps = tables.steps(SD_SCHEDULE, "pndm", 50)
    assert steps.calls == 51
    assert tuple(steps.rows[[0, 1, 2, 3, -2, -1], 0, 0]) == (981, 961, 961, 941, 21, 1)


@pytest.mark.parametrize("name", SAMPLERS)
def test_tables_are_finite_float64_of_one_shape(name):
    schedule = SD3_SCHEDULE if SAMPLERS[name].is_flow else SD_SCHEDULE
    for num_steps in (1, 2, 3, 7, 50):
        steps = tables.steps(schedule, name, num_steps)
        assert steps.rows.shape == (steps.calls, rows.VARIANTS, len(rows.COLUMNS))
        assert steps.rows.dtype == np.float64 and np.isfinite(steps.rows).all()
        assert steps.signal.shape == steps.sigma.shape == (steps.calls,)
        # Only the history's use depends on the variant, and the last row draws no noise.
        shared = [rows.COLUMNS.index(c) for c in ("timestep", "input_scale", "p", "q", "c")]
        assert np.all(steps.rows[:, :, shared] == steps.rows[:, :1, shared])
        assert np.all(steps.rows[-1, :, -1] == 0)


# Errors


def test_errors_state_the_rule_and_what_came():
    with pytest.raises(
        ConfigError, match=r"Unknown scheduler 'dpm_fast'\. Known: ddim, .*kerascv-2022"
    ):
        tables.steps(SD_SCHEDULE, "dpm_fast", 20)
    for num_steps in (0, -3, 2.5, 1000):
        with pytest.raises(
            ConfigError, match=rf"whole number, at least 1.* Received: {num_steps}$"
        ):
            tables.steps(SD_SCHEDULE, "ddim", num_steps)
    with pytest.raises(ConfigError, match=r"Unknown beta_schedule 'cosine'\. Known: linear, sc"):
        tables.steps(replace(SD_SCHEDULE, beta_schedule="cosine"), "ddim", 20)
    with pytest.raises(ConfigError, match=r"beta .* epsilon or v_prediction\. Received: 'sample'"):
        tables.steps(replace(SD_SCHEDULE, prediction="sample"), "ddim", 20)
    for strength in (0, -0.1, 1.01, float("nan")):
        with pytest.raises(ConfigError, match=rf"above 0 and at most 1\. Received: {strength}"):
            tables.start_row("ddim", 20, strength)
    with pytest.raises(ConfigError, match=r"at least 1,.* num_steps=10, strength=0\.05"):
        tables.start_row("ddim", 10, 0.05)


@pytest.mark.parametrize(
    ("spec", "message"),
    (
        (
            SamplerSpec("dpmpp_2m", "leading"),
            r"^The scheduler 'wrong' cannot be used: the method dpmpp_2m honours the spacing "
            r"linspace or flow, not leading\. Choose another\.$",
        ),
        (SamplerSpec("pndm", "trailing"), r"the method pndm honours the spacing leading, not tra"),
        (SamplerSpec("euler", karras=True), r"the method euler does not honour Karras\."),
        (SamplerSpec("dpm_fast"), r"Unknown method 'dpm_fast'\. Known: ddim"),
    ),
)
def test_what_a_method_does_not_honour_is_refused(spec, message, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "wrong", spec)
    with pytest.raises(ConfigError, match=message):
        tables.steps(SD_SCHEDULE, "wrong", 20)
