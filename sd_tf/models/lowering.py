"""Rewrites: equivalent forms of a computation that one target's compiler turns into faster code.

A model is written once, as its papers have it. Code that traces it can request rewrites:

    with lowered(TARGETS["cpu"]):
        graph = tf.function(unet).get_concrete_function(...)

Layers read `rewrites()` while they are traced. Weights and results stay the same, up to rounding.
"""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Rewrites:
    """The rewrites, each on or off; `layers`, `convolution` and `attention` implement them."""

    winograd: bool = False
    upsample_phases: bool = False
    small_maps: bool = False
    query_blocks: bool = False
    fused_attention: bool = False
    graph_kernels: bool = False
    attention_kernel: bool = False  # which the code that traces brings along

    def without(self, names) -> "Rewrites":
        on = {field.name: getattr(self, field.name) for field in fields(self)}
        return Rewrites(**{**on, **dict.fromkeys(names, False)})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rewrites that are on."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name))


AS_WRITTEN = Rewrites()
NAMES = tuple(field.name for field in fields(Rewrites))

# The rewrites that make XLA's code faster on each target, as measured in docs/performance.md.
TARGETS = {
    "cpu": Rewrites(winograd=True, upsample_phases=True, small_maps=True, query_blocks=True),
    "gpu": Rewrites(fused_attention=True),
    # On a TPU, Keras 3.15's fused attention applies a causal mask even if none is given.
    "tpu": AS_WRITTEN,
}

# Those of JAX, which lets programs bring kernels of their own for a TPU.
ON_JAX = TARGETS | {"tpu": Rewrites(attention_kernel=True)}

# bfloat16 on a CPU: XLA widens it there, so SavedModels leave products to the graph's own kernels,
# each with its bias, as those compute both at once. Nothing is compiled.
IN_GRAPH = Rewrites(upsample_phases=True, query_blocks=True, graph_kernels=True)


def in_saved_models(target: str, precision: str, disabled=()) -> Rewrites:
    """Return the rewrites of SavedModels for a target, without those whose names are given."""
    is_in_graph = (target, precision) == ("cpu", "bfloat16") and "graph_kernels" not in disabled
    return (IN_GRAPH if is_in_graph else TARGETS[target]).without(disabled)


# (q, k, v, number of heads, scale) → what `scaled_dot_product` gives, or None where it cannot.
AttentionKernel = Callable[..., object | None]

_rewrites = ContextVar("rewrites", default=AS_WRITTEN)
_attention_kernel: ContextVar[AttentionKernel | None] = ContextVar("kernel", default=None)


def rewrites() -> Rewrites:
    """Return the rewrites that are in force where a model is being traced."""
    return _rewrites.get()


def attention_kernel() -> AttentionKernel | None:
    """Return the kernel that attention tries first where a model is being traced."""
    return _attention_kernel.get() if rewrites().attention_kernel else None


@contextlib.contextmanager
def lowered(wanted: Rewrites, kernel: AttentionKernel | None = None):
    """Trace models with the rewrites `wanted` inside this context.

    Args:
        kernel: of attention, for the rewrite of that name; None: as without it.
    """
    tokens = _rewrites.set(wanted), _attention_kernel.set(kernel)
    try:
        yield
    finally:
        _rewrites.reset(tokens[0])
        _attention_kernel.reset(tokens[1])
