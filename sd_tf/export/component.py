"""Export one SavedModel: build, trace, save, drop, reload and compare it.

No more than one copy of the weights is in memory at any time.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from sd_tf.components.build import Component, component, empty_tokens_of
from sd_tf.components.describe import origins
from sd_tf.components.geometry import Geometry
from sd_tf.config.rewrites import AS_WRITTEN, Rewrites, in_saved_models
from sd_tf.export import bundles, verify
from sd_tf.export.modules import ComponentModule
from sd_tf.export.options import ExportOptions
from sd_tf.export.text_to_image import GENERATE, TextToImageModule
from sd_tf.runtime.chain import NEEDED
from sd_tf.runtime.manifest import (
    TEXT_TO_IMAGE,
    VERSION_FOLDER,
    ComponentRecord,
    Manifest,
    describe_files,
)
from sd_tf.runtime.saved_model import best_device, give_back
from sd_tf.weights import Checkpoint

Report = Callable[[str, str], None]  # (component, what is being done or was done)
Exported = tuple[ComponentRecord, dict[str, Any]]  # and the figures of its verification


def export_component(
    name: str,
    checkpoint: Checkpoint,
    geometry: Geometry,
    options: ExportOptions,
    origin: dict[str, Any],
    folder: Path,
    report: Report,
) -> Exported:
    """Export a component of the checkpoint; return its record and the figures."""
    start = time.perf_counter()
    report(name, "loading weights")
    part = _part(name, checkpoint, geometry, options)
    target, rewrites = _lowering(part, options)
    is_compiled = name != "text_encoder" or options.jit_compile_text_encoder
    module = ComponentModule(part, geometry.shapes, rewrites, is_compiled)
    endpoints = verify.endpoints_for(name, checkpoint.config, geometry, options.verify)
    samples = [_sampled(module, part, endpoint, options, report) for endpoint in endpoints]
    give_back()
    stored = {}
    if samples:
        stored = verify.storage_figures(part, samples[0], checkpoint, geometry, options.precision)
    runs = verify.reuse_runs(part, samples, options.verify)
    report(name, "saving")
    signatures = _save(module, folder / name / VERSION_FOLDER)
    if has_places := bool(part.places.by_layer):
        part.adaptable.write(folder / name)
    del module, part
    _clear()
    if has_places:
        bundles.rebuild([folder / name / VERSION_FOLDER])
        _clear()
    compared = _compared(name, folder, samples, options, report, runs, rewrites.graph_kernels)
    figures = {**compared, **stored}
    report(name, _done(start, folder / name, figures))
    files = describe_files(folder, name)
    return ComponentRecord(signatures, target, rewrites.names, files, origin), figures


def _sampled(
    module: ComponentModule, part: Component, endpoint: str, options: ExportOptions, report: Report
) -> verify.Sample:
    """Compute an endpoint's reference, and keep nothing that would hold the models."""
    report(part.name, f"computing the reference of {endpoint}")
    specs = module.endpoints[endpoint].structured_input_signature[1]
    inputs = verify.sample_inputs(specs, part, options.verify)
    return verify.sampled(endpoint, module.eager[endpoint], inputs, options.precision)


def export_text_to_image(
    checkpoint: Checkpoint,
    geometry: Geometry,
    options: ExportOptions,
    manifest: Manifest,
    folder: Path,
    report: Report,
) -> tuple[dict[str, ComponentRecord], dict[str, Any]]:
    """Export the whole pipeline, on the values of its exported components.

    Returns:
        The records of all components, whose files change, and the figures.
    """
    start, name = time.perf_counter(), TEXT_TO_IMAGE
    report(name, "loading weights")
    parts = {part: _part(part, checkpoint, geometry, options) for part in NEEDED}
    lowerings = {part: _lowering(parts[part], options) for part in parts}
    tokenizers = [checkpoint.tokenizer(encoder) for encoder in manifest.tokenizers]
    rewrites = {part: found for part, (_, found) in lowerings.items()}
    module = TextToImageModule(parts, tokenizers, manifest, rewrites)
    report(name, "saving")
    path = folder / name / VERSION_FOLDER
    signatures = _save(module, path)
    loop = parts["diffusion_model"]
    run = verify.run_of(loop, options.verify) if options.verify != "off" else {}
    del module, parts, loop
    _clear()
    bundles.share([folder / part / VERSION_FOLDER for part in NEEDED], path)

    records = {
        part: dataclasses.replace(record, files=describe_files(folder, part))
        for part, record in manifest.components.items()
    }
    manifest = dataclasses.replace(manifest, components=records)
    manifest.write(folder)
    samples = []
    if run:
        report(name, "drawing with its components")
        samples = verify.drawn(folder, manifest, int(run["num_steps"]), GENERATE, options.verify)
        _clear()
    target, found = lowerings["diffusion_model"]
    figures = _compared(name, folder, samples, options, report, optimize=found.graph_kernels)
    report(name, _done(start, folder / name, figures))
    origin = origins(checkpoint, [name])[name]
    files = describe_files(folder, name)
    record = ComponentRecord(signatures, target, found.names, files, origin)
    return {**records, name: record}, figures


def _part(
    name: str, checkpoint: Checkpoint, geometry: Geometry, options: ExportOptions
) -> Component:
    return component(
        name,
        checkpoint.config,
        geometry,
        options.precision,
        empty_tokens_of(checkpoint),
        checkpoint.build,
    )


def lowering_of(options: ExportOptions) -> tuple[str, Rewrites]:
    """Return the target, and the rewrites for it of a component that is rewritten."""
    target = best_device() if options.target is None else options.target
    return target, in_saved_models(target, options.precision, options.disabled_rewrites)


def _lowering(part: Component, options: ExportOptions) -> tuple[str, Rewrites]:
    """Choose the target, and the rewrites for it."""
    target, rewrites = lowering_of(options)
    return target, rewrites if part.is_rewritten else AS_WRITTEN


def _save(module: tf.Module, path: Path) -> tuple[str, ...]:
    """Save a module's endpoints as a SavedModel; return their names."""
    # Custom gradients add a function for every activation, and loading them costs memory.
    save_options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    with bundles.full_disk_told():
        tf.saved_model.save(module, str(path), signatures=module.endpoints, options=save_options)
    return tuple(sorted(module.endpoints))


def _clear() -> None:
    """Free what was deleted before, and give its memory back to the system."""
    keras.backend.clear_session(free_memory=False)  # which would collect, too
    gc.collect()
    give_back()


def _compared(
    name: str,
    folder: Path,
    samples: list[verify.Sample],
    options: ExportOptions,
    report: Report,
    runs: Mapping[int, dict] = MappingProxyType({}),
    optimize: bool = False,
) -> dict[str, Any]:
    figures: dict[str, Any] = {"level": options.verify}
    if samples:
        report(name, "reloading and comparing")
        figures |= verify.compare(
            name, folder, samples, options.verify, options.precision, runs, optimize
        )
        _clear()
    return figures


def _done(start: float, folder: Path, figures: dict[str, Any]) -> str:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    best = [f"{k} {v['psnr_db']:.0f} dB" for k, v in figures.items() if isinstance(v, dict)]
    agreement = f", agrees: {', '.join(best)}" if best else ", not verified"
    return f"done in {time.perf_counter() - start:.1f} s, {size / 1e6:.1f} MB{agreement}"
