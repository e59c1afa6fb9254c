"""The computations of a pipeline's components, endpoint by endpoint, in `keras.ops`.

`export` makes SavedModels of the endpoints, `sd_tf.jax` jits them or compiles them ahead of time.
"""

from sd_tf.components.spec import COMPONENTS, VISION_ENCODER, Endpoint, Spec, as_is

__all__ = ["COMPONENTS", "VISION_ENCODER", "Endpoint", "Spec", "as_is"]
