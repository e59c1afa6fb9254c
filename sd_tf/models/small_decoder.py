"""A decoder of convolutions alone, for a small part of what the autoencoder's costs."""

from keras import ops

from sd_tf.models.layers import ACTIVATIONS, Block, conv

LATENT_RANGE = 3.0  # latents are bent to ±3


class SmallBlock(Block):
    """Three convolutions with a shortcut."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.activation = ACTIVATIONS[config.activation]
        layers = [conv(config.channels, config.channels, dtype=dtype) for _ in range(3)]
        # The checkpoint numbers the activations in between, too.
        self.conv = [layers[0], None, layers[1], None, layers[2]]

    def call(self, x):
        h = self.activation(self.conv[0](x))
        h = self.activation(self.conv[2](h))
        return ops.relu(self.conv[4](h) + x)


class Layers(Block):
    """The decoder's layers under the checkpoint's numbers, which count what has no weights, too."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width, levels = config.channels, len(config.blocks)
        self.activation = ACTIVATIONS[config.activation]
        first = conv(config.latent_channels, width, dtype=dtype)
        layers = [first, None]
        for level, blocks in enumerate(config.blocks, start=1):
            layers += [SmallBlock(config, dtype) for _ in range(blocks)]
            if level < levels:
                layers += [None, conv(width, width, use_bias=False, dtype=dtype)]
            else:
                layers.append(conv(width, config.out_channels, dtype=dtype))
        self.layers = layers

    def call(self, x):
        first, _, *rest = self.layers
        x = self.activation(first(x))
        doubles = False
        for layer in rest:
            if layer is None:
                doubles = True
            elif doubles:
                _, height, width, _ = x.shape
                x, doubles = layer(x, doubled_to=(2 * height, 2 * width)), False
            else:
                x = layer(x)
        return x


class SmallDecoder(Block):
    """The decoder of diffusers' `AutoencoderTiny`."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        self.decoder = Layers(config, dtype)

    def decode(self, latents):
        """Decode latents (B, h, w, c) → images (B, H, W, 3), about in [-1, 1]."""
        bent = LATENT_RANGE * ops.tanh(latents / LATENT_RANGE)
        return 2.0 * self.decoder(bent) - 1.0
