"""Noise from seeds, guidance and the loop, on both backends."""

import keras
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from keras import ops

from sd_tf.config import SAMPLERS, ScheduleConfig
from sd_tf.sampling import noise
from sd_tf.sampling.loop import denoise, empty_history, guide
from sd_tf.sampling.tables import steps

pytestmark = pytest.mark.backend


def words(*values):
    return ops.convert_to_tensor(np.array(values, "uint32"))


# Salmon et al.'s published known answers for threefry2x32 with 20 rounds: key, counter, result.
ALL_ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ALL_ONES, ALL_ONES), (ALL_ONES, ALL_ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN_ANSWERS)
def test_threefry_known_answers(key, counter, expected):
    result = noise.threefry(tuple(map(words, key)), tuple(map(words, counter)))
    assert tuple(int(np.asarray(word)[0]) for word in result) == expected


def test_threefry_is_jax_generator():
    """JAX's own generator, an independent implementation of the same function."""
    from jax.extend.random import threefry_2x32

    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype="uint32")
    counter = rng.integers(0, 2**32, (2, 50), dtype="uint32")
    ours = noise.threefry((words(key[0]), words(key[1])), (words(*counter[0]), words(*counter[1])))
    theirs = np.asarray(threefry_2x32(key, counter.reshape(-1)))
    np.testing.assert_array_equal(np.concatenate([np.asarray(word) for word in ours]), theirs)


def draw(seeds, stream=0, shape=(16, 16, 4)):
    return np.asarray(noise.normal(ops.convert_to_tensor(np.array(seeds, "int32")), stream, shape))


def test_noise_is_normal():
    x = draw(range(64)).astype("float64").reshape(-1)
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
    assert abs((x**3).mean()) < 0.05 and abs((x**4).mean() - 3) < 0.15
    assert 3.5 < np.abs(x).max() < 6
    for shift in (1, 2, 1024):
        assert abs(np.corrcoef(x[:-shift], x[shift:])[0, 1]) < 0.02


def test_one_seed_is_one_noise():
    """Whatever stands beside it; other seeds and streams are other noise."""
    alone, beside = draw([7]), draw([-1, 7, 2**31 - 1])
    np.testing.assert_array_equal(alone[0], beside[1])
    for other in (draw([8]), draw([-7]), draw([7], stream=1)):
        assert abs(np.corrcoef(alone.ravel(), other.ravel())[0, 1]) < 0.1


# What both backends have to give, to the last bits: seed 7, the first four numbers.
GOLDEN = [-0.04046418, -0.43626466, -0.32056665, 0.79902756]


def test_backends_agree():
    np.testing.assert_allclose(draw([7], shape=(64, 64, 4))[0, 0, 0], GOLDEN, rtol=1e-5)


def test_guidance_against_diffusers():
    rng = np.random.default_rng(1)
    u, c = rng.standard_normal((2, 3, 8, 8, 4)).astype("float32")
    for scale in (0.0, 1.0, 7.5):
        guided = torch.from_numpy(u + scale * (c - u))
        np.testing.assert_allclose(guide(u, c, scale), guided, rtol=1e-5, atol=1e-5)
        for rescale in (0.3, 1.0):
            theirs = rescale_noise_cfg(guided, torch.from_numpy(c), rescale)
            ours = guide(ops.convert_to_tensor(u), ops.convert_to_tensor(c), scale, rescale)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_loop_walks_the_table(sampler):
    """float32 and `while_loop` against NumPy in float64, with history and noise; whole and cut."""
    flow = {"kind": "flow", "prediction": "flow"} if SAMPLERS[sampler].is_flow else {}
    run = steps(ScheduleConfig(**flow), sampler, 7)
    rng = np.random.default_rng(2)
    matrix = rng.standard_normal((4, 4)) * 0.3
    start = rng.standard_normal((1, 2, 2, 4)) * run.initial_scale
    seeds = ops.convert_to_tensor(np.array([5], "int32"))

    x, past = start.copy(), np.zeros((5, *start.shape))
    for i in range(run.calls):
        row = run.rows[i, min(i, run.rows.shape[1] - 1)]
        t, scale, p, q, a, *b, c = row
        kept = p * x + q * (scale * x @ matrix + np.sin(t))
        past = np.concatenate([kept[None], past[:-1]])
        x = a * x + np.tensordot(b, past, 1) + c * draw([5], i + 1, (2, 2, 4))

    table = ops.convert_to_tensor(run.rows.astype("float32"))

    def rows(i, variant):
        return ops.take(ops.take(table, i, axis=0), variant, axis=0)

    def predict(sample, timestep, call):
        product = ops.matmul(sample, ops.convert_to_tensor(matrix.astype("float32")))
        return (product + ops.sin(timestep),)

    ours = ops.convert_to_tensor(start.astype("float32"))
    history = empty_history(ours)
    for first, last in ((0, 2), (2, 3), (3, run.calls)):
        ours, history = denoise(predict, rows, ours, history, (), 0, first, last, seeds)
    error = np.abs(keras.ops.convert_to_numpy(ours) - x).max()
    assert error <= 1e-4 * np.abs(x).max()
