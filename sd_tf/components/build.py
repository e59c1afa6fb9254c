"""Assemble the components' endpoints from a checkpoint's configuration and a geometry.

`export` makes SavedModels of the endpoints, `sd_tf.jax` jits them, the trainer draws samples with
them. These callers bring different models, but put them together in this one way.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import keras
import numpy as np

from sd_tf.components.autoencoder import decoder, image_encoder
from sd_tf.components.conditions import conditioner_of, conditions_of
from sd_tf.components.controls import Controls
from sd_tf.components.diffusion import DiffusionModel
from sd_tf.components.geometry import Geometry
from sd_tf.components.guidance import guidance_of
from sd_tf.components.image_prompts import LoopImagePrompts, vision_encoder
from sd_tf.components.places import Place, Places
from sd_tf.components.reuse import LoopReuse, reuse_of
from sd_tf.components.spec import COMPONENTS, VISION_ENCODER, Endpoint, as_is
from sd_tf.components.text_encoder import Read, reader_of, text_encoder
from sd_tf.components.tiles import Tiles
from sd_tf.config import (
    AUTOENCODER,
    DECODER,
    PREVIEW_DECODER,
    ImageAttentionConfig,
    ImageProjectionConfig,
    PipelineConfig,
)
from sd_tf.models import deferred_variables
from sd_tf.models.branches import Branch, branches
from sd_tf.models.controlnet import ControlNet
from sd_tf.models.image_prompts import ImageAttention
from sd_tf.runtime.adapter_places import DOWN, PREFIX, UP, AdapterPlaces
from sd_tf.runtime.adapters import LayerRecord, Layers
from sd_tf.runtime.shapes import Shape, Size
from sd_tf.sampling.packed import Packed, pack
from sd_tf.weights import Checkpoint, layout

# The autoencoder's layers that each half computes with, by the start of their names.
OF_DECODER, OF_ENCODER = ("decoder.", "post_quant_conv."), ("encoder.", "quant_conv.")

# The denoiser's layers that have places for adapters, by the option's value.
IN_DENOISER = {
    "attention": lambda path: any(part in path for part in (".attn.", ".attn1.", ".attn2.")),
    "transformer": lambda path: ".attentions." in path or "transformer_blocks." in path,
    "all": lambda path: True,
}

# (the checkpoint's component, dtype, storage of its linear layers) → its model
Build = Callable[[str, str, str | None], keras.layers.Layer]


@dataclass(frozen=True)
class Component:
    """One component: its models, by the checkpoint's names, and the endpoints made of them."""

    name: str
    models: Mapping[str, keras.layers.Layer]
    declare: Callable[..., dict[str, Endpoint]]  # (shape, tables, shared) → the endpoints
    layers: tuple[str, ...] = ("",)  # starts of the names of the layers that it computes with
    # The samplers' tables for each size of pictures, where it has a loop. Sizes may share them.
    tables: Mapping[Size, Packed] = field(default_factory=dict)
    default_scheduler: int = 0  # its number in the tables
    places: Places = field(default_factory=Places)
    reuse: LoopReuse = field(default_factory=LoopReuse)
    is_rewritten: bool = True  # for the target's compiler; a text encoder stays as it is written

    def endpoints(self, shape: Shape, tables=None, shared=as_is) -> dict[str, Endpoint]:
        """Return the endpoints for one of the geometry's shapes.

        Args:
            tables: the backend's arrays in place of the NumPy tables, by size.
            shared: wraps the functions that several endpoints share; see `as_is`.
        """
        found = self.tables if tables is None else tables
        return self.declare(shape, found.get(shape.size), shared)

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
    def variables(self) -> dict[str, keras.Variable]:
        """The variables of `slots`, by the tensors' names, or those with an addition."""
        return {
            name + end: variable
            for name, slot in self.slots.items()
            for end, variable in slot.variables.items()
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
            if not isinstance(model, ControlNet | ImageAttention)
        }
        return Layers(found)


def component(
    name: str,
    config: PipelineConfig,
    geometry: Geometry,
    precision: str,
    empty_tokens: Mapping[str, np.ndarray],
    build: Build,
) -> Component:
    """Put one component together; `build` makes or fetches its models."""

    def build_stored(part: str, dtype: str) -> keras.layers.Layer:
        return build(part, dtype, geometry.storage.get(part))

    return _ASSEMBLERS[name](config, geometry, precision, empty_tokens, build_stored)


def _text_encoder(config, geometry, precision, empty_tokens, build) -> Component:
    models = {name: build(name, precision) for name in config.text_encoders}
    places = places_of(models, geometry.adapters, lambda path: ".encoder.layers." in path)
    read = _with_branches(reader_of(models, config), places)

    def declare(shape, tables, shared):
        return text_encoder(
            shared(read, open_batch=True, fixed=tuple(places.inputs)),
            places,
            empty_tokens,
            config,
            geometry,
            shape.batch_size,
        )

    return Component("text_encoder", models, declare, places=places, is_rewritten=False)


def _with_branches(read: Read, places: Places) -> Read:
    """Have the text encoders add the adapters' changes beside their layers: it costs less there."""
    if not places.slots:
        return read

    def run(adapter_scales, **tokens):
        factors = places.scaled(adapter_scales)
        with branches({layer: Branch(*pair) for layer, pair in factors.items()}):
            return read(**tokens)

    return run


def places_of(
    models: Mapping[str, keras.layers.Layer],
    wanted: AdapterPlaces,
    has_place: Callable[[str], bool],
) -> Places:
    """Make places, whose variables have no storage yet, for the layers that are to have one."""
    by_layer = {}
    if wanted.slots:
        with deferred_variables():
            for part, model in models.items():
                for path, layer in layout.layers(model).items():
                    if hasattr(layer, "kernel") and has_place(path):
                        by_layer[part, path] = _place(f"{PREFIX}{part}.{path}", layer, wanted)
    return Places(wanted.slots, wanted.rank, by_layer)


def _place(name: str, layer: keras.layers.Layer, wanted: AdapterPlaces) -> Place:
    def variable(end: str, width: int) -> keras.Variable:
        shape = (wanted.slots * wanted.rank, width)
        return keras.Variable("zeros", shape, "float32", trainable=False, name=name + end)

    *inputs, outputs = layer.kernel.shape
    return Place(layer, variable(DOWN, math.prod(inputs)), variable(UP, outputs))


def _diffusion_model(config, geometry, precision, empty_tokens, build) -> Component:
    models = {config.denoiser.component: build(config.denoiser.component, precision)}
    nets = {name: build(name, precision) for name in config.controlnets}
    controls = Controls(tuple(nets.values()))
    attentions = _parts_of_prompts(config, ImageAttentionConfig, build, precision)
    images = LoopImagePrompts.of(config, tuple(attentions.values()), geometry.image_prompts)
    places = places_of(models, geometry.adapters, IN_DENOISER[geometry.adapters.layers])
    model, skipped = models[config.denoiser.component], config.denoiser.skip_layers
    counts = conditioner_of(config).counts(config, geometry.prompt_chunks)
    model = model if counts is None else partial(model, counts=counts)
    denoiser = places.taking_kernels(model)
    skipping = places.taking_kernels(partial(model, skipped=skipped)) if skipped else None
    guidance = guidance_of(geometry.guidance, config, geometry.guidance_rescale)
    reuse = LoopReuse()
    if geometry.reuse > 1:
        keeping = places.taking_kernels(partial(model, keeps=True))
        reuse = LoopReuse(reuse_of(config, geometry), model, keeping)
    tables = {size: tables_of(config, size, geometry.max_steps) for size in geometry.shapes.sizes}
    default = next(iter(tables.values())).numbers[config.schedule.sampler]

    def declare(shape, tables, shared):
        return DiffusionModel(
            denoiser,
            tables,
            conditions_of(config, geometry, shape),
            guidance,
            places,
            controls,
            images,
            reuse,
            shape,
            geometry.shapes,
            default,
            config.denoiser.is_told_guidance,
            skipping,
            shared,
        ).endpoints

    return Component(
        "diffusion_model",
        {**models, **nets, **attentions},
        declare,
        tables=tables,
        default_scheduler=default,
        places=places,
        reuse=reuse,
    )


def _parts_of_prompts(config, kind: type, build, precision: str) -> dict:
    """Build the models of one kind for pictures as prompts."""
    parts = {} if config.image_prompts is None else config.image_prompts.components
    return {name: build(name, precision) for name, one in parts.items() if isinstance(one, kind)}


def tables_of(config: PipelineConfig, size: Size, max_steps: int) -> Packed:
    """Return the samplers' tables for pictures of one size."""
    return pack(config.schedule.for_patches(config.patches(size)), max_steps)


def _decoder(config, geometry, precision, empty_tokens, build) -> Component:
    if DECODER in config.small_decoders:
        return _small_decoder(DECODER, config, geometry, precision, build)
    vae = build(AUTOENCODER, autoencoder_precision(config, precision))

    scale, tiles = config.autoencoder.latent_scale, Tiles(geometry.tile)

    def declare(shape, tables, shared):
        return decoder(vae, scale, tiles, geometry.shapes, shape, shared)

    return Component("decoder", {AUTOENCODER: vae}, declare, OF_DECODER)


def _preview_decoder(config, geometry, precision, empty_tokens, build) -> Component:
    return _small_decoder(PREVIEW_DECODER, config, geometry, precision, build)


def _small_decoder(name: str, config, geometry, precision: str, build) -> Component:
    model, small = build(name, precision), config.small_decoders[name]
    scale, tiles = small.latent_scale, Tiles(geometry.tile, small.reach)

    def declare(shape, tables, shared):
        return decoder(model, scale, tiles, geometry.shapes, shape, shared)

    return Component(name, {name: model}, declare)


def _image_encoder(config, geometry, precision, empty_tokens, build) -> Component:
    vae = build(AUTOENCODER, autoencoder_precision(config, precision))

    def declare(shape, tables, shared):
        return image_encoder(vae, Tiles(geometry.tile), geometry.shapes, shape, shared)

    return Component("image_encoder", {AUTOENCODER: vae}, declare, OF_ENCODER)


def _vision_encoder(config, geometry, precision, empty_tokens, build) -> Component:
    encoder = build(VISION_ENCODER, precision)
    projections = _parts_of_prompts(config, ImageProjectionConfig, build, precision)

    def declare(shape, tables, shared):
        return vision_encoder(encoder, tuple(projections.values()), shape, shared)

    return Component(VISION_ENCODER, {VISION_ENCODER: encoder, **projections}, declare)


_ASSEMBLERS = {
    **dict(
        zip(COMPONENTS, (_text_encoder, _diffusion_model, _decoder, _image_encoder), strict=True)
    ),
    VISION_ENCODER: _vision_encoder,
    PREVIEW_DECODER: _preview_decoder,
}
EVERY_COMPONENT = tuple(_ASSEMBLERS)  # in the order of an export


def component_names(config: PipelineConfig) -> tuple[str, ...]:
    """Return the components that a checkpoint has."""
    vision = () if config.image_prompts is None else (VISION_ENCODER,)
    preview = (PREVIEW_DECODER,) if PREVIEW_DECODER in config.small_decoders else ()
    return (*COMPONENTS, *vision, *preview)


def autoencoder_precision(config: PipelineConfig, precision: str) -> str:
    """Return the autoencoder's precision: SDXL's overflows in float16, and stays in float32."""
    is_upcast = config.autoencoder.force_upcast and precision == "float16"
    return "float32" if is_upcast else precision


def empty_tokens_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Tokenize "" for the text encoders, by input.

    CLIP's ids are (1, 77) or (1, encoders, 77), T5's (1, L).
    """
    ids: dict[str, list[np.ndarray]] = {}
    for name, encoder in checkpoint.config.text_encoders.items():
        ids.setdefault(encoder.tokens, []).append(checkpoint.empty_text(name))
    return {
        name: found[0] if len(found) == 1 else np.stack(found, axis=1)
        for name, found in ids.items()
    }
