"""Weights of a prompt's tokens, as Stable Diffusion web UIs apply them to a text encoder's output.

Each token's row of a chunk is multiplied by the token's weight, and then the whole chunk by one
number, so that its mean stays what it was: z·w·mean(z)/mean(z·w).
"""

from keras import ops

# Of the mean absolute value. A smaller mean is mostly rounding, and a quotient of two such means is
# noise: a norm at the end that only normalizes makes every row's mean 0.
LEAST_MEAN = 1e-3


def emphasized(context, weights):
    """Apply weights (N, 77) to contexts (N, 77, D), each a chunk; weights of 1 change nothing."""
    weights = weights[:, :, None]
    mean = _mean(context)
    # As a sum, so that both means agree to the last bit where all weights are 1.
    new_mean = mean + _mean(context * (weights - 1.0))
    least = LEAST_MEAN * _mean(ops.abs(context))
    is_known = ops.logical_and(ops.abs(mean) > least, ops.abs(new_mean) > least)
    restored = mean / ops.where(is_known, new_mean, 1.0)
    return context * weights * ops.where(is_known, restored, 1.0)


def kept(pooled, weights):
    """Return the pooled text (N, P) as it is, or zeros for a text whose weights are all 0."""
    is_text = ops.any(ops.not_equal(weights, 0.0), axis=tuple(range(1, len(weights.shape))))
    return pooled * ops.cast(is_text, pooled.dtype)[:, None]


def _mean(x):
    return ops.mean(x, axis=(1, 2), keepdims=True)
