"""Run an export with TensorFlow: it needs the tokenizer, but no model code."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from sd_tf.errors import SdTfError
from sd_tf.runtime.adapters import layers_of
from sd_tf.runtime.chain import NEEDED, Chain, Result, open_export
from sd_tf.runtime.compile_cache import publish, set_compile_cache
from sd_tf.runtime.graph_kernels import (
    check_weights_change,
    is_in_graph,
    keep_weights,
    tell_widening,
)
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.needed_pictures import needed_pictures
from sd_tf.runtime.runner import Callback, LocalRunner
from sd_tf.runtime.saved_model import SavedModel, best_device, tell_misfit
from sd_tf.runtime.shapes import Shape

__all__ = [
    "Callback",
    "Pipeline",
    "Result",
    "set_compile_cache",
]


class DeviceError(SdTfError):
    """A device that this process does not have: those that it has."""


class Pipeline(Chain):
    """An export that makes pictures with TensorFlow: see `load` and `__call__`."""

    @classmethod
    def load(
        cls,
        export_dir: str | Path,
        jit_compile: bool = True,
        compile_cache: str | Path | None = None,
        devices: Sequence[str] | None = None,
        fixed_weights: bool = False,
        mapped: bool = True,
    ) -> "Pipeline":
        """Read an export and check its files; nothing is compiled before the first call.

        Args:
            export_dir: the folder of an export.
            jit_compile: run the signatures that XLA compiles; else their plain twins.
            compile_cache: folder where compiled code is kept between processes. Set it before the
                process first uses XLA, which reads the setting once.
            devices: one replica on each, the images divided among them; None: TensorFlow's choice.
            fixed_weights: no weights change in this process, of whatever models: bfloat16 on a CPU
                is faster then. It takes effect before anything was computed.
            mapped: the weights are the export's files themselves, which nobody may write to as long
                as the pipeline lives; False: copies of them, which take longer to load.
        """
        start = time.perf_counter()
        if compile_cache is not None:
            set_compile_cache(compile_cache)
        folder = Path(export_dir)
        manifest, tokenizers = open_export(folder)
        manifest.check_files(folder)
        if fixed_weights and jit_compile:
            keep_weights(manifest)
        known = [device.name for device in tf.config.list_logical_devices()]
        devices = [None] if devices is None else [_device(name, known) for name in devices]
        if not devices:
            raise DeviceError("At least one device is needed. Received: none")
        replicas = [
            SavedModelRunner(folder, manifest, jit_compile, device, mapped) for device in devices
        ]
        layers = layers_of(folder, manifest)
        return cls(manifest, replicas, tokenizers, time.perf_counter() - start, layers)


class SavedModelRunner(LocalRunner):
    """Runs the SavedModels on one device."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        jit_compile: bool,
        device: str | None,
        mapped: bool = True,
    ):
        super().__init__(manifest, jit_compile)
        self.device, self._maps = device, mapped
        self._folder = folder
        self._locks = {name: threading.Lock() for name in manifest.parts}
        check_weights_change(manifest)
        if jit_compile:
            tell_widening(manifest)
            kind = tf.DeviceSpec.from_string(device).device_type if device else best_device()
            tell_misfit(manifest, kind.lower(), manifest.parts)
        at_once = [*manifest.parts] if needed_pictures(manifest) else [*NEEDED]
        with ThreadPoolExecutor(len(at_once)) as pool:
            self.loaded = dict(zip(at_once, pool.map(self._load, at_once), strict=True))

    def _load(self, component: str) -> SavedModel:
        compiled = self.jit_compile and component != "text_encoder"
        optimize = not compiled or is_in_graph(self.manifest, component)
        self._check_same(component)
        mapped = self.manifest.components[component].files if self._maps else None
        loaded = SavedModel(self._folder, component, optimize, self.device, mapped)
        self._check_same(component)
        return loaded

    def _check_same(self, component: str) -> None:
        """Refuse to mix components of two exports."""
        if Manifest.read(self._folder) != self.manifest:
            raise ExportError(
                f"{self._folder} holds another export than when this pipeline was opened, and the "
                f"{component} is not loaded yet. Load the pipeline again."
            )

    def component(self, name: str) -> SavedModel:
        """Return a component's SavedModel; the image encoder is loaded when first needed."""
        if name not in self.loaded:
            with self._locks[name]:
                if name not in self.loaded:  # by another thread
                    self.loaded[name] = self._load(name)
        return self.loaded[name]

    def leave(self, component: str) -> None:
        if component in self.loaded:  # by a call that looked at it
            self.loaded[component].let_go()

    def put(self, component: str, rows: Mapping[str, np.ndarray], first: int) -> None:
        self.component(component).put(rows, first)

    def call(self, component: str, endpoint: str, shape: Shape, **inputs) -> dict[str, np.ndarray]:
        outputs = self.component(component).run(self.signature(component, endpoint, shape), inputs)
        publish()
        return outputs


def _device(name: str, known: list[str]) -> str:
    matches = [device for device in known if device.lower().endswith(name.lower().lstrip("/"))]
    if len(matches) != 1:
        raise DeviceError(f"A device is one of {', '.join(known)}. Received: {name!r}")
    return matches[0]
