"""Where arrays lie on a mesh of devices: pictures over `data`, weights over `model`."""

import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sd_tf.runtime.adapter_places import ADAPTER_SCALES
from sd_tf.runtime.controls import PER_NET
from sd_tf.runtime.image_prompts import SCALES as IMAGE_SCALES
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.reuse import FEATURES

DATA, MODEL = "data", "model"
# The starts of the names of weights that are divided: those of the denoisers, of
# ControlNets and of T5.
DIVIDED = re.compile(
    r"(unet|controlnet(_\d+)?|transformer|text_encoder_\d\.(encoder\.block|shared))\."
)

# A pair of layers works on halves of the channels between them: the first is divided by its
# outputs, the second by its inputs, so that only the second's sum crosses devices. Everything else
# is divided by its outputs, to save memory.
BY_INPUTS = ("to_out.0", "to_add_out", "net.2", "conv2", "SelfAttention.o", "DenseReluDense.wo")


def make_mesh(devices: Sequence[jax.Device] | None = None, model: int = 1) -> Mesh:
    """Arrange devices (None: all, of all hosts), `model` of them to each copy of the models."""
    devices = jax.devices() if devices is None else devices
    if model < 1 or len(devices) % model:
        raise ExportError(
            f"The model axis divides the number of devices, {len(devices)}. Received: {model}"
        )
    return Mesh(np.reshape(devices, (-1, model)), (DATA, MODEL))


def check_mesh(mesh: Mesh, *batch_sizes: int) -> None:
    """Refuse other axes than ours, and batches that the mesh does not divide evenly."""
    if set(mesh.axis_names) != {DATA, MODEL}:
        raise ExportError(
            f"A mesh has the axes {DATA} and {MODEL}; make one with sd_tf.jax.make_mesh. "
            f"Received: {', '.join(map(str, mesh.axis_names))}"
        )
    if uneven := [size for size in batch_sizes if size % mesh.shape[DATA]]:
        raise ExportError(
            f"The batch is divided evenly among {mesh.shape[DATA]} devices. "
            f"Received: batch_size={uneven[0]}"
        )


def of_value(mesh: Mesh, name: str, rank: int) -> NamedSharding:
    """Return where an input or output lies: its pictures are divided over the data axis."""
    if rank == 0 or name in (ADAPTER_SCALES, IMAGE_SCALES, *PER_NET):
        return NamedSharding(mesh, PartitionSpec())
    before = (None,) if name in ("history", FEATURES) else ()
    return NamedSharding(mesh, PartitionSpec(*before, DATA))


def of_weight(mesh: Mesh, name: str, shape: Sequence[int]) -> NamedSharding:
    """Return where a weight lies, by its name and its shape in Keras: inputs before outputs."""
    parts = mesh.shape[MODEL]
    if parts == 1 or not DIVIDED.match(name) or len(shape) < 2:
        return NamedSharding(mesh, PartitionSpec())
    layer = name.rpartition(".")[0]
    by_inputs = layer.endswith(BY_INPUTS)
    axis = len(shape) - (2 if by_inputs else 1)
    if shape[axis] % parts:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, MODEL))


def bytes_per_device(shardings: Mapping[str, NamedSharding], arrays: Mapping) -> int:
    """Return the bytes on each device of arrays, or shapes and dtypes, under `shardings`."""
    return sum(
        math.prod(shardings[name].shard_shape(tuple(x.shape))) * np.dtype(x.dtype).itemsize
        for name, x in arrays.items()
    )


def place(value, sharding: NamedSharding) -> jax.Array:
    """Place a value that all hosts have: each of their devices takes its part."""
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def to_host(value) -> np.ndarray:
    """Return the whole value, on every host."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)
