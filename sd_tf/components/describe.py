"""Describe a compiled pipeline in its manifest, for TensorFlow and JAX alike."""

import functools
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sd_tf.components.build import component_names, tables_of
from sd_tf.components.geometry import Fixed, Geometry
from sd_tf.components.guidance import guidance_of
from sd_tf.components.image_prompts import image_prompts_of
from sd_tf.components.reuse import reuse_of
from sd_tf.config import family_of, suited_to
from sd_tf.runtime.controls import ControlRecord
from sd_tf.runtime.manifest import ComponentRecord, Manifest, SchedulerRecord, file_hash, serves
from sd_tf.sampling.rows import HISTORY
from sd_tf.weights import Checkpoint


def manifest_of(
    checkpoint: Checkpoint,
    geometry: Geometry,
    fixed: Fixed,
    components: dict[str, ComponentRecord],
    *,
    compiler: str,
    jit_compiled_text_encoder: bool,
    verification: dict | None = None,
) -> Manifest:
    """Return the manifest of a compiled pipeline."""
    config = checkpoint.config
    packed = tables_of(config, geometry.shapes.first.size, geometry.max_steps)
    guidance = guidance_of(geometry.guidance, config, geometry.guidance_rescale)
    return Manifest(
        family=family_of(config),
        shapes=geometry.shapes,
        precision=fixed.precision,
        storage=dict(geometry.storage),
        max_steps=geometry.max_steps,
        schedulers={
            name: SchedulerRecord(packed.numbers[name], calls)
            for name, calls in packed.calls_by_sampler().items()
        },
        history=HISTORY,
        default_sampler=config.schedule.sampler,
        guidance=geometry.guidance,
        guidance_rescale=geometry.guidance_rescale,
        prediction=config.schedule.prediction,
        latent_inputs=config.latent_inputs,
        time_ids=config.denoiser.num_time_ids,
        further_scales=tuple(guidance.further_inputs),
        suited=suited_to(config),
        zero_empty_negative=config.zero_empty_negative,
        scaling_factor=config.autoencoder.scaling_factor,
        shift_factor=config.autoencoder.shift_factor,
        jit_compiled_text_encoder=jit_compiled_text_encoder,
        prompt_chunks=geometry.prompt_chunks,
        adapters=geometry.adapters,
        controls=tuple(
            ControlRecord(name, net.pools)
            for name, net in zip(checkpoint.controlnets, config.controlnets.values(), strict=True)
        ),
        image_prompts=image_prompts_of(config, checkpoint.image_adapters, geometry.image_prompts),
        reuse=reuse_of(config, geometry),
        tile=fixed.tile,
        tokenizers={name: tokenizer_folder(name) for name in config.text_encoders},
        components={
            name: components[name] for name in component_names(config) if name in components
        },
        verification={} if verification is None else verification,
        versions={name: importlib.metadata.version(name) for name in ("sd_tf", compiler, "keras")},
    )


def tokenizer_folder(text_encoder: str) -> str:
    """Name the folder of a text encoder's tokenizer."""
    return text_encoder.replace("text_encoder", "tokenizer")


def origins(
    checkpoint: Checkpoint, names: Iterable[str], hashed: bool = True
) -> dict[str, dict[str, Any]]:
    """Return what the record of each component says about the checkpoint of its weights.

    Adapters are listed where they were merged into the component's weights.

    Args:
        hashed: give the SHA-256 of the weights' files, which reads all of them.
    """
    hash_once = functools.cache(file_hash)  # a single file holds every part

    def hashes(files: Iterable[Path]) -> dict[str, str]:
        return {path.name: hash_once(path) for path in files} if hashed else {}

    def origin(name: str) -> dict[str, Any]:
        parts = [part for part in checkpoint.readers if serves(name, part)]
        if name in checkpoint.config.small_decoders:
            parts = [name]
        merged = [
            {"name": adapter.name, "scale": adapter.scale, "sha256": hashes(adapter.files)}
            for adapter in checkpoint.adapters
            if set(adapter.components) & set(parts)
        ]
        embeddings = [
            {
                "token": embedding.token,
                "vectors": embedding.count,
                "file": embedding.file.name,
                **({"sha256": hash_once(embedding.file)} if hashed else {}),
            }
            for embedding in checkpoint.embeddings
            if set(checkpoint.config.text_encoders) & set(parts)
        ]
        return {
            "name": checkpoint.name,
            "format": checkpoint.format,
            "sha256": {part: hashes(checkpoint.files(part)) for part in parts if hashed},
            **({"adapters": merged} if merged else {}),
            **({"embeddings": embeddings} if embeddings else {}),
        }

    return {name: origin(name) for name in names}
