"""The values of a SavedModel's variables: its files' own pages, instead of copies of them.

Restoring takes most of the time that loading takes: the system clears every page before a value is
copied there. Variables that refer to a mapped file cost nothing before they are read. Processes
that load one export share its pages, and the system may drop them and read them again. What writes
to a variable copies it first.
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, tensor_bundle_pb2
from tensorflow.python.saved_model import loader_impl

from sd_tf.runtime.manifest import FINGERPRINT, ExportError

VARIABLES = "variables/variables"  # below a SavedModel's folder
ALIGNMENT = 64  # bytes: TensorFlow copies what lies elsewhere in memory
CHUNK = 1 << 26  # bytes whose fingerprint is taken at once
# The index is a table as LevelDB writes it: blocks of keys and values, and at the end their places.
FOOTER = 48
MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
UNCOMPRESSED = 0
RESTARTS = 4  # bytes of each number behind a block's entries


def comes_last(dtype: tf.DType, shape: tf.TensorShape) -> bool:
    """Tell whether what follows a value in a file could not be mapped."""
    return shape.num_elements() * dtype.size % ALIGNMENT > 0


class NotMappedError(Exception):
    """A SavedModel whose variables have to be restored: why."""


class MappingLoader(loader_impl.SavedModelLoader):
    """Loads a SavedModel as TensorFlow's own loader does, but maps the variables' values.

    What cannot be mapped is restored: values in another order of bytes than this machine's, in a
    folder that the system does not map, or behind a graph that another TensorFlow wrote otherwise.
    """

    files: Sequence[mmap.mmap] = ()  # those whose pages are values

    def restore_variables(self, sess, saver, import_scope=None) -> None:
        meta_graph = self.get_meta_graph_def_from_tags([tf.saved_model.SERVING])
        try:
            handles = dict(handles_of(meta_graph))
            values, files = mapped_values(Path(self.export_dir))
            if handles.keys() - values.keys():
                raise NotMappedError("it has variables without values")
        except (NotMappedError, OSError, LookupError):  # another TensorFlow's graph names others
            super().restore_variables(sess, saver, import_scope)
            return
        with sess.graph.as_default(), tf.device(None):
            assign, feed = [], {}
            for name, handle in handles.items():
                value = values[name]
                with tf.device("CPU"):
                    given = tf.compat.v1.placeholder(value.dtype, value.shape)
                resource = sess.graph.get_tensor_by_name(handle)
                assign.append(tf.raw_ops.AssignVariableOp(resource=resource, value=given))
                feed[given] = value  # not copied, as long as TensorFlow can use it where it lies
        sess.run(assign, feed)
        self.files = files


def handles_of(meta_graph: meta_graph_pb2.MetaGraphDef) -> Iterator[tuple[str, str]]:
    """(a value's name in the files, the tensor of its variable's handle), as the graph restores."""
    graph, name = meta_graph.graph_def, meta_graph.saver_def.restore_op_name
    functions = {function.signature.name: function for function in graph.library.function}
    calls = [node for node in graph.node if node.name == name]
    if not calls or calls[0].attr["f"].func.name not in functions:
        raise NotMappedError("it has no function that restores")
    function = functions[calls[0].attr["f"].func.name]
    arguments = [argument.name for argument in function.signature.input_arg]
    given = dict(zip(arguments, calls[0].input, strict=True))
    nodes = {node.name: node for node in function.node_def}
    names = [
        name.decode()
        for name in tf.make_ndarray(nodes["RestoreV2/tensor_names"].attr["value"].tensor)
    ]
    for node in function.node_def:
        if node.op == "AssignVariableOp":
            handle, value = node.input
            source = nodes[value.partition(":")[0]].input[0]  # of an Identity
            yield names[int(source.rpartition(":")[2])], f"{given[handle].partition(':')[0]}:0"


def mapped_values(model: Path) -> tuple[dict[str, np.ndarray], list[mmap.mmap]]:
    """Map a SavedModel's files of values: the arrays by their names, and the files."""
    prefix = model / VARIABLES
    entries = dict(read_index(Path(f"{prefix}.index")))
    header = tensor_bundle_pb2.BundleHeaderProto.FromString(entries.pop(""))
    if header.endianness != header.LITTLE:
        raise NotMappedError("its values are not little-endian")
    files, values = {}, {}
    for name, content in entries.items():
        entry = tensor_bundle_pb2.BundleEntryProto.FromString(content)
        dtype = tf.dtypes.as_dtype(entry.dtype)
        if entry.slices or not dtype.is_numpy_compatible or dtype == tf.string:
            continue
        shard = entry.shard_id
        if shard not in files:
            with open(f"{prefix}.data-{shard:05d}-of-{header.num_shards:05d}", "rb") as file:
                # What is written is copied.
                files[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        stored = np.frombuffer(files[shard], np.uint8, entry.size, entry.offset)
        shape = [dimension.size for dimension in entry.shape.dim]
        values[name] = stored.view(dtype.as_numpy_dtype).reshape(shape)
    return values, list(files.values())


def let_go(files: Iterable[mmap.mmap]) -> None:
    """Let the system have the pages of files, until they are read again.

    They count as the process's memory no more, and stay in the system's cache of files as long as
    nobody else needs that memory. What was written into them would be lost.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        for file in files:
            file.madvise(mmap.MADV_DONTNEED)


@dataclass
class _Reader:
    content: bytes
    at: int = 0

    def number(self) -> int:
        """Read a number of 7 bits a byte, the low ones first."""
        value = shift = 0
        while True:
            byte = self.content[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.content[self.at - count : self.at]


def read_index(path: Path) -> Iterator[tuple[str, bytes]]:
    """The keys and values of a bundle's index."""
    content = path.read_bytes()
    if content[-len(MAGIC) :] != MAGIC:
        raise NotMappedError(f"{path} is no table")
    footer = _Reader(content[-FOOTER:])
    _, _, *place = (footer.number() for _ in range(4))  # behind the place of what is not used here
    for _, value in _entries(content, *place):
        block = _Reader(value)
        for key, entry in _entries(content, block.number(), block.number()):
            yield key.decode(), entry


def _entries(content: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """A block's entries, whose keys share their beginnings with the key before."""
    if content[start + size] != UNCOMPRESSED:
        raise NotMappedError("its index is compressed")
    restarts = int.from_bytes(content[start + size - RESTARTS : start + size], "little")
    block, key = _Reader(content[start : start + size - RESTARTS * (restarts + 1)]), b""
    while block.at < len(block.content):
        shared, own, length = block.number(), block.number(), block.number()
        key = key[:shared] + block.bytes(own)
        yield key, block.bytes(length)


def check_large(folder: Path, files: Mapping[str, Mapping]) -> bool:
    """Compare the fingerprints of an export's large files.

    Returns: whether all have one. Those of an older sd_tf have none: TensorFlow compares its own
        checksums when it restores them.

    Raises:
        ExportError: a file is not the one that was exported.
    """
    large = {name: known for name, known in files.items() if "sha256" not in known}
    if any(FINGERPRINT not in known for known in large.values()):
        return False
    for name, known in large.items():
        if fingerprint(folder / name) != known[FINGERPRINT]:
            raise ExportError(
                f"{folder / name} is not the file that was exported: its fingerprint differs. Copy "
                f"or export it again."
            )
    return True


def fingerprint(path: Path) -> str:
    """Hash a large file several times as fast as SHA-256 does; it notices damage, not malice."""
    size, found = path.stat().st_size, hashlib.sha256()
    for start in range(0, size, CHUNK):  # each mapped alone: what was read counts as memory
        piece = np.memmap(path, np.uint8, "c", start, (1, min(CHUNK, size - start)))
        data = tf.experimental.dlpack.from_dlpack(piece.__dlpack__())  # not copied
        found.update(tf.raw_ops.Fingerprint(data=data, method="farmhash64").numpy())
    return found.hexdigest()
