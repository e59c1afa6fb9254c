"""Every table walked beside what it stands for: diffusers' own schedulers, KerasCV's own loop.

The model is synthetic: a fixed linear map of its input plus a sinusoid in the timestep, so that no
two calls agree and every entry of the history shows in the result.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import keras_cv
import numpy as np
import pytest
import torch
from keras_cv.src.models.stable_diffusion import constants as kerascv_constants

from sd_tf.config import SAMPLERS, SD_SCHEDULE, ConfigError
from sd_tf.sampling import tables

DIFFUSERS = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}),
    "pndm": (diffusers.PNDMScheduler, {"skip_prk_steps": True}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler_ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {}),
    "lms": (diffusers.LMSDiscreteScheduler, {}),
    "lcm": (diffusers.LCMScheduler, {}),
}
SHARED = [name for name, spec in SAMPLERS.items() if spec.method in DIFFUSERS]
PREDICTIONS = ("epsilon", "v_prediction")
STEP_COUNTS = (1, 2, 3, 4, 5, 10, 20, 25, 30, 45, 50, 100)
WIDTH = 8
# np.arange(1000, 0, -1000 / N) has N + 1 elements here, the last of them rounding to timestep -1.
OVERLONG_TRAILING = (61, 103, 121, 122)

_rng = np.random.default_rng(0)
MIX, PHASE = 0.15 * _rng.normal(size=(WIDTH, WIDTH)), _rng.normal(size=WIDTH)


def model(x, t):
    return MIX @ x + np.sin(t / 150 + PHASE)


def accepted(name, num_steps):
    return name != "lcm" or num_steps <= 50


def scheduler_for(name, schedule=SD_SCHEDULE):
    spec = SAMPLERS[name]
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


def walk_diffusers(monkeypatch, name, scheduler, num_steps, x, noise, begin=None, model=model):
    """x before every call and after the last. `begin` None: text-to-image, x is unit noise;
    else image-to-image from that row, x is (latents, unit noise)."""
    scheduler.set_timesteps(num_steps)
    timesteps = scheduler.timesteps[begin:]
    x = torch.from_numpy(np.asarray(x))[..., None, :]  # a batch of one
    if begin is None:
        x = x * scheduler.init_noise_sigma
    else:
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
        x = scheduler.add_noise(x[0], x[1], timesteps[:1])
    fresh = (torch.from_numpy(row)[None] for row in noise)
    module = sys.modules[type(scheduler).__module__]
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(fresh))
    walked = [x]
    for k, t in enumerate(timesteps):
        model_input = scheduler.scale_model_input(x, t)[0].double().numpy()
        # Left alone, diffusers' LMS takes its order from the row, not from the history it has.
        order = {"order": min(k + 1, 4)} if SAMPLERS[name].method == "lms" else {}
        prediction = torch.from_numpy(model(model_input, float(t)))[None]
        x = scheduler.step(prediction, t, x, **order).prev_sample
        walked.append(x)
    return torch.cat(walked).double().numpy()


def walk_table(steps, x, noise, begin=None, model=model):
    """The loop that the table is for, in float64."""
    start = 0 if begin is None else begin
    if begin is None:
        x = steps.initial_scale * x
    else:
        x = steps.signal[start] * x[0] + steps.sigma[start] * x[1]
    history = np.zeros((tables.HISTORY, *x.shape))
    walked = [x]
    for k, i in enumerate(range(start, steps.calls)):
        timestep, input_scale, p, q, a, *b, c = steps.rows[i, min(k, tables.VARIANTS - 1)]
        m = p * x + q * model(input_scale * x, timestep)
        history = np.concatenate([m[None], history[:-1]])
        x = a * x + np.tensordot(b, history, 1) + c * noise[k]
        walked.append(x)
    return np.array(walked)


def check_walk(monkeypatch, name, schedule, num_steps, begin=None):
    rng = np.random.default_rng(num_steps)
    noise = rng.normal(size=(num_steps + 1, WIDTH))
    x = rng.normal(size=(WIDTH,) if begin is None else (2, WIDTH))
    scheduler = scheduler_for(name, schedule)
    theirs = walk_diffusers(monkeypatch, name, scheduler, num_steps, x, noise, begin)
    ours = walk_table(tables.steps(schedule, name, num_steps), x, noise, begin)
    scale = np.abs(theirs).max(axis=1, keepdims=True)
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_steps", STEP_COUNTS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SHARED)
def test_text_to_image_is_diffusers(name, prediction, num_steps, monkeypatch):
    schedule = replace(SD_SCHEDULE, prediction=prediction)
    if accepted(name, num_steps):
        check_walk(monkeypatch, name, schedule, num_steps)
        return
    with pytest.raises(ValueError, match=r"cannot be larger|is smaller than"):
        scheduler_for(name).set_timesteps(num_steps)
    with pytest.raises(ConfigError, match=r"lcm takes at most 50 steps.*num_steps=100"):
        tables.steps(schedule, name, num_steps)


@pytest.mark.parametrize("num_steps", (2, 3, 5, 10, 25, 50))
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SHARED)
def test_image_to_image_is_diffusers(name, prediction, num_steps, monkeypatch):
    schedule = replace(SD_SCHEDULE, prediction=prediction)
    for begin in {0, 1, 2, 3, num_steps // 2, num_steps - 1} & set(range(num_steps)):
        check_walk(monkeypatch, name, schedule, num_steps, begin)


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
    scheduler = scheduler_for(name)
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
    variance, training_sigmas = 0.25, np.sqrt(1 / tables.abar(SD_SCHEDULE) - 1)

    def gaussian(x, t):
        sigma = np.interp(t, np.arange(1000), training_sigmas)
        return sigma * np.sqrt(sigma**2 + 1) * x / (variance + sigma**2)

    steps = tables.steps(SD_SCHEDULE, "lms", 20)
    x, noise = np.ones((2, WIDTH)), np.zeros((21, WIDTH))
    walked = walk_table(steps, x, noise, begin, gaussian)
    exact = walked[0] * np.sqrt(variance / (variance + steps.sigma[begin] ** 2))
    np.testing.assert_allclose(walked[-1], exact, rtol=0.01)
    scheduler = scheduler_for("lms")
    # Any other name than an LMS sampler's leaves diffusers' order alone.
    theirs = walk_diffusers(monkeypatch, "euler", scheduler, 20, x, noise, begin, gaussian)
    assert np.all(np.abs(theirs[-1] / exact - 1) > 0.05)


def test_start_row_is_diffusers_get_timesteps():
    img2img = diffusers.StableDiffusionImg2ImgPipeline
    for num_steps in STEP_COUNTS:
        scheduler = scheduler_for("ddim")
        scheduler.set_timesteps(num_steps)
        for strength in (0.1, 0.29, 0.3, 0.5, 0.57, 0.75, 0.8, 0.99, 1, 1.0):
            if int(num_steps * strength) >= 1:
                pipeline = SimpleNamespace(scheduler=scheduler)
                timesteps, left = img2img.get_timesteps(pipeline, num_steps, strength, "cpu")
                assert len(timesteps) == left
                assert tables.start_row(num_steps, strength) == num_steps - left


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


def test_noise_schedule():
    abar = tables.abar(SD_SCHEDULE)
    assert abar.shape == (1000,) and abar.dtype == np.float64
    np.testing.assert_allclose(abar[[0, 999]], [0.99915, 0.00466010], rtol=2e-6)
    np.testing.assert_allclose(abar, kerascv_constants._ALPHAS_CUMPROD, rtol=1e-5)


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
    for num_steps in (1, 2, 3, 7, 50):
        steps = tables.steps(SD_SCHEDULE, name, num_steps)
        assert steps.rows.shape == (steps.calls, tables.VARIANTS, len(tables.COLUMNS))
        assert steps.rows.dtype == np.float64 and np.isfinite(steps.rows).all()
        assert steps.signal.shape == steps.sigma.shape == (steps.calls,)
        # Only the history's use depends on the variant, and the last row draws no noise.
        shared = [tables.COLUMNS.index(c) for c in ("timestep", "input_scale", "p", "q", "c")]
        assert np.all(steps.rows[:, :, shared] == steps.rows[:, :1, shared])
        assert np.all(steps.rows[-1, :, -1] == 0)


# Errors


def test_errors_state_the_rule_and_what_came():
    with pytest.raises(
        ConfigError, match=r"Unknown scheduler 'heun'\. Known: ddim, .*kerascv-2022"
    ):
        tables.steps(SD_SCHEDULE, "heun", 20)
    for num_steps in (0, -3, 2.5, 1000):
        with pytest.raises(
            ConfigError, match=rf"whole number, at least 1.* Received: {num_steps}$"
        ):
            tables.steps(SD_SCHEDULE, "ddim", num_steps)
    with pytest.raises(ConfigError, match=r"Unknown beta_schedule 'cosine'\. Known: linear, sc"):
        tables.steps(replace(SD_SCHEDULE, beta_schedule="cosine"), "ddim", 20)
    with pytest.raises(ConfigError, match=r"Unknown prediction 'sample'\. Known: epsilon, v_"):
        tables.steps(replace(SD_SCHEDULE, prediction="sample"), "ddim", 20)
    for strength in (0, -0.1, 1.01, float("nan")):
        with pytest.raises(ConfigError, match=rf"above 0 and at most 1\. Received: {strength}"):
            tables.start_row(20, strength)
    with pytest.raises(ConfigError, match=r"at least 1,.* num_steps=10, strength=0\.05"):
        tables.start_row(10, 0.05)
