"""Rewrites of `config.rewrites`, in force while a model is traced.

A model is written once, as its papers have it. Code that traces it can request rewrites:

    with lowered(TARGETS["cpu"]):
        graph = tf.function(unet).get_concrete_function(...)

Layers read `rewrites()` while they are traced. Weights and results stay the same, up to rounding.
"""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar

from sd_tf.config.rewrites import AS_WRITTEN, Rewrites

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
