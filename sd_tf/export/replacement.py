"""Replace components of an export: the new ones must fit those that stay."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

from tensorflow.core.protobuf import saved_model_pb2

from sd_tf.components import VISION_ENCODER
from sd_tf.components.conditions import conditions_of
from sd_tf.components.geometry import Geometry, takes_weights
from sd_tf.config import PREVIEW_DECODER
from sd_tf.export.options import ExportOptions
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, VERSION_FOLDER, ExportError, Manifest, serves
from sd_tf.weights import Checkpoint

# Fields of the manifest that all components share, those that some share (the components between
# which latents pass, those that take pictures or latents in tiles, and those with places for
# adapters), and those that one component decides.
SHARED = ("shapes", "precision")
SHARED_BY = {
    ("diffusion_model", "decoder", "image_encoder", PREVIEW_DECODER): (
        "scaling_factor",
        "shift_factor",
    ),
    ("decoder", "image_encoder", PREVIEW_DECODER): ("tile",),
    ("text_encoder", "diffusion_model"): ("adapters",),
}
OWNED = {
    "text_encoder": (
        "jit_compiled_text_encoder",
        "zero_empty_negative",
        "tokenizers",
        "prompt_chunks",
    ),
    "diffusion_model": (
        "family",
        "max_steps",
        "schedulers",
        "history",
        "default_sampler",
        "guidance",
        "guidance_rescale",
        "prediction",
        "latent_inputs",
        "time_ids",
        "further_scales",
        "suited",
        "controls",
        "image_prompts",
        "reuse",
    ),
}
# Options that decide a field of what a component owns, and may differ from what the export has.
DECIDES = {
    "max_steps": "max_steps",
    "guidance_rescale": "guidance_rescale",
    "reuse": "reuse",
    "prompt_chunks": "prompt_chunks",
    "jit_compile_text_encoder": "jit_compiled_text_encoder",
    "adapter_slots": "adapters",
    "tile": "tile",
}
TEXT_CONDITIONS = ("context", "pooled")  # what a text encoder gives to a diffusion model


def kept_from(previous: Manifest, replaced: Collection[str]) -> list[str]:
    """Return the components that stay; a vision encoder serves one diffusion model alone."""
    kept = [name for name in previous.components if name not in replaced]
    if "diffusion_model" in replaced and VISION_ENCODER in kept:
        kept.remove(VISION_ENCODER)
    return kept


def check_saved_models(export: Path, manifest: Manifest, instead: str) -> None:
    """Refuse a folder that JAX compiled; `instead` completes the message."""
    if not all((export / name / VERSION_FOLDER).is_dir() for name in manifest.components):
        raise ExportError(f"{export} has no SavedModels: it was compiled with JAX, {instead}.")


def check_options(
    options: ExportOptions, manifest: Manifest, previous: Manifest, kept: Collection[str]
) -> None:
    """Refuse an option of components that stay, unless it is as they have it.

    Args:
        manifest: that of the options alone.
    """
    default, owned = ExportOptions(), _owned(kept)
    for option, field in DECIDES.items():
        is_given = getattr(options, option) != getattr(default, option)
        old, new = _compared(previous, field), _compared(manifest, field)
        if is_given and field in owned and old != new:
            raise ExportError(
                f"`{option}` would change components that stay, out of {', '.join(kept)}, which "
                f"have {_said(field, old)}: leave it out, or replace them, too. Received: "
                f"{_said(field, new)}"
            )


def _owned(kept: Collection[str]) -> list[str]:
    """Return the fields that components decide which stay."""
    owned = [field for name in kept for field in OWNED.get(name, ())]
    for components, fields in SHARED_BY.items():
        if any(name in components for name in kept):
            owned += fields
    return owned


def merged(
    manifest: Manifest, previous: Manifest, kept: Collection[str], replaced: Collection[str]
) -> Manifest:
    """Return the manifest with the fields that belong to the kept components from `previous`."""
    if TEXT_TO_IMAGE in previous.components:
        raise ExportError(
            f"The export's {TEXT_TO_IMAGE} shares the weights of its components, so they are "
            f"replaced together: export all components. Received: {', '.join(replaced)}"
        )
    shared = list(SHARED)
    for components, fields in SHARED_BY.items():
        if all(any(name in components for name in names) for names in (kept, replaced)):
            shared += fields
    for field in shared:
        old, new = _compared(previous, field), _compared(manifest, field)
        if old != new:
            raise ExportError(
                f"A component can only be replaced by one of the same {field}: the export has "
                f"{_said(field, old)}. Received: {_said(field, new)}"
            )
    if "adapters" in shared and previous.adapters.loaded:
        raise ExportError(
            f"A component whose places hold adapters cannot be replaced: take the adapters out "
            f"first, with `sd-tf export-adapters EXPORT --remove NAME`. The export has "
            f"{', '.join(previous.adapters.names)}"
        )
    storage = {
        part: kind
        for one, names in ((previous, kept), (manifest, replaced))
        for part, kind in one.storage.items()
        if any(serves(name, part) for name in names)
    }
    fields = {field: getattr(previous, field) for field in _owned(kept)}
    return dataclasses.replace(manifest, storage=storage, **fields)


def _compared(manifest: Manifest, field: str) -> object:
    """Return a field's value as options decide it; of places for adapters, not what they hold."""
    if field == "reuse":
        return manifest.reuse.most
    if field != "adapters":
        return getattr(manifest, field)
    places = manifest.adapters
    return (places.slots, places.rank, places.layers) if places.slots else ()


def _said(field: str, value) -> str:
    """Return a value of `_compared` as a message has it."""
    if field != "adapters":
        return str(value)
    if not value:
        return "no places"
    slots, rank, layers = value
    return f"{slots} places of the rank {rank} for layers of {layers!r}"


def check_conditions(
    export: Path,
    kept: Collection[str],
    replaced: Collection[str],
    checkpoint: Checkpoint,
    geometry: Geometry,
) -> None:
    """Check that the text encoder gives what the diffusion model takes, where one is replaced."""
    theirs = {
        name: spec.shape
        for name, spec in conditions_of(
            checkpoint.config, geometry, geometry.shapes.first
        ).model.items()
        if name in TEXT_CONDITIONS
    }
    if "text_encoder" in kept and "diffusion_model" in replaced:
        given, taken = _shapes(export, "text_encoder", "outputs"), theirs
    elif "diffusion_model" in kept and "text_encoder" in replaced:
        given, taken = theirs, _shapes(export, "diffusion_model", "inputs")
    else:
        return
    if given != taken:
        there = given if taken is theirs else taken
        raise ExportError(
            f"The text_encoder must give what the diffusion_model takes, {taken}: "
            f"{_mend(there, theirs, checkpoint, geometry)}. Received: {given}"
        )


def _mend(
    there: dict[str, tuple[int, ...]],
    theirs: dict[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    geometry: Geometry,
) -> str:
    """Say how a checkpoint's conditions, `theirs`, are made those of the component that stays."""
    (_, wanted, _), (batch, own, width) = there["context"], theirs["context"]
    if wanted != own and there == {**theirs, "context": (batch, wanted, width)}:
        if takes_weights(checkpoint.config):
            chunks = wanted * geometry.prompt_chunks // own
            return f"give `prompt_chunks`={chunks}, as the export has it"
        if t5s := [*checkpoint.config.t5_encoders]:
            length = checkpoint.empty_text(t5s[0]).shape[-1] + wanted - own
            return f"give `max_sequence_length`={length}, as the export has it"
    return "replace both, or choose a checkpoint that fits the one that stays"


def _shapes(export: Path, component: str, side: str) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the text's conditions on one side of an exported component."""
    content = saved_model_pb2.SavedModel()
    path = export / component / VERSION_FOLDER / "saved_model.pb"
    content.ParseFromString(path.read_bytes())
    tensors = getattr(content.meta_graphs[0].signature_def["serving_default"], side)
    return {
        name: tuple(size.size for size in tensors[name].tensor_shape.dim)
        for name in TEXT_CONDITIONS
        if name in tensors
    }
