"""IP-Adapter's own layers: an encoded picture → tokens → keys and values for a UNet's attention."""

from keras import ops

from sd_tf.config.image_prompts import FULL, LINEAR, RESAMPLER
from sd_tf.models.attention import scaled_dot_product
from sd_tf.models.layers import ACTIVATIONS, Block, LayerNorm, Table, dense

EPSILON = 1e-5
HEAD = 64  # width of a resampler's heads


class LinearProjection(Block):
    """One embedding (B, P) → a few tokens (B, T, D)."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.shape = (-1, config.num_tokens, config.context_dim)
        self.proj = dense(config.embed_dim, config.num_tokens * config.context_dim, dtype=dtype)
        self.norm = LayerNorm(config.context_dim, EPSILON, dtype)

    def call(self, encoded, given):
        embedding = encoded["embedding"]
        embedding = embedding * ops.cast(given[:, None], embedding.dtype)
        return self.norm(ops.reshape(self.proj(embedding), self.shape))


class FullProjection(Block):
    """Tokens (B, N, P) → as many (B, N, D)."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width = config.embed_dim
        self.proj = [
            dense(width, width, dtype=dtype),
            None,
            dense(width, config.context_dim, dtype=dtype),
            LayerNorm(config.context_dim, EPSILON, dtype),
        ]

    def call(self, encoded, given):
        first, _, second, norm = self.proj
        return norm(second(first(encoded["tokens"], activation=ACTIVATIONS["gelu"])))


class PerceiverAttention(Block):
    """Latents attend to a picture's tokens and to themselves."""

    def __init__(self, width, inner, dtype=None):
        super().__init__(dtype)
        self.num_heads = inner // HEAD
        self.norm1 = LayerNorm(width, EPSILON, dtype)
        self.norm2 = LayerNorm(width, EPSILON, dtype)
        self.to_q = dense(width, inner, use_bias=False, dtype=dtype)
        self.to_kv = dense(width, 2 * inner, use_bias=False, dtype=dtype)
        self.to_out = dense(inner, width, use_bias=False, dtype=dtype)

    def call(self, tokens, latents):
        tokens, latents = self.norm1(tokens), self.norm2(latents)
        k, v = ops.split(self.to_kv(ops.concatenate([tokens, latents], axis=1)), 2, axis=-1)
        return self.to_out(scaled_dot_product(self.to_q(latents), k, v, self.num_heads))


class ResamplerLayer(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width, inner = config.hidden_size, config.intermediate_size
        self.attn = PerceiverAttention(width, config.inner_size, dtype)
        self.ff = [
            LayerNorm(width, EPSILON, dtype),
            dense(width, inner, use_bias=False, dtype=dtype),
            None,
            dense(inner, width, use_bias=False, dtype=dtype),
        ]

    def call(self, tokens, latents):
        latents = latents + self.attn(tokens, latents)
        norm, first, _, second = self.ff
        return latents + second(first(norm(latents), activation=ACTIVATIONS["gelu"]))


class Resampler(Block):
    """Tokens (B, N, P) → a few (B, T, D), which learnt latents collect."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width = config.hidden_size
        self.latents = Table((1, config.num_tokens, width), dtype)
        self.proj_in = dense(config.embed_dim, width, dtype=dtype)
        self.layers = [ResamplerLayer(config, dtype) for _ in range(config.num_layers)]
        self.proj_out = dense(width, config.context_dim, dtype=dtype)
        self.norm_out = LayerNorm(config.context_dim, EPSILON, dtype)

    def call(self, encoded, given):
        tokens = self.proj_in(encoded["tokens"])
        latents = ops.cast(self.latents.values, tokens.dtype)
        latents = ops.broadcast_to(latents, (ops.shape(tokens)[0], *latents.shape[1:]))
        for layer in self.layers:
            latents = layer(tokens, latents)
        return self.norm_out(self.proj_out(latents))


PROJECTIONS = {LINEAR: LinearProjection, FULL: FullProjection, RESAMPLER: Resampler}


class ImageProjection(Block):
    """Makes tokens of what a vision encoder gives, by the kind that the configuration says.

    `given` (B,) is 0 in place of no picture at all, of which the base adapters project zeros.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.image_proj = PROJECTIONS[config.kind](config, dtype)

    def call(self, encoded, given):
        return self.image_proj(encoded, given)


class KeysAndValues(Block):
    def __init__(self, context_dim, width, dtype=None):
        super().__init__(dtype)
        self.to_k_ip = dense(context_dim, width, use_bias=False, dtype=dtype)
        self.to_v_ip = dense(context_dim, width, use_bias=False, dtype=dtype)


class ImageAttention(Block):
    """Tokens (B, T, D) → keys and values (B, T, C) for each attention of a UNet to its prompt."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.ip_adapter = [
            KeysAndValues(config.context_dim, width, dtype) for width in config.widths
        ]

    def call(self, tokens):
        return [(one.to_k_ip(tokens), one.to_v_ip(tokens)) for one in self.ip_adapter]
