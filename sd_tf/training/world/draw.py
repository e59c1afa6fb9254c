"""Draw scenes: shapes are inside tests, whose sums are computed once and then looked up."""

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from sd_tf.training.world.scene import BACKGROUNDS, COLOURS, Scene, WorldError

# Shapes are functions that test whether (u, v) lies inside; u and v are from -1 to 1, v downwards.

SQUARE_HALF = 0.85
TRIANGLE_TOP, TRIANGLE_BASE, TRIANGLE_HALF = -0.95, 0.8, 0.98
DIAMOND_HALF = 0.78  # half of its width; half of its height is 1
STAR_INNER = 0.45  # radius of the inner corners
RING_INNER = 0.52
CROSS_HALF, CROSS_ARM = 0.34, 0.96
MOON_SHIFT, MOON_INNER = 0.5, 0.8  # the disc that is cut out: its centre and radius
LOBE_X, LOBE_Y, LOBE_RADIUS, HEART_TIP = 0.47, -0.4, 0.53, 0.95

# Backgrounds: muted, so that no object's colour is near any of their pixels.
PLAIN = {"black": (12, 12, 14), "gray": (112, 112, 116), "dark blue": (22, 30, 84)}
GRADIENT = (42, 62, 70), (142, 126, 114)  # top, bottom
STRIPES = (70, 54, 64), (108, 88, 94)
STRIPES_ACROSS = 4  # periods along one side of the picture
CHECKS = (54, 70, 58), (88, 106, 92)
CHECKS_ACROSS = 8  # fields along one side of the picture

TABLE = 1024  # samples across a shape in the table of sums
SAMPLES = 8  # samples across a pixel of a background


def draw(scene: Scene, size: int = 64, hollow: float = 0.0) -> np.ndarray:
    """Draw the scene, anti-aliased: uint8 (size, size, 3).

    With `hollow`, each shape is cut out of its own middle, scaled by that factor.
    """
    picture = background(scene.background, size).copy()
    for thing in scene.things:
        place = thing.x * size, thing.y * size, thing.radius * size
        box, alpha = coverage(thing.shape, *place, size)
        if hollow:
            alpha = alpha - _inner(thing.shape, *place, hollow, box, size)
        alpha = alpha[..., None]
        blended = picture[box] * (1 - alpha) + np.array(COLOURS[thing.colour], "float32") * alpha
        picture[box] = np.rint(blended)
    return picture


def outline(scene: Scene, size: int = 64, hollow: float = 0.8) -> np.ndarray:
    """Draw the outlines of the scene's things, white on black: uint8 (size, size, 3).

    `hollow` is the size of what is cut out of a shape's middle, as a share of the shape's.
    """
    lines = np.zeros((size, size), "float32")
    for thing in scene.things:
        place = thing.x * size, thing.y * size, thing.radius * size
        box, alpha = coverage(thing.shape, *place, size)
        drawn = alpha - _inner(thing.shape, *place, hollow, box, size)
        lines[box] = np.maximum(lines[box], drawn)
    return np.repeat(np.rint(255 * lines).astype("uint8")[..., None], 3, axis=-1)


def _inner(shape, x, y, radius, hollow, box, size) -> np.ndarray:
    """Return the share of each pixel of the box that the scaled shape covers, of the shape itself.

    The scaled shape need not lie inside the shape: that of a ring reaches into the ring's hole.
    """
    whole, inner = np.zeros((size, size), "float32"), np.zeros((size, size), "float32")
    whole[box] = coverage(shape, x, y, radius, size)[1]
    inner_box, covered = coverage(shape, x, y, radius * hollow, size)
    inner[inner_box] = covered
    return np.minimum(whole, inner)[box]


# Shapes


def coverage(
    shape: str, x: float, y: float, radius: float, size: int
) -> tuple[tuple[slice, slice], np.ndarray]:
    """Return the box in which a shape lies, and the share of each pixel there that it covers.

    All lengths are in pixels. A pixel's share is a difference of four sums, which is as exact as
    supersampling with the table's samples, at the cost of one sample.
    """
    sums = _sums(shape)
    rows, row_edges = _edges(y, radius, size)
    columns, column_edges = _edges(x, radius, size)
    bounded_rows = np.minimum(np.maximum(row_edges, 0), TABLE)
    found = sums[bounded_rows[:, None], np.minimum(np.maximum(column_edges, 0), TABLE)]
    inside = found[1:, 1:] - found[:-1, 1:] - found[1:, :-1] + found[:-1, :-1]
    samples = (row_edges[1:] - row_edges[:-1])[:, None] * (column_edges[1:] - column_edges[:-1])
    return (rows, columns), (inside / samples).astype("float32")


def _edges(centre: float, radius: float, size: int) -> tuple[slice, np.ndarray]:
    """Return the pixels that a shape may touch along one axis, and their edges in its table."""
    low = min(max(int(centre - radius), 0), size - 1)
    high = max(min(int(centre + radius) + 1, size), low + 1)
    edges = (np.arange(low, high + 1) - (centre - radius)) * (TABLE / (2 * radius))
    return slice(low, high), np.rint(edges).astype(int)


@cache
def _sums(shape: str) -> np.ndarray:
    """Count the samples inside the shape that lie above and left of each sample's corner."""
    ticks = (np.arange(TABLE, dtype="float32") + 0.5) * (2 / TABLE) - 1
    inside = INSIDE[shape](ticks[None, :], ticks[:, None])
    return np.pad(inside, ((1, 0), (1, 0))).astype("int32").cumsum(0).cumsum(1, dtype="int32")


def _circle(u, v):
    return u**2 + v**2 <= 1


def _square(u, v):
    return (abs(u) <= SQUARE_HALF) & (abs(v) <= SQUARE_HALF)


def _triangle(u, v):
    slope = TRIANGLE_HALF / (TRIANGLE_BASE - TRIANGLE_TOP)
    return (v <= TRIANGLE_BASE) & (abs(u) <= (v - TRIANGLE_TOP) * slope)


def _diamond(u, v):
    return abs(u) / DIAMOND_HALF + abs(v) <= 1


def _star(u, v):
    """Rotate each point into the tenth between a tip and an inner corner, and test its one edge."""
    tenth = np.pi / 5
    angle = abs((np.arctan2(u, -v) + tenth) % (2 * tenth) - tenth)  # 0 at a tip
    along, across = np.hypot(u, v) * (np.cos(angle), np.sin(angle))
    corner_along, corner_across = STAR_INNER * np.cos(tenth), STAR_INNER * np.sin(tenth)
    return across * (1 - corner_along) <= (1 - along) * corner_across


def _ring(u, v):
    return _circle(u, v) & (u**2 + v**2 >= RING_INNER**2)


def _cross(u, v):
    bar = (abs(u) <= CROSS_ARM) & (abs(v) <= CROSS_HALF)
    return bar | ((abs(u) <= CROSS_HALF) & (abs(v) <= CROSS_ARM))


def _heart(u, v):
    """Join two discs and, below them, the wedge between their tangents through the tip."""
    drop = HEART_TIP - LOBE_Y
    distance = np.hypot(LOBE_X, drop)
    angle = np.arctan2(LOBE_X, drop) + np.arcsin(LOBE_RADIUS / distance)
    touching = HEART_TIP - (distance**2 - LOBE_RADIUS**2) ** 0.5 * np.cos(angle)
    discs = (abs(u) - LOBE_X) ** 2 + (v - LOBE_Y) ** 2 <= LOBE_RADIUS**2
    wedge = (abs(u) <= (HEART_TIP - v) * np.tan(angle)) & (v >= touching)
    between = (abs(u) <= LOBE_X) & (v >= LOBE_Y) & (v <= touching)
    return discs | wedge | between


def _moon(u, v):
    return _circle(u, v) & ((u - MOON_SHIFT) ** 2 + v**2 >= MOON_INNER**2)


INSIDE: dict[str, Callable] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "heart": _heart,
    "moon": _moon,  # which no scene has: an adapter adds it
}


# Backgrounds


@lru_cache(maxsize=64)
def background(name: str, size: int) -> np.ndarray:
    """Draw the background of that name: uint8 (size, size, 3), cached and therefore read-only."""
    if name not in BACKGROUNDS:
        raise WorldError(f"name must be one of {', '.join(BACKGROUNDS)}. Received: {name!r}")
    if name in PLAIN:
        picture = np.broadcast_to(np.array(PLAIN[name], "float64"), (size, size, 3))
    else:
        (first, second), share = PATTERNS[name]
        ticks = (np.arange(size * SAMPLES) + 0.5) / (size * SAMPLES)
        mixed = np.broadcast_to(share(ticks[None, :], ticks[:, None]), (len(ticks), len(ticks)))
        mixed = mixed.reshape(size, SAMPLES, size, SAMPLES).mean((1, 3))[..., None]
        picture = np.array(first) * (1 - mixed) + np.array(second) * mixed
    picture = np.rint(picture).astype("uint8")
    picture.flags.writeable = False
    return picture


# Background → its two colours, and a function for the second one's share at (x, y).
PATTERNS: dict[str, tuple[tuple, Callable]] = {
    "gradient": (GRADIENT, lambda x, y: y),
    "striped": (STRIPES, lambda x, y: ((x + y) * STRIPES_ACROSS) % 1 < 0.5),
    "checkered": (
        CHECKS,
        lambda x, y: (np.floor(x * CHECKS_ACROSS) + np.floor(y * CHECKS_ACROSS)) % 2,
    ),
}
