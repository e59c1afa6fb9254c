"""A `tf.Module` for each component, which is saved as its SavedModel.

Every endpoint exists for every shape: compiled by XLA and, under `plain_`, not compiled, all on
the same variables. The compiled ones are traced with the target's rewrites, the plain ones as the
models are written: once for all batches of a size.
"""

from collections.abc import Callable, Collection
from dataclasses import fields

import tensorflow as tf
from keras import ops

from sd_tf.components import Endpoint, Spec
from sd_tf.components.build import Component
from sd_tf.config.rewrites import AS_WRITTEN, Rewrites
from sd_tf.export.bundles import PLACES
from sd_tf.models.lowering import lowered, rewrites
from sd_tf.runtime.mapped import comes_last
from sd_tf.runtime.runner import PLAIN
from sd_tf.runtime.shapes import Shapes, Size
from sd_tf.sampling.packed import Packed

# The tables that are large, and therefore saved as variables rather than as constants.
LARGE_TABLES = ("rows", "signals", "sigmas")


class ComponentModule(tf.Module):
    """A component's endpoints as signatures, compiled and plain."""

    def __init__(
        self, component: Component, shapes: Shapes, rewrites: Rewrites, jit_compile: bool = True
    ):
        """Trace the endpoints; without `jit_compile` only plain, but under their own names."""
        super().__init__()
        keep_variables(self, component)
        self._rewrites, self._jit_compile = rewrites, jit_compile
        self.endpoints = {}  # name → concrete function, the signatures of the SavedModel
        self.eager = {}  # name → the endpoint as a Python function, which shares no traces
        self.tables = TablesBySize(component)
        traces = Traces()
        for shape in shapes.all:
            endpoints = component.endpoints(shape, self.tables, traces.shared)
            for name, endpoint in endpoints.items():
                self._declare(shapes.signature(name, shape), endpoint)
            for name, endpoint in component.endpoints(shape, self.tables).items():
                self.eager[shapes.signature(name, shape)] = endpoint.function
            if component.name == "decoder":
                self._declare_png(shapes.signature("png", shape), endpoints["serving_default"])

    def _declare(self, name: str, endpoint: Endpoint) -> None:
        plain = tf.function(endpoint.function, autograph=False)
        if endpoint.compiled and self._jit_compile:
            self._sign(name, compiled(endpoint.function, self._rewrites), endpoint.inputs)
            self._sign(PLAIN + name, plain, endpoint.inputs)
        else:
            self._sign(name, plain, endpoint.inputs)

    def _declare_png(self, name: str, decode: Endpoint) -> None:
        """Add the endpoint that returns PNG files, which are encoded outside XLA."""

        def as_png(run):
            def call(latent):
                return {"image_bytes": png_files(run(latent=latent)["generated_images"])}

            return tf.function(call, autograph=False)

        self._sign(name, as_png(compiled(decode.function, self._rewrites)), decode.inputs)
        self._sign(PLAIN + name, as_png(decode.function), decode.inputs)

    def _sign(self, name: str, body, inputs: dict[str, Spec]) -> None:
        counts_steps = self.tables.distinct and "num_steps" in inputs
        self.endpoints[name] = signed(body, inputs, self.tables.checks if counts_steps else None)


def keep_variables(module: tf.Module, component: Component) -> None:
    """Have a module save a component's variables, under the same names in every module.

    Files hold them in this order.
    """
    variables = [variable.value for variable in component.variables.values()]
    variables.sort(key=lambda x: comes_last(x.dtype, x.shape))
    setattr(module, component.name, variables)
    places = component.places.variables
    for variable in places.values():
        variable._initialize(ops.zeros(variable.shape, variable.dtype))
    setattr(module, component.name + PLACES, {name: v.value for name, v in places.items()})


def compiled(function, rewrites: Rewrites):
    """Wrap a function for XLA, or for the graph's kernels, with the target's rewrites."""

    def rewritten(**inputs):
        with lowered(rewrites):
            return function(**inputs)

    # Not False: who compiles the whole from outside may.
    jit_compile = None if rewrites.graph_kernels else True
    return tf.function(rewritten, jit_compile=jit_compile, autograph=False)


def signed(body, inputs: dict[str, Spec], checks: Callable | None = None):
    """Trace a signature. Inputs are checked before the compiled part: XLA drops assertions."""

    def call(**inputs):
        with tf.control_dependencies([] if checks is None else checks(**inputs)):
            inputs = {key: tf.identity(value) for key, value in inputs.items()}
        return body(**inputs)

    specs = {key: tf.TensorSpec(s.shape, s.dtype, key) for key, s in inputs.items()}
    return tf.function(call, autograph=False).get_concrete_function(**specs)


def png_files(images):
    """Encode uint8 (B, H, W, 3) → string (B,)."""
    return tf.stack([tf.io.encode_png(image) for image in tf.unstack(images)])


class Traces:
    """Traces of functions, each of which all endpoints share that call it with the same shapes.

    As they are written, models take any batch, so one trace serves all. Rewrites have to know it.
    """

    def __init__(self):
        self._traced = {}

    def shared(self, function, open_batch: bool = False, fixed: Collection[str] = ()):
        """Return a function that calls the trace for its arguments' shapes; see `as_is`."""

        def open_spec(x) -> tf.TensorSpec:
            return tf.TensorSpec([None, *x.shape[1:]], x.dtype)

        def fixed_spec(x) -> tf.TensorSpec:
            return tf.TensorSpec(x.shape, x.dtype)

        def call(*args, **kwargs):
            spec = open_spec if open_batch and rewrites() == AS_WRITTEN else fixed_spec
            named = {
                name: tf.nest.map_structure(fixed_spec if name in fixed else spec, value)
                for name, value in kwargs.items()
            }
            specs = tf.nest.map_structure(spec, args), named
            key = function, rewrites(), tuple(named), tuple(tf.nest.flatten(specs))
            if key not in self._traced:
                traced = tf.function(function, autograph=False)
                self._traced[key] = traced.get_concrete_function(*specs[0], **specs[1])
            outputs = self._traced[key](*args, **kwargs)
            if spec is open_spec:  # TensorFlow infers the batch, but not through a loop
                opened = {name: x for name, x in kwargs.items() if name not in fixed}
                batch = tf.nest.flatten((args, opened))[0].shape[0]
                for output in tf.nest.flatten(outputs):
                    output.set_shape([batch, *output.shape[1:]])
            return outputs

        return call


class TablesBySize(tf.Module):
    """A component's sampler tables, each once for all sizes of pictures that share it."""

    def __init__(self, component: Component):
        super().__init__()
        distinct = {id(packed): packed for packed in component.tables.values()}
        default = component.default_scheduler
        self.distinct = [SamplerTables(packed, default) for packed in distinct.values()]
        self._places = {
            _name(size): list(distinct).index(id(packed))
            for size, packed in component.tables.items()
        }

    def get(self, size: Size) -> "SamplerTables | None":
        """Return the tables of a size; None for a component without a loop."""
        place = self._places.get(_name(size))
        return None if place is None else self.distinct[place]

    @property
    def checks(self) -> Callable:
        """The assertions about a call's steps, which are the same for all sizes."""
        return self.distinct[0].checks


def _name(size: Size) -> str:
    return "{}x{}".format(*size)


class SamplerTables(tf.Module):
    """The fields of `sampling.packed.Packed` as TensorFlow variables and constants."""

    def __init__(self, packed: Packed, default_scheduler: int):
        super().__init__()
        self.default_scheduler = tf.constant(default_scheduler, "int32")
        for field in fields(packed):
            value = getattr(packed, field.name)
            if field.name in LARGE_TABLES:
                value = tf.Variable(value, trainable=False, name=field.name)
            else:
                value = tf.constant(value)
            setattr(self, field.name, value)

    def checks(self, num_steps, scheduler=None, first=0, start=0, **_):
        """Assert that a call's steps are a run of the tables, and lie within it."""
        if scheduler is None:
            scheduler = self.default_scheduler
        count, most_steps = self.calls.shape
        valid = [
            _is_within(scheduler, 0, count - 1, "scheduler"),
            _is_within(num_steps, 1, most_steps, "num_steps"),
        ]
        with tf.control_dependencies(valid):
            calls = tf.gather_nd(self.calls, tf.stack([scheduler, num_steps - 1]))
        return [
            *valid,
            tf.debugging.assert_positive(calls, "this scheduler has no such num_steps"),
            tf.debugging.assert_non_negative(first, "first must not be negative"),
            tf.debugging.assert_less_equal(first, start, "start must not be before first"),
            tf.debugging.assert_less(start, calls, "start must be below the number of model calls"),
        ]


def _is_within(value, low: int, high: int, name: str):
    """Assert low ≤ value ≤ high."""
    is_within = tf.logical_and(tf.greater_equal(value, low), tf.less_equal(value, high))
    return tf.debugging.Assert(is_within, [f"{name} must be {low}…{high}. Received:", value])
