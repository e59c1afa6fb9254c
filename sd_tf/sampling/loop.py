"""The diffusion loop: gather a row of the sampler's table, call the model, combine.

The loop's state is the sample and the last predictions. Noise schedule, sampler and step count are
in the table, so none of them is compiled in.
"""

from keras import ops

from sd_tf.sampling import noise as noise_source
from sd_tf.sampling.rows import COLUMNS, HISTORY, VARIANTS

COLUMN = {name: index for index, name in enumerate(COLUMNS)}


def guide(unconditional, conditional, scale, rescale=0.0):
    """Apply classifier-free guidance (Ho and Salimans 2022), rescaled as in Lin et al. 2023."""
    guided = unconditional + scale * (conditional - unconditional)
    if not rescale:
        return guided
    axes = tuple(range(1, len(guided.shape)))
    ratio = _std(conditional, axes) / _std(guided, axes)
    return guided * (rescale * ratio + (1.0 - rescale))


def guide_edit(full, image_only, neither, scale, image_scale):
    """Apply InstructPix2Pix's guidances by text and by picture (Brooks et al. 2022, eq. 3)."""
    return neither + scale * (full - image_only) + image_scale * (image_only - neither)


def _std(x, axes):
    """Return the unbiased standard deviation over `axes`, as diffusers computes it."""
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    centered = x - ops.mean(x, axis=axes, keepdims=True)
    return ops.sqrt(ops.sum(ops.square(centered), axis=axes, keepdims=True) / (count - 1))


def empty_history(latents):
    """Return the predictions of a walk that has not begun: zeros."""
    return ops.zeros((HISTORY, *latents.shape), dtype="float32")


def denoise(predict, rows, latents, history, kept, first, start, stop, seeds):
    """Walk rows [start, stop) of a run that began at row `first`; return the state after it.

    The state is latents, history, and what `predict` keeps. `rows(i, variant)` gives a row of the
    table, `predict(x, timestep, i, *kept)` the guided model output and what it keeps then.
    """

    def step(i, x, past, *kept):
        row = rows(i, ops.minimum(i - first, VARIANTS - 1))

        def column(name):
            return row[COLUMN[name]]

        output, *kept = predict(x * column("input_scale"), column("timestep"), i, *kept)
        prediction = column("p") * x + column("q") * output
        past = ops.concatenate([prediction[None], past[:-1]], axis=0)
        x = column("a") * x
        for j in range(HISTORY):
            x = x + column(f"b{j}") * past[j]
        x = x + column("c") * noise_source.normal(seeds, i + 1, tuple(x.shape[1:]))
        return i + 1, x, past, *kept

    _, *state = ops.while_loop(lambda i, *state: i < stop, step, (start, latents, history, *kept))
    return state
