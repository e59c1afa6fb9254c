"""The errors of what serves exports."""

from sd_tf.errors import SdTfError


class BatchError(SdTfError):
    """A batch job that cannot be run: the rule, what was received, how to mend it."""


class ServingError(SdTfError):
    """A serving folder or setting that is refused: the rule, what was received, how to mend it."""


class RefusedError(Exception):
    """A request that cannot be answered: HTTP's status and why.

    Where they are known, also the parameter that is wrong, and a word for programs for what is
    wrong with it.
    """

    def __init__(
        self, status: int, message: str, parameter: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.parameter, self.code = status, message, parameter, code
