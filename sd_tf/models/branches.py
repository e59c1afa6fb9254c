"""Low-rank branches beside a model's layers: x·W + b becomes x·W + b + (x·A)·B·scale.

An adapter can so be trained, or chosen for each call, while the layers keep their own weights:

    with branches({unet.mid_block.attentions[0].proj_in: Branch(a, b)}):
        output = unet(latents, timesteps, context)

Layers read `branch_of` while they are called or traced. Layers without a branch compute what they
compute outside this context.
"""

import contextlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
from keras import ops


class Branch(NamedTuple):
    """A layer's branch: tensors or variables, cast to the layer's compute dtype where it is used.

    Several adapters make one branch: their A side by side, their B one below the other.
    """

    a: Any  # (in, rank); with a convolution's window, (k, k, in, rank)
    b: Any  # (rank, out)
    scale: float = 1.0


Branches = Mapping[keras.layers.Layer, Branch]

_branches: ContextVar[Branches | None] = ContextVar("branches", default=None)


def branch_of(layer: keras.layers.Layer) -> Branch | None:
    """Return the layer's branch that is in force where a model is being called."""
    found = _branches.get()
    return None if found is None else found.get(layer)


@contextlib.contextmanager
def branches(wanted: Branches):
    """Call or trace models with these branches inside this context, instead of any outer ones."""
    token = _branches.set(wanted)
    try:
        yield
    finally:
        _branches.reset(token)


def with_branch(layer: keras.layers.Layer, y, reduce):
    """Add the layer's branch, if it has one, to its output y.

    Args:
        reduce: computes the layer's input times A, (…, rank).
    """
    branch = branch_of(layer)
    if branch is None:
        return y
    a, b = (ops.cast(ops.convert_to_tensor(x), y.dtype) for x in (branch.a, branch.b))
    more = ops.matmul(reduce(a), b)
    return y + (more if branch.scale == 1.0 else more * branch.scale)
