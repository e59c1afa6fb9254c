"""Write adapters into an export's places: a new export that replaces the old one in one step."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sd_tf.adapters import AdapterError
from sd_tf.export import bundles
from sd_tf.export.replacement import check_saved_models
from sd_tf.files.publish import link, staging
from sd_tf.runtime.adapters import (
    ADAPTED_COMPONENTS,
    layers_of,
    opened,
    rows_of,
    with_adapter,
    without_adapter,
)
from sd_tf.runtime.chain import NEEDED
from sd_tf.runtime.manifest import (
    FILE_NAME,
    TEXT_TO_IMAGE,
    VERSION_FOLDER,
    ExportError,
    Manifest,
    describe_files,
)


def write_adapters(
    export: str | Path, adapters: Mapping[str, str | Path], removed: Sequence[str] = ()
) -> Manifest:
    """Put adapters into the places of an export, and take others out.

    The weights' files are linked, not copied. A pipeline or a server that has loaded the export
    keeps what it loaded.

    Args:
        adapters: files by name; a name that is there is replaced.
        removed: names of adapters whose places become free before.
    """
    target = Path(export)
    Manifest.read(target)  # refuses what is no export before a lock lies beside it
    if not adapters and not removed:
        raise AdapterError("Give at least one adapter to write or to remove. Received: none")
    with staging(target, True, FILE_NAME, ExportError) as folder:
        manifest = Manifest.read(target)
        manifest.check_files(target)
        check_saved_models(
            target, manifest, "where a pipeline's `load_adapter` puts adapters into their places"
        )
        layers = layers_of(target, manifest)
        places, changed = manifest.adapters, {}
        for name in removed:
            before, places = places, without_adapter(places, name)
            changed[before.loaded[name].slot] = None
        for name, path in adapters.items():
            adapter = opened(path, layers, places)
            places = with_adapter(places, name, adapter)
            changed[places.loaded[name].slot] = adapter
        shutil.copytree(target, folder, copy_function=link, dirs_exist_ok=True)
        for slot, adapter in changed.items():
            rows = {
                bundles.place_name(component, matrix): (slot * places.rank, values)
                for component in layers
                for matrix, values in rows_of(adapter, layers[component], places).items()
            }
            _write(folder, manifest, rows)
        records = {
            name: dataclasses.replace(record, files=describe_files(folder, name))
            for name, record in manifest.components.items()
        }
        manifest = dataclasses.replace(manifest, adapters=places, components=records)
        (folder / FILE_NAME).unlink()  # a link to the old export's own
        manifest.write(folder)
    return manifest


def _write(folder: Path, manifest: Manifest, rows: bundles.Rows) -> None:
    whole = (
        folder / TEXT_TO_IMAGE / VERSION_FOLDER if TEXT_TO_IMAGE in manifest.components else None
    )
    parts = ADAPTED_COMPONENTS if whole is None else NEEDED
    bundles.rebuild([folder / name / VERSION_FOLDER for name in parts], whole, rows)
