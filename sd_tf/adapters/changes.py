"""What an adapter adds to one layer's weight: LoRA, LoHa, LoKr and DoRA.

Weights are in the layout of PyTorch's checkpoints: (out, in), or (out, in, k, k) for a convolution.
Everything is computed in float32. Tensors are read when they are needed, and not kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from sd_tf.adapters.errors import AdapterError
from sd_tf.files.tensors import StoredTensor

Shape = tuple[int, ...]
Parts = Mapping[str, StoredTensor]  # what a tensor is to its change → the tensor


@dataclass(frozen=True, eq=False)
class Change(ABC):
    """The change of one layer's weight."""

    kind: ClassVar[str]
    shape: Shape  # of the weight
    parts: Parts

    @property
    @abstractmethod
    def rank(self) -> int | None:
        """The rank of `factors`; None: there are none."""

    @property
    @abstractmethod
    def stored_rank(self) -> int | None:
        """The rank that was set for the training; None: nothing is factored."""

    @abstractmethod
    def difference(self, weight: np.ndarray) -> np.ndarray:
        """Return what a scale of 1 adds to this weight, which has any shape of the same size."""

    @abstractmethod
    def factors(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return A (rank, in·k·k) and B (out, rank) with delta = B·A, or None for DoRA."""

    @property
    def has_bias(self) -> bool:
        """Whether the layer's bias changes, too."""
        return "bias" in self.parts

    def bias(self) -> np.ndarray:
        """Return what a scale of 1 adds to the layer's bias, if it changes."""
        raise AdapterError(f"{self.kind} changes no bias.")


@dataclass(frozen=True, eq=False)
class Sum(Change):
    """A change that is added, whatever the weight: ΔW, times a scale."""

    multiplier: float  # alpha / rank

    def difference(self, weight: np.ndarray) -> np.ndarray:
        return self.delta().reshape(weight.shape)

    def delta(self) -> np.ndarray:
        """Return ΔW in the weight's shape, times alpha / rank."""
        return (np.float32(self.multiplier) * self._product()).reshape(self.shape)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = self._factors()
        return a, np.float32(self.multiplier) * b

    @abstractmethod
    def _product(self) -> np.ndarray:
        """Return ΔW as (out, in·k·k), without the multiplier."""

    @abstractmethod
    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return A and B without the multiplier."""

    @classmethod
    @abstractmethod
    def wanted(cls, parts: Parts, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """Yield the shape that each tensor must have for a weight of that shape."""


class LoRA(Sum):
    """ΔW = B·A; a `mid` (LoCon) is a k×k convolution between a 1×1 A and B."""

    kind = "LoRA"

    @classmethod
    def wanted(cls, parts, shape):
        out, *inner = shape
        rank = parts["down"].shape[0]
        yield "up", (out, rank)
        if "mid" in parts:
            yield "mid", (rank, rank, *inner[1:])
            inner = inner[:1]
        yield "down", (rank, *inner)
        if "bias" in parts:
            yield "bias", (out,)

    @property
    def stored_rank(self):
        return self.parts["down"].shape[0]

    @property
    def rank(self):
        return self.stored_rank

    def _product(self):
        a, b = self._factors()
        return b @ a

    def _factors(self):
        down, up = (_rows(self.parts[name]) for name in ("down", "up"))
        if "mid" in self.parts:
            down = _through(_values(self.parts["mid"]), down)
        return down, up

    def bias(self):
        return np.float32(self.multiplier) * _values(self.parts["bias"])


class LoHa(Sum):
    """ΔW = (w1_a·w1_b) ∘ (w2_a·w2_b), the product of the elements."""

    kind = "LoHa"

    @classmethod
    def wanted(cls, parts, shape):
        for number in (1, 2):
            names = (f"hada_w{number}_a", f"hada_w{number}_b", f"hada_t{number}")
            yield from _pair_shapes(parts, *names, shape)

    @property
    def stored_rank(self):
        return self.parts["hada_w1_b"].shape[0]

    @property
    def rank(self):
        return self.parts["hada_w1_b"].shape[0] * self.parts["hada_w2_b"].shape[0]

    def _pairs(self):
        return [
            _pair(self.parts, f"hada_w{number}_a", f"hada_w{number}_b", f"hada_t{number}")
            for number in (1, 2)
        ]

    def _product(self):
        (first_a, first_b), (second_a, second_b) = self._pairs()
        return (first_a @ first_b) * (second_a @ second_b)

    def _factors(self):
        # B[:, (i, j)] = w1_a[:, i] · w2_a[:, j], and A[(i, j), :] in the same way
        (first_a, first_b), (second_a, second_b) = self._pairs()
        a = np.einsum("ix,jx->ijx", first_b, second_b).reshape(self.rank, -1)
        b = np.einsum("oi,oj->oij", first_a, second_a).reshape(-1, self.rank)
        return a, b


class LoKr(Sum):
    """ΔW = w1 ⊗ w2, Kronecker's product; each is whole or itself a product."""

    kind = "LoKr"

    @classmethod
    def wanted(cls, parts, shape):
        out, inner, *kernel = shape
        first = parts.get("lokr_w1")
        rows, columns = (
            (parts["lokr_w1_a"].shape[0], parts["lokr_w1_b"].shape[1])
            if first is None
            else first.shape[:2]
        )
        if out % rows or inner % columns:
            raise AdapterError(f"w1 of shape {[rows, columns]} does not divide {list(shape)}")
        if first is None:
            yield from _pair_shapes(parts, "lokr_w1_a", "lokr_w1_b", "", (rows, columns))
        else:
            yield "lokr_w1", (rows, columns)
        second = (out // rows, inner // columns, *kernel)
        if "lokr_w2" in parts:
            yield "lokr_w2", second
        else:
            yield from _pair_shapes(parts, "lokr_w2_a", "lokr_w2_b", "lokr_t2", second)

    @property
    def stored_rank(self):
        for name in ("lokr_w2_b", "lokr_w1_b"):
            if name in self.parts:
                return self.parts[name].shape[0]
        return None

    @property
    def rank(self):
        return prod(
            self.parts[f"{name}_b"].shape[0]
            if f"{name}_b" in self.parts
            else min(_matrix_shape(self.parts[name].shape))
            for name in ("lokr_w1", "lokr_w2")
        )

    def _product(self):
        first, second = (
            _rows(self.parts[name]) if name in self.parts else np.matmul(*self._pair(name))
            for name in ("lokr_w1", "lokr_w2")
        )
        return np.kron(first, second)  # the kernel is the fastest axis of in·k·k in both

    def _factors(self):
        (first_a, first_b), (second_a, second_b) = map(self._pair, ("lokr_w1", "lokr_w2"))
        return np.kron(first_b, second_b), np.kron(first_a, second_a)

    def _pair(self, name):
        if name not in self.parts:
            return _pair(self.parts, f"{name}_a", f"{name}_b", "lokr_t2" if "2" in name else "")
        whole = _rows(self.parts[name])
        rows, columns = whole.shape
        if rows <= columns:
            return np.eye(rows, dtype="float32"), whole
        return whole, np.eye(columns, dtype="float32")


@dataclass(frozen=True, eq=False)
class DoRA(Change):
    """W' = m · V/‖V‖ with V = W + ΔW: the direction changes by a sum, the magnitude is m.

    A scale w gives W + w·(W' − W).
    """

    direction: Sum
    is_per_input: bool  # norms over all axes but the second; else over all but the first

    @property
    def kind(self):
        return "DoRA" if isinstance(self.direction, LoRA) else f"DoRA of {self.direction.kind}"

    @property
    def rank(self):
        return None

    @property
    def stored_rank(self):
        return self.direction.stored_rank

    def factors(self):
        return None

    def difference(self, weight):
        stored = weight.reshape(self.shape)
        v = stored + self.direction.delta()
        kept = 1 if self.is_per_input else 0
        axes = tuple(axis for axis in range(v.ndim) if axis != kept)
        norm = np.sqrt(np.square(v).sum(axes, keepdims=True))
        magnitude = _values(next(iter(self.parts.values()))).reshape(norm.shape)
        return (magnitude / norm * v - stored).reshape(weight.shape)


def merged(weight: np.ndarray, changes: Iterable[tuple[Change, float]]) -> np.ndarray:
    """Return W + Σ scale · (difference of the original W), in float32 and in W's shape."""
    weight = weight.astype("float32")
    total = weight.copy()
    for change, scale in changes:
        total += np.float32(scale) * change.difference(weight)
    return total


def _pair_shapes(parts: Parts, a: str, b: str, tucker: str, shape: Shape):
    """Yield the shapes of a product's two matrices, and of the tucker kernel between them."""
    out, inner, *kernel = shape
    rank = parts[b].shape[0]
    if tucker in parts:
        yield a, (rank, out)
        yield tucker, (rank, rank, *kernel)
        yield b, (rank, inner)
    else:
        yield a, (out, rank)
        yield b, (rank, inner * prod(kernel))


def _pair(parts: Parts, a: str, b: str, tucker: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two matrices (out, r) and (r, in·k·k) whose product is the one that is stored."""
    if tucker in parts:
        return _rows(parts[a]).T, _through(_values(parts[tucker]), _rows(parts[b]))
    return _rows(parts[a]), _rows(parts[b])


def _through(kernel: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Compose a matrix (n, in) with the convolution (m, n, k, k) after it: (m, in·k·k)."""
    return np.einsum("mnkl,ni->mikl", kernel, matrix).reshape(len(kernel), -1)


def _values(tensor: StoredTensor) -> np.ndarray:
    return tensor.read().astype("float32")


def _rows(tensor: StoredTensor) -> np.ndarray:
    return _values(tensor).reshape(_matrix_shape(tensor.shape))


def _matrix_shape(shape: Shape) -> tuple[int, int]:
    return shape[0], prod(shape[1:])
