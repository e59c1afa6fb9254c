"""A pipeline's endpoints as pure functions of weights and inputs, for `jax.jit`.

The models hold no weights here: these are arguments, dictionaries by the checkpoint's names, so
that they can be placed, divided and donated, and XLA does not fold them into the code.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from sd_tf.components import Endpoint
from sd_tf.components.diffusion import diffusion_model
from sd_tf.components.fixed import Geometry, vae_precision
from sd_tf.components.pictures import decoder, image_encoder
from sd_tf.components.text import text_encoder
from sd_tf.config import PipelineConfig
from sd_tf.jax.program import Program
from sd_tf.jax.sharding import of_value, of_weight, place
from sd_tf.manifest import ExportError
from sd_tf.models.lowering import AS_WRITTEN, TARGETS, Rewrites, lowered
from sd_tf.sampling.packed import Packed, pack
from sd_tf.weights import Checkpoint, layout

# The endpoints that a chain calls; `serving_default` and the like of the loop are a server's.
CALLED = {
    "text_encoder": ("serving_default", "encode"),
    "diffusion_model": ("noise", "begin", "begin_image", "segment"),
    "decoder": ("serving_default",),
    "image_encoder": ("serving_default",),
}
STATE = ("latent", "history")  # what a segment is given and gives back: its memory is used again
TABLES = "tables."
OF_DECODER, OF_ENCODER = ("decoder.", "post_quant_conv."), ("encoder.", "quant_conv.")


@dataclass(frozen=True)
class Component:
    """Models without storage, the names of what they need, and the endpoints they serve."""

    models: dict[str, keras.layers.Layer]  # by the checkpoint's components
    slots: dict[str, layout.Slot]  # weight → its place in a model
    tables: dict[str, np.ndarray]  # the sampler's, float32 whatever the precision
    endpoints: Callable[[Packed | None], dict[str, Endpoint]]
    rewrites: Rewrites

    @property
    def weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {
            name: jax.ShapeDtypeStruct(tuple(slot.variable.shape), slot.variable.dtype)
            for name, slot in self.slots.items()
        }
        shapes |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.tables.items()}
        return shapes

    def pure(self, endpoint: str, mesh: Mesh | None = None) -> Callable[..., dict]:
        """(weights, state, inputs) → outputs; on a mesh these lie as the inputs of the next do."""

        def function(weights, state, inputs):
            given = [(slot.variable, weights[name]) for name, slot in self.slots.items()]
            tables = None
            if self.tables:
                tables = Packed(**{f.name: weights[TABLES + f.name] for f in fields(Packed)})
            with keras.StatelessScope(state_mapping=given), lowered(self.rewrites):
                outputs = self.endpoints(tables)[endpoint].function(**state, **inputs)
            if mesh is None:
                return outputs
            return {
                name: jax.lax.with_sharding_constraint(x, of_value(mesh, name, x.ndim))
                for name, x in outputs.items()
            }

        return function

    def arguments(self, endpoint: str, batch_size: int):
        """Shapes and dtypes of (weights, state, inputs)."""
        specs = self.endpoints(None)[endpoint].inputs
        inputs = {
            name: jax.ShapeDtypeStruct([batch_size if n is None else n for n in s.shape], s.dtype)
            for name, s in specs.items()
        }
        donated = STATE if endpoint == "segment" else ()
        return self.weights, {name: inputs.pop(name) for name in donated}, inputs

    def jitted(self, endpoint: str, mesh: Mesh, batch_size: int):
        """`jax.jit` of it with everything in its place, and its arguments' shapes."""
        weights, state, inputs = self.arguments(endpoint, batch_size)
        placed = (
            {name: of_weight(mesh, name, x.shape) for name, x in weights.items()},
            {name: of_value(mesh, name, x.ndim) for name, x in state.items()},
            {name: of_value(mesh, name, x.ndim) for name, x in inputs.items()},
        )
        function = jax.jit(self.pure(endpoint, mesh), in_shardings=placed, donate_argnums=1)
        return function, (weights, state, inputs), placed

    def program(self, endpoint: str, mesh: Mesh, batch_size: int) -> Program:
        """Traced and compiled when it is first called."""
        function, _, (_, state, inputs) = self.jitted(endpoint, mesh, batch_size)
        return Program(function, state, inputs)


def components_of(
    config: PipelineConfig,
    geometry: Geometry,
    precision: str,
    empty_tokens: np.ndarray,
    target: str,
) -> dict[str, Component]:
    """All components of a pipeline, for cpu, gpu or tpu; nothing is allocated but tables."""
    if keras.backend.backend() != "jax":
        raise ExportError(
            "sd_tf.jax needs Keras on JAX: set KERAS_BACKEND=jax, or import sd_tf.jax before "
            f"keras. Received: {keras.backend.backend()}"
        )
    rewrites = TARGETS[target]
    encoders = {
        name: layout.abstract_model(part, precision) for name, part in config.text_encoders.items()
    }
    unet = layout.abstract_model(config.unet, precision)
    vae = layout.abstract_model(config.vae, vae_precision(config, precision))
    packed = pack(config.schedule, geometry.max_steps)

    def slots(part, model, prefixes=("",)):
        found = layout.slots(model).items()
        return {f"{part}.{path}": slot for path, slot in found if path.startswith(prefixes)}

    text_slots = {}
    for name, model in encoders.items():
        text_slots |= slots(name, model)
    models = list(encoders.values())
    batch = geometry.batch_size
    return {
        "text_encoder": Component(
            encoders,
            text_slots,
            {},
            lambda _: text_encoder(models, empty_tokens, config, batch),
            AS_WRITTEN,
        ),
        "diffusion_model": Component(
            {"unet": unet},
            slots("unet", unet),
            {TABLES + field.name: getattr(packed, field.name) for field in fields(Packed)},
            lambda tables: diffusion_model(unet, tables, config, geometry),
            rewrites,
        ),
        "decoder": Component(
            {"vae": vae},
            slots("vae", vae, OF_DECODER),
            {},
            lambda _: decoder(vae, config, geometry),
            rewrites,
        ),
        "image_encoder": Component(
            {"vae": vae},
            slots("vae", vae, OF_ENCODER),
            {},
            lambda _: image_encoder(vae, geometry),
            rewrites,
        ),
    }


def calls_of(components: dict[str, Component]) -> dict[str, list[int]]:
    """Model calls by sampler and step count, for a manifest."""
    tables = components["diffusion_model"].tables
    return Packed(**{f.name: tables[TABLES + f.name] for f in fields(Packed)}).calls_by_sampler()


def load_weights(
    components: dict[str, Component], checkpoint: Checkpoint, mesh: Mesh
) -> dict[str, dict[str, jax.Array]]:
    """Component → its weights in their places, strictly and one tensor at a time."""
    return {
        name: {
            key: place(read(), of_weight(mesh, key, component.weights[key].shape))
            for key, read in readers(component, checkpoint).items()
        }
        for name, component in components.items()
    }


def host_weights(component: Component, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: read() for name, read in readers(component, checkpoint).items()}


def readers(component: Component, checkpoint: Checkpoint) -> dict[str, Callable[[], np.ndarray]]:
    """Weight → what fetches it as the component wants it; the checkpoint is checked first."""
    tensors = {}
    for part in sorted({name.partition(".")[0] for name in component.slots}):
        tensors[part] = checkpoint.tensors(part)
        layout.check(component.models[part], tensors[part], f"{part} of {checkpoint.source}")

    def read(name, slot):
        part, _, path = name.partition(".")
        return slot.arranged(tensors[part][path].read()).astype(slot.variable.dtype)

    found = {name: partial(read, name, slot) for name, slot in component.slots.items()}
    return found | {name: partial(np.asarray, x) for name, x in component.tables.items()}
