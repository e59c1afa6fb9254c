"""Rewrites: equivalent forms of a computation that one target's compiler turns into faster code.

Here is what each target takes; `models.lowering` puts it in force while a model is traced.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Rewrites:
    """The rewrites, each on or off; `models` implements them: layers, convolution, attention."""

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
REWRITES = tuple(field.name for field in fields(Rewrites))

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
