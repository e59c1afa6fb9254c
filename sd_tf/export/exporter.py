"""Export a checkpoint as verified SavedModels and a manifest, published together or not at all."""

import dataclasses
import errno
import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from sd_tf.components import COMPONENTS
from sd_tf.components.build import Component, component, empty_tokens_of
from sd_tf.components.describe import manifest_of, origins
from sd_tf.export import verify
from sd_tf.export.modules import ComponentModule
from sd_tf.export.options import ExportOptions, check
from sd_tf.export.replacement import check_conditions, merged
from sd_tf.files.publish import staging
from sd_tf.models import lowering
from sd_tf.runtime.manifest import (
    FILE_NAME,
    VERSION_FOLDER,
    ComponentRecord,
    ExportError,
    Manifest,
    describe_files,
)
from sd_tf.runtime.saved_model import best_device
from sd_tf.weights import Checkpoint

Report = Callable[[str, str], None]  # (component, what is being done or was done)


def export(
    checkpoint: Checkpoint,
    output_dir: str | Path,
    options: ExportOptions,
    report: Report | None = None,
) -> Manifest:
    """Write all components, or replace some in an existing export; return the manifest."""
    report = report or (lambda component, text: None)
    target = Path(output_dir)
    geometry = check(checkpoint, options)
    manifest = manifest_of(
        checkpoint,
        geometry,
        options,
        {},
        compiler="tensorflow",
        jit_compiled_text_encoder=options.jit_compile_text_encoder,
    )
    replacing = set(options.components) != set(COMPONENTS)
    with staging(target, options.overwrite or replacing, FILE_NAME, ExportError) as folder:
        components, figures = {}, {}
        if replacing:
            previous = Manifest.read(target)
            kept = [name for name in previous.components if name not in options.components]
            manifest = merged(manifest, previous, kept, options.components)
            check_conditions(target, kept, options.components, checkpoint, geometry)
            _keep(target, folder, previous, kept)
            components = {name: previous.components[name] for name in kept}
            figures = {name: previous.verification[name] for name in kept}
        origin = origins(checkpoint, options.components)
        for name in options.components:
            components[name], figures[name] = _export_one(
                name, checkpoint, geometry, options, origin[name], folder, report
            )
        if "text_encoder" in options.components:
            for encoder, name in manifest.tokenizers.items():
                checkpoint.tokenizer(encoder).save(folder / name)
        manifest = dataclasses.replace(
            manifest,
            components={name: components[name] for name in COMPONENTS if name in components},
            verification=figures,
        )
        manifest.write(folder)
    return manifest


def _export_one(name, checkpoint, geometry, options, origin, folder, report):
    """Export one component: build, trace, save, drop, reload and compare it.

    No more than one copy of the weights is in memory at any time.
    """
    start = time.perf_counter()
    report(name, "loading weights")
    part = component(
        name,
        checkpoint.config,
        geometry,
        options.precision,
        empty_tokens_of(checkpoint),
        checkpoint.build,
    )
    target, rewrites = _lowering(part, options)
    is_compiled = name != "text_encoder" or options.jit_compile_text_encoder
    module = ComponentModule(part, geometry.shapes, rewrites, is_compiled)
    samples = []
    for endpoint in verify.endpoints_for(name, geometry.shapes, options.verify):
        report(name, f"computing the reference of {endpoint}")
        specs = module.endpoints[endpoint].structured_input_signature[1]
        inputs = verify.sample_inputs(specs, part, options.verify)
        reference = verify.eager(module.eager[endpoint], inputs)
        samples.append(verify.Sample(endpoint, inputs, reference))
    report(name, "saving")
    path = folder / name / VERSION_FOLDER
    try:
        # Custom gradients add a function for every activation, and loading them costs memory.
        save_options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(module, str(path), signatures=module.endpoints, options=save_options)
    except tf.errors.ResourceExhaustedError as error:  # TensorFlow raises it when the disk is full
        raise OSError(errno.ENOSPC, error.message) from error
    signatures = tuple(sorted(module.endpoints))
    del module, part
    keras.backend.clear_session()
    gc.collect()
    figures = {"level": options.verify}
    if samples:
        report(name, "reloading and comparing")
        figures |= verify.compare(name, folder, samples, options.verify, options.precision)
        gc.collect()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    seconds = time.perf_counter() - start
    best = [f"{k} {v['psnr_db']:.0f} dB" for k, v in figures.items() if isinstance(v, dict)]
    agreement = f", agrees: {', '.join(best)}" if best else ", not verified"
    report(name, f"done in {seconds:.1f} s, {size / 1e6:.1f} MB{agreement}")
    files = describe_files(folder, name)
    return ComponentRecord(signatures, target, rewrites.names, files, origin), figures


def _lowering(part: Component, options: ExportOptions) -> tuple[str, lowering.Rewrites]:
    """Choose the target, and the rewrites for it."""
    target = best_device() if options.target is None else options.target
    if not part.is_rewritten:
        return target, lowering.AS_WRITTEN
    return target, lowering.TARGETS[target].without(options.disabled_rewrites)


def _keep(target: Path, folder: Path, previous: Manifest, kept: list[str]) -> None:
    """Link the components that stay into the new folder, without copying their files."""
    previous.check_files(target)
    tokenizers = previous.tokenizers.values() if "text_encoder" in kept else ()
    for name in (*kept, *tokenizers):
        shutil.copytree(target / name, folder / name, copy_function=os.link)
