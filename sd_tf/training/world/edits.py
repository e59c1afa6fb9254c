"""Edits of scenes: an instruction, the scene before it and the true scene after it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sd_tf.training.world.captions import AskedThing, noun
from sd_tf.training.world.draw import draw
from sd_tf.training.world.oracle import Found, Reading, position_of
from sd_tf.training.world.scene import (
    BACKGROUNDS,
    COLOURS,
    GAP,
    HELD_OUT,
    POSITIONS,
    SHAPES,
    SIZES,
    SPLITS,
    Scene,
    Thing,
    WorldError,
    choice,
    sample_scene,
)

STREAM = 11  # edits have random numbers of their own, apart from their scenes'
TRIES = 1000  # scenes that are sampled to find one that suits an edit

PHRASES = {
    "colour": (
        "make the {shape} {new}",
        "make the {colour} {shape} {new}",
        "change the {shape} to {new}",
        "paint the {shape} {new}",
    ),
    "shape": (
        "turn the {shape} into {new}",
        "turn the {colour} {shape} into {new}",
        "change the {shape} to {new}",
        "replace the {shape} with {new}",
    ),
    "add": ("add {new}", "put in {new}", "draw {new} too"),
    "remove": ("remove the {shape}", "remove the {colour} {shape}", "take the {shape} away"),
    "background": (
        "make the background {new}",
        "change the background to {new}",
        "give it a {new} background",
    ),
    "move": (
        "move it to the {new}",
        "move the {shape} to the {new}",
        "move the {colour} {shape} to the {new}",
    ),
}
KINDS = tuple(PHRASES)


@dataclass(frozen=True)
class Edit:
    """An instruction with the scenes before and after it.

    `things` is the thing that it changes, before and after; None where that thing does not exist.
    """

    kind: str
    instruction: str
    before: Scene
    after: Scene
    things: tuple[Thing | None, Thing | None]


def sample_edit(index: int, seed: int = 0, split: str = "train", kind: str | None = None) -> Edit:
    """Return the edit of that index, the same on every call; a `kind` of None means any.

    Some pairs of shape and colour occur in no training scene. Every edit of the split `held_out`
    has such a pair before, after, or both.
    """
    if split not in SPLITS:
        raise WorldError(f"split must be one of {', '.join(SPLITS)}. Received: {split!r}")
    if kind is not None and kind not in KINDS:
        raise WorldError(f"kind must be one of {', '.join(KINDS)}. Received: {kind!r}")
    rng = np.random.default_rng([seed, index, SPLITS.index(split), STREAM])
    kind = choice(rng, KINDS) if kind is None else kind
    for _ in range(TRIES):
        scene = sample_scene(int(rng.integers(2**31)), seed, choice(rng, _SCENES[split]))
        found = _EDITS[kind](rng, scene)
        if found is None:
            continue
        after, things, new = found
        if _is_held_out(scene, after) == (split == "held_out"):
            words = {"new": new}
            if things[0] is not None:
                words |= {"shape": things[0].shape, "colour": things[0].colour}
            instruction = choice(rng, PHRASES[kind]).format(**words)
            return Edit(kind, instruction, scene, after, things)
    raise AssertionError(f"no edit {kind} in {TRIES} scenes")


# Splits of the scenes before: an edit can also create a held-out pair in a training scene.
_SCENES = {"train": ("train",), "held_out": ("train", "held_out")}


def _is_held_out(*scenes: Scene) -> bool:
    return any((t.shape, t.colour) in HELD_OUT for scene in scenes for t in scene.things)


# A function for each kind returns the scene after, the thing before and after, and the new words;
# or None if the scene does not suit the edit.

Outcome = tuple[Scene, tuple[Thing | None, Thing | None], str]


def _recolour(rng, scene):
    thing = choice(rng, scene.things)
    colour = choice(rng, [c for c in COLOURS if c not in {t.colour for t in scene.things}])
    return _changed(scene, thing, replace(thing, colour=colour), colour)


def _reshape(rng, scene):
    thing = choice(rng, scene.things)
    shape = choice(rng, [s for s in SHAPES if s not in {t.shape for t in scene.things}])
    return _changed(scene, thing, replace(thing, shape=shape), noun(AskedThing(shape, None, None)))


def _add(rng, scene):
    """Add a thing to a scene of one, in the region that is farthest from the other."""
    if len(scene.things) > 1:
        return None
    (there,) = scene.things
    shape = choice(rng, [s for s in SHAPES if s != there.shape])
    colour = choice(rng, [c for c in COLOURS if c != there.colour])
    size = choice(rng, tuple(SIZES))

    def away(place):
        return np.hypot(POSITIONS[place][0] - there.x, POSITIONS[place][1] - there.y)

    place = max(POSITIONS, key=away)
    thing = Thing(shape, colour, size, *POSITIONS[place], SIZES[size])
    if away(place) < there.radius + thing.radius + GAP:
        return None
    after = replace(scene, things=(there, thing), position=None)
    return after, (None, thing), noun(AskedThing(shape, colour, size))


def _remove(rng, scene):
    """Remove one of two things."""
    if len(scene.things) == 1:
        return None
    thing = choice(rng, scene.things)
    left = tuple(t for t in scene.things if t is not thing)
    after = replace(scene, things=left, position=None, relation=None)
    return after, (thing, None), ""


def _background(rng, scene):
    new = choice(rng, [b for b in BACKGROUNDS if b != scene.background])
    thing = scene.things[0]
    return replace(scene, background=new), (thing, thing), new


def _move(rng, scene):
    """Move the only thing of a scene to the middle of another region."""
    if len(scene.things) > 1:
        return None
    (thing,) = scene.things
    place = choice(rng, [p for p in POSITIONS if p != scene.position])
    x, y = POSITIONS[place]
    after, things, _ = _changed(scene, thing, replace(thing, x=x, y=y), place)
    return replace(after, position=place), things, place


_EDITS: dict[str, Callable[..., Outcome | None]] = {
    "colour": _recolour,
    "shape": _reshape,
    "add": _add,
    "remove": _remove,
    "background": _background,
    "move": _move,
}


def _changed(scene: Scene, old: Thing, new: Thing, words: str) -> Outcome:
    things = tuple(new if t is old else t for t in scene.things)
    return replace(scene, things=things), (old, new), words


# Judging
def followed(reading: Reading, edit: Edit) -> bool:
    """Tell whether a picture, as the oracle reads it, shows what the instruction asked for."""
    if edit.kind == "background":
        return reading.background == edit.after.background
    old, new = edit.things
    if len(reading.things) != len(edit.after.things):
        return False
    if new is None:
        return not any(_is(found, old) for found in reading.things)
    return any(
        _is(found, new)
        and (edit.kind != "add" or found.size == new.size)
        and (edit.kind != "move" or position_of(found) == edit.after.position)
        for found in reading.things
    )


def _is(found: Found, thing: Thing) -> bool:
    return (found.shape, found.colour) == (thing.shape, thing.colour)


def untouched(edit: Edit, size: int) -> np.ndarray:
    """Return the mask, bool (size, size), of the pixels that are equal before and after."""
    return np.all(draw(edit.before, size) == draw(edit.after, size), axis=-1)
