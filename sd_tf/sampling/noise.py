"""Noise from a seed: the same numbers on every backend and device, whatever the batch.

Every image has a seed and every use of noise a stream, the two words of a Threefry-2x32 key
(Salmon et al. 2011, 20 rounds); the counter is the place in the latent. Box-Muller makes normals.
"""

import math

from keras import ops

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
INITIAL = 0  # the stream of the start noise; step i draws from stream i + 1


def threefry(key, counter):
    """Encrypt a counter with a key, two uint32 words each, in 20 rounds; shapes broadcast."""
    keys = (*key, ops.bitwise_xor(ops.bitwise_xor(*key), ops.cast(PARITY, "uint32")))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = x + y
            y = ops.bitwise_xor(_rotated(y, bits), x)
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + ops.cast(group + 1, "uint32")
    return x, y


def _rotated(x, bits):
    left = ops.left_shift(x, ops.cast(bits, "uint32"))
    right = ops.right_shift(x, ops.cast(32 - bits, "uint32"))
    return ops.bitwise_or(left, right)


def normal(seeds, stream, shape):
    """Draw standard normals (B, *shape), float32, from seeds int32 (B,) and a stream int32 ()."""
    pairs = math.prod(shape) // 2
    key = (ops.cast(seeds, "uint32")[:, None], ops.cast(stream, "uint32"))
    place = ops.cast(ops.arange(pairs, dtype="int32"), "uint32")[None]
    first, second = threefry(key, (place, ops.zeros_like(place)))
    # 24 bits are what a float32 holds; the first of a pair must not be zero.
    radius = ops.sqrt(-2.0 * ops.log((_top_bits(first) + 1.0) * 2.0**-24))
    angle = _top_bits(second) * (2.0 * math.pi * 2.0**-24)
    both = ops.stack([radius * ops.cos(angle), radius * ops.sin(angle)], axis=-1)
    return ops.reshape(both, (-1, *shape))


def _top_bits(x):
    return ops.cast(ops.cast(ops.right_shift(x, ops.cast(8, "uint32")), "int32"), "float32")
