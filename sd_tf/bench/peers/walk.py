"""Draw pictures with engines that are models only: DDIM's steps from the table, in NumPy."""

import time
from collections.abc import Callable

import numpy as np

from sd_tf.bench.peers.agreement import guided
from sd_tf.bench.peers.inputs import pair, repeated

Model = Callable[..., np.ndarray]


def walk(inputs: dict[str, np.ndarray], steps: int, encode: Model, unet: Model, decode: Model):
    """Draw pictures in at most the table's number of steps; return the seconds of one step."""
    x = inputs["noise"]
    context = repeated(encode(inputs["tokens"]), len(x))
    rows = inputs["rows"][:steps]
    start = time.perf_counter()
    for timestep, p, q, a, b in rows:
        r = guided(unet(pair(x), timestep, context))
        x = (a * x + b * (p * x + q * r)).astype("float32")
    seconds = (time.perf_counter() - start) / len(rows)
    decode(x)
    return seconds
