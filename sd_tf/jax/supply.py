"""Give a pipeline that was compiled from shapes alone a checkpoint's weights, if they fit it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from sd_tf.components.describe import manifest_of, origins
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import family_of, storage_text
from sd_tf.jax import artifacts
from sd_tf.jax import compile as ahead
from sd_tf.jax import components as programs
from sd_tf.runtime.adapter_places import DEFAULT_RANK
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.tokenizer.open import Tokenizer
from sd_tf.weights import Checkpoint, open_checkpoint

SHOWN = 4  # of the ids of "": the last of them is padding

Weights = dict[str, dict[str, jax.Array]]


def supplied(
    source: str | Path,
    opening: Mapping,
    compiled: artifacts.Compiled,
    manifest: Manifest,
    tokenizers: Mapping[str, Tokenizer],
    mesh: Mesh,
) -> tuple[Weights, Manifest, dict[str, Tokenizer]]:
    """Open a checkpoint for a compiled pipeline, and load its weights onto the mesh.

    Returns:
        The weights; the manifest with the checkpoint's schedule, and what pictures say of it; the
        checkpoint's own tokenizers where it has some.

    Raises:
        ExportError: the checkpoint computes something else than what was compiled.
    """
    checkpoint = open_checkpoint(source, **opening)
    if family_of(checkpoint.config) != manifest.family:
        raise ExportError(
            f"The pipeline was compiled for the family {manifest.family}. Received: "
            f"{family_of(checkpoint.config)}, {source}"
        )
    fixed = _fixed(manifest)
    components = ahead.components(checkpoint, fixed, mesh)
    if differing := sorted(components.keys() ^ compiled.programs.keys()):
        raise ExportError(
            f"{source} does not fit the compiled pipeline: only one of them has the component "
            f"{', '.join(differing)}. Compile again for this checkpoint."
        )
    artifacts.check_config(compiled, checkpoint.config, str(source))
    for name, component in components.items():
        artifacts.check_weights(compiled.programs[name], component.weights, str(source))
    _check_empty_text(checkpoint, tokenizers, str(source))
    own = {
        name: checkpoint.tokenizer(name)
        for name in tokenizers
        if name in checkpoint.tokenizer_readers
    }
    weights = programs.load_weights(components, checkpoint, mesh)
    return weights, _described(manifest, checkpoint, fixed), {**tokenizers, **own}


def _fixed(manifest: Manifest) -> Fixed:
    return Fixed(
        batch_sizes=manifest.shapes.batch_sizes,
        sizes=manifest.shapes.sizes,
        precision=manifest.precision,
        storage=storage_text(manifest.storage),
        max_steps=manifest.max_steps,
        guidance=manifest.guidance,
        guidance_rescale=manifest.guidance_rescale,
        prompt_chunks=manifest.prompt_chunks,
        adapter_slots=manifest.adapters.slots,
        adapter_rank=manifest.adapters.rank or DEFAULT_RANK,
        adapter_layers=manifest.adapters.layers,
    )


def _check_empty_text(
    checkpoint: Checkpoint, tokenizers: Mapping[str, Tokenizer], source: str
) -> None:
    """Refuse other tokens of "", which stand for a missing negative prompt, than were compiled."""
    for name, tokenizer in tokenizers.items():
        wanted, received = tokenizer("")[0], checkpoint.empty_text(name)[0]
        if not np.array_equal(wanted, received):
            shown = (f"({', '.join(map(str, ids[:SHOWN]))}, …)" for ids in (wanted, received))
            raise artifacts.misfit(source, f'what {name} reads for ""', *shown)


def _described(manifest: Manifest, checkpoint: Checkpoint, fixed: Fixed) -> Manifest:
    """Return the manifest with what the checkpoint brings: its schedule, name and checksums."""
    geometry = geometry_of(checkpoint.config, fixed)
    ours = manifest_of(
        checkpoint, geometry, fixed, {}, compiler="jax", jit_compiled_text_encoder=True
    )
    origin = origins(checkpoint, manifest.components)
    return replace(
        manifest,
        schedulers=ours.schedulers,
        default_sampler=ours.default_sampler,
        prediction=ours.prediction,
        components={
            name: replace(record, checkpoint=origin[name])
            for name, record in manifest.components.items()
        },
    )
