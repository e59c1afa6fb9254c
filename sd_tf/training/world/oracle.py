"""The oracle: reads a picture back by geometry, and judges it by what a caption asked for.

Nothing is learnt: the background is the known one with which most pixels agree, a thing is a patch
of pixels that differ from it, and its shape is the ideal outline that covers the patch best. An
attribute that is near no known value is `UNKNOWN`, which never counts as right.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy import ndimage

from sd_tf.training.world.captions import Ask, AskedThing
from sd_tf.training.world.draw import background, coverage
from sd_tf.training.world.scene import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    Thing,
    WorldError,
)

UNKNOWN = "unknown"
LEAST_SIZE = 48  # pixels

# Distances between colours are Euclidean, between RGB values from 0 to 255.
BACKGROUND_TOLERANCE = 22  # median over all pixels; a plain mean of the stripes would be at 26
FOREGROUND_DISTANCE = 55
SLACK = 3  # width in pixels of the window within which an edge of a background may move
COLOUR_TOLERANCE = 60  # greatest distance of a thing's median colour from a known colour
FOREIGN_DISTANCE = 45  # pixels this far from all mixtures of thing and background are foreign
LEAST_PURITY = 0.95  # share of pixels that must not be foreign for a thing to have a colour

SPECK_SHARE = 0.004  # smaller patches are ignored: 16 of 64×64 pixels, a quarter of the least star
MOST_THINGS = 8  # most things that are read, enough to see that there are too many
CORE = 0.6  # pixels at least this share of a thing's depth inside it tell its colour
REACH = 2  # pixels around a thing that may belong to its soft edge
SIZE_TOLERANCE = 1.25  # greatest ratio of the radius found to a size's radius
LEAST_OVERLAP = 0.85  # intersection over union of an outline and a patch
THIN, LEAST_OVERLAP_THIN = ("star", "ring"), 0.78  # shapes that lose more of their area to blur

SHARPNESS = 2.5  # added contrast of soft edges, so that blur does not count as a wrong outline
FITTED = 2  # number of shapes that are fitted finely, after a rough comparison of all
SHIFT, GROWTH, ROUNDS = 0.5, 0.03, 3  # steps of the fine fit (pixels, ratio), halved every round


@dataclass(frozen=True)
class Found(Thing):
    """A thing that was read; `overlap` and `purity` tell how well its shape and colour fit."""

    overlap: float
    purity: float


@dataclass(frozen=True)
class Reading:
    """The background and the things that a picture shows, the largest thing first."""

    background: str
    things: tuple[Found, ...]


# Reading


def read(picture: np.ndarray) -> Reading:
    """Read what a square picture, uint8 (size, size, 3), shows."""
    size = len(picture)
    if picture.dtype != np.uint8 or picture.shape != (size, size, 3) or size < LEAST_SIZE:
        raise WorldError(
            f"The oracle reads square pictures, uint8 (size, size, 3), with a size of at least "
            f"{LEAST_SIZE}. Received: {picture.dtype} {picture.shape}"
        )
    pixels = picture.astype("float32")
    smooth = _smooth(pixels)
    medians = {
        name: float(np.median(_distance(smooth, _smooth_background(name, size))))
        for name in BACKGROUNDS
    }
    nearest = min(medians, key=medians.get)

    agreeing = np.clip(pixels, *_bounds(nearest, size))
    patches, _ = ndimage.label(_distance(pixels, agreeing) > FOREGROUND_DISTANCE, np.ones((3, 3)))
    areas = np.bincount(patches.ravel())[1:]
    largest = np.argsort(-areas)[:MOST_THINGS]
    kept = [i + 1 for i in largest if areas[i] >= SPECK_SHARE * size**2]
    behind = background(nearest, size).astype("float32")
    return Reading(
        background=nearest if medians[nearest] <= BACKGROUND_TOLERANCE else UNKNOWN,
        things=tuple(_read_thing(pixels, behind, patches, i) for i in kept),
    )


def _read_thing(pixels: np.ndarray, behind: np.ndarray, patches: np.ndarray, number: int) -> Found:
    size = len(pixels)
    patch = patches == number
    depth = ndimage.distance_transform_edt(patch)
    rgb = np.median(pixels[depth >= CORE * depth.max()], axis=0)

    # The share of each pixel that the thing covers is its place between the background's and the
    # thing's colour. A pixel of a third colour counts as covered, and makes the patch impure.
    towards = rgb - behind
    share = ((pixels - behind) * towards).sum(-1) / np.maximum((towards**2).sum(-1), 1)
    share = np.clip(share, 0, 1)
    is_foreign = _distance(pixels, behind + share[..., None] * towards) > FOREIGN_DISTANCE
    share[is_foreign] = 1
    near = ndimage.binary_dilation(patch, np.ones((3, 3)), iterations=REACH)
    share[~near | ((patches > 0) & ~patch)] = 0
    purity = 1 - float(is_foreign[patch].mean())

    shape, x, y, radius, overlap = _fit(_sharpen(share))
    least = LEAST_OVERLAP_THIN if shape in THIN else LEAST_OVERLAP
    return Found(
        shape=shape if overlap >= least else UNKNOWN,
        colour=_colour_of(rgb) if purity >= LEAST_PURITY else UNKNOWN,
        size=_size_of(radius / size),
        x=x / size,
        y=y / size,
        radius=radius / size,
        overlap=overlap,
        purity=purity,
    )


def _smooth(pixels: np.ndarray) -> np.ndarray:
    return ndimage.uniform_filter(pixels, (SLACK, SLACK, 1))


@lru_cache(maxsize=64)
def _smooth_background(name: str, size: int) -> np.ndarray:
    return _smooth(background(name, size).astype("float32"))


@lru_cache(maxsize=64)
def _bounds(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest value of a background around each pixel."""
    window = (SLACK, SLACK, 1)
    picture = background(name, size).astype("float32")
    return ndimage.minimum_filter(picture, window), ndimage.maximum_filter(picture, window)


def _colour_of(rgb: np.ndarray) -> str:
    distances = {name: float(_distance(rgb, value)) for name, value in COLOURS.items()}
    nearest = min(distances, key=distances.get)
    return nearest if distances[nearest] <= COLOUR_TOLERANCE else UNKNOWN


def _size_of(radius: float) -> str:
    ratios = {name: abs(math.log(radius / value)) for name, value in SIZES.items()}
    nearest = min(ratios, key=ratios.get)
    return nearest if ratios[nearest] <= math.log(SIZE_TOLERANCE) else UNKNOWN


def _distance(pixels: np.ndarray, others) -> np.ndarray:
    return np.sqrt(((pixels - np.asarray(others, "float32")) ** 2).sum(-1))


# Fitting


def _fit(share: np.ndarray) -> tuple[str, float, float, float, float]:
    """Find the shape that covers a patch best: its name, centre and radius in pixels, overlap.

    Every shape is placed by the patch's area and centroid; the best are then shifted and scaled.
    """
    ticks = np.arange(len(share)) + 0.5
    area = share.sum()
    x, y = (share.sum(0) @ ticks) / area, (share.sum(1) @ ticks) / area
    rough = []
    for shape in SHAPES:
        unit_area, unit_y = _moments(shape)
        radius = math.sqrt(area / unit_area)
        place = (x, y - radius * unit_y, radius)
        rough.append((_overlap(share, area, shape, *place), shape, place))
    best = sorted(rough, reverse=True)[:FITTED]
    fitted = [
        (*_refine(share, area, shape, overlap, place), shape) for overlap, shape, place in best
    ]
    overlap, (x, y, radius), shape = max(fitted)
    return shape, float(x), float(y), float(radius), float(overlap)


def _refine(share, area, shape, overlap, place):
    """Change x, y and radius one at a time, up or down, as long as the overlap grows."""
    for fineness in range(ROUNDS):
        shift, growth = SHIFT / 2**fineness, GROWTH / 2**fineness
        for axis in range(3):
            for sign in (-1, 1):
                moved = list(place)
                moved[axis] += sign * (shift if axis < 2 else growth * place[2])
                found = _overlap(share, area, shape, *moved)
                if found > overlap:
                    overlap, place = found, tuple(moved)
    return overlap, place


def _overlap(share, area, shape, x, y, radius) -> float:
    """Return the intersection over union of a soft patch and an ideal outline."""
    box, ideal = coverage(shape, x, y, radius, len(share))
    ideal = _sharpen(ideal)
    both = np.minimum(share[box], ideal).sum()
    return float(both / (area + ideal.sum() - both))


def _sharpen(share: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum((share - 0.5) * SHARPNESS + 0.5, 0), 1)


@cache
def _moments(shape: str) -> tuple[float, float]:
    """Return area and centroid's y of a shape of radius 1; all shapes are symmetric in x."""
    size = 256
    _, ideal = coverage(shape, size / 2, size / 2, size / 2, size)
    ticks = (np.arange(size) + 0.5) * (2 / size) - 1
    return float(ideal.sum() * (2 / size) ** 2), float(ideal.sum(1) @ ticks / ideal.sum())


# Judging


def judge(reading: Reading, ask: Ask) -> dict[str, bool]:
    """Map each attribute that was asked for to whether the picture shows it.

    The things found are matched to those asked for in the best way. An attribute is right only if
    it is right for all of them.
    """
    matched = _match(reading.things, ask.things)
    pairs = list(zip(matched, ask.things, strict=True))
    verdict = {"count": len(reading.things) == len(ask.things)}
    for attribute in ("shape", "colour", "size"):
        asked = [(found, getattr(thing, attribute)) for found, thing in pairs]
        asked = [(found, value) for found, value in asked if value is not None]
        if asked:
            verdict[attribute] = all(
                found is not None and getattr(found, attribute) == value for found, value in asked
            )
    if ask.position is not None:
        verdict["position"] = matched[0] is not None and position_of(matched[0]) == ask.position
    if ask.relation is not None:
        verdict["relation"] = None not in matched and relation_of(*matched) == ask.relation
    if ask.background is not None:
        verdict["background"] = reading.background == ask.background
    return verdict


def position_of(thing: Found) -> str:
    """Return the name of the region whose centre is nearest to the thing."""
    return min(POSITIONS, key=lambda name: math.dist(POSITIONS[name], (thing.x, thing.y)))


def relation_of(first: Found, second: Found) -> str:
    """Return the relation of the first to the second, on the axis where they are further apart."""
    away = (first.x - second.x, first.y - second.y)
    axis = 0 if abs(away[0]) > abs(away[1]) else 1
    sign = 1 if away[axis] > 0 else -1
    return next(name for name, value in RELATIONS.items() if value == (axis, sign))


def _match(found: tuple[Found, ...], asked: tuple[AskedThing, ...]) -> tuple[Found | None, ...]:
    """Order the things found like those asked for, with None for each that is missing."""
    missing = (None,) * (len(asked) - len(found))

    def agreement(order):
        pairs = [(f, a) for f, a in zip(order, asked, strict=True) if f is not None]
        by_kind = sum((f.shape == a.shape) + (f.colour == a.colour) for f, a in pairs)
        return by_kind, sum(f.size == a.size for f, a in pairs)

    return max(itertools.permutations((*found, *missing), len(asked)), key=agreement)
