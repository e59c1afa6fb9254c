"""Attention on a TPU, as a kernel that takes heads as they lie: side by side.

XLA arranges the heads one after the other first, each padded to the width of a TPU's registers, and
back afterwards. Here a block of 128 channels holds several whole heads. For each, all channels
but its own are zero in the queries, so that one product of the whole block gives its scores, and
another its outputs, in its own channels.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from sd_tf.jax.sharding import DATA, MODEL

LANES = 128  # of a TPU's registers
QUERIES = 256  # of a block; twice as many where all keys are read anew for each block
CHUNK = 512  # keys that are scored at once
# Of a block. Its keys and values, twice, as the next ones arrive meanwhile, take 10 MB of the 16
# that a v5e's compiler gives to a kernel.
MOST_KEYS = 5120


@dataclass(frozen=True)
class AttentionKernel:
    """Attends on each device of a mesh to its own pictures and heads."""

    mesh: Mesh
    interpret: bool = False  # run it as other code, on any device

    def __call__(
        self, q, k, v, num_heads: int, scale: float, counts: Sequence[int] | None = None
    ) -> jax.Array | None:
        """Attend: q (B, N, C), k and v (B, M, C) → (B, N, C), or None where heads fill no block.

        `counts` are M numbers of equal keys, as many as each key stands for.
        """
        channels = q.shape[-1]
        own, width = channels // self.mesh.shape[MODEL], channels // num_heads
        if LANES % width or own % LANES or num_heads % self.mesh.shape[MODEL]:
            return None
        several = tuple((key, n) for key, n in enumerate(counts or ()) if n > 1)
        attend = functools.partial(
            _attend, width=width, scale=scale, several=several, interpret=self.interpret
        )
        spec = PartitionSpec(DATA, None, MODEL)
        return jax.shard_map(
            attend, mesh=self.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
        )(q, k, v)


def _attend(
    q, k, v, *, width: int, scale: float, several: Sequence[tuple[int, int]], interpret: bool
):
    batch, count, channels = q.shape
    keys = k.shape[1]
    step = min(MOST_KEYS, keys)
    queries = min(QUERIES if step == keys else 2 * QUERIES, count)
    grid = (batch, channels // LANES, pl.cdiv(count, queries), pl.cdiv(keys, step))
    of_queries = pl.BlockSpec((1, queries, LANES), lambda b, c, i, j: (b, i, c))
    of_keys = pl.BlockSpec((1, step, LANES), lambda b, c, i, j: (b, j, c))
    reads = 1 if step == keys else grid[2]  # of each key
    heads = LANES // width
    return pl.pallas_call(
        functools.partial(_kernel, width=width, scale=scale, keys=keys, several=several),
        grid=grid,
        in_specs=[of_queries, of_keys, of_keys],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((queries, LANES), jnp.float32),
            pltpu.VMEM((heads, queries, 1), jnp.float32),
            pltpu.VMEM((heads, queries, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * count * keys * channels,
            transcendentals=batch * count * keys * channels // width,
            bytes_accessed=2 * (math.prod(q.shape) + reads * math.prod(k.shape)) * q.dtype.itemsize,
        ),
        interpret=interpret,
    )(q, k, v)


def _kernel(
    q_ref, k_ref, v_ref, out_ref, sums_ref, highest_ref, totals_ref, *, width, scale, keys, several
):
    """Add a block of keys to the softmax of a block of queries, for each head in the block.

    `several` are the places of keys that stand for several, and for how many.
    """
    index, step = pl.program_id(3), k_ref.shape[1]
    heads = range(LANES // width)

    @pl.when(index == 0)
    def begin():
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)
        highest_ref[...] = jnp.full(highest_ref.shape, -jnp.inf, jnp.float32)
        totals_ref[...] = jnp.zeros(totals_ref.shape, jnp.float32)

    def add(first, count):
        q, k, v = q_ref[0], k_ref[0, pl.ds(first, count)], v_ref[0, pl.ds(first, count)]
        left = keys - index * step - first
        if keys % step:  # the last block ends beyond the keys, where there may be anything
            v = jnp.where(_indices(v.shape, 0) < left, v, jnp.zeros_like(v))
        logs = jnp.zeros((1, count), jnp.float32)  # n equal scores s are one of s + ln n
        for place, number in several:
            here = _indices(logs.shape, 1) == place - index * step - first
            logs = jnp.where(here, math.log(number), logs)
        for head in heads:
            own = _indices(q.shape, 1) // width == head
            scores = scale * _product(jnp.where(own, q, jnp.zeros_like(q)), k, 1)
            if several:
                scores += logs
            if keys % step:
                scores = jnp.where(_indices(scores.shape, 1) < left, scores, -jnp.inf)
            before = highest_ref[head]
            highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights, kept = jnp.exp(scores - highest), jnp.exp(before - highest)
            highest_ref[head] = highest
            totals_ref[head] = totals_ref[head] * kept + jnp.sum(weights, axis=1, keepdims=True)
            sums = sums_ref[...]
            added = _product(weights.astype(v.dtype), v, 0)
            sums_ref[...] = jnp.where(own, sums * kept + added, sums)

    whole, rest = divmod(step, CHUNK)
    if whole:

        @pl.loop(0, whole)
        def add_chunk(number):
            add(pl.multiple_of(number * CHUNK, CHUNK), CHUNK)

    if rest:
        add(whole * CHUNK, rest)

    @pl.when(index == pl.num_programs(3) - 1)
    def end():
        totals = jnp.ones(sums_ref.shape, jnp.float32)
        for head in heads:
            own = _indices(totals.shape, 1) // width == head
            totals = jnp.where(own, totals_ref[head], totals)
        out_ref[0] = (sums_ref[...] / totals).astype(out_ref.dtype)


def _indices(shape, axis: int):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _product(a, b, axis: int):
    """Sum a (n, m) over m with `axis` of b, in float32."""
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )
