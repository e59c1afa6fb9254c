"""The tiny world: drawn scenes with captions to train small models on, and an oracle to judge them.

`scene` samples what a picture shows, `draw` renders it, `captions` describes it, and `oracle` reads
a picture back by geometry, so that a model is judged by what it drew and not by another model.
"""

from sd_tf.training.world.captions import Ask, AskedThing, describe, prompts, unplaced
from sd_tf.training.world.draw import draw, outline
from sd_tf.training.world.edits import KINDS, Edit, followed, sample_edit, untouched
from sd_tf.training.world.oracle import Reading, judge, read
from sd_tf.training.world.places import QUESTIONS, answers
from sd_tf.training.world.scene import Scene, Thing, WorldError, sample_scene

__all__ = [
    "KINDS",
    "QUESTIONS",
    "Ask",
    "AskedThing",
    "Edit",
    "Reading",
    "Scene",
    "Thing",
    "WorldError",
    "answers",
    "describe",
    "draw",
    "followed",
    "judge",
    "outline",
    "prompts",
    "read",
    "sample_edit",
    "sample_scene",
    "unplaced",
    "untouched",
]
