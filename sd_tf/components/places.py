"""Places for adapters in a component's models.

A place is two matrices beside a layer's kernel, whose product is added to the kernel. Both have
`rank` rows for each slot: an adapter's factors fill those of its slot, and zeros are no change. A
call gives a scale for each slot, so another mixture of adapters compiles nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import keras
from keras import ops
from keras.src.backend.common.stateless_scope import get_stateless_scope

from sd_tf.components.spec import Spec
from sd_tf.runtime.adapter_places import ADAPTER_SCALES

KERNELS = "kernels"  # the argument of a denoiser with places: its layers' kernels


@dataclass(frozen=True)
class Place:
    layer: keras.layers.Layer
    down: keras.Variable  # (slots · rank, inputs of one output)
    up: keras.Variable  # (slots · rank, outputs)


@dataclass(frozen=True, eq=False)
class Places:
    """The places of a component's models, by the checkpoint's part and the layer's name."""

    slots: int = 0
    rank: int = 0
    by_layer: Mapping[tuple[str, str], Place] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """All matrices, by the names under which a saved graph and JAX's weights have them."""
        both = [v for place in self.by_layer.values() for v in (place.down, place.up)]
        return {variable.name: variable for variable in both}

    @property
    def inputs(self) -> dict[str, Spec]:
        """The endpoints' further input; none without places."""
        return {ADAPTER_SCALES: Spec((self.slots,))} if self.slots else {}

    def none(self) -> dict:
        """Return the value of `inputs` that adds no adapter."""
        return {ADAPTER_SCALES: ops.zeros(self.slots)} if self.slots else {}

    def taking_kernels(self, model: Callable) -> Callable:
        """Return the model as a function that takes its layers' kernels by the name `KERNELS`."""
        if not self.slots:
            return model

        def run(*args, kernels, **inputs):
            with self._replaced(kernels):
                return model(*args, **inputs)

        return run

    def scaled(self, adapter_scales) -> dict[keras.layers.Layer, tuple]:
        """Return for each layer the factors of its change: (inputs, r) and (r, outputs)."""
        factors = ops.repeat(adapter_scales, self.rank)[:, None]
        return {
            place.layer: (
                ops.transpose(ops.convert_to_tensor(place.down)),
                factors * ops.convert_to_tensor(place.up),
            )
            for place in self.by_layer.values()
        }

    def merged(self, adapter_scales) -> list:
        """Return the layers' kernels with the changes, computed in float32 and rounded once."""
        return [
            _added(ops.convert_to_tensor(layer.kernel), ops.matmul(down, up))
            for layer, (down, up) in self.scaled(adapter_scales).items()
        ]

    @contextlib.contextmanager
    def _replaced(self, kernels: list) -> Iterator[None]:
        """Have the layers compute with these kernels, which `merged` returned."""
        variables = [place.layer.kernel for place in self.by_layer.values()]
        with _Inner(zip(variables, kernels, strict=True)):
            yield


class _Inner(keras.StatelessScope):
    """Gives some variables other values than the scope around it, which keeps the others'."""

    def __enter__(self):
        self._outer = get_stateless_scope()
        return super().__enter__()

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None and self._outer is not None:
            return self._outer.get_current_value(variable)
        return value


def _added(kernel, change):
    sum_ = ops.cast(kernel, "float32") + ops.reshape(change, kernel.shape)
    return ops.cast(sum_, kernel.dtype)
