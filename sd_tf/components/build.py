"""Assemble the components' endpoints from a checkpoint's configuration and a geometry.

`export` makes SavedModels of the endpoints, `sd_tf.jax` jits them, the trainer draws samples with
them. These callers bring different models, but put them together in this one way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import keras
import numpy as np

from sd_tf.components.autoencoder import decoder, image_encoder
from sd_tf.components.conditions import conditions_of, reader_of, text_encoder
from sd_tf.components.diffusion import DiffusionModel
from sd_tf.components.geometry import Geometry
from sd_tf.components.guidance import guidance_of
from sd_tf.components.places import Places, in_denoiser, in_text_encoder
from sd_tf.components.spec import COMPONENTS, Endpoint, as_is
from sd_tf.config import AUTOENCODER, PipelineConfig
from sd_tf.runtime.adapters import LayerRecord, Layers
from sd_tf.runtime.shapes import Shape
from sd_tf.sampling.packed import Packed, pack
from sd_tf.weights import Checkpoint, layout

# The autoencoder's layers that each half computes with, by the start of their names.
OF_DECODER, OF_ENCODER = ("decoder.", "post_quant_conv."), ("encoder.", "quant_conv.")

Build = Callable[[str, str], keras.layers.Layer]  # (the checkpoint's component, dtype) → its model


@dataclass(frozen=True)
class Component:
    """One component: its models, by the checkpoint's names, and the endpoints made of them."""

    name: str
    models: Mapping[str, keras.layers.Layer]
    declare: Callable[..., dict[str, Endpoint]]  # (shape, tables, shared) → the endpoints
    layers: tuple[str, ...] = ("",)  # starts of the names of the layers that it computes with
    tables: Packed | None = None  # the samplers' tables, where it has a loop
    default_scheduler: int = 0  # its number in the tables
    places: Places = field(default_factory=Places)
    is_rewritten: bool = True  # for the target's compiler; a text encoder stays as it is written

    def endpoints(self, shape: Shape, tables=None, shared=as_is) -> dict[str, Endpoint]:
        """Return the endpoints for one of the geometry's shapes.

        Args:
            tables: the backend's arrays in place of the NumPy tables.
            shared: wraps the functions that several endpoints share; see `as_is`.
        """
        return self.declare(shape, self.tables if tables is None else tables, shared)

    @property
    def slots(self) -> dict[str, layout.Slot]:
        """The variables that the component uses, by the checkpoint's component and tensor names."""
        return {
            f"{part}.{path}": slot
            for part, model in self.models.items()
            for path, slot in layout.slots(model).items()
            if path.startswith(self.layers)
        }

    @property
    def adaptable(self) -> Layers:
        """The layers that an adapter may change, and whether they have places."""
        found = {
            part: {
                layer: LayerRecord(shape, (part, layer) in self.places.by_layer)
                for layer, shape in layout.layer_shapes(model).items()
            }
            for part, model in self.models.items()
        }
        return Layers(found)


def component(
    name: str,
    config: PipelineConfig,
    geometry: Geometry,
    precision: str,
    empty_tokens: np.ndarray,
    build: Build,
) -> Component:
    """Put one component together; `build` makes or fetches its models."""
    return _ASSEMBLERS[name](config, geometry, precision, empty_tokens, build)


def _text_encoder(config, geometry, precision, empty_tokens, build) -> Component:
    models = {name: build(name, precision) for name in config.text_encoders}
    places = Places(models, geometry.adapters, in_text_encoder)
    read = reader_of(list(models.values()), places)

    def declare(shape, tables, shared):
        return text_encoder(
            shared(read, open_batch=True, fixed=tuple(places.inputs)),
            places,
            empty_tokens,
            config.zero_empty_negative,
            shape.batch_size,
            geometry.prompt_chunks,
        )

    return Component("text_encoder", models, declare, places=places, is_rewritten=False)


def _diffusion_model(config, geometry, precision, empty_tokens, build) -> Component:
    models = {config.denoiser.component: build(config.denoiser.component, precision)}
    places = Places(models, geometry.adapters, in_denoiser(geometry.adapters.layers))
    denoiser = places.taking_kernels(models[config.denoiser.component])
    packed = pack(config.schedule, geometry.max_steps)
    default = packed.numbers[config.schedule.sampler]

    def declare(shape, tables, shared):
        return DiffusionModel(
            denoiser,
            tables,
            conditions_of(config, geometry, shape),
            guidance_of(geometry.guidance, config.latent_inputs, geometry.guidance_rescale),
            places,
            (shape.batch_size, *geometry.shapes.latent(shape.size)),
            default,
            config.denoiser.guidance_embed_dim,
            shared,
        ).endpoints

    return Component(
        "diffusion_model",
        models,
        declare,
        tables=packed,
        default_scheduler=default,
        places=places,
    )


def _decoder(config, geometry, precision, empty_tokens, build) -> Component:
    vae = build(AUTOENCODER, autoencoder_precision(config, precision))

    def declare(shape, tables, shared):
        return decoder(vae, config.autoencoder.latent_scale, geometry.shapes, shape, shared)

    return Component("decoder", {AUTOENCODER: vae}, declare, OF_DECODER)


def _image_encoder(config, geometry, precision, empty_tokens, build) -> Component:
    vae = build(AUTOENCODER, autoencoder_precision(config, precision))

    def declare(shape, tables, shared):
        return image_encoder(vae, shape, shared)

    return Component("image_encoder", {AUTOENCODER: vae}, declare, OF_ENCODER)


_ASSEMBLERS = dict(
    zip(COMPONENTS, (_text_encoder, _diffusion_model, _decoder, _image_encoder), strict=True)
)


def autoencoder_precision(config: PipelineConfig, precision: str) -> str:
    """Return the autoencoder's precision: SDXL's overflows in float16, and stays in float32."""
    is_upcast = config.autoencoder.force_upcast and precision == "float16"
    return "float32" if is_upcast else precision


def empty_tokens_of(checkpoint: Checkpoint) -> np.ndarray:
    """Tokenize "" for one or several text encoders: (1, 77) or (1, encoders, 77)."""
    ids = [checkpoint.tokenizer(name)("") for name in checkpoint.config.text_encoders]
    return ids[0] if len(ids) == 1 else np.stack(ids, axis=1)
