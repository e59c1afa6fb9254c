"""The base class of every error that a user can mend."""


class SdTfError(ValueError):
    """An error that a user can mend: its message says the rule, what was received, and how.

    The message names the library's parameters in backticks, as in "set `overwrite`", or begins with
    the one that `parameter` names. A command replaces each with its own flag for it.
    """

    parameter: str | None = None
