"""Questions about what a scene shows where, with numbered answers, to train a text encoder on."""

from sd_tf.training.world.scene import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
)

ALONE = "alone"
SIDES = {(0, -1): "left", (0, 1): "right", (1, -1): "top", (1, 1): "bottom"}  # (axis, sign)
_ATTRIBUTES = {"shape": SHAPES, "colour": tuple(COLOURS), "size": tuple(SIZES)}
_POSITIONS = tuple(POSITIONS)

# Question → its number of answers. The last answer means that there is nothing in that place.
QUESTIONS = {
    "background": len(BACKGROUNDS),
    "position": len(POSITIONS) + 1,
    **{
        f"{place}, {attribute}": len(values) + 1
        for place in (ALONE, *SIDES.values())
        for attribute, values in _ATTRIBUTES.items()
    },
}


def answers(scene: Scene) -> dict[str, int]:
    """Map each question to the number of its answer."""
    nothing = {question: count - 1 for question, count in QUESTIONS.items()}
    found = {"background": BACKGROUNDS.index(scene.background)}
    if scene.position is not None:
        found["position"] = _POSITIONS.index(scene.position)
    for place, thing in zip(_places(scene), scene.things, strict=True):
        for attribute, values in _ATTRIBUTES.items():
            found[f"{place}, {attribute}"] = values.index(getattr(thing, attribute))
    return {**nothing, **found}


def _places(scene: Scene) -> tuple[str, ...]:
    if scene.relation is None:
        return (ALONE,)
    axis, sign = RELATIONS[scene.relation]
    return SIDES[axis, sign], SIDES[axis, -sign]
