"""Layers whose kernels are stored in fewer bits than the models compute in.

    with stored_as("int8"):
        model = T5Encoder(config, dtype="bfloat16")

Dense and convolution layers that are made inside this context have such kernels. They compute what
they compute otherwise, up to the rounding of their kernels.
"""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar

from keras import ops

from sd_tf.config import INT8

_storage: ContextVar[str | None] = ContextVar("storage", default=None)


@contextlib.contextmanager
def stored_as(storage: str | None):
    """Build models inside this context whose kernels are stored so; None: as computed."""
    token = _storage.set(storage)
    try:
        yield
    finally:
        _storage.reset(token)


class Storable:
    """A mix-in for Keras' layers with a kernel, which is made as the context wants it stored.

    In 8 bits, a kernel is whole numbers from -127 to 127 and a scale for each output;
    `weights.int8` finds both. No dtype policy changes what a kernel is stored in.
    """

    storage: str | None = None
    kernel_scale = None

    def add_weight(self, *args, name=None, **options):
        storage = _storage.get()
        if name != "kernel" or storage is None:
            return super().add_weight(*args, name=name, **options)
        self.storage = storage
        fixed = {"trainable": False, "autocast": False}
        shape = options.pop("shape") if "shape" in options else args[0]
        if storage == INT8:
            self.kernel_scale = super().add_weight(
                shape[-1:], "zeros", "float32", name="kernel_scale", **fixed
            )
        return super().add_weight(shape, "zeros", storage, name=name, **fixed)

    def product(self, x, by: Callable):
        """Return `by(kernel)`, which multiplies or convolves x, for the kernel as it is computed.

        The outputs are scaled, not the kernel: whole numbers fit into every type. Only in float16
        the outputs would be too large, so there the kernel is.
        """
        kernel = ops.convert_to_tensor(self.kernel)
        if self.storage is None:
            return by(kernel)
        kernel, dtype = computed_after(x, kernel), self.compute_dtype
        if self.kernel_scale is None:
            return by(ops.cast(kernel, dtype))
        if dtype == "float16":
            return by(ops.cast(ops.cast(kernel, "float32") * self.kernel_scale, dtype))
        scaled = ops.cast(by(ops.cast(kernel, dtype)), "float32") * self.kernel_scale
        return ops.cast(scaled, dtype)


def computed_after(x, kernel):
    """Return the kernel as a result that depends on x, as no compiler can see that it does not.

    TensorFlow runs an operation as soon as its inputs exist, and XLA computes once, before a loop,
    what is the same in all rounds. Both would widen the kernels of all layers before the first one
    runs, and need the memory that narrow ones save.
    """
    is_not_a_number = ops.isnan(ops.reshape(x, (-1,))[0])
    return kernel + ops.cast(is_not_a_number, kernel.dtype)
