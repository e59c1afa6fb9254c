"""The error of adapter files."""

from sd_tf.errors import SdTfError


class AdapterError(SdTfError):
    """An adapter file that cannot be used: what is wrong, where, and how to mend it."""
