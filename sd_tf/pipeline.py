"""The runtime: an export folder in, pictures out. TensorFlow and the tokenizer, no model code."""

import time
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from sd_tf.chain import (
    DEFAULT_GUIDANCE,
    DEFAULT_STEPS,
    Callback,
    Chain,
    Result,
    Stages,
    open_export,
)
from sd_tf.compile_cache import publish, set_compile_cache
from sd_tf.manifest import VERSION_FOLDER, ExportError, Manifest

__all__ = [
    "DEFAULT_GUIDANCE",
    "DEFAULT_STEPS",
    "Callback",
    "Pipeline",
    "Result",
    "load_component",
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
        # One after the other: XLA's keys hold names that TensorFlow numbers as it loads, and in
        # another order the compile cache would not be found again.
        with tf.device(device):
            self._loaded = {name: load_component(folder, name) for name in manifest.components}

    def call(self, component: str, endpoint: str, **inputs) -> dict[str, tf.Tensor]:
        function = self._loaded[component].signatures[self.signature(component, endpoint)]
        with tf.device(self.device):
            outputs = function(**{key: tf.convert_to_tensor(v) for key, v in inputs.items()})
        publish()
        return outputs


def load_component(folder: Path, name: str):
    """One SavedModel of an export."""
    path = folder / name / VERSION_FOLDER
    try:
        return tf.saved_model.load(str(path))
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be loaded: {error}. Copy or export it again.") from error


def _device(name: str, known: list[str]) -> str:
    matches = [device for device in known if device.lower().endswith(name.lower().lstrip("/"))]
    if len(matches) != 1:
        raise ValueError(f"A device is one of {', '.join(known)}. Received: {name!r}")
    return matches[0]
