"""Put adapters into an export's places: which layers have one, and what an adapter writes there."""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sd_tf.adapters import Adapter, AdapterError, Change, read_adapter
from sd_tf.runtime.adapter_places import DOWN, LAYERS, PREFIX, UP, AdapterPlaces, LoadedAdapter
from sd_tf.runtime.manifest import (
    ExportError,
    Manifest,
    file_hash,
    read_record,
    typed,
    write_record,
)

ADAPTED_COMPONENTS = ("text_encoder", "diffusion_model")
LAYERS_FILE = "adapter_layers.json"  # in the folder of a component with places
FORMAT_VERSION = 1
FORBIDDEN = "@,="  # in names: they divide names from numbers and paths


@dataclass(frozen=True)
class LayerRecord:
    """A layer that an adapter may change."""

    shape: tuple[int, ...]  # of its weight, as checkpoints store it
    has_place: bool


@dataclass(frozen=True)
class Layers:
    """The layers of a component, by the checkpoint's part and the layer's name."""

    parts: dict[str, dict[str, LayerRecord]]

    def write(self, folder: Path) -> None:
        write_record(self, folder / LAYERS_FILE, FORMAT_VERSION)

    @classmethod
    def read(cls, folder: Path) -> "Layers":
        path = folder / LAYERS_FILE
        return typed(cls, read_record(path, FORMAT_VERSION, "export again"), str(path))


def layers_of(folder: Path, manifest: Manifest) -> dict[str, Layers]:
    """Read the layers of an export's components; none without places."""
    if not manifest.adapters.slots:
        return {}
    return {name: Layers.read(folder / name) for name in ADAPTED_COMPONENTS}


def opened(path: str | Path, layers: Mapping[str, Layers], places: AdapterPlaces) -> Adapter:
    """Read an adapter's file; refuse one that does not fit the places."""
    check_switchable(layers, places)
    records = {part: found for one in layers.values() for part, found in one.parts.items()}
    shapes = {
        part: {path: record.shape for path, record in found.items()}
        for part, found in records.items()
    }
    adapter = read_adapter(path, shapes)
    _check_places(adapter, layers, places)
    _check_kinds(adapter, places)
    return adapter


def check_switchable(layers: Mapping[str, Layers], places: AdapterPlaces) -> None:
    """Refuse to change adapters where there are no places, or where they are in a server."""
    if not places.slots:
        raise ExportError(
            "The export has no places for adapters: export with --adapter_slots, or merge the "
            "adapter with --lora."
        )
    if not layers:
        raise ExportError(
            "The models run in a server, whose adapters lie in its export: put others there with "
            "`sd-tf export-adapters`."
        )


def _check_places(adapter: Adapter, layers: Mapping[str, Layers], places: AdapterPlaces) -> None:
    without = [
        (name, f"{part}.{layer}")
        for name, one in layers.items()
        for part, layer in adapter.changes
        if part in one.parts and not one.parts[part][layer].has_place
    ]
    if without:
        # The text encoders' places do not depend on the option.
        of_denoiser = {name for name, _ in without} == {"diffusion_model"}
        would_help = of_denoiser and places.layers != LAYERS[-1]
        merge = "Export with --adapter_layers=all, or merge it" if would_help else "Merge it"
        raise AdapterError(
            f"{adapter.name} changes {len(without)} layers that have no place, such as "
            f"{without[0][1]}; the denoiser's places are for layers of the kind {places.layers!r}. "
            f"{merge} with --lora."
        )


def _check_kinds(adapter: Adapter, places: AdapterPlaces) -> None:
    for (part, layer), change in adapter.changes.items():
        where = f"{adapter.name}: the change of {part}.{layer}"
        if change.rank is None:
            raise AdapterError(f"{where} has no factors of low rank. Merge it with --lora.")
        if change.has_bias:
            raise AdapterError(f"{where} also changes the bias. Merge it with --lora.")
    highest = max(change.rank for change in adapter.changes.values())
    if highest > places.rank:
        raise AdapterError(
            f"{adapter.name} has the rank {highest}, the export's places have {places.rank}. "
            f"Export with --adapter_rank={highest}, or merge it with --lora."
        )


def rows_of(
    adapter: Adapter | None, layers: Layers, places: AdapterPlaces
) -> dict[str, np.ndarray]:
    """Return what a component's places hold of an adapter, by the matrices' names.

    Places of layers that the adapter does not change are filled with zeros; all, without adapter.
    """
    rows = {}
    for part, records in layers.parts.items():
        for layer, record in records.items():
            if record.has_place:
                change = None if adapter is None else adapter.changes.get((part, layer))
                name = f"{PREFIX}{part}.{layer}"
                rows[name + DOWN], rows[name + UP] = _factors(change, record.shape, places.rank)
    return rows


def _factors(change: Change | None, shape: tuple[int, ...], rank: int):
    """Return the factors of a layer's change in Keras' layout: (rank, inputs), (rank, outputs)."""
    outputs, *inputs = shape
    down = np.zeros((rank, math.prod(inputs)), "float32")
    up = np.zeros((rank, outputs), "float32")
    if change is not None:
        a, b = change.factors()
        kernel = np.reshape(a, (len(a), *inputs))
        down[: len(a)] = np.moveaxis(kernel, 1, -1).reshape(len(a), -1)
        up[: len(a)] = b.T
    return down, up


def with_adapter(places: AdapterPlaces, name: str, adapter: Adapter) -> AdapterPlaces:
    """Return the places with an adapter in its own slot, or else in the first free one."""
    if not name or set(name) & set(FORBIDDEN):
        raise AdapterError(
            f"The name of an adapter has a character or more, and none of {FORBIDDEN}. Received: "
            f"{name!r}"
        )
    used = {one.slot for one in places.loaded.values()}
    if name in places.loaded:
        slot = places.loaded[name].slot
    elif free := sorted(set(range(places.slots)) - used):
        slot = free[0]
    else:
        raise AdapterError(
            f"The export has places for {places.slots} adapters, which {', '.join(places.names)} "
            f"have taken: unload one, or export with --adapter_slots={places.slots + 1}. Received: "
            f"{name!r}"
        )
    file = adapter.files[0]
    record = LoadedAdapter(slot, file.name, file_hash(file))
    return replace(places, loaded={**places.loaded, name: record})


def without_adapter(places: AdapterPlaces, name: str) -> AdapterPlaces:
    """Return the places with the adapter's slot free."""
    if name not in places.loaded:
        known = f"There are {', '.join(places.names)}." if places.loaded else "There is none."
        raise AdapterError(f"There is no adapter {name!r} in the export's places. {known}")
    return replace(places, loaded={k: one for k, one in places.loaded.items() if k != name})


class SwitchLock:
    """A lock that many calls hold at a time, or one change, which goes before new calls."""

    def __init__(self):
        self._changed = threading.Condition()
        self._calls, self._changes = 0, 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._changes)
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._changed:
            self._changes += 1
            try:
                self._changed.wait_for(lambda: not self._calls)
                yield
            finally:
                self._changes -= 1
                self._changed.notify_all()
