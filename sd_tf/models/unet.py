"""The UNet denoiser: noisy latents, a timestep and a text context → the model's prediction."""

import math

import numpy as np
from keras import ops

from sd_tf.config.unet import SHALLOW
from sd_tf.models.attention import SpatialTransformer
from sd_tf.models.layers import (
    Block,
    Downsample,
    GroupNorm,
    ResnetBlock,
    Upsample,
    conv,
    dense,
    silu,
    sinusoid,
)

BOTH_SIDES = ((1, 1), (1, 1))


class TimestepEmbedding(Block):
    """Two dense layers over a sinusoid, to which LCM first adds its embedded guidance scale."""

    def __init__(self, in_dim, out_dim, condition_dim=None, dtype=None):
        super().__init__(dtype)
        self.linear_1 = dense(in_dim, out_dim, dtype=dtype)
        self.cond_proj = None
        if condition_dim is not None:
            self.cond_proj = dense(condition_dim, in_dim, use_bias=False, dtype=dtype)
        self.linear_2 = dense(out_dim, out_dim, dtype=dtype)

    def call(self, x, condition=None):
        if self.cond_proj is not None:
            x = ops.cast(x, self.compute_dtype) + self.cond_proj(condition)
        return self.linear_2(silu(self.linear_1(x)))


class Stage(Block):
    """The layers of one resolution: resnets, each followed by a transformer if its depth is > 0."""

    def __init__(self, in_channels, out_channels, depths, num_heads, config, dtype=None):
        super().__init__(dtype)
        self.resnets = [
            ResnetBlock(
                channels,
                out_channels,
                config.norm_groups,
                config.resnet_norm_eps,
                config.time_embed_dim,
                dtype,
            )
            for channels in in_channels
        ]
        self.attentions = [
            SpatialTransformer(out_channels, num_heads, depth, config, dtype) if depth else None
            for depth in depths
        ]
        self.depths = depths

    def beside(self, pictures, chosen=slice(None)):
        """Take from an iterator what each transformer attends to beside the context."""
        if pictures is None:
            return None
        return [[next(pictures) for _ in range(depth)] for depth in self.depths[chosen]]

    def layers(self, beside, chosen=slice(None)):
        """Yield each chosen resnet, its transformer, and that one's part of `beside`."""
        resnets, attentions = self.resnets[chosen], self.attentions[chosen]
        yield from zip(resnets, attentions, beside or [None] * len(resnets), strict=True)


class DownBlock(Stage):
    def __init__(self, in_channels, out_channels, depths, num_heads, downsample, config, dtype):
        inputs = (in_channels, *[out_channels] * (len(depths) - 1))
        super().__init__(inputs, out_channels, depths, num_heads, config, dtype)
        self.width = out_channels
        self.downsamplers = [Downsample(out_channels, BOTH_SIDES, dtype)] if downsample else []

    def call(self, x, time_embedding, context, beside=None, first=0, stop=None):
        """Return the result and the skip connections for the way up.

        Of the layers, those from `first` to before `stop` are run; after the last one, the
        downsampler.
        """
        skips = []
        for resnet, attention, more in self.layers(beside, slice(first, stop)):
            x = resnet(x, time_embedding)
            if attention is not None:
                x = attention(x, context, pictures=more)
            skips.append(x)
        for downsampler in self.downsamplers if stop is None else ():
            x = downsampler(x)
            skips.append(x)
        return x, skips


class MidBlock(Stage):
    """Resnet, transformer and resnet; with depth 0, a single resnet."""

    def __init__(self, channels, depth, num_heads, config, dtype=None):
        inputs = (channels, channels) if depth else (channels,)
        super().__init__(inputs, channels, (depth,) if depth else (), num_heads, config, dtype)

    def call(self, x, time_embedding, context, beside=None):
        x = self.resnets[0](x, time_embedding)
        beside = beside or [None] * len(self.attentions)
        for attention, resnet, more in zip(self.attentions, self.resnets[1:], beside, strict=True):
            x = resnet(attention(x, context, pictures=more), time_embedding)
        return x


class UpBlock(Stage):
    def __init__(
        self, in_channels, skip_channels, out_channels, depths, num_heads, upsample, config, dtype
    ):
        inputs = [
            (in_channels if j == 0 else out_channels) + skip for j, skip in enumerate(skip_channels)
        ]
        super().__init__(inputs, out_channels, depths, num_heads, config, dtype)
        self.upsamplers = [Upsample(out_channels, dtype)] if upsample else []

    def call(self, x, skips, time_embedding, context, size=None, beside=None, first=0, stop=None):
        """Run the layers from `first` to before `stop`; after the last one, the upsampler.

        `size` is the next level's height and width (None: twice this one's).
        """
        layers = self.layers(beside, slice(first, stop))
        for (resnet, attention, more), skip in zip(layers, skips, strict=True):
            x = resnet(ops.concatenate([x, skip], axis=-1), time_embedding)
            if attention is not None:
                x = attention(x, context, pictures=more)
        for upsampler in self.upsamplers if stop is None else ():
            x = upsampler(x, size=size)
        return x


class Trunk(Block):
    """The way down and the middle, which a ControlNet has, too.

    `skip_channels` are those of the skip connections, from the first to the deepest.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        channels, levels = config.channels, len(config.channels)
        time_dim = config.time_embed_dim

        self.conv_in = conv(config.in_channels, channels[0], dtype=dtype)
        self.time_embedding = TimestepEmbedding(
            channels[0], time_dim, config.guidance_embed_dim, dtype
        )
        self.add_embedding = None
        if config.added is not None:
            self.add_embedding = TimestepEmbedding(config.added.input_dim, time_dim, dtype=dtype)

        self.skip_channels = [channels[0]]
        self.down_blocks = []
        for i, depths in enumerate(config.down_depths):
            before, last = channels[max(i - 1, 0)], i == levels - 1
            self.down_blocks.append(
                DownBlock(before, channels[i], depths, config.num_heads[i], not last, config, dtype)
            )
            self.skip_channels += [channels[i]] * (len(depths) + (not last))

        self.mid_block = None
        if config.mid_depth is not None:
            self.mid_block = MidBlock(
                channels[-1], config.mid_depth, config.num_heads[-1], config, dtype
            )

    def descend(self, x, embedding, context, pictures=None):
        """Go down from the first feature map; return the middle's output and the skips."""
        skips = self.enter(x, embedding, context, pictures)
        x, more = self.descend_further(skips[-1], embedding, context, pictures)
        return x, skips + more

    def enter(self, x, embedding, context, pictures=None):
        """Run the shallow layers; return their skips, of which the last is the result."""
        block = self.down_blocks[0]
        beside = block.beside(pictures, slice(SHALLOW))
        _, more = block(x, embedding, context, beside=beside, stop=SHALLOW)
        return [x, *more]

    def descend_further(self, x, embedding, context, pictures=None):
        """Go down from the shallow layers; return the middle's output and the further skips."""
        skips, first = [], SHALLOW
        for block in self.down_blocks:
            beside = block.beside(pictures, slice(first, None))
            x, more = block(x, embedding, context, beside=beside, first=first)
            skips, first = skips + more, 0
        if self.mid_block is not None:
            x = self.mid_block(x, embedding, context, beside=self.mid_block.beside(pictures))
        return x, skips

    def shapes(self, latents):
        """Return the shapes of the skips and of the middle's output for latents (B, h, w, C)."""
        batch, height, width, _ = latents
        found = [(batch, height, width, self.skip_channels[0])]
        for block in self.down_blocks:
            found += [(batch, height, width, block.width)] * len(block.resnets)
            for _ in block.downsamplers:
                height, width = (height + 1) // 2, (width + 1) // 2
                found.append((batch, height, width, block.width))
        return [*found, found[-1]]

    def embed(self, timesteps, pooled=None, time_ids=None, guidance=None):
        """Embed everything that depends on no latent: timesteps and added conditions → (B, D)."""
        if guidance is not None:
            guidance = embed_guidance(guidance, self.config.guidance_embed_dim)
        embedding = self.time_embedding(sinusoid(timesteps, self.config.channels[0]), guidance)
        if self.add_embedding is None:
            return embedding
        added = self.config.added
        ids = sinusoid(ops.reshape(time_ids, (-1,)), added.time_embed_dim)
        ids = ops.reshape(ids, (-1, added.num_time_ids * added.time_embed_dim))
        return embedding + self.add_embedding(
            ops.concatenate([ops.cast(pooled, "float32"), ids], axis=-1)
        )


class UNet(Trunk):
    """Predicts noise or velocity at one noise level; the sampling loop and guidance are outside."""

    def __init__(self, config, dtype=None):
        super().__init__(config, dtype)
        channels, levels = config.channels, len(config.channels)
        skips = list(self.skip_channels)
        self.up_blocks = []
        before = channels[-1]
        for i, depths in enumerate(config.up_depths):
            level = levels - 1 - i
            skip_channels = [skips.pop() for _ in depths]
            self.up_blocks.append(
                UpBlock(
                    before,
                    skip_channels,
                    channels[level],
                    depths,
                    config.num_heads[level],
                    level > 0,
                    config,
                    dtype,
                )
            )
            before = channels[level]

        self.conv_norm_out = GroupNorm(
            channels[0], config.norm_groups, config.resnet_norm_eps, dtype
        )
        self.conv_out = conv(channels[0], config.out_channels, dtype=dtype)

    def call(
        self,
        latents,
        timesteps,
        context,
        pooled=None,
        time_ids=None,
        guidance=None,
        control=None,
        pictures=None,
        features=None,
        keeps=False,
    ):
        """Predict: latents (B, h, w, C), timesteps (B,), context (B, 77, D) → (B, h, w, 4).

        SDXL also takes `pooled` (B, 1280) and `time_ids` (B, 6; the refiner's: B, 5). LCM also
        takes `guidance`, the guidance scale (B,). `control` is what ControlNets add to the skip
        connections and, the last one, to the middle's output. `pictures` are the keys, values and
        masks of image prompts for each attention to the context, in the order of computation.

        With `keeps`, the deep layers' features are returned, too: a later call that takes them as
        `features` runs the shallow layers alone (DeepCache, Ma et al. 2023). Its `control` has but
        the `shallow_skips`.
        """
        if pictures is not None:
            pictures = iter(pictures if features is None else self._of_shallow(pictures))
        embedding = self.embed(timesteps, pooled, time_ids, guidance)
        skips = self.enter(self.conv_in(latents), embedding, context, pictures)
        if features is None:
            x, more = self.descend_further(skips[-1], embedding, context, pictures)
            skips += more
            if control is not None:
                *skips, x = _sums([*skips, x], control)
            features = self._rise(x, skips, embedding, context, pictures)
        elif control is not None:
            skips = _sums(skips, control)
        last, first = self.up_blocks[-1], self.config.first_shallow
        beside = last.beside(pictures, slice(first, None))
        shallow = skips[: self.config.shallow_skips][::-1]
        x = last(features, shallow, embedding, context, beside=beside, first=first)
        output = self.conv_out(silu(self.conv_norm_out(x)))
        return (output, features) if keeps else output

    def _rise(self, x, skips, embedding, context, pictures):
        """Go up from the middle's output until the shallow layers; return their features."""
        skips = list(skips)
        for number, block in enumerate(self.up_blocks):
            is_last = number == len(self.up_blocks) - 1
            stop = self.config.first_shallow if is_last else None
            mine = [skips.pop() for _ in block.resnets[:stop]]  # the last one first
            size = tuple(skips[-1].shape[1:3])
            beside = block.beside(pictures, slice(stop))
            x = block(x, mine, embedding, context, size=size, beside=beside, stop=stop)
        return x

    def _of_shallow(self, pictures):
        """Leave out what the deep layers' attentions take."""
        down = sum(self.down_blocks[0].depths[:SHALLOW])
        up = sum(self.up_blocks[-1].depths[self.config.first_shallow :])
        return [*pictures[:down], *pictures[len(pictures) - up :]]


def _sums(own, added):
    return [one + more for one, more in zip(own, added, strict=True)]


def embed_guidance(scale, width):
    """Embed w = guidance scale − 1 as LCM does, (B,) → (B, width): sines, then cosines."""
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype="float32") * (-math.log(10000.0) / (half - 1)))
    angles = 1000.0 * (scale[:, None] - 1.0) * frequencies
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
