"""A SavedModel as TensorFlow Serving runs it: a session over the graph in its file.

`tf.saved_model.load` makes Python functions of every signature and names them as it goes. A session
loads in a third of the time and in less memory, several at once, and XLA finds its compiled code
again, because the functions keep the names that they have in the file.
"""

import contextlib
import copy
import ctypes
import logging
import mmap
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from sd_tf.runtime.manifest import LARGE, VERSION_FOLDER, ExportError, Manifest
from sd_tf.runtime.mapped import MappingLoader, check_large, let_go

TAG = "serve"
# Seconds from one return of memory to the next, while a call runs, and in a signature's first one.
BETWEEN, BETWEEN_IN_FIRST = 1.0, 0.2
# What a session puts around an operation's own message.
AROUND = re.compile(r"\AGraph execution error:\s*|\n\t \[\[.*\Z", re.DOTALL)

logger = logging.getLogger(__name__)


class SavedModel:
    """One component of an export: its signatures, arrays in and arrays out."""

    def __init__(
        self,
        folder: Path,
        name: str,
        optimize: bool = True,
        device: str | None = None,
        mapped: Mapping[str, Mapping] | None = None,
    ):
        """Load a component.

        Args:
            optimize: rework its graph, which does not help what XLA compiles.
            mapped: what the manifest says of its files, whose pages are the variables' values then;
                None: the values are copied into memory.
        """
        path = folder / name / VERSION_FOLDER
        maps = mapped is not None and check_large(folder, mapped)
        config = tf.compat.v1.ConfigProto(
            device_count={"CPU": len(tf.config.list_logical_devices("CPU"))}
        )
        rewrites = config.graph_options.rewrite_options
        rewrites.disable_meta_optimizer = not optimize
        rewrites.disable_tfg_optimizer = True  # it takes a third of the start, and gains nothing
        self._large_files: Sequence[mmap.mmap] = ()
        self.graph = tf.Graph()
        with self.graph.as_default(), tf.device(device), _without_advice():
            self._session = tf.compat.v1.Session(graph=self.graph, config=config)
            try:
                if maps:
                    loader = MappingLoader(str(path))
                    content = loader.load(self._session, [TAG])
                    self._large_files = [file for file in loader.files if len(file) >= LARGE]
                    del loader  # it has the graph, too
                else:
                    content = tf.compat.v1.saved_model.load(self._session, [TAG], str(path))
            except (tf.errors.OpError, OSError, ValueError, RuntimeError) as error:
                raise ExportError(
                    f"{path} cannot be loaded: {message_of(error)}. Copy or export it again."
                ) from error
        # Copied, because each original would keep the whole graph in memory.
        self.signatures = {k: copy.deepcopy(v) for k, v in content.signature_def.items()}
        self._callables, self._writer, self._writing = {}, None, threading.Lock()
        del content
        give_back()

    def runs(self, signature: str) -> bool:
        """Return whether a signature computes outputs; TensorFlow adds one that does not."""
        found = self.signatures.get(signature)
        return found is not None and found.method_name == tf.saved_model.PREDICT_METHOD_NAME

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        is_new = signature not in self._callables
        if is_new:
            self._callables[signature] = self._callable(self.signatures[signature])
        names, dtypes, outputs, function = self._callables[signature]
        arrays = [np.asarray(inputs[name], dtypes[name]) for name in names]
        with self._tidying(is_new):
            found = function(*arrays)
        return dict(zip(outputs, found, strict=True))

    def let_go(self) -> None:
        """Let the system have the pages of mapped weights until the next call reads them."""
        with self._writing:
            if self._writer is None:  # what was written is nowhere else
                let_go(self._large_files)

    @contextlib.contextmanager
    def _tidying(self, is_first: bool) -> Iterator[None]:
        """Return memory to the system all the time, instead of when all of it has gathered.

        Weights that are copied or transformed are needed once, the others once in a step. What
        compiling frees, in a first call, would stand beside them.
        """
        if not is_first and not self._large_files:
            yield
            return
        ends = threading.Event()

        def work():
            while not ends.wait(BETWEEN_IN_FIRST if is_first else BETWEEN):
                self.let_go()
                if is_first:
                    give_back()

        thread = threading.Thread(target=work, name="tidying")
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
            if is_first:
                give_back()

    def put(self, rows: Mapping[str, np.ndarray], first: int) -> None:
        """Write rows of variables, from `first` on; always of the same variables."""
        with self._writing:
            if self._writer is None:  # one for all: each callable keeps a copy of the graph
                self._writer = self._make_writer(rows)
            self._writer(first, *rows.values())

    def _make_writer(self, rows: Mapping[str, np.ndarray]):
        with self.graph.as_default():
            start = tf.compat.v1.placeholder(tf.int32, ())
            values = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in rows.values()]
            writes = [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=self.graph.get_operation_by_name(name).outputs[0],
                    indices=start + tf.range(value.shape[0]),
                    updates=value,
                )
                for name, value in zip(rows, values, strict=True)
            ]
            write = tf.group(*writes)
        return self._session.make_callable(write, [start, *values])

    def _callable(self, signature):
        tensor = self.graph.get_tensor_by_name
        inputs = {name: tensor(info.name) for name, info in signature.inputs.items()}
        outputs = {name: tensor(info.name) for name, info in signature.outputs.items()}
        function = self._session.make_callable(list(outputs.values()), list(inputs.values()))
        dtypes = {name: x.dtype.as_numpy_dtype for name, x in inputs.items()}
        return tuple(inputs), dtypes, tuple(outputs), function


def best_device() -> str:
    """Return the kind of the best device that TensorFlow sees here: tpu, gpu or cpu."""
    found = {device.device_type.lower() for device in tf.config.list_physical_devices()}
    return next(name for name in ("tpu", "gpu", "cpu") if name in found)


def tell_misfit(manifest: Manifest, device: str, components: Iterable[str]) -> None:
    """Log a warning if compiled signatures have rewrites for other hardware than the device."""
    if misfit := manifest.misfit(device, components):
        logger.warning(
            "%s. They compute the same there, but may be slow or need more memory: export with "
            "--target %s.",
            misfit,
            device,
        )


def message_of(error: Exception) -> str:
    """Return an error's message without its place in the graph."""
    return AROUND.sub("", getattr(error, "message", str(error)))


def give_back() -> None:
    """Return freed memory, which the C library keeps, to the system: a gigabyte with SD1.5."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Hold back TensorFlow's warning that sessions are deprecated."""

    def keeps(record):
        return "deprecat" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)
