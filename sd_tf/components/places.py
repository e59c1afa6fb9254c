"""Places for adapters in a component's models.

A place is two matrices beside a layer's kernel, whose product is added to the kernel. Both have
`rank` rows for each slot: an adapter's factors fill those of its slot, and zeros are no change. A
call gives a scale for each slot, so another mixture of adapters compiles nothing.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import keras
from keras import ops
from keras.src.backend.common.stateless_scope import get_stateless_scope

from sd_tf.components.spec import Spec
from sd_tf.models import deferred_variables
from sd_tf.models.branches import Branch, branches
from sd_tf.runtime.adapter_places import (
    ADAPTER_SCALES,
    DOWN,
    NO_PLACES,
    PREFIX,
    UP,
    AdapterPlaces,
)
from sd_tf.weights import layout

KERNELS = "kernels"  # the argument of a denoiser with places: its layers' kernels


def in_denoiser(layers: str) -> Callable[[str], bool]:
    """Return whether a layer of the denoiser, by its name, has a place."""
    return {
        "attention": lambda path: ".attn1." in path or ".attn2." in path,
        "transformer": lambda path: ".attentions." in path,
        "all": lambda path: True,
    }[layers]


def in_text_encoder(path: str) -> bool:
    """Return whether a layer of a text encoder, by its name, has a place."""
    return ".encoder.layers." in path


@dataclass(frozen=True)
class Place:
    layer: keras.layers.Layer
    down: keras.Variable  # (slots · rank, inputs of one output)
    up: keras.Variable  # (slots · rank, outputs)


class Places:
    """The places of a component's models, by the checkpoint's part and the layer's name."""

    def __init__(
        self,
        models: Mapping[str, keras.layers.Layer] = MappingProxyType({}),
        places: AdapterPlaces = NO_PLACES,
        has_place: Callable[[str], bool] = lambda path: True,
    ):
        self.slots, self.rank = places.slots, places.rank
        self.by_layer: dict[tuple[str, str], Place] = {}
        if not places.slots:
            return
        rows = places.slots * places.rank
        with deferred_variables():
            for part, model in models.items():
                for path, layer in layout.leaves(model):
                    if hasattr(layer, "kernel") and has_place(path):
                        *inputs, outputs = layer.kernel.shape
                        self.by_layer[part, path] = Place(
                            layer,
                            _variable(f"{PREFIX}{part}.{path}{DOWN}", (rows, math.prod(inputs))),
                            _variable(f"{PREFIX}{part}.{path}{UP}", (rows, outputs)),
                        )

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

    def _scaled(self, adapter_scales) -> dict[keras.layers.Layer, tuple]:
        """Return for each layer the factors of its change: (inputs, r) and (r, outputs)."""
        factors = ops.repeat(adapter_scales, self.rank)[:, None]
        return {
            place.layer: (
                ops.transpose(ops.convert_to_tensor(place.down)),
                factors * ops.convert_to_tensor(place.up),
            )
            for place in self.by_layer.values()
        }

    @contextlib.contextmanager
    def beside(self, adapter_scales=None) -> Iterator[None]:
        """Have the layers add the changes as branches of low rank, where scales are given."""
        found = {} if adapter_scales is None else self._scaled(adapter_scales)
        with branches({layer: Branch(*factors) for layer, factors in found.items()}):
            yield

    def merged(self, adapter_scales) -> list:
        """Return the layers' kernels with the changes, computed in float32 and rounded once."""
        return [
            _added(ops.convert_to_tensor(layer.kernel), ops.matmul(down, up))
            for layer, (down, up) in self._scaled(adapter_scales).items()
        ]

    @contextlib.contextmanager
    def _replaced(self, kernels: list) -> Iterator[None]:
        """Have the layers compute with these kernels, which `merged` returned."""
        variables = [place.layer.kernel for place in self.by_layer.values()]
        outer = get_stateless_scope()
        with keras.StatelessScope(zip(variables, kernels, strict=True)) as scope:
            if outer is not None:
                scope.state_mapping = {**outer.state_mapping, **scope.state_mapping}
            yield


def _variable(name: str, shape: tuple[int, int]) -> keras.Variable:
    return keras.Variable("zeros", shape=shape, dtype="float32", trainable=False, name=name)


def _added(kernel, change):
    sum_ = ops.cast(kernel, "float32") + ops.reshape(change, kernel.shape)
    return ops.cast(sum_, kernel.dtype)
