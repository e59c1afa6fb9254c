"""Other ways to write the same computation, for targets whose compiler does better with them.

A model is written once, as its papers have it. Whoever traces it may ask for rewrites:

    with lowered(TARGETS["cpu"]):
        graph = tf.function(unet).get_concrete_function(...)

Layers ask `rewrites()` while they are traced. Weights and results stay the same, up to rounding.
"""

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Rewrites:
    """What each of them does stands where it is done: `convolution` and `attention`."""

    winograd: bool = False
    upsample_phases: bool = False
    small_maps: bool = False
    query_blocks: bool = False
    fused_attention: bool = False

    def without(self, names) -> "Rewrites":
        on = {field.name: getattr(self, field.name) for field in fields(self)}
        return Rewrites(**{**on, **dict.fromkeys(names, False)})

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name))


AS_WRITTEN = Rewrites()
NAMES = tuple(field.name for field in fields(Rewrites))

# What XLA's code for each target gains from. Measured: docs/performance.md.
TARGETS = {
    "cpu": Rewrites(winograd=True, upsample_phases=True, small_maps=True, query_blocks=True),
    "gpu": Rewrites(fused_attention=True),
    # Keras 3.15's fused attention takes a causal mask on a TPU where none is given.
    "tpu": AS_WRITTEN,
}

_rewrites = ContextVar("rewrites", default=AS_WRITTEN)


def rewrites() -> Rewrites:
    return _rewrites.get()


@contextlib.contextmanager
def lowered(wanted: Rewrites):
    """Inside, models are traced with these rewrites."""
    token = _rewrites.set(wanted)
    try:
        yield
    finally:
        _rewrites.reset(token)
