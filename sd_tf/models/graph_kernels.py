"""What TensorFlow's own kernels compute in one pass, for models that stay in its graph.

The one part of the models that needs TensorFlow: imported where the rewrite `graph_kernels` is on.
"""

import tensorflow as tf


def group_norm(x, scale, bias, groups: int, epsilon: float):
    """Normalize bfloat16 x (B, h, w, C) as `layers.GroupNorm` does: two passes over each picture.

    They are batch norms of one picture, which are in float32 inside. The first one is there for its
    channels' statistics, the second one takes those of their groups.
    """
    batch, height, width, _ = x.shape
    biased = 1.0 - 1.0 / (height * width)  # the kernel's variance is that of a sample

    def norm(picture, *statistics):  # without any, the kernel takes them itself
        means, variances = statistics or ([], [])
        return tf.raw_ops.FusedBatchNormV3(
            x=picture,
            scale=scale,
            offset=bias,
            mean=means,
            variance=variances,
            epsilon=epsilon,
            is_training=not statistics,
        )

    def of_picture(picture):
        _, means, variances, *_ = norm(picture)
        means, variances = (tf.reshape(of_all, (groups, -1)) for of_all in (means, variances))
        mean = tf.reduce_mean(means, axis=-1, keepdims=True)
        variance = tf.reduce_mean(
            variances * biased + tf.square(means - mean), axis=-1, keepdims=True
        )
        of_groups = [tf.broadcast_to(one, means.shape) for one in (mean, variance)]
        return norm(picture, *(tf.reshape(one, (-1,)) for one in of_groups))[0]

    return tf.concat([of_picture(one) for one in tf.split(x, batch)], axis=0)


def layer_norm(x, scale, bias, epsilon: float):
    """Normalize each row of bfloat16 x (…, C) as `layers.LayerNorm` does, in one pass.

    It is a batch norm whose channels are the rows, in the form in which the graph's optimizer makes
    one kernel of it and of what follows, which is in float32 inside. That form has ones and zeros
    filled in by the graph; behind a placeholder, their number is not taken for a constant, and they
    are not filled in beforehand.
    """
    rows = tf.reshape(x, (1, -1, x.shape[-1], 1))
    count = tf.raw_ops.PlaceholderWithDefault(input=tf.shape(rows)[1:2], shape=(1,))
    normalized, *_ = tf.raw_ops.FusedBatchNormV3(
        x=rows,
        scale=tf.fill(count, 1.0),
        offset=tf.fill(count, 0.0),
        mean=[],
        variance=[],
        epsilon=epsilon,
        data_format="NCHW",
        is_training=True,
    )
    return tf.reshape(normalized, tf.shape(x)) * scale + bias
