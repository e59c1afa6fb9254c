"""Measure how often an export draws what it is asked for, in the tiny world.

Prompts go through the exported, compiled SavedModels; the oracle reads the pictures back.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sd_tf.runtime.call import Call
from sd_tf.runtime.pictures import contact_sheet
from sd_tf.runtime.psnr import psnr
from sd_tf.training import world
from sd_tf.training.data import World
from sd_tf.training.settings import TrainingError

RESULT_FILE = "evaluation.json"
MOST_DECIBELS = 138.13  # for identical pictures, as infinity is no JSON
GROUPS = {  # name → split, number of things
    "one thing, seen": ("train", 1),
    "one thing, held out": ("held_out", 1),
    "two things, seen": ("train", 2),
    "two things, held out": ("held_out", 2),
}
GROUP_SEED = 1_000_000  # seeds of a group's pictures: the group's number times this, and upwards
UNSEEN_WORLD = 2**30  # seed of scenes for the autoencoder that no training uses
RECONSTRUCTED = 64
SHEET_PICTURES = 64
FRAME, WRONG = 3, (230, 30, 30)

NEGATIVE_PROMPT_PICTURES = 64
NEGATIVES = (("a circle", "red"), ("a star", "yellow"), ("a heart", "blue"))


@dataclass(frozen=True)
class EvaluationOptions:
    """How many prompts are drawn, and with which parameters."""

    prompts: int = 250  # in each of the four groups
    num_steps: int = 20
    guidance_scale: float | None = None  # None: the export's default
    scheduler: str | None = None
    reuse: int | None = None  # the UNet's deep layers run in every such model call
    more_guidance: Sequence[float] = ()  # further guidance scales to measure
    negative_prompts: bool = False


@dataclass
class Score:
    """The counts of one group: pictures with everything right, and right ones by attribute."""

    pictures: int = 0
    all_right: int = 0
    attributes: dict[str, list[int]] = field(default_factory=dict)  # name → [right, asked]
    verdicts: list[bool] = field(default_factory=list)

    def add(self, judgement: dict[str, bool]) -> None:
        self.pictures += 1
        self.verdicts.append(all(judgement.values()))
        self.all_right += self.verdicts[-1]
        for name, right in judgement.items():
            count = self.attributes.setdefault(name, [0, 0])
            count[0] += right
            count[1] += 1

    def record(self) -> dict:
        shares = {name: round(right / asked, 4) for name, (right, asked) in self.attributes.items()}
        share = round(self.all_right / self.pictures, 4)
        return {"pictures": self.pictures, "all_right": share, "attributes": shares}


def evaluate(
    pipe, options: EvaluationOptions, folder: Path, report: Callable[[str], None] = print
) -> dict:
    """Measure, write `evaluation.json` and the sheets into `folder`, and return the figures."""
    if options.prompts < 1:
        raise TrainingError(f"`prompts` must be at least 1. Received: {options.prompts}")
    side_of(pipe)
    options = with_defaults(options, pipe, "guidance_scale")
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "checkpoint": pipe.manifest.checkpoint,
        "options": asdict(options),
        "scheduler": options.scheduler or pipe.manifest.default_sampler,
        "compiled": True,
        "groups": {},
    }
    for name in GROUPS:
        score, pictures = measure(pipe, name, options, options.guidance_scale)
        content["groups"][name] = score.record()
        report(_line(name, options.guidance_scale, score))
        sheet(pictures, score.verdicts).save(
            folder / f"{name.replace(', ', '-').replace(' ', '-')}.png"
        )
    if options.more_guidance:
        content["guidance"] = {}
        for scale in options.more_guidance:
            records = content["guidance"][str(scale)] = {}
            for name in GROUPS:
                score, _ = measure(pipe, name, options, scale)
                records[name] = score.record()
                report(_line(name, scale, score))
    if options.negative_prompts:
        content["negative_prompts"] = negative_prompts(pipe, options)
        for entry in content["negative_prompts"]:
            report(
                f"{entry['prompt']!r}: {entry['without']:.1%} {entry['negative']}; with the "
                f"negative prompt {entry['negative']!r}: {entry['with']:.1%}"
            )
    if "image_encoder" in pipe.manifest.components:
        content["reconstruction_db"] = round(reconstruction(pipe), 2)
        report(f"autoencoder: {content['reconstruction_db']} dB on unseen scenes")
    (folder / RESULT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def measure(pipe, group: str, options: EvaluationOptions, guidance_scale: float):
    """Draw one group's prompts; return their score and the pictures."""
    split, things = GROUPS[group]
    asked = world.prompts(options.prompts, split, things)
    pictures = pipe(
        [prompt for prompt, _ in asked],
        num_steps=options.num_steps,
        guidance_scale=guidance_scale,
        scheduler=options.scheduler,
        reuse=options.reuse,
        seed=GROUP_SEED * (1 + list(GROUPS).index(group)),
    ).images
    score = Score()
    for picture, (_, ask) in zip(pictures, asked, strict=True):
        score.add(world.judge(world.read(picture), ask))
    return score, pictures


def negative_prompts(pipe, options: EvaluationOptions) -> list[dict]:
    """Return the shares of pictures that show a colour, with and without it as negative prompt."""

    def share(prompt, colour, negative):
        pictures = pipe(
            [prompt] * NEGATIVE_PROMPT_PICTURES,
            negative_prompt=negative,
            num_steps=options.num_steps,
            guidance_scale=options.guidance_scale,
            scheduler=options.scheduler,
            reuse=options.reuse,
            seed=0,
        ).images
        shown = [any(t.colour == colour for t in world.read(p).things) for p in pictures]
        return float(np.mean(shown))

    return [
        {
            "prompt": prompt,
            "negative": colour,
            "without": share(prompt, colour, None),
            "with": share(prompt, colour, colour),
        }
        for prompt, colour in NEGATIVES
    ]


def side_of(pipe) -> int:
    """Return the width and height of the export's first size; refuse one that is not square."""
    height, width = pipe.manifest.shapes.first.size
    if height != width:
        raise TrainingError(
            f"The oracle reads square pictures only. The export's are {width}×{height}."
        )
    return height


def with_defaults(options, pipe, *names: str):
    """Return the options with the export's defaults for those that are None among `names`."""
    known = Call.parameters()
    missing = [name for name in names if getattr(options, name) is None]
    return replace(options, **{name: known[name].default_for(pipe.manifest) for name in missing})


def reconstruction(pipe) -> float:
    """Return the mean PSNR in dB of unseen scenes after image encoder and decoder."""
    scenes = World(RECONSTRUCTED, side_of(pipe), UNSEEN_WORLD)
    batch = pipe.manifest.shapes.first.batch_size
    values = []
    for start in range(0, RECONSTRUCTED, batch):
        indices = [min(start + i, RECONSTRUCTED - 1) for i in range(batch)]
        pictures = np.stack([scenes.picture(i) for i in indices])
        pairs = zip(pictures, pipe.decode(pipe.encode(pictures)), strict=True)
        found = [min(psnr(*pair, peak=255), MOST_DECIBELS) for pair in pairs]
        values += found[: RECONSTRUCTED - start]
    return float(np.mean(values))


def sheet(pictures: np.ndarray, verdicts: Sequence[bool]) -> Image.Image:
    """Arrange the first pictures on a sheet; wrong ones get a red frame."""
    framed = []
    for picture, right in zip(pictures[:SHEET_PICTURES], verdicts, strict=False):
        image = Image.fromarray(picture)
        if not right:
            box = (0, 0, image.width - 1, image.height - 1)
            ImageDraw.Draw(image).rectangle(box, outline=WRONG, width=FRAME)
        framed.append(np.asarray(image))
    return contact_sheet(np.stack(framed))


def _line(name: str, scale: float, score: Score) -> str:
    record = score.record()
    attributes = ", ".join(f"{key} {value:.1%}" for key, value in record["attributes"].items())
    return f"{name}, guidance {scale:g}: all right {record['all_right']:.1%} ({attributes})"
