"""The error raised for a configuration that cannot be computed."""

from sd_tf.errors import SdTfError


class ConfigError(SdTfError):
    """A configuration that this package cannot compute, named by field and value."""
