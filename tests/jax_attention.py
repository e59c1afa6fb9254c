"""`python -m tests.jax_attention FILE`: the kernel's attention on meshes of four devices.

FILE (.npz) has q, k, v and the number of heads; it gets the outputs by the size of the model axis.
"""

import os
import sys

from tests.jax_many import xla_flags

MODEL_AXES = (1, 2, 4)


def main(path: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = xla_flags(4)
    import jax
    import numpy as np

    from sd_tf.jax import make_mesh
    from sd_tf.jax.attention import AttentionKernel

    with np.load(path) as given:
        q, k, v, heads = (given[name] for name in ("q", "k", "v", "heads"))
    found = {}
    for model in MODEL_AXES:
        kernel = AttentionKernel(make_mesh(model=model), interpret=True)
        h = jax.jit(lambda q, k, v, kernel=kernel: kernel(q, k, v, int(heads), 0.3))(q, k, v)
        if h is not None:
            found[str(model)] = np.asarray(h)
    np.savez(path, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
