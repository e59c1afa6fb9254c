"""Reads a picture back by geometry, and judges it by what a caption asked for.

Nothing is learned: the background is the known picture that most pixels agree with, a thing is a
patch of pixels far from it, and a shape is the ideal outline that covers the patch best. What no
known picture, colour, shape or size comes near is `UNKNOWN`, which is never right.
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

# Distances between colours are Euclidean, of RGB values from 0 to 255.
BACKGROUND_TOLERANCE = 22  # median distance of all pixels; of the mean of its stripes it is 26
FOREGROUND_DISTANCE = 55
SLACK = 3  # pixels across the window in which an edge of a background may lie
COLOUR_TOLERANCE = 60  # of a thing's median colour
FOREIGN_DISTANCE = 45  # of a pixel that is no mixture of the thing's colour and the background
LEAST_PURITY = 0.95  # share of a thing's pixels that are not foreign, for it to have a colour

SPECK_SHARE = 0.004  # of the picture: 16 pixels of 64×64; the smallest star has four times that
MOST_THINGS = 8  # that are read: enough to see that there are too many
CORE = 0.6  # of a thing's depth, from which on its pixels tell its colour
REACH = 2  # pixels around a thing in which its soft edge is looked for
SIZE_TOLERANCE = 1.25  # ratio of the radius found to that of a size
LEAST_OVERLAP = 0.85  # of an outline and a patch, as intersection over union
THIN, LEAST_OVERLAP_THIN = ("star", "ring"), 0.78  # which lose more of themselves to blur

SHARPNESS = 2.5  # contrast of soft edges, so that blur does not count as a wrong outline
FITTED = 2  # shapes that are fitted finely: the best of the rough comparison
SHIFT, GROWTH, ROUNDS = 0.5, 0.03, 3  # of the fine fit: pixels, ratio; halved every round


@dataclass(frozen=True)
class Found(Thing):
    """A thing as it was read; `overlap` tells how well its shape fits, `purity` its colour."""

    overlap: float
    purity: float


@dataclass(frozen=True)
class Reading:
    """What a picture shows, the largest thing first."""

    background: str
    things: tuple[Found, ...]


# Reading


def read(picture: np.ndarray) -> Reading:
    """What is in a square picture, uint8 (size, size, 3)."""
    size = len(picture)
    if picture.dtype != np.uint8 or picture.shape != (size, size, 3) or size < LEAST_SIZE:
        raise WorldError(
            f"The oracle reads square pictures of at least {LEAST_SIZE} pixels, uint8 "
            f"(size, size, 3). Received: {picture.dtype} {picture.shape}"
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

    # How much of each pixel is the thing: its place between the background and the thing's
    # colour. A pixel of any third colour belongs to the patch wholly, and makes it impure.
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
    """The least and the greatest value that a background has around each pixel."""
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
    """The shape that covers a patch best: name, centre and radius in pixels, overlap.

    Area and centroid place every shape at once; the best of them are then moved and grown.
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
    """One number after the other, up or down, as long as the overlap grows."""
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
    """Intersection over union of a soft patch and an ideal outline."""
    box, ideal = coverage(shape, x, y, radius, len(share))
    ideal = _sharpen(ideal)
    both = np.minimum(share[box], ideal).sum()
    return float(both / (area + ideal.sum() - both))


def _sharpen(share: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum((share - 0.5) * SHARPNESS + 0.5, 0), 1)


@cache
def _moments(shape: str) -> tuple[float, float]:
    """Area and height of the centroid of a shape of radius 1; all shapes are symmetric in x."""
    size = 256
    _, ideal = coverage(shape, size / 2, size / 2, size / 2, size)
    ticks = (np.arange(size) + 0.5) * (2 / size) - 1
    return float(ideal.sum() * (2 / size) ** 2), float(ideal.sum(1) @ ticks / ideal.sum())


# Judging


def judge(reading: Reading, ask: Ask) -> dict[str, bool]:
    """What was asked → whether it is so; what was not asked is not judged.

    Two things are matched to the two asked for in the best way, and an attribute is right only if
    it is right of both.
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
    """The region whose centre is nearest."""
    return min(POSITIONS, key=lambda name: math.dist(POSITIONS[name], (thing.x, thing.y)))


def relation_of(first: Found, second: Found) -> str:
    """Where the first lies from the second, along the axis on which they are further apart."""
    away = (first.x - second.x, first.y - second.y)
    axis = 0 if abs(away[0]) > abs(away[1]) else 1
    sign = 1 if away[axis] > 0 else -1
    return next(name for name, value in RELATIONS.items() if value == (axis, sign))


def _match(found: tuple[Found, ...], asked: tuple[AskedThing, ...]) -> tuple[Found | None, ...]:
    """The things found in the order of those asked for; None for each that is missing."""
    missing = (None,) * (len(asked) - len(found))

    def agreement(order):
        pairs = [(f, a) for f, a in zip(order, asked, strict=True) if f is not None]
        by_kind = sum((f.shape == a.shape) + (f.colour == a.colour) for f, a in pairs)
        return by_kind, sum(f.size == a.size for f, a in pairs)

    return max(itertools.permutations((*found, *missing), len(asked)), key=agreement)
