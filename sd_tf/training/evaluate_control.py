"""Measure how often an export puts things where an outline drawing has them, in the tiny world.

The prompt says what is there and in which colours, the drawing where. The oracle reads the pictures
back, those of the same prompts without the drawing too.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sd_tf.training import world
from sd_tf.training.evaluate import (
    GROUP_SEED,
    GROUPS,
    RESULT_FILE,
    Score,
    sheet,
    side_of,
    with_defaults,
)
from sd_tf.training.settings import TrainingError
from sd_tf.training.world.captions import EVALUATION_SEED

NEAR = 0.06  # of the picture: the greatest distance of a thing's centre from the drawn one's
SHOWN = 32  # pictures on a sheet, each beside its drawing


@dataclass(frozen=True)
class ControlEvaluationOptions:
    """How many drawings are followed, and with which parameters."""

    drawings: int = 250  # in each of the four groups
    num_steps: int = 20
    guidance_scale: float | None = None  # None: the export's default
    control_scale: float = 1.0
    scheduler: str | None = None


def evaluate(
    pipe, options: ControlEvaluationOptions, folder: Path, report: Callable[[str], None] = print
) -> dict:
    """Measure, write `evaluation.json` and the sheets into `folder`, and return the figures."""
    if options.drawings < 1:
        raise TrainingError(f"`drawings` must be at least 1. Received: {options.drawings}")
    if len(pipe.manifest.controls) != 1:
        raise TrainingError(
            f"Following drawings is measured with one ControlNet in the export. Received: "
            f"{len(pipe.manifest.controls)}"
        )
    options = with_defaults(options, pipe, "guidance_scale")
    folder.mkdir(parents=True, exist_ok=True)
    content = {"checkpoint": pipe.manifest.checkpoint, "options": asdict(options)}
    for key, scale in (("groups", options.control_scale), ("without", 0.0)):
        content[key] = {}
        for name in GROUPS:
            score, drawings, pictures = _measured(pipe, name, options, scale)
            content[key][name] = record = score.record()
            shares = ", ".join(f"{k} {v:.1%}" for k, v in record["attributes"].items())
            report(f"{name}, control {scale:g}: all right {record['all_right']:.1%} ({shares})")
            if key == "groups":
                both = np.stack([drawings, pictures], axis=1).reshape(-1, *pictures.shape[1:])
                verdicts = [right for right in score.verdicts for _ in range(2)]
                file = f"{name.replace(', ', '-').replace(' ', '-')}.png"
                sheet(both[: 2 * SHOWN], verdicts).save(folder / file)
    (folder / RESULT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def _measured(pipe, group: str, options: ControlEvaluationOptions, scale: float):
    """Draw one group's scenes; return the score, the drawings and the pictures."""
    scenes = scenes_of(group, options.drawings)
    drawings = np.stack([world.outline(scene, side_of(pipe)) for scene in scenes])
    pictures = pipe(
        [world.unplaced(scene, i, EVALUATION_SEED) for i, scene in enumerate(scenes)],
        control_image=drawings,
        control_scale=scale,
        num_steps=options.num_steps,
        guidance_scale=options.guidance_scale,
        scheduler=options.scheduler,
        seed=GROUP_SEED * list(GROUPS).index(group),
    ).images
    score = Score()
    for scene, picture in zip(scenes, pictures, strict=True):
        score.add(judged(scene, world.read(picture)))
    return score, drawings, pictures


def scenes_of(group: str, count: int) -> list[world.Scene]:
    split, things = GROUPS[group]
    return [world.sample_scene(i, EVALUATION_SEED, split, things) for i in range(count)]


def judged(scene: world.Scene, reading: world.Reading) -> dict[str, bool]:
    """Judge what was read: each drawn thing has the nearest one that was found for its own."""
    pairs = [(thing, _nearest(thing, reading.things)) for thing in scene.things]
    found = [(thing, one) for thing, one in pairs if one is not None]
    is_whole = len(found) == len(pairs)
    return {
        "number of things": len(reading.things) == len(scene.things),
        "place": is_whole and all(_distance(thing, one) <= NEAR for thing, one in found),
        "shape": is_whole and all(thing.shape == one.shape for thing, one in found),
        "colour": is_whole and all(thing.colour == one.colour for thing, one in found),
    }


def _nearest(thing, found):
    return min(found, key=lambda one: _distance(thing, one), default=None)


def _distance(one, other) -> float:
    return float(np.hypot(one.x - other.x, one.y - other.y))
