"""An exponential moving average of the weights, kept beside them and updated in the step."""

import keras
import numpy as np
from keras import ops

from sd_tf.training.settings import Averaging


class Average:
    """One float32 copy of each variable; follows them from `start` on."""

    def __init__(self, variables, averaging: Averaging, steps: int):
        self.followed = list(variables)
        self.start = averaging.first_step(steps)
        self.half_life = averaging.half_life
        self.variables = [
            # Through NumPy: a step gives away its buffers, so each variable needs its own.
            keras.Variable(np.array(v), trainable=False, dtype="float32", name="average")
            for v in self.followed
        ]

    def update(self, step):
        """`step` int32 () counts from 0; before `start` the average is the weights themselves."""
        age = ops.cast(ops.maximum(step - self.start, 0), "float32")
        half_life = ops.minimum(self.half_life, ops.maximum(age / 10.0, 1e-3))
        keep = ops.where(age > 0, ops.power(0.5, 1.0 / half_life), 0.0)
        for average, variable in zip(self.variables, self.followed, strict=True):
            value = ops.cast(variable, "float32")
            average.assign(value + keep * (ops.convert_to_tensor(average) - value))

    def exchange(self) -> None:
        """The average into the models, and their weights in its place; a second time, back."""
        for variable, average in zip(self.followed, self.variables, strict=True):
            value, averaged = np.array(variable), np.array(average)
            variable.assign(averaged)
            average.assign(value)


class Averages:
    """Several averages of one run. They do not touch what the run learns, so each is the one that a
    run of its own would have had.
    """

    def __init__(self, variables, averagings: dict[str, Averaging], steps: int):
        self.each = {name: Average(variables, a, steps) for name, a in averagings.items()}
        self.variables = [v for average in self.each.values() for v in average.variables]

    def update(self, step):
        for average in self.each.values():
            average.update(step)

    def exchange(self) -> None:
        """None of them is the run's own: the last weights stay in place."""
