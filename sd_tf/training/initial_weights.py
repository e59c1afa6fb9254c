"""Initial weights for training from scratch: they keep activations' size, with zero branches."""

import zlib

import numpy as np

from sd_tf.weights import layout

# The last layers of all residual branches, and of the network, start as zeros, so that each block
# is the identity until it has learnt something.
CLOSED = ("conv2.weight", "proj_out.weight", "out_proj.weight", "mlp.fc2.weight")
CLOSED_OUTPUTS = ("conv_out.weight",)
EMBEDDING_SCALE = {"token_embedding": 0.5, "position_embedding": 0.1}


def initialize(model, name: str, seed: int, token_ids=None, open_output: bool = False) -> None:
    """Fill `model` in place, each tensor with its own random numbers from `seed`.

    Args:
        token_ids: the tokens that the data uses; the embeddings of others stay zero.
        open_output: do not start the last layer at zero, where an autoencoder would stay.
    """
    closed = CLOSED if open_output else (*CLOSED, *CLOSED_OUTPUTS)
    for path, slot in layout.slots(model).items():
        rng = np.random.default_rng([seed, zlib.crc32(f"{name}.{path}".encode())])
        value = _initial(path, slot.shape, rng, closed)
        if token_ids is not None and "token_embedding" in path:
            used = np.zeros((slot.shape[0], 1), "float32")
            used[np.asarray(token_ids)] = 1.0
            value = value * used
        slot.fill(lambda value=value: value)


def _initial(path, shape, rng, closed):
    if len(shape) == 1:
        scale = path.endswith("weight") and "norm" in path
        return np.full(shape, 1.0 if scale else 0.0, "float32")
    if path.endswith(closed):
        return np.zeros(shape, "float32")
    for name, scale in EMBEDDING_SCALE.items():
        if name in path:
            return rng.standard_normal(shape, "float32") * np.float32(scale)
    return rng.standard_normal(shape, "float32") * np.float32(np.prod(shape[1:]) ** -0.5)
