"""One optimizer update, compiled by XLA: the same losses, optimizer and average on each backend."""

import keras
import numpy as np
from keras import ops

from sd_tf.training.hosts import placed
from sd_tf.training.settings import Settings


def compiled_step(loss, optimizer, average, settings: Settings):
    """A function of a batch (arrays by name) that updates everything and returns the figures."""
    trained = loss.trainable_variables
    optimizer.build(trained)
    make = _jax_step if keras.backend.backend() == "jax" else _tensorflow_step
    return make(loss, optimizer, average, trained, settings)


def state_of(loss, optimizer, average) -> list[keras.Variable]:
    """Every variable that a run consists of, in a fixed order."""
    return [
        *loss.trainable_variables,
        *optimizer.variables,
        *(average.variables if average is not None else []),
    ]


def _accumulated(gradients_of, batch, count):
    """Gradients and figures of a batch, computed in `count` parts one after another."""
    total = None
    for i in range(count):
        part = {
            name: value[i * (value.shape[0] // count) : (i + 1) * (value.shape[0] // count)]
            for name, value in batch.items()
        }
        gradients, figures = gradients_of(part)
        one = ([g / count for g in gradients], {k: v / count for k, v in figures.items()})
        if total is not None:
            one = (
                [a + b for a, b in zip(total[0], one[0], strict=True)],
                {k: total[1][k] + v for k, v in one[1].items()},
            )
        total = one
    return total


def _update(gradients, optimizer, average, trained):
    step = ops.convert_to_tensor(optimizer.iterations)
    optimizer.apply(gradients, trained)
    if average is not None:
        average.update(step)


def _tensorflow_step(loss, optimizer, average, trained, settings):
    import tensorflow as tf

    values = [v.value for v in trained]

    def gradients_of(batch):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            value, figures = loss(batch)
        gradients = tape.gradient(value, values)
        return [tf.convert_to_tensor(g) for g in gradients], figures  # embeddings' are sparse

    @tf.function(jit_compile=settings.jit_compile, autograph=False)
    def step(batch):
        gradients, figures = _accumulated(gradients_of, batch, settings.accumulate)
        _update(gradients, optimizer, average, trained)
        return figures

    def run(batch):
        figures = step({name: tf.constant(value) for name, value in batch.items()})
        return {name: value.numpy() for name, value in figures.items()}

    return run


def _jax_step(loss, optimizer, average, trained, settings):
    import jax

    variables = state_of(loss, optimizer, average)

    def step(state, batch):
        def gradients_of(part):
            def value_of(values):
                with keras.StatelessScope(zip(trained, values, strict=True)):
                    return loss(part)

            return jax.grad(value_of, has_aux=True)(state[: len(trained)])

        gradients, figures = _accumulated(gradients_of, batch, settings.accumulate)
        with keras.StatelessScope(zip(variables, state, strict=True)) as scope:
            _update(gradients, optimizer, average, trained)
        after = (scope.get_current_value(v) for v in variables)
        return [old if new is None else new for old, new in zip(state, after, strict=True)], figures

    if settings.jit_compile:
        step = jax.jit(step, donate_argnums=0)

    def run(batch):
        state, figures = step([v.value for v in variables], placed(batch))
        for variable, value in zip(variables, state, strict=True):
            variable._value = value
        return {name: np.asarray(value) for name, value in figures.items()}

    return run
