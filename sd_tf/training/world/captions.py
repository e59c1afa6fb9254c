"""Captions of scenes, in several phrasings, with the attributes that each of them asks for."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sd_tf.training.world.scene import Scene, WorldError, sample_scene

# The share of captions that do not mention an attribute.
WITHOUT_COLOUR = 0.1
WITHOUT_SIZE = 0.25
WITHOUT_POSITION = 0.25
WITHOUT_BACKGROUND = 0.25
WITHOUT_RELATION = 0.1

EVALUATION_SEED = 2**31 - 1  # seed of the prompts that judge a model; no training uses it
DRAWS_PER_PROMPT, DRAWS_AT_LEAST = 20, 20_000  # scenes sampled before prompts() gives up
CAPTION_STREAM = 7  # captions have random numbers of their own, apart from the scene's

OPENINGS = ("", "", "", "a picture of ", "a drawing of ", "an image of ")
BACKGROUND_PHRASES = (
    "{opening}{subject} on {a} {background} background",
    "{opening}{subject} on {a} {background} background",
    "{opening}{subject} with {a} {background} background",
    "{opening}{subject}, {background} background",
    "{background} background, {subject}",
    "on {a} {background} background, {subject}",
)
POSITION_PHRASES = {
    "center": ("in the center", "in the middle", "at the center"),
    "left": ("on the left", "at the left", "on the left side"),
    "right": ("on the right", "at the right", "on the right side"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
    "top left": ("in the top left", "in the top left corner", "at the top left"),
    "top right": ("in the top right", "in the top right corner", "at the top right"),
    "bottom left": ("in the bottom left", "in the bottom left corner", "at the bottom left"),
    "bottom right": ("in the bottom right", "in the bottom right corner", "at the bottom right"),
}
RELATION_PHRASES = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
    None: ("and",),
}


@dataclass(frozen=True)
class AskedThing:
    """The attributes of one thing that a caption asks for; None if it does not mention one."""

    shape: str
    colour: str | None
    size: str | None


@dataclass(frozen=True)
class Ask:
    """Everything that a caption asks for; None if it does not mention an attribute."""

    things: tuple[AskedThing, ...]
    background: str | None
    position: str | None
    relation: str | None


def describe(scene: Scene, index: int, seed: int = 0, complete: bool = False) -> tuple[str, Ask]:
    """Return a caption of the scene, the same on every call, and what it asks for."""
    rng = np.random.default_rng([seed, index, CAPTION_STREAM])

    def said(value: str | None, without: float) -> str | None:
        is_left_out = rng.random() < without
        return None if is_left_out and not complete else value

    ask = Ask(
        things=tuple(
            AskedThing(
                thing.shape, said(thing.colour, WITHOUT_COLOUR), said(thing.size, WITHOUT_SIZE)
            )
            for thing in scene.things
        ),
        background=said(scene.background, WITHOUT_BACKGROUND),
        position=said(scene.position, WITHOUT_POSITION),
        relation=said(scene.relation, WITHOUT_RELATION),
    )
    return phrase(ask, lambda options: options[rng.integers(len(options))]), ask


def unplaced(scene: Scene, index: int, seed: int = 0, relations: bool = True) -> str:
    """Return a caption that says neither where the things are nor how large: a drawing does.

    With `relations` it says how two things lie to one another, and so which of them is which.
    """
    rng = np.random.default_rng([seed, index, CAPTION_STREAM])
    things = tuple(AskedThing(thing.shape, thing.colour, None) for thing in scene.things)
    ask = Ask(things, scene.background, None, scene.relation if relations else None)
    return phrase(ask, lambda options: options[rng.integers(len(options))])


def phrase(ask: Ask, choose: Callable[[tuple[str, ...]], str]) -> str:
    """Put what is asked into words; `choose` picks one of several phrasings."""
    subject = noun(ask.things[0])
    if len(ask.things) == 2:
        relation = choose(RELATION_PHRASES[ask.relation])
        subject = f"{subject} {relation} {noun(ask.things[1])}"
    if ask.position is not None:
        subject = f"{subject} {choose(POSITION_PHRASES[ask.position])}"
    opening = choose(OPENINGS)
    if ask.background is None:
        return opening + subject
    return choose(BACKGROUND_PHRASES).format(
        opening=opening, subject=subject, a=_article(ask.background), background=ask.background
    )


def prompts(
    count: int, split: str = "train", things: int = 1, seed: int = EVALUATION_SEED
) -> list[tuple[str, Ask]]:
    """Return `count` complete captions that all ask for different things, and what they ask for."""
    found = {}
    for index in range(max(count * DRAWS_PER_PROMPT, DRAWS_AT_LEAST)):
        if len(found) == count:
            break
        scene = sample_scene(index, seed, split, things)
        caption, ask = describe(scene, index, seed, complete=True)
        found.setdefault(ask, caption)
    if len(found) < count:
        raise WorldError(
            f"count must not exceed the number of different prompts: about {len(found)} have "
            f"{things} thing(s) in the split {split!r}. Received: {count}"
        )
    return [(caption, ask) for ask, caption in found.items()]


def noun(thing: AskedThing) -> str:
    words = " ".join(word for word in (thing.size, thing.colour, thing.shape) if word is not None)
    return f"{_article(words)} {words}"


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"
