"""Run compiled endpoints on a mesh, without model code and without Keras."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from sd_tf.jax.sharding import place, to_host
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.runner import LocalRunner
from sd_tf.runtime.shapes import Shape


@dataclass(frozen=True)
class Program:
    run: Callable[..., dict[str, jax.Array]]  # (weights, state, inputs) → outputs
    state: Mapping[str, NamedSharding]  # inputs whose memory the outputs take over
    inputs: Mapping[str, NamedSharding]

    def __call__(self, weights, given) -> dict[str, jax.Array]:
        state, inputs = (
            {name: place(given[name], sharding) for name, sharding in wanted.items()}
            for wanted in (self.state, self.inputs)
        )
        return self.run(weights, state, inputs)


class JaxRunner(LocalRunner):
    """Runs the components on one mesh."""

    def __init__(
        self,
        manifest: Manifest,
        programs: Mapping[str, Mapping[str, Program]],
        weights: Mapping[str, dict[str, jax.Array]],
    ):
        super().__init__(manifest, jit_compile=True)
        self._programs, self.weights = programs, weights

    def put(self, component: str, rows: Mapping[str, np.ndarray], first: int) -> None:
        weights = self.weights[component]
        for matrix, values in rows.items():
            whole = np.array(to_host(weights[matrix]))
            whole[first : first + len(values)] = values
            weights[matrix] = place(whole, weights[matrix].sharding)

    def call(self, component: str, endpoint: str, shape: Shape, **inputs) -> dict[str, jax.Array]:
        program = self._programs[component][self.signature(component, endpoint, shape)]
        return program(self.weights[component], inputs)

    def to_host(self, value) -> np.ndarray:
        return to_host(value)
