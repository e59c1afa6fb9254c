"""An exponential moving average of the weights, kept beside them and updated in the step."""

import keras
import numpy as np
from keras import ops

from sd_tf.training.settings import Averaging


class Average:
    """A moving average of variables, in float32, that begins at step `start`."""

    def __init__(self, variables, averaging: Averaging, steps: int):
        self.followed = list(variables)
        self.start = averaging.first_step(steps)
        self.half_life = averaging.half_life
        self.variables = [
            # A copy through NumPy: a step donates its buffers, so each variable needs its own.
            keras.Variable(np.array(v), trainable=False, dtype="float32", name="average")
            for v in self.followed
        ]

    def update(self, step):
        """Take in the variables after `step`, int32 () from 0; before `start`, just copy them."""
        age = ops.cast(ops.maximum(step - self.start, 0), "float32")
        half_life = ops.minimum(self.half_life, ops.maximum(age / 10.0, 1e-3))
        keep = ops.where(age > 0, ops.power(0.5, 1.0 / half_life), 0.0)
        for average, variable in zip(self.variables, self.followed, strict=True):
            value = ops.cast(variable, "float32")
            average.assign(value + keep * (ops.convert_to_tensor(average) - value))

    def exchange(self) -> None:
        """Swap the average with the models' weights; a second call swaps them back."""
        for variable, average in zip(self.followed, self.variables, strict=True):
            value, averaged = np.array(variable), np.array(average)
            variable.assign(averaged)
            average.assign(value)
