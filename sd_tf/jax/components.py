"""A pipeline's endpoints as pure functions of weights and inputs, for `jax.jit`.

The models hold no weights here: these are arguments, dictionaries by the checkpoint's names, so
that they can be placed, divided and donated, and XLA does not fold them into the code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from sd_tf.components.build import Component, component, component_names, empty_tokens_of
from sd_tf.components.geometry import Fixed, Geometry
from sd_tf.config.rewrites import AS_WRITTEN, ON_JAX, Rewrites
from sd_tf.jax.attention import AttentionKernel
from sd_tf.jax.runner import Program
from sd_tf.jax.sharding import of_value, of_weight, place
from sd_tf.models.lowering import lowered
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.reuse import FEATURES
from sd_tf.runtime.runner import CALLED
from sd_tf.runtime.shapes import Shape, Shapes, Size
from sd_tf.sampling.packed import Packed
from sd_tf.weights import Checkpoint, layout

# A segment's inputs that it also returns, in the same memory; the last one where it has it.
STATE = ("latent", "history", FEATURES)
TABLES = "tables."
# Rewrites that take code of one platform alone: cuDNN's attention, and a TPU's kernel.
NOT_PORTABLE = ("fused_attention", "attention_kernel")


@dataclass(frozen=True)
class JaxComponent:
    """A component whose models have no storage, and the rewrites for where it will run."""

    component: Component
    rewrites: Rewrites

    @cached_property
    def slots(self) -> dict[str, layout.Slot]:
        """Each weight's place in a model, by name."""
        return self.component.slots

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """The samplers' tables as weights: float32, whatever the models' precision."""
        return {
            prefix + field.name: getattr(self.component.tables[size], field.name)
            for size, prefix in self._table_prefixes.items()
            for field in fields(Packed)
        }

    @cached_property
    def _table_prefixes(self) -> dict[Size, str]:
        """The start of the names of each size's tables; sizes that share tables share it."""
        tables = self.component.tables
        shared = {id(packed): TABLES for packed in tables.values()}
        if len(shared) > 1:
            shared |= {id(x): f"{TABLES}{h}x{w}." for (h, w), x in tables.items()}
        return {size: shared[id(packed)] for size, packed in tables.items()}

    @cached_property
    def places(self) -> dict[str, keras.Variable]:
        """The places for adapters, by name."""
        return self.component.places.variables

    @cached_property
    def _variables(self) -> dict[str, keras.Variable]:
        return self.component.variables | self.places

    @property
    def weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {
            name: jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)
            for name, variable in self._variables.items()
        }
        shapes |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.tables.items()}
        return shapes

    def pure(self, endpoint: str, shape: Shape, mesh: Mesh | None = None) -> Callable[..., dict]:
        """Return a function (weights, state, inputs) → outputs.

        On a mesh, the outputs are placed as the next call takes them. Without one, the program has
        no code of one platform, so that any device can run it.
        """
        rewrites, kernel = self.rewrites.without(NOT_PORTABLE), None
        if mesh is not None:
            rewrites, kernel = self.rewrites, AttentionKernel(mesh)

        def function(weights, state, inputs):
            given = [(variable, weights[name]) for name, variable in self._variables.items()]
            tables = {
                size: Packed(**{f.name: weights[prefix + f.name] for f in fields(Packed)})
                for size, prefix in self._table_prefixes.items()
            }
            with keras.StatelessScope(state_mapping=given), lowered(rewrites, kernel):
                endpoints = self.component.endpoints(shape, tables)
                outputs = endpoints[endpoint].function(**state, **inputs)
            if mesh is None:
                return outputs
            return {
                name: jax.lax.with_sharding_constraint(x, of_value(mesh, name, x.ndim))
                for name, x in outputs.items()
            }

        return function

    def arguments(self, endpoint: str, shape: Shape):
        """Return the shapes and dtypes of (weights, state, inputs)."""
        specs = self.component.endpoints(shape)[endpoint].inputs
        inputs = {
            name: jax.ShapeDtypeStruct(
                [shape.batch_size if n is None else n for n in s.shape], s.dtype
            )
            for name, s in specs.items()
        }
        donated = [name for name in STATE if name in inputs and endpoint == "segment"]
        return self.weights, {name: inputs.pop(name) for name in donated}, inputs

    def jitted(self, endpoint: str, mesh: Mesh, shape: Shape):
        """Return `jax.jit` of the endpoint, its arguments' shapes, and where each of them lies."""
        weights, state, inputs = self.arguments(endpoint, shape)
        placed = (
            {name: of_weight(mesh, name, x.shape) for name, x in weights.items()},
            {name: of_value(mesh, name, x.ndim) for name, x in state.items()},
            {name: of_value(mesh, name, x.ndim) for name, x in inputs.items()},
        )
        function = jax.jit(self.pure(endpoint, shape, mesh), in_shardings=placed, donate_argnums=1)
        return function, (weights, state, inputs), placed

    def program(self, endpoint: str, mesh: Mesh, shape: Shape) -> Program:
        """Make a program, which is traced and compiled when it is first called."""
        function, _, (_, state, inputs) = self.jitted(endpoint, mesh, shape)
        return Program(function, state, inputs)


def called(component: JaxComponent, shapes: Shapes) -> dict[str, tuple[str, Shape]]:
    """Return the signatures that a runner calls: each one's endpoint and shape, by its name."""
    return {
        shapes.signature(endpoint, shape): (endpoint, shape)
        for shape in shapes.all
        for known in [component.component.endpoints(shape)]
        for endpoint in CALLED[component.component.name]
        if endpoint in known
    }


def components_of(
    checkpoint: Checkpoint, geometry: Geometry, fixed: Fixed, target: str
) -> dict[str, JaxComponent]:
    """Assemble all components for cpu, gpu or tpu; nothing is allocated but tables."""
    if keras.backend.backend() != "jax":
        raise ExportError(
            "sd_tf.jax needs Keras on JAX: set KERAS_BACKEND=jax, or import sd_tf.jax before "
            f"keras. Received: {keras.backend.backend()}"
        )
    config, empty_tokens = checkpoint.config, empty_tokens_of(checkpoint)

    def build(part: str, dtype: str, storage: str | None):
        return layout.abstract_model(config.components[part], dtype, storage)

    rewrites = ON_JAX[target].without(fixed.disabled_rewrites)
    found = {}
    for name in component_names(config):
        part = component(name, config, geometry, fixed.precision, empty_tokens, build)
        found[name] = JaxComponent(part, rewrites if part.is_rewritten else AS_WRITTEN)
    return found


def load_weights(
    components: dict[str, JaxComponent], checkpoint: Checkpoint, mesh: Mesh
) -> dict[str, dict[str, jax.Array]]:
    """Load each component's weights onto the mesh, strictly and one tensor at a time."""
    return {
        name: {
            key: place(value, of_weight(mesh, key, value.shape))
            for key, value in read_weights(component, checkpoint)
        }
        for name, component in components.items()
    }


def host_weights(component: JaxComponent, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return dict(read_weights(component, checkpoint))


def read_weights(
    component: JaxComponent, checkpoint: Checkpoint
) -> Iterator[tuple[str, np.ndarray]]:
    """Check the checkpoint, then read each weight, arranged and cast as the component takes it."""
    tensors = {}
    for part in sorted({name.partition(".")[0] for name in component.slots}):
        tensors[part] = checkpoint.tensors(part)
        layout.check(
            component.component.models[part], tensors[part], f"{part} of {checkpoint.source}"
        )

    for name, slot in component.slots.items():
        part, _, path = name.partition(".")
        for end, value in slot.values(tensors[part][path].read()).items():
            yield name + end, value.astype(slot.variables[end].dtype)
    yield from component.tables.items()
    for name, variable in component.places.items():
        yield name, np.zeros(tuple(variable.shape), variable.dtype)
