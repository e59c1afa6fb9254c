"""The diffusion loop: gather a row of the sampler's table, call the model, combine.

The loop's state is the sample and the last predictions; noise schedule, sampler and step count are
all in the table, so none of them is compiled in.
"""

from keras import ops

from sd_tf.sampling import noise as noise_source
from sd_tf.sampling.tables import COLUMNS, HISTORY, VARIANTS

COLUMN = {name: index for index, name in enumerate(COLUMNS)}


def guide(unconditional, conditional, scale, rescale=0.0):
    """Classifier-free guidance (Ho and Salimans 2022), with the rescaling of Lin et al. 2023."""
    guided = unconditional + scale * (conditional - unconditional)
    if not rescale:
        return guided
    axes = tuple(range(1, len(guided.shape)))
    ratio = _std(conditional, axes) / _std(guided, axes)
    return guided * (rescale * ratio + (1.0 - rescale))


def guide_edit(full, image_only, neither, scale, image_scale):
    """InstructPix2Pix's two guidances (Brooks et al. 2022, eq. 3): by the text, by the picture."""
    return neither + scale * (full - image_only) + image_scale * (image_only - neither)


def _std(x, axes):
    """Unbiased, as in diffusers."""
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    centered = x - ops.mean(x, axis=axes, keepdims=True)
    return ops.sqrt(ops.sum(ops.square(centered), axis=axes, keepdims=True) / (count - 1))


def empty_history(latents):
    return ops.zeros((HISTORY, *latents.shape), dtype="float32")


def denoise(predict, rows, latents, history, first, start, stop, seeds):
    """Rows [start, stop) of a run that began at row `first`; returns latents and history.

    `rows(i, variant)` gives a row of the table, `predict(x, timestep)` the guided model output.
    """

    def step(i, x, past):
        row = rows(i, ops.minimum(i - first, VARIANTS - 1))

        def column(name):
            return row[COLUMN[name]]

        output = predict(x * column("input_scale"), column("timestep"))
        kept = column("p") * x + column("q") * output
        past = ops.concatenate([kept[None], past[:-1]], axis=0)
        x = column("a") * x
        for j in range(HISTORY):
            x = x + column(f"b{j}") * past[j]
        x = x + column("c") * noise_source.normal(seeds, i + 1, tuple(x.shape[1:]))
        return i + 1, x, past

    _, latents, history = ops.while_loop(
        lambda i, x, past: i < stop, step, (start, latents, history)
    )
    return latents, history
