"""Offline batches on Ray Data: make a folder of pictures from a file of prompts.

`rows` reads and checks the prompts and divides them into units, each one model batch. `folder`
writes finished units, and finds them again by their files. `work` runs units on Ray's workers.
Units depend on the whole input, not on those already done, so a job that was killed and started
again makes the same pictures.
"""

from sd_tf.serving.errors import BatchError

__all__ = ["BatchError"]
