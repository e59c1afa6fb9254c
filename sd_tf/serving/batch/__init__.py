"""Offline batches on Ray Data: make a folder of pictures from a file of prompts.

`rows` reads and checks the prompts and divides them into units, each one model batch. `folder`
writes finished units, and finds them again by their files. `work` runs units on Ray's workers.
A picture follows from its row and the flags, its seed included, and not from the rows that share
its unit. So a job that was killed and started again, which divides the missing rows alone, makes
the same pictures, in parquet parts that begin and end elsewhere.
"""

from sd_tf.serving.errors import BatchError

__all__ = ["BatchError"]
