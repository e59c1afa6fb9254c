"""Scenes as data: everything that a picture can show, and the endless series sampled from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sd_tf.errors import SdTfError

SHAPES = ("circle", "square", "triangle", "diamond", "star", "ring", "cross", "heart")
COLOURS = {
    "red": (225, 20, 30),
    "orange": (255, 130, 0),
    "yellow": (255, 230, 0),
    "green": (40, 200, 70),
    "cyan": (30, 220, 235),
    "blue": (40, 80, 255),
    "purple": (165, 50, 215),
    "white": (250, 250, 250),
}
BACKGROUNDS = ("black", "gray", "dark blue", "gradient", "striped", "checkered")
SIZES = {"small": 0.125, "large": 0.205}  # radius, as a fraction of the picture
POSITIONS = {  # centres (x, y) of the nine regions, y downwards
    "center": (0.5, 0.5),
    "left": (0.25, 0.5),
    "right": (0.75, 0.5),
    "top": (0.5, 0.25),
    "bottom": (0.5, 0.75),
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}
RELATIONS = {  # where the first thing lies from the second: (axis, sign)
    "left of": (0, -1),
    "right of": (0, 1),
    "above": (1, -1),
    "below": (1, 1),
}

# Every shape and every colour once. A model sees these pairs in no training picture.
HELD_OUT = frozenset(
    {
        ("circle", "cyan"),
        ("square", "purple"),
        ("triangle", "green"),
        ("diamond", "red"),
        ("star", "blue"),
        ("ring", "orange"),
        ("cross", "yellow"),
        ("heart", "white"),
    }
)
SPLITS = ("train", "held_out")

RADIUS_JITTER = 0.04  # share of the radius; the rest are shares of the picture
POSITION_JITTER = 0.025
CROSS_JITTER = 0.08  # for two things, along the axis that their relation does not name
MARGIN = 0.01  # least distance to the edge of the picture
GAP = 0.05  # least distance between two things

_PAIRS = tuple((shape, colour) for shape in SHAPES for colour in COLOURS)
_TRAIN_PAIRS = tuple(pair for pair in _PAIRS if pair not in HELD_OUT)
_HELD_OUT_PAIRS = tuple(pair for pair in _PAIRS if pair in HELD_OUT)


class WorldError(SdTfError):
    """Raised for a request that the tiny world cannot meet; says the rule and what was received."""


@dataclass(frozen=True)
class Thing:
    """A coloured shape; centre and radius are fractions of the picture, y downwards."""

    shape: str
    colour: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """One thing at a position, or two things, the first in a relation to the second."""

    background: str
    things: tuple[Thing, ...]
    position: str | None
    relation: str | None


def sample_scene(
    index: int, seed: int = 0, split: str = "train", things: int | None = None
) -> Scene:
    """Return the scene of that index, the same on every call; a `things` of None means 1 or 2."""
    if split not in SPLITS:
        raise WorldError(f"split must be one of {', '.join(SPLITS)}. Received: {split!r}")
    if things not in (None, 1, 2):
        raise WorldError(f"things must be 1, 2 or None. Received: {things!r}")
    rng = np.random.default_rng([seed, index, SPLITS.index(split), things or 0])
    if things is None:
        things = 1 + int(rng.integers(2))
    background = choice(rng, BACKGROUNDS)
    return (_sample_one if things == 1 else _sample_two)(rng, split, background)


def _sample_one(rng: np.random.Generator, split: str, background: str) -> Scene:
    shape, colour = choice(rng, _TRAIN_PAIRS if split == "train" else _HELD_OUT_PAIRS)
    size, radius = _sample_size(rng)
    position = choice(rng, tuple(POSITIONS))
    x, y = np.array(POSITIONS[position]) + rng.uniform(-POSITION_JITTER, POSITION_JITTER, 2)
    thing = Thing(shape, colour, size, float(x), float(y), radius)
    return Scene(background, (thing,), position, None)


def _sample_two(rng: np.random.Generator, split: str, background: str) -> Scene:
    pairs = _sample_pairs(rng, split)
    sizes = [_sample_size(rng) for _ in pairs]
    relation = choice(rng, tuple(RELATIONS))
    axis, sign = RELATIONS[relation]
    radii = [radius for _, radius in sizes]

    # Along the relation's axis: margin, thing, gap, thing, margin; free space is shared at random.
    free = 1 - 2 * MARGIN - GAP - 2 * sum(radii)
    before, until = np.sort(rng.uniform(0, free, 2))
    near, far = (0, 1) if sign < 0 else (1, 0)
    centres = np.empty((2, 2))  # (thing, axis)
    centres[near, axis] = MARGIN + before + radii[near]
    centres[far, axis] = MARGIN + until + 2 * radii[near] + GAP + radii[far]
    centres[:, 1 - axis] = 0.5 + rng.uniform(-CROSS_JITTER, CROSS_JITTER, 2)

    things = tuple(
        Thing(shape, colour, size, float(x), float(y), radius)
        for (shape, colour), (size, radius), (x, y) in zip(pairs, sizes, centres, strict=True)
    )
    return Scene(background, things, None, relation)


def _sample_pairs(rng: np.random.Generator, split: str) -> list[tuple[str, str]]:
    """Sample two pairs of shape and colour that differ in both."""
    if split == "train":
        pools = [_TRAIN_PAIRS, _TRAIN_PAIRS]
    else:
        pools = [_HELD_OUT_PAIRS, _PAIRS]
        if rng.integers(2):
            pools.reverse()
    while True:
        first, second = (choice(rng, pool) for pool in pools)
        if first[0] != second[0] and first[1] != second[1]:
            return [first, second]


def _sample_size(rng: np.random.Generator) -> tuple[str, float]:
    size = choice(rng, tuple(SIZES))
    return size, float(SIZES[size] * (1 + rng.uniform(-RADIUS_JITTER, RADIUS_JITTER)))


def choice(rng: np.random.Generator, options: Sequence):
    return options[rng.integers(len(options))]
