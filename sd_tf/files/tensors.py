"""Tensors on disk, listed by name, shape and dtype, and read one at a time."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sd_tf.errors import SdTfError
from sd_tf.files.objects import read_object

SHARD = re.compile(r"-\d+-of-\d+")  # in the name of one of several files of a part's weights
PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


class CheckpointError(SdTfError):
    """A checkpoint that cannot be loaded: what is wrong, where, and how to mend it."""


@dataclass(frozen=True)
class InFile:
    """Values that lie in a file one after the other; a call reads them."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in bytes

    def __call__(self) -> np.ndarray:
        # Mapped pages would count as resident memory until the file is closed, so they are read.
        count = math.prod(self.shape)
        values = np.fromfile(self.path, self.dtype, count, offset=self.offset)
        if len(values) != count:
            raise CheckpointError(f"{self.path} became shorter while it was being read.")
        if self.dtype.name.startswith("float8"):
            values = values.astype(ml_dtypes.bfloat16)
        return values.reshape(self.shape)

    def rows(self, start: int, stop: int) -> "InFile":
        of_row = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * of_row
        return replace(self, shape=shape, offset=offset)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, in the checkpoint's own layout; `read` returns its values.

    Those of 8 bits, with which no framework computes, are read as bfloat16, which has room for all.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    file: Path | None = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    def as_read(self) -> "StoredTensor":
        """Return the tensor with the dtype of the values that are read."""
        return replace(self, dtype="bfloat16") if self.dtype.startswith("float8") else self

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """Return some rows of the tensor; of one in a file, only these are read."""
        if isinstance(self.read, InFile):
            read = self.read.rows(start, stop)
        else:
            read = lambda: self.read()[start:stop]  # noqa: E731
        return StoredTensor((stop - start, *self.shape[1:]), self.dtype, read, self.file)

    def with_halves_swapped(self) -> "StoredTensor":
        """Return the tensor with the second half of its rows first."""
        half = self.shape[0] // 2
        return replace(self, read=lambda: np.roll(self.read(), half, axis=0))

    @classmethod
    def identity(cls, width: int, dtype: str) -> "StoredTensor":
        """Return a matrix that is in no file."""
        return cls((width, width), dtype, lambda: np.eye(width, dtype=numpy_dtype(dtype)))

    def transposed(self) -> "StoredTensor":
        return StoredTensor(self.shape[::-1], self.dtype, lambda: self.read().T, self.file)


def save_safetensors(
    tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file with the permissions of its folder; the library's are for the owner alone."""
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(path.parent.stat().st_mode & 0o666)


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype of a name, of which NumPy itself does not know all."""
    return BY_NAME[name]


def refuse_pickle(path: Path, converted: str | None = None) -> None:
    """Refuse a pickle, with the command that converts it.

    Tensors that lie in a part's own dictionary, as an IP-Adapter's do, are called PART.NAME. All
    shards of several become one file. Tensors that share their memory, as T5's tied embeddings do,
    are copied, as safetensors refuses them.

    Args:
        converted: the new file's name without its suffix; None: as the pickle's.
    """
    if path.suffix in PICKLES:
        load = "torch.load({}, weights_only=True, map_location='cpu')"
        read, new = load.format(f"'{path.name}'"), path.stem if converted is None else converted
        if SHARD.search(path.name):
            shards = f"glob.glob('{SHARD.sub('-*-of-*', path.name)}')"
            read = f"{{k: v for f in {shards} for k, v in {load.format('f')}.items()}}"
        raise CheckpointError(
            f"{path} is a pickle, which can run any code when it is read; only safetensors and "
            f"HDF5 are loaded. The command below takes no code; where torch refuses the file for "
            f"more than tensors, such as a training's callbacks, weights_only=False lets it run. "
            f"If you trust the file, convert it: "
            f'python -c "import glob, torch, safetensors.torch as s; '
            f"w = {read}; "
            f"w = w.get('state_dict', w); "
            f"w = {{k: v for a, b in w.items() for k, v in "
            f"({{f'{{a}}.{{c}}': d for c, d in b.items()}} if isinstance(b, dict) else {{a: b}})"
            f".items()}}; "
            f"s.save_file({{k: w.pop(k).contiguous().clone() for k in [*w] if hasattr(w[k], "
            f"'shape')}}, '{SHARD.sub('', new)}.safetensors')\""
        )


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one file by name, after the library has checked header and length."""
    length, header = _header(path)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {entry['dtype']}; supported are "
                f"{', '.join(DTYPES)}."
            )
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(shape, dtype.name, InFile(path, dtype, shape, offset), path)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that a file's writer put beside its tensors, by name."""
    return _header(path)[1].get("__metadata__", {})


def _header(path: Path) -> tuple[int, dict]:
    """Return a file's header and its length in bytes, once the library has checked the file."""
    if not path.is_file():
        raise CheckpointError(f"No such file: {path}")
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        reason = "truncated" if "incomplete" in str(error) or path.stat().st_size < 8 else "corrupt"
        raise CheckpointError(
            f"{path} is {reason}: {error}. Its size is {path.stat().st_size} bytes; download it "
            f"again."
        ) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length, json.loads(file.read(length))


def open_sharded(index_file: Path) -> dict[str, StoredTensor]:
    """List the tensors of all shards that an index names; index and shards must agree."""
    index = read_object(index_file, CheckpointError)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file} has no weight_map.")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_file}: its weight_map must name a file for each tensor.")
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        if os.path.basename(shard) != shard:
            raise CheckpointError(f"{index_file} points outside its folder: {shard!r}")
        tensors |= open_safetensors(index_file.parent / shard)
    if missing := weight_map.keys() - tensors.keys():
        raise CheckpointError(
            f"{index_file} names tensors that its shards do not hold: {shortened(missing)}"
        )
    if surplus := tensors.keys() - weight_map.keys():
        raise CheckpointError(
            f"The shards of {index_file} hold tensors that it does not name: {shortened(surplus)}"
        )
    return tensors


def shortened(names, most=5) -> str:
    """Join the first names of many, and say how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
