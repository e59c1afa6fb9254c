"""Match a model's variables with a checkpoint's tensors: names, shapes, transposes; strictly.

The models' attributes are named after the checkpoint, so a variable's path is its tensor's name.
All that is needed beyond that is one rule for each kind of layer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from sd_tf.config import AUTOENCODER, INT8, PipelineConfig
from sd_tf.files.tensors import CheckpointError, StoredTensor, shortened
from sd_tf.models import MODEL_CLASSES, deferred_variables, stored_as
from sd_tf.models.layers import Norm, PointwiseConv, RMSNorm, Table
from sd_tf.weights.int8 import rounded

# Layer kind → (its variable, the checkpoint's name, the axes from the stored layout to Keras').
LAYOUTS = (
    (keras.layers.Dense, (("kernel", "weight", (1, 0)), ("bias", "bias", None))),
    (keras.layers.Conv2D, (("kernel", "weight", (2, 3, 1, 0)), ("bias", "bias", None))),
    (keras.layers.Embedding, (("embeddings", "weight", None),)),
    (Norm, (("scale", "weight", None), ("bias", "bias", None))),
    (RMSNorm, (("scale", "weight", None),)),
    (Table, (("values", "", None),)),
)


@dataclass(frozen=True)
class Slot:
    """A variable of a model, and how a checkpoint stores it."""

    variable: keras.Variable
    axes: tuple[int, ...] | None
    pointwise: bool  # stored as a 1×1 convolution

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        shape = tuple(self.variable.shape)
        if self.axes is not None:
            shape = tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))
        return (*shape, 1, 1) if self.pointwise else shape

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape fits; a matrix may be stored as a 1×1 convolution."""
        return _without_kernel(shape, self.axes) == _without_kernel(self.shape, self.axes)

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """All variables that the tensor fills, by what is added to its name."""
        return {"": self.variable}

    def values(self, stored: np.ndarray) -> dict[str, np.ndarray]:
        """Turn the stored tensor into the variables' values, which may have its dtype."""
        return {"": self.arranged(stored)}

    def fill(self, read: Callable[[], np.ndarray]) -> None:
        for end, values in self.values(read()).items():
            variable = self.variables[end]
            value = ops.convert_to_tensor(values, dtype=variable.dtype)
            if variable._value is None:  # deferred: this is its first storage
                variable._initialize(value)
            else:
                variable.assign(value)

    def arranged(self, stored: np.ndarray) -> np.ndarray:
        """Turn stored values into Keras' layout."""
        if self.axes is not None:
            stored = stored.reshape(_without_kernel(stored.shape, self.axes))
            stored = np.transpose(stored, self.axes)
        return np.ascontiguousarray(stored)

    def stored(self, dtype: str | None = None) -> np.ndarray:
        value = self._value()
        if dtype is not None:
            value = value.astype(dtype)
        if self.axes is not None:
            value = np.transpose(value, np.argsort(self.axes))
        return np.ascontiguousarray(value.reshape(self.shape))

    def _value(self) -> np.ndarray:
        return np.asarray(self.variable)


@dataclass(frozen=True)
class Int8Slot(Slot):
    """A kernel's whole numbers, and their scales, which the same tensor fills."""

    scale: keras.Variable

    @property
    def variables(self) -> dict[str, keras.Variable]:
        return {"": self.variable, "_scale": self.scale}

    def values(self, stored: np.ndarray) -> dict[str, np.ndarray]:
        values, scale = rounded(stored.reshape(len(stored), -1))
        return {"": self.arranged(values.reshape(stored.shape)), "_scale": scale}

    def _value(self) -> np.ndarray:
        return np.asarray(self.variable) * np.asarray(self.scale)


def _without_kernel(shape, axes):
    """Return a tensor's shape; that of a matrix stored as a 1×1 convolution, as a matrix."""
    is_matrix = axes == (1, 0) and len(shape) == 4 and tuple(shape[2:]) == (1, 1)
    return tuple(shape[:2]) if is_matrix else tuple(shape)


def slots(model: keras.layers.Layer) -> dict[str, Slot]:
    """Map the checkpoint's name of every variable of the model to its slot."""
    found = {}
    for path, layer in _leaves(model, ""):
        for attribute, name, axes in _layout(layer):
            variable = getattr(layer, attribute)
            if variable is not None:
                full_name = f"{path}.{name}" if name else path
                pointwise = isinstance(layer, PointwiseConv) and attribute == "kernel"
                if attribute == "kernel" and getattr(layer, "storage", None) == INT8:
                    slot = Int8Slot(variable, axes, pointwise, layer.kernel_scale)
                else:
                    slot = Slot(variable, axes, pointwise)
                found[full_name] = slot
    return found


def layers(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """Map the checkpoint's name of every layer that has variables to the layer."""
    return dict(_leaves(model, ""))


def slot_of_kernel(layer: keras.layers.Layer) -> Slot:
    """Return the slot of a dense or convolution layer's kernel."""
    [axes] = [axes for attribute, _, axes in _layout(layer) if attribute == "kernel"]
    return Slot(layer.kernel, axes, isinstance(layer, PointwiseConv))


def _layout(layer):
    for kind, layout in LAYOUTS:
        if isinstance(layer, kind):
            return layout
    return None


def _leaves(layer, path) -> Iterator[tuple[str, keras.layers.Layer]]:
    if _layout(layer) is not None:
        yield path, layer
        return
    for name, value in vars(layer).items():
        if name.startswith("_"):
            continue
        children = (
            {f"{name}.{i}": child for i, child in enumerate(value)}
            if isinstance(value, list | tuple)
            else {name: value}
        )
        for child_name, child in children.items():
            if isinstance(child, keras.layers.Layer):
                yield from _leaves(child, f"{path}.{child_name}" if path else child_name)


def abstract_model(
    config, dtype: str = "float32", storage: str | None = None
) -> keras.layers.Layer:
    """Build the model of a component's config, with variables that have no storage yet."""
    with deferred_variables(), stored_as(storage):
        return MODEL_CLASSES[type(config)](config, dtype=dtype)


def layers_of(config: PipelineConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the layers that adapters may change: the shapes of their weights, by component.

    These are all linear and convolution layers but the autoencoder's, with the shapes as stored.
    """
    return {
        component: _layers(part)
        for component, part in config.components.items()
        if component != AUTOENCODER
    }


@functools.cache
def _layers(part) -> dict[str, tuple[int, ...]]:
    return layer_shapes(abstract_model(part))


def layer_shapes(model: keras.layers.Layer) -> dict[str, tuple[int, ...]]:
    """Return the model's linear and convolution layers: the shapes of their stored weights."""
    return {
        name.removesuffix(".weight"): slot.shape
        for name, slot in slots(model).items()
        if slot.axes is not None
    }


def problems(model: keras.layers.Layer, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Describe each way in which these tensors differ from exactly this model's, if any."""
    expected = slots(model)
    found = []
    if missing := expected.keys() - tensors.keys():
        found.append(f"{len(missing)} tensors are missing: {shortened(missing)}")
    if surplus := tensors.keys() - expected.keys():
        found.append(f"{len(surplus)} tensors have no place in the model: {shortened(surplus)}")
    wrong = [
        f"{name} is {list(tensors[name].shape)}, the model wants {list(slot.shape)}"
        for name, slot in expected.items()
        if name in tensors and not slot.accepts(tensors[name].shape)
    ]
    if wrong:
        found.append(f"{len(wrong)} tensors have the wrong shape: {shortened(wrong, most=3)}")
    return found


def check(model: keras.layers.Layer, tensors: Mapping[str, StoredTensor], where: str) -> None:
    if found := problems(model, tensors):
        raise CheckpointError(f"{where} does not fit its configuration. " + ". ".join(found))


def load(
    config,
    tensors: Mapping[str, StoredTensor],
    dtype: str,
    where: str,
    storage: str | None = None,
) -> keras.layers.Layer:
    """Build a component's model and fill it with the tensors, one at a time.

    Args:
        storage: how its kernels are stored; None: in `dtype`.
    """
    model = abstract_model(config, dtype, storage)
    check(model, tensors, where)
    for name, slot in slots(model).items():
        slot.fill(tensors[name].read)
    return model


@contextlib.contextmanager
def read_when_used(*models: tuple[keras.layers.Layer, Mapping[str, StoredTensor]]):
    """Run models whose variables have no storage: each is read from the tensors when it is used.

    One tensor is in memory at a time, so a model that would not fit can be run, but every run reads
    the whole checkpoint, and Keras' embeddings more than once.
    """
    with _Reader(models):
        yield


class _Reader(keras.StatelessScope):
    """Gives variables the values of tensors."""

    def __init__(self, models: Sequence[tuple[keras.layers.Layer, Mapping[str, StoredTensor]]]):
        super().__init__(initialize_variables=False)
        self.places = {
            id(variable): (slot, end, tensors[name])
            for model, tensors in models
            for name, slot in slots(model).items()
            for end, variable in slot.variables.items()
        }

    def get_current_value(self, variable):
        if id(variable) not in self.places:
            return super().get_current_value(variable)
        slot, end, tensor = self.places[id(variable)]
        return ops.convert_to_tensor(slot.values(tensor.read())[end], dtype=variable.dtype)
