"""Our transformer, compiled by XLA: in TensorFlow or on JAX, with the CPU's rewrites."""

import keras
import numpy as np

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.engine import CALL, Job, Loaded, Stage
from sd_tf.config.rewrites import TARGETS
from sd_tf.models.lowering import lowered
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

    run = _compiled(model, predict, TARGETS[job.device])
    return Loaded({CALL: Stage(lambda: run(*given.values()), lambda output: output)}, None)


def _compiled(model, predict, rewrites):
    if keras.backend.backend() == "jax":
        from sd_tf.bench.peers.engines.jax_models import compiled

        return compiled(model, predict, rewrites)
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def call(*values):
        with lowered(rewrites):
            return tf.cast(predict(model, *values), "float32")

    return lambda *values: np.asarray(call(*map(tf.constant, values)))
