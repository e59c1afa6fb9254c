"""Measure how often an export does what an instruction asks for, and nothing else.

In the tiny world the true picture is known, and the oracle reads the edited one.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sd_tf.runtime.psnr import psnr
from sd_tf.training import world
from sd_tf.training.evaluate import MOST_DECIBELS, RESULT_FILE, sheet, side_of, with_defaults
from sd_tf.training.pairs import WorldPairs
from sd_tf.training.settings import TrainingError
from sd_tf.training.world.captions import EVALUATION_SEED
from sd_tf.training.world.scene import SPLITS

SHOWN = 32  # pairs on a sheet
SCALES = ("guidance_scale", "image_guidance_scale")
LABELS = {"train": "seen", "held_out": "held out"}
COLOURS = {"train": "#1f6feb", "held_out": "#d9480f"}
RESOLUTION = 110  # dots per inch, of the plot


@dataclass(frozen=True)
class EditEvaluationOptions:
    """How many pairs are edited, and with which parameters."""

    pairs: int = 500  # in each split
    num_steps: int = 20
    guidance_scale: float | None = None  # None: the export's default
    image_guidance_scale: float | None = None  # likewise
    scheduler: str | None = None
    more_guidance: Sequence[float] = ()  # further guidance scales to measure
    more_image_guidance: Sequence[float] = ()  # further image guidance scales to measure


@dataclass
class Score:
    """The results of one split: instructions followed, and how well the rest was preserved."""

    kinds: dict[str, list[int]] = field(default_factory=dict)  # kind → [followed, pairs]
    verdicts: list[bool] = field(default_factory=list)
    preserved: list[float] = field(default_factory=list)  # PSNR in dB where nothing should change

    def add(self, edit: world.Edit, picture: np.ndarray) -> None:
        right = world.followed(world.read(picture), edit)
        self.verdicts.append(right)
        count = self.kinds.setdefault(edit.kind, [0, 0])
        count[0] += right
        count[1] += 1
        size = len(picture)
        same = world.untouched(edit, size)
        if same.any():
            found = psnr(picture[same], world.draw(edit.after, size)[same], peak=255)
            self.preserved.append(min(found, MOST_DECIBELS))

    def record(self) -> dict:
        kinds = {name: round(right / all_, 4) for name, (right, all_) in self.kinds.items()}
        return {
            "pairs": len(self.verdicts),
            "followed": round(float(np.mean(self.verdicts)), 4),
            "preserved_db": round(float(np.mean(self.preserved)), 2),
            "kinds": dict(sorted(kinds.items())),
        }


def evaluate(
    pipe, options: EditEvaluationOptions, folder: Path, report: Callable[[str], None] = print
) -> dict:
    """Measure, write `evaluation.json` and the sheets into `folder`, and return the figures."""
    if options.pairs < 1:
        raise TrainingError(f"`pairs` must be at least 1. Received: {options.pairs}")
    if pipe.manifest.latent_inputs != "image":
        raise TrainingError(
            f"Measuring edits needs an InstructPix2Pix export. Received: {pipe.manifest.family}"
        )
    side_of(pipe)
    options = with_defaults(options, pipe, *SCALES)
    folder.mkdir(parents=True, exist_ok=True)
    scales = (options.guidance_scale, options.image_guidance_scale)
    content = {"checkpoint": pipe.manifest.checkpoint, "options": asdict(options), "splits": {}}
    for split in SPLITS:
        score, before, after = _measured(pipe, split, options, *scales)
        content["splits"][split] = score.record()
        report(_line(split, *scales, score))
        both = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
        verdicts = [right for right in score.verdicts for _ in range(2)]
        sheet(both[: 2 * SHOWN], verdicts).save(folder / f"{split}.png")
    sweeps = [(scale, scales[1]) for scale in options.more_guidance]
    sweeps += [(scales[0], scale) for scale in options.more_image_guidance]
    content["sweep"] = []
    for pair in sweeps:
        for split in SPLITS:
            score, _, _ = _measured(pipe, split, options, *pair)
            record = {"split": split, **dict(zip(SCALES, pair, strict=True)), **score.record()}
            content["sweep"].append(record)
            report(_line(split, *pair, score))
    if sweeps:
        plot_sweep(content, folder / "sweep.png")
    (folder / RESULT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def _measured(
    pipe, split: str, options: EditEvaluationOptions, guidance_scale, image_guidance_scale
):
    def edit(instructions, before):
        return pipe(
            instructions,
            image=before,
            num_steps=options.num_steps,
            guidance_scale=guidance_scale,
            image_guidance_scale=image_guidance_scale,
            scheduler=options.scheduler,
            seed=0,
        ).images

    return measure(edit, WorldPairs(options.pairs, side_of(pipe), EVALUATION_SEED, split))


def measure(edit: Callable[[list[str], np.ndarray], np.ndarray], pairs: WorldPairs):
    """Edit all pairs by `edit` (instructions, pictures → pictures) and judge the results.

    Returns the score, the pictures before, and those after.
    """
    edits = [pairs.edit(index) for index in range(len(pairs))]
    before = np.stack([world.draw(e.before, pairs.size) for e in edits])
    after = edit([e.instruction for e in edits], before)
    score = Score()
    for each, picture in zip(edits, after, strict=True):
        score.add(each, picture)
    return score, before, after


def _line(split: str, scale: float, image_scale: float, score: Score) -> str:
    record = score.record()
    kinds = ", ".join(f"{name} {share:.1%}" for name, share in record["kinds"].items())
    return (
        f"{split}, guidance {scale:g} and {image_scale:g}: followed {record['followed']:.1%} "
        f"({kinds}), {record['preserved_db']:.1f} dB where nothing should change"
    )


def plot_sweep(content: dict, path: Path) -> None:
    """Draw how often instructions were followed and how much was preserved, along both scales.

    `content`: an evaluation's result with a sweep.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    axes = figure.subplots(2, 2)
    options = content["options"]
    for column, (name, title) in enumerate(
        (("guidance_scale", "guidance by the text"), ("image_guidance_scale", "by the picture"))
    ):
        (other,) = {"guidance_scale", "image_guidance_scale"} - {name}
        for split in SPLITS:
            base = {**content["splits"][split], name: options[name]}
            points = [base] + [
                record
                for record in content["sweep"]
                if record["split"] == split and record[other] == options[other]
            ]
            points.sort(key=lambda record: record[name])
            scales = [record[name] for record in points]
            shares = [100.0 * record["followed"] for record in points]
            kept = [record["preserved_db"] for record in points]
            style = {"color": COLOURS[split], "marker": "o", "label": LABELS[split]}
            axes[0][column].plot(scales, shares, **style)
            axes[1][column].plot(scales, kept, **style)
        axes[1][column].set_xlabel(f"{title} ({other} {options[other]:g})")
    axes[0][0].set_ylabel("followed, %")
    axes[1][0].set_ylabel("where nothing should change, dB")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=RESOLUTION)
