"""The manifest of a pipeline, whatever it is compiled with."""

import importlib.metadata

from sd_tf.components import COMPONENTS
from sd_tf.components.fixed import Fixed, Geometry
from sd_tf.manifest import Component, Manifest, file_hash
from sd_tf.weights import Checkpoint


def manifest_of(
    checkpoint: Checkpoint,
    geometry: Geometry,
    fixed: Fixed,
    components: dict[str, Component],
    calls: dict[str, list[int]],
    *,
    compiler: str,
    jit_compiled_text_encoder: bool,
    verification: dict | None = None,
    hashed: bool = True,
) -> Manifest:
    """`hashed`: with the checkpoint's SHA-256, for which all of it is read."""
    config = checkpoint.config
    added = config.unet.added
    return Manifest(
        family=config.family,
        batch_size=geometry.batch_size,
        height=geometry.height,
        width=geometry.width,
        latent_shape=geometry.latent_shape,
        precision=fixed.precision,
        max_steps=geometry.max_steps,
        calls=calls,
        default_sampler=config.schedule.sampler,
        guidance=geometry.guidance,
        guidance_rescale=geometry.guidance_rescale,
        prediction=config.schedule.prediction,
        latent_inputs=config.latent_inputs,
        time_ids=0 if added is None else added.num_time_ids,
        zero_empty_negative=config.zero_empty_negative,
        scaling_factor=config.vae.scaling_factor,
        jit_compiled_text_encoder=jit_compiled_text_encoder,
        tokenizers={
            name: name.replace("text_encoder", "tokenizer") for name in config.text_encoders
        },
        components={name: components[name] for name in COMPONENTS if name in components},
        checkpoint={
            "source": checkpoint.source,
            "format": checkpoint.format,
            "sha256": {
                name: {path.name: file_hash(path) for path in checkpoint.files(name)}
                for name in (checkpoint.readers if hashed else ())
            },
        },
        verification=verification or {},
        versions={name: importlib.metadata.version(name) for name in ("sd_tf", compiler, "keras")},
    )
