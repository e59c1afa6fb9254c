"""The kinds of layers that the models consist of; each creates its variables when constructed.

Dense and convolution layers are Keras' own, with room for an adapter's branch (`branches.py`).
They may store their kernels in fewer bits than they compute in (`storage.py`).
Norms compute their statistics in float32 under every dtype policy. All weights start at zero: a
checkpoint or a trainer fills them.
"""

import contextlib
import math

import keras
import numpy as np
from keras import ops
from keras.src.backend.common import global_state

from sd_tf.models.branches import branch_of, with_branch
from sd_tf.models.convolution import convolve, convolve_doubled
from sd_tf.models.lowering import rewrites
from sd_tf.models.storage import Storable

# Pixels from which the graph's own group norm saves more than its further operations cost.
LARGE_MAP = 1 << 10
# A gate is a product of its own in the graph unless there are so many channels for each row: the
# kernel is then divided in every call, which costs more than to divide the product.
FEW_ROWS = 4


@contextlib.contextmanager
def deferred_variables():
    """Create variables with a shape and a dtype but no storage in models built inside this context.

    A weight loader fills them one by one, so that nothing is allocated twice. Keras lists such
    variables in order to initialize them later, which would allocate models whose shapes alone are
    wanted. Those created here are removed from that list.
    """
    pending = global_state.get_global_attribute("uninitialized_variables", [], set_to_default=True)
    before = len(pending)
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        del pending[before:]


class Block(keras.layers.Layer):
    """A layer composed of others. It does not cast its inputs: the layers inside cast their own."""

    def __init__(self, dtype=None):
        super().__init__(dtype=dtype, autocast=False)
        self.built = True


class Linear(Storable, keras.layers.Dense):
    """A matrix product with a bias, and an activation of it where one is asked for."""

    def call(self, x, activation=None):
        if self.takes(activation):
            return self.fused(x, self.kernel, self.bias, IN_PRODUCT[activation])
        h = self.product(x, lambda kernel: self.of_rows(x, kernel))
        if self.bias is not None:
            h = ops.add(h, self.bias)
        h = with_branch(self, as_tokens(h, x), lambda a: ops.matmul(x, a))
        return h if activation is None else activation(h)

    def gated(self, x, activation):
        """Multiply the first half of the outputs by the activation of the second one."""
        rows, width = math.prod(x.shape[1:-1]) * (x.shape[0] or 1), x.shape[-1]
        if not self.takes(activation) or FEW_ROWS * rows < width:
            value, gate = ops.split(self(x), 2, axis=-1)
            return value * activation(gate)
        kernels, biases = ops.split(self.kernel, 2, axis=-1), ops.split(self.bias, 2)
        value = self.fused(x, kernels[0], biases[0], lambda h: h)
        return value * self.fused(x, kernels[1], biases[1], IN_PRODUCT[activation])

    def takes(self, activation):
        """Whether one of the graph's kernels computes the activation with product and bias."""
        is_alone = self.storage is None and self.bias is not None and branch_of(self) is None
        return rewrites().graph_kernels and activation in IN_PRODUCT and is_alone

    def fused(self, x, kernel, bias, activation):
        """Compute in the graph, with nothing between the product and what follows it."""
        return as_tokens(activation(ops.add(self.of_rows(x, kernel), bias)), x)

    def of_rows(self, x, kernel):
        """Multiply x; in the graph's own kernels as a matrix, so that the bias can follow it."""
        if rewrites().graph_kernels:
            x = ops.reshape(x, (-1, kernel.shape[0]))
        return ops.matmul(x, kernel)


def as_tokens(h, x):
    """Undo what `of_rows` has done to x, where it has, in a product h."""
    return ops.reshape(h, (-1, *x.shape[1:-1], h.shape[-1])) if rewrites().graph_kernels else h


def dense(in_features, out_features, use_bias=True, dtype=None):
    layer = Linear(out_features, use_bias=use_bias, kernel_initializer="zeros", dtype=dtype)
    layer.build((None, in_features))
    return layer


class PointwiseConv(Linear):
    """A 1×1 convolution: computed as a matrix product, stored in checkpoints as a convolution."""


def pointwise_conv(in_channels, out_channels, dtype=None):
    layer = PointwiseConv(out_channels, kernel_initializer="zeros", dtype=dtype)
    layer.build((None, None, None, in_channels))
    return layer


class Conv(Storable, keras.layers.Conv2D):
    """A 3×3 convolution. With `doubled_to`, its input is first doubled to that height and width."""

    def call(self, x, doubled_to=None):
        is_widened = self.storage is not None

        def by(kernel):
            if doubled_to is None:
                return convolve(x, kernel, is_widened)
            return convolve_doubled(x, kernel, doubled_to, is_widened)

        h = self.product(x, by)
        return with_branch(self, h if self.bias is None else ops.add(h, self.bias), by)


def conv(in_channels, out_channels, use_bias=True, dtype=None):
    layer = Conv(
        out_channels,
        3,
        padding="same",
        use_bias=use_bias,
        kernel_initializer="zeros",
        dtype=dtype,
    )
    layer.build((None, None, None, in_channels))
    return layer


class StridedConv(Storable, keras.layers.Conv2D):
    """A convolution with a stride and without padding: UNet and VAE pad it differently."""

    def call(self, x):
        def by(kernel):
            return self.convolution_op(x, kernel)

        h = self.product(x, by)
        return with_branch(self, h if self.bias is None else ops.add(h, self.bias), by)


def strided_conv(in_channels, out_channels, dtype=None, size=3, stride=2, use_bias=True):
    layer = StridedConv(
        out_channels,
        size,
        strides=stride,
        padding="valid",
        use_bias=use_bias,
        kernel_initializer="zeros",
        dtype=dtype,
    )
    layer.build((None, None, None, in_channels))
    return layer


def embedding(count, width, dtype=None):
    layer = keras.layers.Embedding(count, width, embeddings_initializer="zeros", dtype=dtype)
    layer.build()
    return layer


class Table(keras.layers.Layer):
    """A stored tensor that is no layer's weight, such as an embedding of positions."""

    def __init__(self, shape, dtype=None):
        super().__init__(dtype=dtype, autocast=False)
        self.values = self.add_weight(shape=shape, initializer="zeros", name="values")
        self.built = True


class RMSNorm(keras.layers.Layer):
    """A division by the root mean square in float32, with a learnt scale."""

    def __init__(self, width, epsilon=1e-6, dtype=None):
        super().__init__(dtype=dtype, autocast=False)
        self.epsilon = epsilon
        self.scale = self.add_weight(shape=(width,), initializer="ones", name="scale")
        self.built = True

    def call(self, x):
        x = ops.cast(x, "float32")
        variance = ops.mean(ops.square(x), axis=-1, keepdims=True)
        x = x * ops.rsqrt(variance + self.epsilon) * ops.cast(self.scale, "float32")
        return ops.cast(x, self.compute_dtype)


class Norm(keras.layers.Layer):
    """A normalisation in float32, with a learnt scale and bias."""

    def __init__(self, width, epsilon, dtype=None):
        super().__init__(dtype=dtype, autocast=False)
        self.epsilon = epsilon
        self.scale = self.add_weight(shape=(width,), initializer="ones", name="scale")
        self.bias = self.add_weight(shape=(width,), initializer="zeros", name="bias")
        self.built = True

    def call(self, x):
        scale, bias = (ops.cast(weight, "float32") for weight in (self.scale, self.bias))
        return ops.cast(self.normalize(x, scale, bias), self.compute_dtype)


class LayerNorm(Norm):
    def normalize(self, x, scale, bias):
        if rewrites().graph_kernels and x.dtype == self.compute_dtype == "bfloat16":
            from sd_tf.models.graph_kernels import layer_norm  # which needs TensorFlow

            return layer_norm(x, self.scale, self.bias, self.epsilon)

        x = ops.cast(x, "float32")
        centered = x - ops.mean(x, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(centered), axis=-1, keepdims=True)
        return centered * ops.rsqrt(variance + self.epsilon) * scale + bias


class GroupNorm(Norm):
    def __init__(self, width, groups, epsilon, dtype=None):
        if width % groups:
            raise ValueError(
                f"The number of channels must be a multiple of GroupNorm's groups. "
                f"Received: {width} channels, {groups} groups"
            )
        super().__init__(width, epsilon, dtype)
        self.groups = groups

    def normalize(self, x, scale, bias):
        """Apply one factor and one shift to each channel of each picture.

        A gradient then needs only two sums over the pixels. No gradient flows through the mean that
        centers the variance: to first order, the variance does not depend on it.
        """
        batch, height, width, _ = x.shape
        pays = x.dtype == "bfloat16" and batch is not None and height * width >= LARGE_MAP
        if rewrites().graph_kernels and pays:
            from sd_tf.models.graph_kernels import group_norm  # which needs TensorFlow

            return group_norm(x, scale, bias, self.groups, self.epsilon)

        x = ops.cast(x, "float32")
        mean = self.group_means(x)
        variance = self.group_means(ops.square(x - ops.stop_gradient(mean)))
        factor = scale * ops.rsqrt(variance + self.epsilon)
        return x * factor + (bias - mean * factor)

    def group_means(self, values):
        """Give each channel its group's mean: (B, h, w, C) → (B, 1, 1, C).

        Pixels are averaged first, because channels lie side by side in memory and fill the vector
        units; a single group of 3 or 10 channels would not.
        """
        channels = values.shape[-1]
        size = channels // self.groups
        means = ops.reshape(ops.mean(values, axis=(1, 2)), (-1, self.groups, size))
        means = ops.tile(ops.mean(means, axis=-1, keepdims=True), (1, 1, size))
        return ops.reshape(means, (-1, 1, 1, channels))


class Downsample(Block):
    """A convolution of stride 2; `padding` is ((top, bottom), (left, right))."""

    def __init__(self, channels, padding, dtype=None):
        super().__init__(dtype)
        self.padding = padding
        self.conv = strided_conv(channels, channels, dtype)

    def call(self, x):
        return self.conv(ops.pad(x, ((0, 0), *self.padding, (0, 0))))


class Upsample(Block):
    """Doubles every pixel in both directions, crops to `size` (for odd sizes), and convolves."""

    def __init__(self, channels, dtype=None):
        super().__init__(dtype)
        self.conv = conv(channels, channels, dtype=dtype)

    def call(self, x, size=None):
        _, height, width, _ = x.shape
        return self.conv(x, doubled_to=(2 * height, 2 * width) if size is None else size)


class ResnetBlock(Block):
    """Two convolutions with a shortcut; with `time_dim`, the time embedding is added in between."""

    def __init__(self, in_channels, out_channels, groups, epsilon, time_dim=None, dtype=None):
        super().__init__(dtype)
        self.norm1 = GroupNorm(in_channels, groups, epsilon, dtype)
        self.conv1 = conv(in_channels, out_channels, dtype=dtype)
        self.time_emb_proj = None
        if time_dim is not None:
            self.time_emb_proj = dense(time_dim, out_channels, dtype=dtype)
        self.norm2 = GroupNorm(out_channels, groups, epsilon, dtype)
        self.conv2 = conv(out_channels, out_channels, dtype=dtype)
        self.conv_shortcut = None
        if in_channels != out_channels:
            self.conv_shortcut = pointwise_conv(in_channels, out_channels, dtype)

    def call(self, x, time_embedding=None):
        h = self.conv1(silu(self.norm1(x)))
        if self.time_emb_proj is not None:
            h = h + self.time_emb_proj(silu(time_embedding))[:, None, None, :]
        h = self.conv2(silu(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


def sinusoid(positions, width, max_period=10000.0):
    """Embed positions (B,) → (B, width) float32: cosines, then sines, of falling frequencies."""
    half = width // 2
    # In float32 in this order, as PyTorch has it: the angles are up to 3500 times these.
    exponents = np.float32(-math.log(max_period)) * np.arange(half, dtype="float32")
    frequencies = np.exp(exponents / np.float32(half))
    angles = ops.cast(positions, "float32")[:, None] * frequencies[None]
    return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)


def silu(x):
    # TensorFlow's own registers a gradient wherever it is traced, for good, and with that all
    # weights of the traced models.
    return x * ops.sigmoid(x)


def exact_gelu(x):
    return ops.gelu(x, approximate=False)


def gelu(x):
    if not rewrites().graph_kernels:
        return exact_gelu(x)
    wide = ops.cast(x, "float32")  # which has a faster kernel than Keras' complementary function
    return ops.cast(0.5 * wide * (1.0 + ops.erf(wide * np.float32(0.5**0.5))), x.dtype)


def gelu_tanh(x):
    return ops.gelu(x, approximate=True)


ACTIVATIONS = {
    "relu": ops.relu,
    "silu": silu,
    "mish": lambda x: x * ops.tanh(ops.softplus(x)),
    "quick_gelu": lambda x: x * ops.sigmoid(1.702 * x),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}
# Activations that the graph's optimizer makes one kernel of with the product before, in the form
# in which it finds them.
IN_PRODUCT = {gelu: exact_gelu, gelu_tanh: gelu_tanh}
