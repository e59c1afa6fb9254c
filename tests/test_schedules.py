"""Noise levels of β schedules, and the predictions at a level."""

import diffusers
import numpy as np
import pytest
import torch
from keras_cv.src.models.stable_diffusion import constants as kerascv_constants

from sd_tf.config.families import SD_SCHEDULE
from sd_tf.sampling.schedules import Level, abar, convert, level_at
from tests.walks import WIDTH


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
