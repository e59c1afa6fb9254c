"""Parts of the transformers that see a picture and its texts as two streams of tokens.

A block's norms have no weights of their own: the noise level and the pooled texts give the scales,
shifts and gates of each. Norms, their statistics and softmax are float32.
"""

from keras import ops

from sd_tf.models.attention import scaled_dot_product
from sd_tf.models.layers import ACTIVATIONS, Block, RMSNorm, dense, silu, sinusoid

EPSILON = 1e-6
TIME_WIDTH = 256  # of the sinusoid of a timestep or a guidance scale
GUIDANCE_FACTOR = 1000.0
LARGEST = 65504.0  # of float16


class Embedder(Block):
    """Two dense layers."""

    def __init__(self, in_features, width, dtype=None):
        super().__init__(dtype)
        self.linear_1 = dense(in_features, width, dtype=dtype)
        self.linear_2 = dense(width, width, dtype=dtype)

    def call(self, x):
        return self.linear_2(silu(self.linear_1(x)))


class TimeTextEmbed(Block):
    """Embeds what all tokens are told: the timestep, the pooled texts, perhaps the guidance scale.

    Returns the embedding (B, D), activated as all its readers take it.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width = config.hidden_size
        self.timestep_embedder = Embedder(TIME_WIDTH, width, dtype)
        self.text_embedder = Embedder(config.pooled_dim, width, dtype)
        self.guidance_embedder = None
        if config.is_told_guidance:
            self.guidance_embedder = Embedder(TIME_WIDTH, width, dtype)

    def call(self, timesteps, pooled, guidance=None):
        embedding = self.timestep_embedder(sinusoid(timesteps, TIME_WIDTH))
        if self.guidance_embedder is not None:
            angles = sinusoid(GUIDANCE_FACTOR * guidance, TIME_WIDTH)
            embedding = embedding + self.guidance_embedder(angles)
        return silu(embedding + self.text_embedder(pooled))


class Modulation(Block):
    """Turns the embedding (B, D) into `parts` scales, shifts or gates (B, 1, D)."""

    def __init__(self, width, parts, dtype=None):
        super().__init__(dtype)
        self.parts = parts
        self.linear = dense(width, parts * width, dtype=dtype)

    def call(self, embedding):
        return ops.split(self.linear(embedding)[:, None], self.parts, axis=-1)


def normalized(x):
    """Normalize each token (LayerNorm without weights) → float32."""
    x = ops.cast(x, "float32")
    centered = x - ops.mean(x, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(centered), axis=-1, keepdims=True)
    return centered * ops.rsqrt(variance + EPSILON)


def modulated(x, scale, shift):
    """Scale and shift normalized tokens; the result has the dtype of the scale."""
    dtype = scale.dtype
    return ops.cast(x * (1.0 + ops.cast(scale, "float32")) + ops.cast(shift, "float32"), dtype)


def within_range(x):
    """Clip a float16 tensor to finite values; leave others as they are."""
    return ops.clip(x, -LARGEST, LARGEST) if x.dtype == "float16" else x


class FeedForward(Block):
    """Two dense layers, four times as wide in between."""

    def __init__(self, width, dtype=None):
        super().__init__(dtype)
        # Index 1 is a dropout in the checkpoint's numbering.
        self.net = [Projection(width, 4 * width, dtype), None, dense(4 * width, width, dtype=dtype)]

    def call(self, x):
        return self.net[2](self.net[0](x))


class Projection(Block):
    """A dense layer and an approximate gelu."""

    def __init__(self, in_features, out_features, dtype=None):
        super().__init__(dtype)
        self.proj = dense(in_features, out_features, dtype=dtype)

    def call(self, x):
        return self.proj(x, activation=ACTIVATIONS["gelu_tanh"])


class TokenAttention(Block):
    """Attention of a stream of tokens to itself, without a projection of the result."""

    def __init__(self, width, num_heads, qk_norm, dtype=None):
        super().__init__(dtype)
        self.num_heads = num_heads
        self.to_q = dense(width, width, dtype=dtype)
        self.to_k = dense(width, width, dtype=dtype)
        self.to_v = dense(width, width, dtype=dtype)
        self.norm_q = RMSNorm(width // num_heads, EPSILON, dtype) if qk_norm else None
        self.norm_k = RMSNorm(width // num_heads, EPSILON, dtype) if qk_norm else None

    def call(self, x, rotation=None):
        return self.attend(*self.heads(x), rotation)

    def heads(self, x):
        """Return queries and keys by head, normalized, and values: (B, N, heads, D / heads)."""
        q, k, v = (self.by_head(x) for x in (self.to_q(x), self.to_k(x), self.to_v(x)))
        return _maybe(self.norm_q, q), _maybe(self.norm_k, k), v

    def by_head(self, x):
        return ops.reshape(x, (-1, x.shape[1], self.num_heads, x.shape[2] // self.num_heads))

    def attend(self, q, k, v, rotation=None, counts=None):
        """Attend, with the positions' `rotation`, if there is one → (B, N, D).

        `counts` are the numbers of equal tokens that each one stands for.
        """
        if rotation is not None:
            q, k = rotated(q, *rotation), rotated(k, *rotation)
        joined = (ops.reshape(x, (-1, x.shape[1], x.shape[2] * x.shape[3])) for x in (q, k, v))
        return scaled_dot_product(*joined, self.num_heads, counts=counts)


class SelfAttention(TokenAttention):
    """Attention of a picture's tokens to one another."""

    def __init__(self, width, num_heads, qk_norm, dtype=None):
        super().__init__(width, num_heads, qk_norm, dtype)
        self.to_out = [dense(width, width, dtype=dtype)]

    def call(self, x):
        return self.to_out[0](super().call(x))


class JointAttention(TokenAttention):
    """Attention of texts and picture to both, each with projections of its own.

    With `texts_end`, the texts are only attended to.
    """

    def __init__(self, width, num_heads, qk_norm, texts_end=False, dtype=None):
        super().__init__(width, num_heads, qk_norm, dtype)
        self.add_q_proj = dense(width, width, dtype=dtype)
        self.add_k_proj = dense(width, width, dtype=dtype)
        self.add_v_proj = dense(width, width, dtype=dtype)
        self.norm_added_q = RMSNorm(width // num_heads, EPSILON, dtype) if qk_norm else None
        self.norm_added_k = RMSNorm(width // num_heads, EPSILON, dtype) if qk_norm else None
        self.to_out = [dense(width, width, dtype=dtype)]
        self.to_add_out = None if texts_end else dense(width, width, dtype=dtype)

    def call(self, x, texts, rotation=None, counts=None):
        """Attend: x (B, N, D), texts (B, M, D) → the same of both; None for texts that end.

        `counts` are the numbers of equal texts that each one stands for.
        """
        count = texts.shape[1]
        both = zip(self.heads_of_texts(texts), self.heads(x), strict=True)
        counts = None if counts is None else (*counts, *[1] * x.shape[1])
        h = self.attend(*(ops.concatenate(pair, axis=1) for pair in both), rotation, counts)
        of_texts = None if self.to_add_out is None else self.to_add_out(h[:, :count])
        return self.to_out[0](h[:, count:]), of_texts

    def heads_of_texts(self, x):
        projected = (self.add_q_proj(x), self.add_k_proj(x), self.add_v_proj(x))
        q, k, v = (self.by_head(x) for x in projected)
        return _maybe(self.norm_added_q, q), _maybe(self.norm_added_k, k), v


def _maybe(norm, x):
    return x if norm is None else norm(x)


def rotated(x, cosines, sines):
    """Rotate each pair of neighbouring channels of x (B, N, heads, D) by its angle (N, D / 2)."""
    pairs = ops.reshape(ops.cast(x, "float32"), (-1, *x.shape[1:3], x.shape[3] // 2, 2))
    cosines, sines = cosines[:, None], sines[:, None]
    first, second = pairs[..., 0], pairs[..., 1]
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return ops.cast(ops.reshape(ops.stack(turned, axis=-1), (-1, *x.shape[1:])), x.dtype)


class JointBlock(Block):
    """Lets texts and picture attend to both, and passes each through a feed-forward.

    Args:
        dual: the picture attends a second time, to itself alone.
        texts_end: the last of SD3's blocks, after which the texts are not needed.
    """

    def __init__(self, width, num_heads, qk_norm, dual=False, texts_end=False, dtype=None):
        super().__init__(dtype)
        self.norm1 = Modulation(width, 9 if dual else 6, dtype)
        self.norm1_context = Modulation(width, 2 if texts_end else 6, dtype)
        self.attn = JointAttention(width, num_heads, qk_norm, texts_end, dtype)
        self.attn2 = SelfAttention(width, num_heads, qk_norm, dtype) if dual else None
        self.ff = FeedForward(width, dtype)
        self.ff_context = None if texts_end else FeedForward(width, dtype)

    def call(self, x, texts, embedding, rotation=None, counts=None):
        shift, scale, gate, *of_ff = self.norm1(embedding)
        n = normalized(x)
        if self.ff_context is None:
            scale_c, shift_c = self.norm1_context(embedding)
        else:
            shift_c, scale_c, gate_c, *of_ff_c = self.norm1_context(embedding)
        n_c = modulated(normalized(texts), scale_c, shift_c)
        h, h_c = self.attn(modulated(n, scale, shift), n_c, rotation, counts=counts)
        x = x + gate * h
        if self.attn2 is not None:
            shift, scale, gate = of_ff[3:]
            x = x + gate * self.attn2(modulated(n, scale, shift))
        x = _fed(x, self.ff, *of_ff[:3])
        if self.ff_context is None:
            return x, texts
        return x, within_range(_fed(texts + gate_c * h_c, self.ff_context, *of_ff_c))


def _fed(x, feed_forward, shift, scale, gate):
    return x + gate * feed_forward(modulated(normalized(x), scale, shift))


class FinalNorm(Block):
    """Normalizes and modulates the picture's tokens before they become patches again."""

    def __init__(self, width, dtype=None):
        super().__init__(dtype)
        self.linear = dense(width, 2 * width, dtype=dtype)

    def call(self, x, embedding):
        scale, shift = ops.split(self.linear(embedding)[:, None], 2, axis=-1)
        return modulated(normalized(x), scale, shift)
