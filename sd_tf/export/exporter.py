"""Export a checkpoint as verified SavedModels and a manifest, published together or not at all."""

import dataclasses
import shutil
from pathlib import Path

from sd_tf.components.build import EVERY_COMPONENT, component_names
from sd_tf.components.describe import manifest_of, origins
from sd_tf.export.component import Report, export_component, export_text_to_image, lowering_of
from sd_tf.export.options import ExportOptions, check
from sd_tf.export.replacement import (
    check_conditions,
    check_options,
    check_saved_models,
    kept_from,
    merged,
)
from sd_tf.files.publish import link, staging
from sd_tf.runtime.graph_kernels import tell_software
from sd_tf.runtime.manifest import (
    FILE_NAME,
    TEXT_TO_IMAGE,
    ExportError,
    Manifest,
)
from sd_tf.weights import Checkpoint


def export(
    checkpoint: Checkpoint,
    output_dir: str | Path,
    options: ExportOptions,
    report: Report | None = None,
) -> Manifest:
    """Write all components, or replace some in an existing export; return the manifest."""
    if report is None:
        report = _say_nothing
    target = Path(output_dir)
    geometry, wanted = check(checkpoint, options)
    known = component_names(checkpoint.config)
    _, rewrites = lowering_of(options)
    if rewrites.graph_kernels:
        tell_software()
    manifest = manifest_of(
        checkpoint,
        geometry,
        options,
        {},
        compiler="tensorflow",
        jit_compiled_text_encoder=options.jit_compile_text_encoder,
    )
    replacing = set(wanted) != set(known)
    with staging(target, options.overwrite or replacing, FILE_NAME, ExportError) as folder:
        components, figures = {}, {}
        if replacing:
            previous = Manifest.read(target)
            check_saved_models(target, previous, "where no component is replaced: compile again")
            kept = kept_from(previous, wanted)
            check_options(options, manifest, previous, kept)
            manifest = merged(manifest, previous, kept, wanted)
            check_conditions(target, kept, wanted, checkpoint, geometry)
            _keep(target, folder, previous, kept)
            components = {name: previous.components[name] for name in kept}
            figures = {name: previous.verification[name] for name in kept}
        if "text_encoder" in wanted:  # before it, whose record has the checksums of these, too
            for encoder, name in manifest.tokenizers.items():
                checkpoint.tokenizer(encoder).save(folder / name)
        origin = origins(checkpoint, wanted)
        for name in wanted:
            components[name], figures[name] = export_component(
                name, checkpoint, geometry, options, origin[name], folder, report
            )
        if options.text_to_image:
            together = dataclasses.replace(manifest, components=components)
            components, figures[TEXT_TO_IMAGE] = export_text_to_image(
                checkpoint, geometry, options, together, folder, report
            )
        manifest = dataclasses.replace(
            manifest,
            components=_in_order(components),
            verification=_in_order(figures),
        )
        manifest.write(folder)
    return manifest


def _say_nothing(component: str, text: str) -> None:
    """Report no progress."""


def _in_order(found: dict) -> dict:
    """Return what was found of each component in the order of a whole export."""
    return {name: found[name] for name in (*EVERY_COMPONENT, TEXT_TO_IMAGE) if name in found}


def _keep(target: Path, folder: Path, previous: Manifest, kept: list[str]) -> None:
    """Link the components that stay into the new folder, without copying their files."""
    previous.check_files(target)
    tokenizers = previous.tokenizers.values() if "text_encoder" in kept else ()
    for name in (*kept, *tokenizers):
        shutil.copytree(target / name, folder / name, copy_function=link)
