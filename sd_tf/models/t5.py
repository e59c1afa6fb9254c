"""T5's encoder: token ids → the context that a denoiser attends to. Padding is attended to, too."""

import math

import keras
import numpy as np
from keras import ops

from sd_tf.models.attention import scaled_dot_product
from sd_tf.models.layers import ACTIVATIONS, Block, RMSNorm, dense, embedding


def buckets(length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket (L, L) of the distance from each token, a row, to each other, a column.

    Half of the buckets are for tokens that come later. Of each half, the first half are for one
    distance each, the others for ranges that grow as logarithms up to `max_distance`.
    """
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    half = num_buckets // 2
    exact = half // 2
    a = np.abs(distance)
    # In float32, because some distances lie on the border of two buckets.
    growth = np.log(np.maximum(a, exact).astype("float32") / np.float32(exact))
    far = exact + (growth / math.log(max_distance / exact) * (half - exact)).astype("int32")
    place = np.where(a < exact, a, np.minimum(far, half - 1))
    return (half * (distance > 0) + place).astype("int32")


class SelfAttention(Block):
    """Attention with a learnt bias for the distance of two tokens; its scores are not scaled.

    The first block's has the biases, which all blocks add.
    """

    def __init__(self, config, has_bias, dtype=None):
        super().__init__(dtype)
        self.config = config
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        self.q = dense(width, inner, use_bias=False, dtype=dtype)
        self.k = dense(width, inner, use_bias=False, dtype=dtype)
        self.v = dense(width, inner, use_bias=False, dtype=dtype)
        self.o = dense(inner, width, use_bias=False, dtype=dtype)
        self.relative_attention_bias = None
        if has_bias:
            self.relative_attention_bias = embedding(config.num_buckets, config.num_heads, dtype)

    def position_bias(self, length):
        """Look up the bias (heads, L, L) of each pair of tokens, in float32."""
        config = self.config
        index = buckets(length, config.num_buckets, config.max_distance)
        bias = self.relative_attention_bias(ops.convert_to_tensor(index))  # (L, L, heads)
        return ops.cast(ops.transpose(bias, (2, 0, 1)), "float32")

    def call(self, x, bias):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(scaled_dot_product(q, k, v, self.config.num_heads, bias, scale=1.0))


class GatedMLP(Block):
    """Gated activation: x → wo(gelu(wi_0 x) · wi_1 x). In float16, `wo` and its output are float32.

    In float16, a trained T5's sums overflow there.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width, inner = config.hidden_size, config.intermediate_size
        self.wi_0 = dense(width, inner, use_bias=False, dtype=dtype)
        self.wi_1 = dense(width, inner, use_bias=False, dtype=dtype)
        wo_dtype = "float32" if self.compute_dtype == "float16" else dtype
        self.wo = dense(inner, width, use_bias=False, dtype=wo_dtype)

    def call(self, x):
        return self.wo(ACTIVATIONS["gelu_tanh"](self.wi_0(x)) * self.wi_1(x))


def clamped(x):
    """Replace infinities in float16, as transformers does."""
    if keras.backend.standardize_dtype(x.dtype) != "float16":
        return x
    most = float(np.finfo("float16").max)
    return ops.where(ops.any(ops.isinf(x)), ops.clip(x, 1000 - most, most - 1000), x)


class AttentionLayer(Block):
    def __init__(self, config, has_bias, dtype=None):
        super().__init__(dtype)
        self.SelfAttention = SelfAttention(config, has_bias, dtype)
        self.layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def call(self, x, bias):
        return clamped(ops.add(x, self.SelfAttention(self.layer_norm(x), bias)))


class FeedForwardLayer(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.DenseReluDense = GatedMLP(config, dtype)
        self.layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def call(self, x):
        return ops.add(x, self.DenseReluDense(self.layer_norm(x)))


class EncoderBlock(Block):
    def __init__(self, config, has_bias, dtype=None):
        super().__init__(dtype)
        self.layer = [AttentionLayer(config, has_bias, dtype), FeedForwardLayer(config, dtype)]

    def call(self, x, bias):
        attention, feed_forward = self.layer
        return feed_forward(attention(x, bias))


class Stack(Block):
    """Applies the blocks in turn. In float16, their sum becomes float32 with the first `wo`."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.block = [EncoderBlock(config, i == 0, dtype) for i in range(config.num_layers)]
        self.final_layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def call(self, x):
        bias = self.block[0].layer[0].SelfAttention.position_bias(x.shape[1])
        for block in self.block:
            x = block(x, bias)
        return self.final_layer_norm(x)


class T5Encoder(Block):
    """Maps tokens int32 (B, L) to {"context": (B, L, D)}."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        self.shared = embedding(config.vocab_size, config.hidden_size, dtype)
        self.encoder = Stack(config, dtype)

    def call(self, tokens):
        return {"context": self.encoder(self.shared(tokens))}
