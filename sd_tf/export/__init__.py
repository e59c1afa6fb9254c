"""Checkpoint → verified SavedModels and a manifest, published at once or not at all."""

import dataclasses
import errno
import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf

from sd_tf.components import COMPONENTS
from sd_tf.components.described import manifest_of
from sd_tf.components.fixed import Fixed, Geometry, geometry_of, refuse, vae_precision
from sd_tf.components.text import empty_tokens_of
from sd_tf.export import modules, verify
from sd_tf.manifest import (
    VERSION_FOLDER,
    Component,
    ExportError,
    Manifest,
    describe_files,
)
from sd_tf.models import lowering
from sd_tf.publish import staging
from sd_tf.sampling.packed import pack
from sd_tf.weights import Checkpoint

VERIFY = ("full", "fast", "off")

Report = Callable[[str, str], None]  # (component, what is being done or was done)


@dataclass(frozen=True, kw_only=True)
class Options(Fixed):
    jit_compile_text_encoder: bool = False
    target: str | None = None  # of lowering.TARGETS; None: what this machine computes on
    disabled_rewrites: Sequence[str] = ()
    components: Sequence[str] = COMPONENTS
    verify: str = "full"
    overwrite: bool = False


def export(
    checkpoint: Checkpoint, target: str | Path, options: Options, report: Report | None = None
) -> Manifest:
    """Write all components, or replace some of an export; returns the manifest."""
    report = report or (lambda component, text: None)
    target = Path(target)
    geometry = check(checkpoint, options)
    replacing = set(options.components) != set(COMPONENTS)
    previous = Manifest.read(target) if replacing else None
    with staging(target, options.overwrite or replacing) as folder:
        components, figures, calls = {}, {}, {}
        if previous is not None:
            kept = [name for name in previous.components if name not in options.components]
            _keep(target, folder, previous, kept)
            components = {name: previous.components[name] for name in kept}
            figures = {name: previous.verification[name] for name in kept}
            calls = previous.calls
        for name in options.components:
            signatures, figures[name], new_calls = _export_one(
                name, checkpoint, geometry, options, folder, report
            )
            made_for, rewrites = _lowering(name, options)
            files = describe_files(folder, name)
            components[name] = Component(signatures, made_for, rewrites.names, files)
            calls = new_calls or calls
        manifest = manifest_of(
            checkpoint,
            geometry,
            options,
            components,
            calls,
            compiler="tensorflow",
            jit_compiled_text_encoder=options.jit_compile_text_encoder,
            verification=figures,
        )
        if previous is not None:
            manifest = _with_kept(manifest, previous, kept)
        for encoder, name in manifest.tokenizers.items():
            checkpoint.tokenizer(encoder).save(folder / name)
        manifest.write(folder)
    return manifest


def check(checkpoint: Checkpoint, options: Options) -> Geometry:
    """Options against the checkpoint; everything that can be wrong is found before any work."""
    if unknown := [name for name in options.components if name not in COMPONENTS]:
        refuse(f"Components are {', '.join(COMPONENTS)}.", ", ".join(unknown))
    if not options.components:
        refuse(f"At least one component of {', '.join(COMPONENTS)} is exported.", "none")
    if options.verify not in VERIFY:
        refuse(f"Verification is one of {', '.join(VERIFY)}.", options.verify)
    if options.target not in (None, *lowering.TARGETS):
        refuse(f"The target is one of {', '.join(lowering.TARGETS)}.", options.target)
    if unknown := [name for name in options.disabled_rewrites if name not in lowering.NAMES]:
        refuse(f"Rewrites are {', '.join(lowering.NAMES)}.", ", ".join(unknown))
    return geometry_of(checkpoint.config, options)


def _export_one(name, checkpoint, geometry, options, folder, report):
    """Build, trace, save, drop, reload, compare: one copy of the weights at any time."""
    start = time.perf_counter()
    report(name, "loading weights")
    module, reference_of = _build(name, checkpoint, geometry, options)
    reference = inputs = None
    if options.verify != "off":
        report(name, "computing the reference")
        endpoint = module.endpoints[verify.endpoint_for(name)]
        specs = endpoint.structured_input_signature[1]
        inputs = verify.sample_inputs(specs, name, options.verify)
        reference = verify.eager(reference_of, inputs)
    report(name, "saving")
    path = folder / name / VERSION_FOLDER
    try:
        # Gradients would be a function for every activation, which loading pays for in memory.
        save_options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(module, str(path), signatures=module.endpoints, options=save_options)
    except tf.errors.ResourceExhaustedError as error:  # TensorFlow's word for a full disk
        raise OSError(errno.ENOSPC, error.message) from error
    signatures = tuple(sorted(module.endpoints))
    calls = None
    if name == "diffusion_model":
        calls = pack(checkpoint.config.schedule, geometry.max_steps).calls_by_sampler()
    del module, reference_of
    keras.backend.clear_session()
    gc.collect()
    figures = {"level": options.verify}
    if options.verify != "off":
        report(name, "reloading and comparing")
        figures |= verify.compare(
            name, folder, reference, inputs, options.verify, options.precision
        )
        gc.collect()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    seconds = time.perf_counter() - start
    best = [f"{k} {v['psnr_db']:.0f} dB" for k, v in figures.items() if isinstance(v, dict)]
    agreement = f", agrees: {', '.join(best)}" if best else ", not verified"
    report(name, f"done in {seconds:.1f} s, {size / 1e6:.1f} MB{agreement}")
    return signatures, figures, calls


def _lowering(name, options) -> tuple[str, lowering.Rewrites]:
    """The target and what is rewritten for it; a text encoder stays as it is written."""
    target = options.target
    if target is None:
        found = {device.device_type.lower() for device in tf.config.list_physical_devices()}
        target = next(name for name in ("tpu", "gpu", "cpu") if name in found)
    if name == "text_encoder":
        return target, lowering.AS_WRITTEN
    return target, lowering.TARGETS[target].without(options.disabled_rewrites)


def _build(name, checkpoint, geometry, options):
    """The component's module, and a function that computes its reference with the bare models."""
    config = checkpoint.config
    _, rewrites = _lowering(name, options)
    if name == "text_encoder":
        models = [checkpoint.build(part, options.precision) for part in config.text_encoders]
        empty = empty_tokens_of(checkpoint)
        module = modules.TextEncoder(
            models, empty, config, geometry.batch_size, options.jit_compile_text_encoder
        )
    elif name == "diffusion_model":
        unet = checkpoint.build("unet", options.precision)
        module = modules.DiffusionModel(unet, config, geometry, rewrites)
    else:
        vae = checkpoint.build("vae", vae_precision(config, options.precision))
        if name == "decoder":
            module = modules.Decoder(vae, config, geometry, rewrites)
        else:
            module = modules.ImageEncoder(vae, geometry, rewrites)
    return module, module.eager[verify.endpoint_for(name)]


def _keep(target: Path, folder: Path, previous: Manifest, kept: list[str]) -> None:
    """The components that stay, as links to the same files: nothing is copied."""
    previous.check_files(target)
    for name in kept:
        shutil.copytree(target / name, folder / name, copy_function=os.link)


# What every component shares, and what a component alone decides.
SHARED = ("batch_size", "height", "width", "latent_shape", "precision", "latent_inputs", "time_ids")
OWNED = {
    "text_encoder": ("jit_compiled_text_encoder", "zero_empty_negative", "tokenizers"),
    "diffusion_model": (
        "max_steps",
        "default_sampler",
        "guidance",
        "guidance_rescale",
        "prediction",
    ),
}


def _with_kept(manifest: Manifest, previous: Manifest, kept: list[str]) -> Manifest:
    """The manifest with what the kept components were exported with."""
    for field in SHARED:
        old, new = getattr(previous, field), getattr(manifest, field)
        if old != new:
            raise ExportError(
                f"A component can only be replaced by one of the same {field}: the export has "
                f"{old}. Received: {new}"
            )
    owned = [field for name in kept for field in OWNED.get(name, ())]
    return dataclasses.replace(manifest, **{field: getattr(previous, field) for field in owned})
