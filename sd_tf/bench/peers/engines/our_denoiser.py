"""Our transformer as exports have it, in TensorFlow, or on JAX with the target's rewrites."""

import os

import keras
import numpy as np

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.engine import CALL, Job, Loaded, Stage
from sd_tf.config.rewrites import TARGETS, in_saved_models
from sd_tf.models.lowering import lowered
from sd_tf.runtime.graph_kernels import KEEPS_WEIGHTS
from sd_tf.weights import open_checkpoint


def load(job: Job) -> Loaded:
    given = npz.read(job.inputs)
    counts = tuple(given.pop("counts").tolist())
    more = {"counts": counts} if max(counts) > 1 else {}
    checkpoint = open_checkpoint(job.checkpoint)
    model = checkpoint.build(checkpoint.config.denoiser.component, job.precision)
    names = list(given)

    def predict(model, *values):
        return model(**dict(zip(names, values, strict=True)), **more)

    run = _compiled(model, predict, job)
    return Loaded({CALL: Stage(lambda: run(*given.values()), lambda output: output)}, None)


def _compiled(model, predict, job: Job):
    if keras.backend.backend() == "jax":
        from sd_tf.bench.peers.engines.jax_models import compiled

        return compiled(model, predict, TARGETS[job.device])
    import tensorflow as tf

    rewrites = in_saved_models(job.device, job.precision)
    if rewrites.graph_kernels:
        os.environ.setdefault(KEEPS_WEIGHTS, "1")  # as a pipeline of such an export has it

    @tf.function(jit_compile=None if rewrites.graph_kernels else True)
    def call(*values):
        with lowered(rewrites):
            return tf.cast(predict(model, *values), "float32")

    return lambda *values: np.asarray(call(*map(tf.constant, values)))
