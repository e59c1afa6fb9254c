"""3×3 convolutions of stride 1 (NHWC, zero-padded), by the algorithm that suits the map's size.

`kernel` is (3, 3, C, K). Transformed kernels depend on no input, so XLA computes them once, outside
the loop over the sampler's steps, unless the kernel `is_anew` in each of them.
"""

import numpy as np
from keras import backend, ops

from sd_tf.models.lowering import rewrites

# Winograd's minimal filtering F(4×4, 3×3), Lavin and Gray 2016: a tile of 6×6 pixels and a kernel
# are both transformed and multiplied element by element, which gives 4×4 pixels.
PIXELS = 4
TILE = 6
TO_TILE = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
TO_KERNEL = np.array(
    [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ]
)
TO_PIXELS = np.array(
    [
        [1, 1, 1, 1, 1, 0],
        [0, 1, -1, 2, -2, 0],
        [0, 1, 1, 4, 4, 0],
        [0, 1, -1, 8, -8, 1],
    ]
)
# A transformed kernel has four times the size: with fewer tiles than this in a batch, reading it
# costs more than it saves. The largest kernels, those of small maps, are not worth their memory.
MIN_TILES = 32
MIN_CHANNELS = 48
MAX_KERNEL_BYTES = 200_000_000
# More tiles than this are computed in blocks of rows, which stay in the cache.
BLOCK_TILES = 256

# On maps of at most this many pixels, XLA's own convolution is far slower than a matrix product.
SMALL_MAP = 4
# On maps of fewer pixels than this, four 2×2 convolutions take longer than one 3×3.
MIN_PHASE_MAP = 64
# The same where the four kernels are made anew in every call, and not once for a whole loop.
MIN_PHASE_MAP_ANEW = 1024


def convolve(x, kernel, is_anew=False):
    """Convolve x (B, h, w, C) → (B, h, w, K)."""
    _, height, width, _ = x.shape
    wanted = rewrites()
    if wanted.small_maps and height * width <= SMALL_MAP:
        return by_patches(x, kernel)
    if wanted.winograd and not is_anew and _winograd_pays(x, kernel):
        return by_winograd(x, kernel)
    return ops.conv(x, kernel, padding="same", data_format="channels_last")


def convolve_doubled(x, kernel, size, is_anew=False):
    """Double x (B, h, w, C) both ways, crop it to `size`, and convolve it → (B, *size, K)."""
    _, height, width, channels = x.shape
    is_doubled = size == (2 * height, 2 * width)
    wanted = rewrites()
    least = MIN_PHASE_MAP_ANEW if wanted.graph_kernels or is_anew else MIN_PHASE_MAP
    if wanted.upsample_phases and is_doubled and height * width >= least:
        return by_phases(x, kernel)
    x = ops.reshape(x, (-1, height, 1, width, 1, channels))
    x = ops.tile(x, (1, 1, 2, 1, 2, 1))
    x = ops.reshape(x, (-1, 2 * height, 2 * width, channels))
    return convolve(x[:, : size[0], : size[1]], kernel, is_anew)


def by_patches(x, kernel):
    """Convolve as one matrix product: each pixel's 3×3 neighbourhood times the kernel."""
    _, height, width, channels = x.shape
    padded = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return ops.matmul(ops.concatenate(patches, -1), ops.reshape(kernel, (9 * channels, -1)))


def by_phases(x, kernel):
    """Double and convolve x by four 2×2 convolutions, one for each parity of the output pixel.

    In a doubled map three taps fall on only two different pixels, so their weights can be added.
    """
    _, height, width, _ = x.shape
    padded = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = [ops.stack([kernel[0], kernel[1] + kernel[2]])]
    rows += [ops.stack([kernel[0] + kernel[1], kernel[2]])]
    phases = []
    for i, taps in enumerate(rows):  # (2, 3, C, K)
        columns = [ops.stack([taps[:, 0], taps[:, 1] + taps[:, 2]], axis=1)]
        columns += [ops.stack([taps[:, 0] + taps[:, 1], taps[:, 2]], axis=1)]
        for j, folded in enumerate(columns):  # (2, 2, C, K)
            seen = padded[:, i : i + height + 1, j : j + width + 1]
            phases.append(ops.conv(seen, folded, padding="valid", data_format="channels_last"))
    phases = [ops.stack(phases[:2], axis=3), ops.stack(phases[2:], axis=3)]
    return ops.reshape(ops.stack(phases, axis=2), (-1, 2 * height, 2 * width, kernel.shape[-1]))


def by_winograd(x, kernel):
    """Convolve by Winograd's minimal filtering, all tiles at once or in blocks of rows."""
    batch, height, width, channels = x.shape
    filters = kernel.shape[-1]
    down, across = -(-height // PIXELS), -(-width // PIXELS)  # tiles
    kernel = transform_kernel(kernel)
    # A tile begins one pixel above and left of its output, and reaches two into the next tile.
    rows, columns = PIXELS * (down + 1), PIXELS * (across + 1)
    x = ops.pad(x, ((0, 0), (1, rows - height - 1), (1, columns - width - 1), (0, 0)))

    block = _block_rows(batch, down, across)
    if block is None:
        x = ops.reshape(x, (batch, down + 1, PIXELS, columns, channels))
        y = _tiles(x, kernel)
    else:
        per_image = down // block

        def of_block(index):
            start = (index // per_image, PIXELS * block * (index % per_image), 0, 0)
            part = ops.slice(x, start, (1, PIXELS * (block + 1), columns, channels))
            return _tiles(ops.reshape(part, (1, block + 1, PIXELS, columns, channels)), kernel)

        y = ops.map(of_block, ops.arange(batch * per_image))
    y = ops.reshape(y, (batch, PIXELS * down, PIXELS * across, filters))
    return y[:, :height, :width]


def transform_kernel(kernel):
    """Transform a kernel for Winograd's algorithm: (3, 3, C, K) → (36, C, K)."""
    matrix = np.kron(TO_KERNEL, TO_KERNEL).astype("float32")
    flat = ops.reshape(kernel, (9, -1))
    return ops.reshape(ops.matmul(matrix, flat), (TILE * TILE, *kernel.shape[2:]))


def _tiles(x, kernel):
    """Convolve rows of tiles: x (B, down + 1, 4, columns, C) → (B, 4·down, columns - 4, K)."""
    batch, down, _, columns, channels = x.shape
    down, across, filters = down - 1, columns // PIXELS - 1, kernel.shape[-1]
    overlap = TILE - PIXELS
    x = ops.concatenate([x[:, :-1], x[:, 1:, :overlap]], axis=2)
    x = _combine(TO_TILE, ops.unstack(x, axis=2))  # (6, B, down, columns, C)
    x = ops.reshape(x, (TILE, batch, down, across + 1, PIXELS, channels))
    x = ops.concatenate([x[:, :, :, :-1], x[:, :, :, 1:, :overlap]], axis=4)
    x = _combine(TO_TILE, ops.unstack(x, axis=4), 1)  # (6, 6, B, down, across, C)
    x = ops.reshape(x, (TILE * TILE, batch * down * across, channels))
    x = ops.reshape(ops.matmul(x, kernel), (TILE, TILE, batch * down * across * filters))
    x = _combine(TO_PIXELS, ops.unstack(x))  # (4, 6, …)
    x = _combine(TO_PIXELS, ops.unstack(x, axis=1), 1)  # (4, 4, …)
    x = ops.reshape(x, (PIXELS, PIXELS, batch, down, across, filters))
    x = ops.transpose(x, (2, 3, 0, 4, 1, 5))
    return ops.reshape(x, (batch, PIXELS * down, PIXELS * across, filters))


def _combine(matrix, parts, axis=0):
    """Multiply the matrix by the list of arrays, as sums: most of its numbers are 0 or ±1."""
    rows = []
    for factors in matrix:
        total = None
        for factor, part in zip(factors, parts, strict=True):
            if factor == 0:
                continue
            term = part if abs(factor) == 1 else float(abs(factor)) * part
            if total is None:
                total = term if factor > 0 else -term
            else:
                total = total + term if factor > 0 else total - term
        rows.append(total)
    return ops.stack(rows, axis=axis)


def _winograd_pays(x, kernel) -> bool:
    batch, height, width, channels = x.shape
    filters = kernel.shape[-1]
    return (
        batch is not None
        and backend.standardize_dtype(x.dtype) == "float32"  # half precision is too coarse for it
        and batch * (height // PIXELS) * (width // PIXELS) >= MIN_TILES
        and min(channels, filters) >= MIN_CHANNELS
        and TILE * TILE * channels * filters * 4 <= MAX_KERNEL_BYTES
    )


def _block_rows(batch, down, across) -> int | None:
    """Return the rows of tiles in a block, a divisor of `down`, or None for all at once."""
    if batch * down * across <= 2 * BLOCK_TILES:
        return None
    wanted = max(1, BLOCK_TILES // across)
    block = next(rows for rows in range(wanted, 0, -1) if down % rows == 0)
    return None if block == down and batch == 1 else block
