"""Linear layers whose kernels are stored in fewer bits than the models compute in.

    with stored_as("int8"):
        model = T5Encoder(config, dtype="bfloat16")

Inside this context, `layers.dense` makes layers of the class that `CLASSES` names. They compute
what a `Linear` computes, up to the rounding of its kernel.
"""

import contextlib
from contextvars import ContextVar

import keras
from keras import ops

from sd_tf.models.branches import with_branch


class Int8Linear(keras.layers.Layer):
    """A matrix product with a kernel of whole numbers from -127 to 127, and a scale per output.

    The kernel is `values` · `scale`; `weights.int8` finds both. No dtype policy changes theirs.
    """

    def __init__(self, in_features, out_features, use_bias=True, dtype=None):
        super().__init__(dtype=dtype)
        self.values = self.add_weight(
            (in_features, out_features), "zeros", "int8", trainable=False, name="values"
        )
        self.scale = self.add_weight(
            (out_features,), "zeros", "float32", trainable=False, autocast=False, name="scale"
        )
        self.bias = None
        if use_bias:
            self.bias = self.add_weight((out_features,), "zeros", name="bias")
        self.built = True

    def call(self, x):
        y = self._product(x)
        if self.bias is not None:
            y = ops.add(y, self.bias)
        return with_branch(self, y, lambda a: ops.matmul(x, a))

    def _product(self, x):
        """Multiply by the whole numbers, which bfloat16 has room for, and scale the outputs.

        In float16 the unscaled outputs would overflow, so there the kernel is scaled.
        """
        values = computed_after(x, ops.convert_to_tensor(self.values))
        if self.compute_dtype == "float16":
            return ops.matmul(x, ops.cast(ops.cast(values, "float32") * self.scale, "float16"))
        y = ops.matmul(x, ops.cast(values, self.compute_dtype))
        return ops.cast(ops.cast(y, "float32") * self.scale, self.compute_dtype)


def computed_after(x, values):
    """Return the matrix `values` as a result that depends on x.

    TensorFlow runs an operation as soon as its inputs exist. Without this dependency it would widen
    the kernels of all layers before it runs the first, and need the memory that int8 saves.
    """
    zero = ops.argmax(ops.reshape(x, (-1,))[:1])  # the place of the largest of one number
    return ops.slice(values, (zero, 0), values.shape)


CLASSES = {"int8": Int8Linear}

_storage: ContextVar[str | None] = ContextVar("storage", default=None)


def linear_class():
    """Return the class of linear layers to build in the context in force; None: the usual one."""
    storage = _storage.get()
    return None if storage is None else CLASSES[storage]


@contextlib.contextmanager
def stored_as(storage: str | None):
    """Build models inside this context whose linear layers are stored so; None: as computed."""
    token = _storage.set(storage)
    try:
        yield
    finally:
        _storage.reset(token)
