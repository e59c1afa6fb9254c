"""Safetensors files that are written one tensor at a time."""

import json
from collections.abc import Mapping
from pathlib import Path

from sd_tf.files.tensors import DTYPES, StoredTensor

ALIGNMENT = 8  # of the first tensor's bytes in the file


def write_safetensors(
    tensors: Mapping[str, StoredTensor], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a file as `safetensors` does, but read each tensor only when its turn comes."""
    names = {dtype.name: name for name, dtype in DTYPES.items()}
    # The library puts wide numbers first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, offset = {"__metadata__": dict(metadata)}, 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.size * tensor.itemsize
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(content).to_bytes(8, "little"))
        file.write(content)
        for name in order:
            tensor = tensors[name]
            values = tensor.read()
            if values.shape != tensor.shape or values.dtype.name != tensor.dtype:
                raise ValueError(
                    f"{name} must be {tensor.dtype} {list(tensor.shape)}. "
                    f"Received: {values.dtype.name} {list(values.shape)}"
                )
            values.tofile(file)
