"""Walk sampler tables and diffusers' schedulers around one synthetic model, to compare them.

The model is a fixed linear map of its input plus a sinusoid in the timestep, so that no two calls
agree and every entry of the history shows in the result.
"""

import sys

import numpy as np
import torch

from sd_tf.sampling.rows import HISTORY, VARIANTS

WIDTH = 8

_rng = np.random.default_rng(0)
MIX, PHASE = 0.15 * _rng.normal(size=(WIDTH, WIDTH)), _rng.normal(size=WIDTH)


def model(x, t):
    return MIX @ x + np.sin(t / 150 + PHASE)


def walk_diffusers(monkeypatch, scheduler, x, noise, model=model, begin=0, **step_options):
    """Return x before every call and after the last, from x at the row `begin`.

    `step_options` maps an argument of `scheduler.step` to its value at the k-th call.
    """
    fresh = (torch.from_numpy(row)[None] for row in noise)
    module = sys.modules[type(scheduler).__module__]
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(fresh))
    x = torch.as_tensor(x)[None]  # a batch of one
    walked = [x]
    for k, t in enumerate(scheduler.timesteps[begin:]):
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        prediction = torch.from_numpy(model(scaled[0].double().numpy(), float(t)))[None]
        options = {name: at(k) for name, at in step_options.items()}
        x = scheduler.step(prediction, t, x, **options).prev_sample
        walked.append(x)
    return torch.cat(walked).double().numpy()


def walk_table(steps, x, noise, begin=0, model=model):
    """Walk a table as the compiled loop does, in float64, from x at the row `begin`."""
    history = np.zeros((HISTORY, *x.shape))
    walked = [x]
    for k, i in enumerate(range(begin, steps.calls)):
        timestep, input_scale, p, q, a, *b, c = steps.rows[i, min(k, VARIANTS - 1)]
        m = p * x + q * model(input_scale * x, timestep)
        history = np.concatenate([m[None], history[:-1]])
        x = a * x + np.tensordot(b, history, 1) + c * noise[k]
        walked.append(x)
    return np.array(walked)


def assert_same_walk(ours, theirs):
    scale = np.abs(theirs).max(axis=1, keepdims=True)
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=1e-5)
