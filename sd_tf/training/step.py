"""One optimizer update, compiled by XLA, on TensorFlow or JAX."""

import keras
import numpy as np
from keras import ops

from sd_tf.training.hosts import placed
from sd_tf.training.settings import Settings


def compiled_step(loss, optimizer, average, settings: Settings):
    """Return a function that updates everything by a batch (arrays by name) and gives figures."""
    optimizer.build(loss.trainable_variables)
    make = _jax_step if keras.backend.backend() == "jax" else _tensorflow_step
    return make(loss, optimizer, average, settings)


def state_of(loss, optimizer, average) -> list[keras.Variable]:
    """List every variable that an update changes, in a fixed order."""
    return [
        *loss.trainable_variables,
        *optimizer.variables,
        *(average.variables if average is not None else []),
    ]


def frozen_of(loss) -> list[keras.Variable]:
    """List the variables that the loss reads and no update changes.

    They are arguments of the compiled update, because XLA would copy constants into its code.
    """
    trained = {id(v) for v in loss.trainable_variables}
    return [v for v in loss.variables if id(v) not in trained]


def _accumulated(gradients_of, batch, count):
    """Compute a batch's gradients and figures in `count` parts, one after another."""
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


def _tensorflow_step(loss, optimizer, average, settings):
    import tensorflow as tf

    trained = loss.trainable_variables
    values = [v.value for v in trained]

    def gradients_of(batch):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            value, figures = loss(batch)
        # Zeros for an adapter's branches at layers that no output depends on.
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(value, values, unconnected_gradients=zero)
        # Gradients of embeddings are sparse.
        return [tf.convert_to_tensor(g) for g in gradients], figures

    @tf.function(jit_compile=settings.jit_compile, autograph=False)
    def step(batch):
        gradients, figures = _accumulated(gradients_of, batch, settings.accumulate)
        _update(gradients, optimizer, average, trained)
        return figures

    def run(batch):
        figures = step({name: tf.constant(value) for name, value in batch.items()})
        return {name: value.numpy() for name, value in figures.items()}

    return run


def jax_update(loss, optimizer, average, settings):
    """Return a pure function: values of `state_of` and `frozen_of`, batch → new state, figures."""
    import jax

    trained, variables = loss.trainable_variables, state_of(loss, optimizer, average)
    frozen = frozen_of(loss)

    def update(state, fixed, batch):
        given = list(zip(frozen, fixed, strict=True))

        def gradients_of(part):
            def value_of(values):
                with keras.StatelessScope([*zip(trained, values, strict=True), *given]):
                    return loss(part)

            return jax.grad(value_of, has_aux=True)(state[: len(trained)])

        gradients, figures = _accumulated(gradients_of, batch, settings.accumulate)
        with keras.StatelessScope(zip(variables, state, strict=True)) as scope:
            _update(gradients, optimizer, average, trained)
        after = (scope.get_current_value(v) for v in variables)
        return [old if new is None else new for old, new in zip(state, after, strict=True)], figures

    return update


def _jax_step(loss, optimizer, average, settings):
    import jax

    variables, frozen = state_of(loss, optimizer, average), frozen_of(loss)
    update = jax_update(loss, optimizer, average, settings)
    if settings.jit_compile:
        update = jax.jit(update, donate_argnums=0)

    def run(batch):
        fixed = [v.value for v in frozen]
        state, figures = update([v.value for v in variables], fixed, placed(batch))
        for variable, value in zip(variables, state, strict=True):
            variable._value = value
        return {name: np.asarray(value) for name, value in figures.items()}

    return run
