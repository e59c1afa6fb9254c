"""Offline batches on Ray Data: a file of prompts in, a folder of pictures out.

`rows` reads and checks the prompts and divides them into units, each one model batch; `folder`
writes what is done, and knows it from the folder alone; `work` runs units on Ray's workers. A unit
depends on the whole input and not on what is done, so a job that was killed ends in the same bits.
"""


class BatchError(ValueError):
    """A job that cannot be run: the rule, what was received, how to mend it."""
