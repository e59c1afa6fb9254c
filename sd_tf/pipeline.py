"""The runtime: an export folder in, pictures out. TensorFlow and the tokenizer, no model code."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from sd_tf.chain import NEEDED, Callback, Chain, Result, Stages, open_export
from sd_tf.compile_cache import publish, set_compile_cache
from sd_tf.manifest import Manifest
from sd_tf.request import DEFAULT_GUIDANCE, DEFAULT_STEPS
from sd_tf.saved_model import SavedModel

__all__ = [
    "DEFAULT_GUIDANCE",
    "DEFAULT_STEPS",
    "Callback",
    "Pipeline",
    "Result",
    "set_compile_cache",
]


class Pipeline(Chain):
    """See `load` and `__call__`."""

    @classmethod
    def load(
        cls,
        export_dir: str | Path,
        jit_compile: bool = True,
        compile_cache: str | Path | None = None,
        devices: Sequence[str] | None = None,
    ) -> "Pipeline":
        """Read an export and check its files; nothing is compiled before the first call.

        Args:
            export_dir: the folder that serialize_savedmodels.py wrote.
            jit_compile: run the signatures that XLA compiles; else their plain twins.
            compile_cache: folder where compiled code is kept between processes. It has to be the
                process's first use of XLA, which reads the setting once.
            devices: one replica on each, the images divided among them; None: TensorFlow's choice.
        """
        start = time.perf_counter()
        if compile_cache is not None:
            set_compile_cache(compile_cache)
        folder = Path(export_dir)
        manifest, tokenizers = open_export(folder)
        manifest.check_files(folder)
        known = [device.name for device in tf.config.list_logical_devices()]
        devices = [None] if devices is None else [_device(name, known) for name in devices]
        if not devices:
            raise ValueError("At least one device is needed. Received: none")
        replicas = [Replica(folder, manifest, jit_compile, device) for device in devices]
        return cls(manifest, replicas, tokenizers, time.perf_counter() - start)


class Replica(Stages):
    """The SavedModels on one device."""

    def __init__(self, folder: Path, manifest: Manifest, jit_compile: bool, device: str | None):
        super().__init__(manifest, jit_compile)
        self.device = device
        self._folder, self._lock = folder, threading.Lock()
        at_once = [*NEEDED] if manifest.latent_inputs == "none" else [*manifest.components]
        with ThreadPoolExecutor(len(at_once)) as pool:
            self.loaded = dict(zip(at_once, pool.map(self._load, at_once), strict=True))

    def _load(self, component: str) -> SavedModel:
        compiled = self.jit_compile and component != "text_encoder"
        return SavedModel(self._folder, component, optimize=not compiled, device=self.device)

    def component(self, name: str) -> SavedModel:
        """The image encoder is loaded when a picture comes, and most of the time none does."""
        with self._lock:
            if name not in self.loaded:
                self.loaded[name] = self._load(name)
        return self.loaded[name]

    def call(self, component: str, endpoint: str, **inputs) -> dict[str, np.ndarray]:
        outputs = self.component(component).run(self.signature(component, endpoint), inputs)
        publish()
        return outputs


def _device(name: str, known: list[str]) -> str:
    matches = [device for device in known if device.lower().endswith(name.lower().lstrip("/"))]
    if len(matches) != 1:
        raise ValueError(f"A device is one of {', '.join(known)}. Received: {name!r}")
    return matches[0]
