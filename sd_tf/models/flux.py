"""Flux.1's transformer: blocks with two streams, then blocks in which texts and picture are one."""

import numpy as np
from keras import ops

from sd_tf.models.joint import (
    FinalNorm,
    JointBlock,
    Modulation,
    TimeTextEmbed,
    TokenAttention,
    modulated,
    normalized,
    within_range,
)
from sd_tf.models.layers import ACTIVATIONS, Block, dense

ROPE_BASE = 10000.0


class SingleBlock(Block):
    """Attention and feed-forward side by side, over texts and picture as one stream."""

    def __init__(self, width, num_heads, dtype=None):
        super().__init__(dtype)
        self.norm = Modulation(width, 3, dtype)
        self.proj_mlp = dense(width, 4 * width, dtype=dtype)
        self.proj_out = dense(5 * width, width, dtype=dtype)
        self.attn = TokenAttention(width, num_heads, qk_norm=True, dtype=dtype)

    def call(self, x, embedding, rotation):
        shift, scale, gate = self.norm(embedding)
        n = modulated(normalized(x), scale, shift)
        wide = self.proj_mlp(n, activation=ACTIVATIONS["gelu_tanh"])
        both = ops.concatenate([self.attn(n, rotation), wide], axis=-1)
        return within_range(x + gate * self.proj_out(both))


class Flux(Block):
    """Predicts the flow from data to noise at one noise level."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        width, heads = config.hidden_size, config.num_heads
        self.x_embedder = dense(config.in_channels, width, dtype=dtype)
        self.time_text_embed = TimeTextEmbed(config, dtype)
        self.context_embedder = dense(config.context_dim, width, dtype=dtype)
        self.transformer_blocks = [
            JointBlock(width, heads, qk_norm=True, dtype=dtype) for _ in range(config.num_layers)
        ]
        self.single_transformer_blocks = [
            SingleBlock(width, heads, dtype) for _ in range(config.num_single_layers)
        ]
        self.norm_out = FinalNorm(width, dtype)
        self.proj_out = dense(width, config.out_channels, dtype=dtype)

    def call(self, latents, timesteps, context, pooled, guidance=None):
        """Predict: latents (B, h, w, C), timesteps (B,), context (B, M, D) → (B, h, w, C).

        Args:
            pooled: the pooled text (B, P).
            guidance: the guidance scale (B,), where the model is told it.
        """
        _, height, width, _ = latents.shape
        embedding = self.time_text_embed(timesteps, pooled, guidance)
        x, texts = self.x_embedder(self.packed(latents)), self.context_embedder(context)
        count, patch = texts.shape[1], self.config.patch_size
        rotation = rotations(self.config.rope_axes, count, height // patch, width // patch)
        for block in self.transformer_blocks:
            x, texts = block(x, texts, embedding, rotation)
        x = ops.concatenate([texts, x], axis=1)
        for block in self.single_transformer_blocks:
            x = block(x, embedding, rotation)
        x = self.proj_out(self.norm_out(x[:, count:], embedding))
        return self.unpacked(x, height, width)

    def packed(self, latents):
        """Turn latents into tokens, whose features are patches channel by channel."""
        _, height, width, channels = latents.shape
        patch = self.config.patch_size
        x = ops.reshape(latents, (-1, height // patch, patch, width // patch, patch, channels))
        x = ops.transpose(x, (0, 1, 3, 5, 2, 4))
        return ops.reshape(x, (-1, (height // patch) * (width // patch), channels * patch**2))

    def unpacked(self, x, height, width):
        patch = self.config.patch_size
        channels = self.config.out_channels // patch**2
        x = ops.reshape(x, (-1, height // patch, width // patch, channels, patch, patch))
        x = ops.transpose(x, (0, 1, 4, 2, 5, 3))
        return ops.reshape(x, (-1, height, width, channels))


def rotations(axes, num_texts, height, width):
    """Return cosines and sines (texts + patches, D / 2) of the tokens' rotary positions.

    A position has three numbers, of which texts have only zeros and patches begin with one.
    Each turns its part of a head's channels. Angles are computed in float64.
    """
    rows, columns = (grid.ravel() for grid in np.mgrid[:height, :width])
    ids = np.zeros((num_texts + height * width, 3))
    ids[num_texts:, 1], ids[num_texts:, 2] = rows, columns
    angles = [
        np.outer(ids[:, axis], ROPE_BASE ** (-np.arange(0, size, 2) / size))
        for axis, size in enumerate(axes)
    ]
    angles = np.concatenate(angles, axis=1)
    return np.cos(angles).astype("float32"), np.sin(angles).astype("float32")
