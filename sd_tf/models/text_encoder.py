"""CLIP's text transformer: token ids → the context that a denoiser attends to."""

import numpy as np
from keras import ops

from sd_tf.models.attention import scaled_dot_product
from sd_tf.models.layers import ACTIVATIONS, Block, LayerNorm, dense, embedding


class Embeddings(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.token_embedding = embedding(config.vocab_size, config.hidden_size, dtype)
        self.position_embedding = embedding(config.max_length, config.hidden_size, dtype)

    def call(self, tokens):
        positions = ops.arange(tokens.shape[1], dtype="int32")
        return self.token_embedding(tokens) + self.position_embedding(positions)[None]


class SelfAttention(Block):
    def __init__(self, config, dtype=None, causal=True):
        super().__init__(dtype)
        self.causal = causal
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.q_proj = dense(width, width, dtype=dtype)
        self.k_proj = dense(width, width, dtype=dtype)
        self.v_proj = dense(width, width, dtype=dtype)
        self.out_proj = dense(width, width, dtype=dtype)

    def call(self, x):
        mask = None
        if self.causal:  # a token attends to itself and to the tokens before it
            mask = np.triu(np.full((x.shape[1], x.shape[1]), -np.inf, "float32"), k=1)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(scaled_dot_product(q, k, v, self.num_heads, mask))


class MLP(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.activation = ACTIVATIONS[config.activation]
        self.fc1 = dense(config.hidden_size, config.intermediate_size, dtype=dtype)
        self.fc2 = dense(config.intermediate_size, config.hidden_size, dtype=dtype)

    def call(self, x):
        return self.fc2(self.fc1(x, activation=self.activation))


class EncoderLayer(Block):
    """A layer of CLIP's transformers: `causal` in that for texts, not in that for pictures."""

    def __init__(self, config, dtype=None, causal=True):
        super().__init__(dtype)
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype)
        self.self_attn = SelfAttention(config, dtype, causal)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def call(self, x):
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Encoder(Block):
    """Applies the layers in turn; returns the output of the context's layer and of the last one.

    Without `need_last` it stops at the context's layer.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.layers = [EncoderLayer(config, dtype) for _ in range(config.num_layers)]
        self.context_index = config.num_layers - config.context_layer

    def call(self, x, need_last):
        context = x
        for index, layer in enumerate(self.layers):
            if index > self.context_index and not need_last:
                break
            x = layer(x)
            if index == self.context_index:
                context = x
        return context, x


class TextTransformer(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.embeddings = Embeddings(config, dtype)
        self.encoder = Encoder(config, dtype)
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype)


class TextEncoder(Block):
    """Maps tokens int32 (B, 77) to {"context": (B, 77, D)}; pooling adds "pooled" (B, P)."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        self.text_model = TextTransformer(config, dtype)
        self.text_projection = None
        if config.projection_dim is not None:
            self.text_projection = dense(
                config.hidden_size, config.projection_dim, use_bias=False, dtype=dtype
            )

    def call(self, tokens):
        text = self.text_model
        pooling = self.config.pooled_dim is not None
        context, last = text.encoder(text.embeddings(tokens), need_last=pooling)
        if self.config.context_norm:
            context = text.final_layer_norm(context)
        outputs = {"context": context}
        if pooling:
            end = ops.one_hot(self.end_position(tokens), tokens.shape[1], dtype=last.dtype)
            row = ops.sum(last * end[:, :, None], axis=1)  # (B, D)
            row = text.final_layer_norm(row)
            projected = self.text_projection is not None
            outputs["pooled"] = self.text_projection(row) if projected else row
        return outputs

    def end_position(self, tokens):
        """Return the index (B,) of each row's first end token."""
        eos = self.config.eos_token_id
        if eos is None:
            return ops.argmax(tokens, axis=1)
        return ops.argmax(ops.cast(ops.equal(tokens, eos), "int32"), axis=1)
