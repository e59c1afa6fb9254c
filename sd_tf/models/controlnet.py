"""ControlNet: a UNet's way down and middle, whose outputs are added to the UNet's own."""

from itertools import pairwise

from keras import ops

from sd_tf.models.layers import Block, conv, pointwise_conv, silu, strided_conv
from sd_tf.models.unet import BOTH_SIDES, Trunk


class HintEmbedding(Block):
    """Control pictures, (B, H, W, 3) in 0…1 → features (B, h, w, C) at the latents' size."""

    def __init__(self, channels, out_channels, dtype=None):
        super().__init__(dtype)
        self.conv_in = conv(3, channels[0], dtype=dtype)
        self.blocks = []
        for width, after in pairwise(channels):
            self.blocks += [conv(width, width, dtype=dtype), strided_conv(width, after, dtype)]
        self.conv_out = conv(channels[-1], out_channels, dtype=dtype)

    def call(self, pictures):
        x = silu(self.conv_in(pictures))
        for same, smaller in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = silu(same(x))
            x = silu(smaller(ops.pad(x, ((0, 0), *BOTH_SIDES, (0, 0)))))
        return self.conv_out(x)


class ControlNet(Trunk):
    """Predicts what is added to a UNet's skip connections and to its middle's output."""

    def __init__(self, config, dtype=None):
        super().__init__(config.trunk, dtype)
        self.control = config
        channels = config.trunk.channels
        self.controlnet_cond_embedding = HintEmbedding(config.hint_channels, channels[0], dtype)
        self.controlnet_down_blocks = [
            pointwise_conv(width, width, dtype) for width in self.skip_channels
        ]
        self.controlnet_mid_block = pointwise_conv(channels[-1], channels[-1], dtype)

    def hint(self, pictures):
        """Embed the control pictures, (B, H, W, 3) in 0…1, which no step changes."""
        if self.control.hint_is_bgr:
            pictures = ops.flip(pictures, axis=-1)
        return self.controlnet_cond_embedding(pictures)

    def call(self, latents, timesteps, context, hint, pooled=None, time_ids=None):
        """Predict from a UNet's inputs and the embedded hint what the UNet takes as `control`.

        It is not scaled yet.
        """
        embedding = self.embed(timesteps, pooled, time_ids)
        x, skips = self.descend(self.conv_in(latents) + hint, embedding, context)
        layers = [*self.controlnet_down_blocks, self.controlnet_mid_block]
        return [layer(s) for layer, s in zip(layers, [*skips, x], strict=True)]
