"""Attention, and the transformer in which a picture attends to itself and to the prompt."""

import numpy as np
from keras import ops

from sd_tf.models.layers import (
    ACTIVATIONS,
    Block,
    GroupNorm,
    LayerNorm,
    dense,
    pointwise_conv,
)
from sd_tf.models.lowering import attention_kernel, rewrites

# With at least this many keys, the scores of all queries together exceed the processor's cache.
MANY_KEYS = 1024
MANY_KEYS_IN_GRAPH = 4096  # there, each block costs several calls of kernels
QUERY_BLOCK = 512
# More scores than these of one picture are never held at once: half a GiB in float32, which SD1 has
# at 512 px.
MOST_SCORES = 2**27


def scaled_dot_product(q, k, v, num_heads, mask=None, upcast=False, scale=None, counts=None):
    """Attend: q (B, N, C), k and v (B, M, C) → (B, N, C); the softmax is always in float32.

    Args:
        mask: (N, M), (heads, N, M) or (B, 1, 1, M), added to the scores.
        scale: of the scores; None: 1 / √(C / heads).
        counts: M numbers of equal keys, as many as each key stands for; without a mask.
    """
    head_dim = q.shape[-1] // num_heads
    scale = head_dim**-0.5 if scale is None else scale
    wanted, kernel = rewrites(), attention_kernel()
    if kernel is not None and mask is None and not upcast:
        h = kernel(q, k, v, num_heads, scale, counts)
        if h is not None:
            return h
    weights = None
    if counts is not None:
        if wanted.fused_attention:  # it takes no weights
            places = np.repeat(np.arange(len(counts)), counts)
            k, v = (ops.take(x, places, axis=1) for x in (k, v))
        else:  # in a softmax, n equal scores s are one of s + ln n
            weights = ops.convert_to_tensor(np.log(np.array(counts, "float32")))
    if wanted.fused_attention and mask is None and not upcast:
        q, k, v = (ops.reshape(x, (-1, x.shape[1], num_heads, head_dim)) for x in (q, k, v))
        h = ops.dot_product_attention(q, k, v, scale=scale)
        return ops.reshape(h, (-1, h.shape[1], num_heads * head_dim))

    def split_heads(x):  # (B, N, C) → (B, heads, N, C / heads)
        return ops.transpose(ops.reshape(x, (-1, x.shape[1], num_heads, head_dim)), (0, 2, 1, 3))

    q, k, v = split_heads(q * scale), split_heads(k), split_heads(v)
    if upcast:
        q, k = ops.cast(q, "float32"), ops.cast(k, "float32")
    many = MANY_KEYS_IN_GRAPH if wanted.graph_kernels else MANY_KEYS
    blocked = wanted.query_blocks and mask is None and k.shape[2] >= many
    if blocked:
        h = _attend_in_blocks(q, k, v, weights)
    elif mask is None and num_heads * q.shape[2] * k.shape[2] > MOST_SCORES:
        h = _attend_in_turns(q, k, v, weights)
    else:
        h = _attend(q, k, v, mask if weights is None else weights)
    h = ops.transpose(h, (0, 2, 1, 3))
    return ops.reshape(h, (-1, h.shape[1], num_heads * head_dim))


def _attend(q, k, v, mask=None):
    """Attend per head: q (…, N, D), k and v (…, M, D) → (…, N, D)."""
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2))
    if mask is None and rewrites().graph_kernels:
        return ops.matmul(ops.softmax(scores, axis=-1), v)  # oneDNN's is in float32 inside
    scores = ops.cast(scores, "float32")
    if mask is not None:
        scores = scores + mask
    return ops.matmul(ops.cast(ops.softmax(scores, axis=-1), v.dtype), v)


def _attend_in_blocks(q, k, v, weights):
    """Attend for a block of one head's queries at a time, so that its scores stay in the cache.

    `weights` (M,), if there are any, are added to the scores of every query.
    """
    batch, heads, count, width = q.shape
    block = min(QUERY_BLOCK, count)
    per_head = -(-count // block)
    q = ops.pad(q, ((0, 0), (0, 0), (0, per_head * block - count), (0, 0)))
    q = ops.reshape(q, (batch * heads * per_head, block, width))
    k, v = (ops.reshape(x, (batch * heads, -1, width)) for x in (k, v))

    def of_block(index):
        head = index // per_head
        if rewrites().graph_kernels:
            return _attend(q[index], k[head], v[head], weights)
        scores = ops.cast(ops.matmul(q[index], ops.transpose(k[head])), "float32")
        scores = scores if weights is None else scores + weights
        shares = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True))
        total = ops.sum(shares, axis=-1, keepdims=True)
        h = ops.cast(ops.matmul(ops.cast(shares, v.dtype), v[head]), "float32")
        return ops.cast(h / total, v.dtype)

    h = ops.map(of_block, ops.arange(batch * heads * per_head))
    return ops.reshape(h, (batch, heads, per_head * block, width))[:, :, :count]


def _attend_in_turns(q, k, v, weights):
    """Attend for a few queries of all heads at a time, so that few scores are held; any batch."""
    _, heads, count, width = q.shape
    # Outside XLA, TensorFlow computes up to ten turns at once.
    turn = min(count, max(1, MOST_SCORES // (16 * heads * k.shape[2])))
    turns = -(-count // turn)
    q = ops.pad(q, ((0, 0), (0, 0), (0, turns * turn - count), (0, 0)))
    q = ops.moveaxis(ops.reshape(q, (-1, heads, turns, turn, width)), 2, 0)
    h = ops.moveaxis(ops.map(lambda some: _attend(some, k, v, weights), q), 0, 2)
    return ops.reshape(h, (-1, heads, turns * turn, width))[:, :, :count]


class Attention(Block):
    """Self-attention; with `context`, cross-attention. Projections have the checkpoint's names."""

    def __init__(
        self, channels, num_heads, context_dim=None, qkv_bias=False, upcast=False, dtype=None
    ):
        super().__init__(dtype)
        if channels % num_heads:
            raise ValueError(
                f"The number of channels must be a multiple of the number of heads. "
                f"Received: {channels} channels, {num_heads} heads"
            )
        context_dim = channels if context_dim is None else context_dim
        self.num_heads = num_heads
        self.upcast = upcast
        self.to_q = dense(channels, channels, qkv_bias, dtype)
        self.to_k = dense(context_dim, channels, qkv_bias, dtype)
        self.to_v = dense(context_dim, channels, qkv_bias, dtype)
        self.to_out = [dense(channels, channels, dtype=dtype)]

    def call(self, x, context=None, pictures=()):
        """Attend; `pictures` are further (keys, values, mask), whose outputs are added."""
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        h = scaled_dot_product(q, k, v, self.num_heads, upcast=self.upcast)
        for k, v, mask in pictures:
            h = h + scaled_dot_product(q, k, v, self.num_heads, mask, self.upcast)
        return self.to_out[0](h)


class GEGLU(Block):
    """Gated activation: x → value · gelu(gate), where one projection gives value and gate."""

    def __init__(self, channels, inner, activation, dtype=None):
        super().__init__(dtype)
        self.activation = ACTIVATIONS[activation]
        self.proj = dense(channels, 2 * inner, dtype=dtype)

    def call(self, x):
        return self.proj.gated(x, self.activation)


class FeedForward(Block):
    """GEGLU to four times the width, and a projection back."""

    def __init__(self, channels, activation, dtype=None):
        super().__init__(dtype)
        inner = 4 * channels
        # Index 1 is a dropout in the checkpoint's numbering.
        self.net = [
            GEGLU(channels, inner, activation, dtype),
            None,
            dense(inner, channels, dtype=dtype),
        ]

    def call(self, x):
        return self.net[2](self.net[0](x))


class TransformerBlock(Block):
    """Self-attention, cross-attention and feed-forward, each with a norm before and a shortcut."""

    def __init__(self, channels, num_heads, config, dtype=None):
        super().__init__(dtype)
        upcast = config.upcast_attention
        self.norm1 = LayerNorm(channels, 1e-5, dtype)
        self.attn1 = Attention(channels, num_heads, upcast=upcast, dtype=dtype)
        self.norm2 = LayerNorm(channels, 1e-5, dtype)
        self.attn2 = Attention(channels, num_heads, config.context_dim, upcast=upcast, dtype=dtype)
        self.norm3 = LayerNorm(channels, 1e-5, dtype)
        self.ff = FeedForward(channels, config.geglu, dtype)

    def call(self, x, context, pictures=()):
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context, pictures=pictures)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(Block):
    """Passes a picture (B, h, w, C), as h·w tokens, through `depth` transformer blocks."""

    def __init__(self, channels, num_heads, depth, config, dtype=None):
        super().__init__(dtype)
        project = dense if config.linear_projection else pointwise_conv
        self.norm = GroupNorm(channels, config.norm_groups, config.transformer_norm_eps, dtype)
        self.proj_in = project(channels, channels, dtype=dtype)
        self.transformer_blocks = [
            TransformerBlock(channels, num_heads, config, dtype) for _ in range(depth)
        ]
        self.proj_out = project(channels, channels, dtype=dtype)

    def call(self, x, context, pictures=None):
        """Transform; `pictures` has an entry for each block, see `Attention`."""
        _, height, width, channels = x.shape
        h = self.proj_in(ops.reshape(self.norm(x), (-1, height * width, channels)))
        beside = [()] * len(self.transformer_blocks) if pictures is None else pictures
        for block, more in zip(self.transformer_blocks, beside, strict=True):
            h = block(h, context, pictures=more)
        return x + ops.reshape(self.proj_out(h), (-1, height, width, channels))
