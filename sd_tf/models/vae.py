"""The autoencoder: pictures in [-1, 1] to latents and back."""

from keras import ops

from sd_tf.models.attention import scaled_dot_product
from sd_tf.models.layers import (
    Block,
    Downsample,
    GroupNorm,
    ResnetBlock,
    Upsample,
    conv,
    dense,
    pointwise_conv,
    silu,
)

BOTTOM_AND_RIGHT = ((0, 1), (0, 1))
LOG_VARIANCE_RANGE = (-30.0, 20.0)


def resnet(in_channels, out_channels, config, dtype):
    return ResnetBlock(in_channels, out_channels, config.norm_groups, config.norm_eps, None, dtype)


class AttentionBlock(Block):
    """Self-attention among all pixels, with one head."""

    def __init__(self, channels, config, dtype=None):
        super().__init__(dtype)
        self.group_norm = GroupNorm(channels, config.norm_groups, config.norm_eps, dtype)
        self.to_q = dense(channels, channels, dtype=dtype)
        self.to_k = dense(channels, channels, dtype=dtype)
        self.to_v = dense(channels, channels, dtype=dtype)
        self.to_out = [dense(channels, channels, dtype=dtype)]

    def call(self, x):
        _, height, width, channels = x.shape
        h = ops.reshape(self.group_norm(x), (-1, height * width, channels))
        h = scaled_dot_product(self.to_q(h), self.to_k(h), self.to_v(h), num_heads=1)
        return x + ops.reshape(self.to_out[0](h), (-1, height, width, channels))


class MidBlock(Block):
    def __init__(self, channels, config, dtype=None):
        super().__init__(dtype)
        self.resnets = [resnet(channels, channels, config, dtype) for _ in range(2)]
        self.attentions = [AttentionBlock(channels, config, dtype)] if config.mid_attention else []

    def call(self, x):
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class EncoderBlock(Block):
    def __init__(self, in_channels, out_channels, downsample, config, dtype=None):
        super().__init__(dtype)
        self.resnets = [
            resnet(in_channels if j == 0 else out_channels, out_channels, config, dtype)
            for j in range(config.layers_per_block)
        ]
        self.downsamplers = (
            [Downsample(out_channels, BOTTOM_AND_RIGHT, dtype)] if downsample else []
        )

    def call(self, x):
        for layer in (*self.resnets, *self.downsamplers):
            x = layer(x)
        return x


class DecoderBlock(Block):
    def __init__(self, in_channels, out_channels, upsample, config, dtype=None):
        super().__init__(dtype)
        self.resnets = [
            resnet(in_channels if j == 0 else out_channels, out_channels, config, dtype)
            for j in range(config.layers_per_block + 1)
        ]
        self.upsamplers = [Upsample(out_channels, dtype)] if upsample else []

    def call(self, x):
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class Encoder(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        channels = config.channels
        self.conv_in = conv(config.in_channels, channels[0], dtype=dtype)
        self.down_blocks = [
            EncoderBlock(channels[max(i - 1, 0)], width, i < len(channels) - 1, config, dtype)
            for i, width in enumerate(channels)
        ]
        self.mid_block = MidBlock(channels[-1], config, dtype)
        self.conv_norm_out = GroupNorm(channels[-1], config.norm_groups, config.norm_eps, dtype)
        self.conv_out = conv(channels[-1], 2 * config.latent_channels, dtype=dtype)

    def call(self, x):
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        channels = config.channels[::-1]
        self.conv_in = conv(config.latent_channels, channels[0], dtype=dtype)
        self.mid_block = MidBlock(channels[0], config, dtype)
        self.up_blocks = [
            DecoderBlock(channels[max(i - 1, 0)], width, i < len(channels) - 1, config, dtype)
            for i, width in enumerate(channels)
        ]
        self.conv_norm_out = GroupNorm(channels[-1], config.norm_groups, config.norm_eps, dtype)
        self.conv_out = conv(channels[-1], config.out_channels, dtype=dtype)

    def call(self, x):
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(silu(self.conv_norm_out(x)))


class VAE(Block):
    """The autoencoder, with `encode` and `decode`. Latents are as the checkpoint's, not scaled."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        moments = 2 * config.latent_channels
        self.encoder = Encoder(config, dtype)
        self.quant_conv = pointwise_conv(moments, moments, dtype) if config.quant_conv else None
        self.post_quant_conv = None
        if config.post_quant_conv:
            self.post_quant_conv = pointwise_conv(
                config.latent_channels, config.latent_channels, dtype
            )
        self.decoder = Decoder(config, dtype)

    def encode(self, images):
        """Encode images (B, H, W, 3) → the posterior's mean and log-variance, each (B, h, w, 4)."""
        moments = self.encoder(images)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        mean, log_variance = ops.split(moments, 2, axis=-1)
        return mean, ops.clip(log_variance, *LOG_VARIANCE_RANGE)

    def decode(self, latents):
        """Decode unscaled latents (B, h, w, 4) → images (B, H, W, 3), about in [-1, 1]."""
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents)
