"""Check a serving folder: read it as the server would."""

from sd_tf.serving.tf_serving.check.folder import check

__all__ = ["check"]
