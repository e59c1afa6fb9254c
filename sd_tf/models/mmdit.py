"""The MMDiT of Stable Diffusion 3 and 3.5, in which patches and texts attend to each other.

Esser et al. 2024, "Scaling Rectified Flow Transformers".
"""

from keras import ops

from sd_tf.models.joint import FinalNorm, JointBlock, TimeTextEmbed
from sd_tf.models.layers import Block, Table, dense, strided_conv


class PatchEmbed(Block):
    """Turns the latents' patches into tokens, and adds an embedding of their positions.

    The positions' table is a square; pictures take a rectangle out of its middle.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        patch, self.side = config.patch_size, config.max_patches
        width = config.hidden_size
        self.proj = strided_conv(config.in_channels, width, dtype, size=patch, stride=patch)
        self.pos_embed = Table((1, self.side**2, width), dtype)
        self.pos_embed.trainable = False  # fixed sinusoids

    def call(self, latents):
        x = self.proj(latents)  # (B, h, w, D)
        _, height, width, channels = x.shape
        top, left = (self.side - height) // 2, (self.side - width) // 2
        if min(top, left) < 0:
            raise ValueError(
                f"There are positions for {self.side} patches a side. "
                f"Received: {height} x {width} patches"
            )
        table = ops.reshape(self.pos_embed.values, (self.side, self.side, channels))
        x = x + ops.cast(table[top : top + height, left : left + width], x.dtype)
        return ops.reshape(x, (-1, height * width, channels))


class MMDiT(Block):
    """Predicts the flow from data to noise at one noise level."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        width, last = config.hidden_size, config.num_layers - 1
        self.pos_embed = PatchEmbed(config, dtype)
        self.time_text_embed = TimeTextEmbed(config, dtype)
        self.context_embedder = dense(config.context_dim, width, dtype=dtype)
        self.transformer_blocks = [
            JointBlock(
                width, config.num_heads, config.qk_norm, i in config.dual_layers, i == last, dtype
            )
            for i in range(config.num_layers)
        ]
        self.norm_out = FinalNorm(width, dtype)
        self.proj_out = dense(width, config.patch_size**2 * config.out_channels, dtype=dtype)

    def call(self, latents, timesteps, context, pooled, skipped=(), counts=None):
        """Predict: latents (B, h, w, C), timesteps (B,), context (B, M, D) → (B, h, w, C).

        Args:
            pooled: the pooled texts (B, P).
            skipped: the blocks that are left out.
            counts: numbers (M,) of equal tokens, as many as each token of the context stands for.
                The result is the one of all of them, as they stay equal through all blocks.
        """
        embedding = self.time_text_embed(timesteps, pooled)
        x, texts = self.pos_embed(latents), self.context_embedder(context)
        for i, block in enumerate(self.transformer_blocks):
            if i not in skipped:
                x, texts = block(x, texts, embedding, counts=counts)
        x = self.proj_out(self.norm_out(x, embedding))
        return self.unpatched(x, *latents.shape[1:3])

    def unpatched(self, x, height, width):
        """Turn tokens, whose features are patches pixel by pixel, into latents."""
        patch, channels = self.config.patch_size, self.config.out_channels
        x = ops.reshape(x, (-1, height // patch, width // patch, patch, patch, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, height, width, channels))
