"""Initial weights for training from scratch: they keep activations' size, with zero branches."""

import zlib

import numpy as np

from sd_tf.weights import layout

# The last layers of all residual branches, and of the network, start as zeros, so that each block
# is the identity until it has learnt something.
CLOSED = (
    *("conv2.weight", "proj_out.weight", "out_proj.weight", "mlp.fc2.weight"),
    # Of transformers, the layers that give the gates (and scales and shifts with them).
    *("norm1.linear.weight", "norm1_context.linear.weight", "norm_out.linear.weight"),
)
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


def sinusoids(width: int, side: int, patches: int) -> np.ndarray:
    """Return SD3's embedding of positions, (1, side², width), of which pictures take the middle.

    Args:
        side: positions of a side.
        patches: those that a picture of the native size has, whose distances are the unit.
    """
    places = np.arange(side) / (side / patches)
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4))
    angles = places[:, None] * frequencies
    one = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)  # (side, width / 2)
    x, y = np.tile(one[None], (side, 1, 1)), np.tile(one[:, None], (1, side, 1))
    return np.concatenate([x, y], axis=-1).reshape(1, side**2, width).astype("float32")


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
