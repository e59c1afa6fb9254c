"""A pipeline whose models run behind a server that speaks TensorFlow Serving's API."""

from sd_tf.serving.client.client import Client, ServerError

__all__ = ["Client", "ServerError"]
