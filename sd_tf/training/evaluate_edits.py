"""Does an export do what an instruction asks for, and nothing else? In the tiny world that can be
computed: the true picture is known, and the oracle reads what was made.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sd_tf.training import plots, world
from sd_tf.training.evaluate import RESULT_FILE, sheet
from sd_tf.training.pairs import WorldPairs
from sd_tf.training.settings import TrainingError
from sd_tf.training.world.captions import EVALUATION_SEED
from sd_tf.training.world.scene import SPLITS

SHOWN = 32  # pairs on a sheet
SCALES = ("guidance_scale", "image_guidance_scale")


@dataclass(frozen=True)
class Options:
    pairs: int = 500  # of each split
    num_steps: int = 20
    guidance_scale: float = 4.0
    image_guidance_scale: float = 1.5
    scheduler: str | None = None
    more_guidance: Sequence[float] = ()  # further scales of the text to measure
    more_image_guidance: Sequence[float] = ()  # and of the picture


@dataclass
class Score:
    """Of one split: how often an instruction was followed, and what else became of the picture."""

    kinds: dict[str, list[int]] = field(default_factory=dict)  # kind → [followed, pairs]
    verdicts: list[bool] = field(default_factory=list)
    preserved: list[float] = field(default_factory=list)  # dB where nothing was to change

    def add(self, edit: world.Edit, picture: np.ndarray) -> None:
        right = world.followed(world.read(picture), edit)
        self.verdicts.append(right)
        count = self.kinds.setdefault(edit.kind, [0, 0])
        count[0] += right
        count[1] += 1
        size = len(picture)
        same = world.untouched(edit, size)
        if same.any():
            error = picture[same].astype("float64") - world.draw(edit.after, size)[same]
            mse = max(np.mean(np.square(error)), 1e-9)
            self.preserved.append(10.0 * np.log10(255.0**2 / mse))

    def record(self) -> dict:
        kinds = {name: round(right / all_, 4) for name, (right, all_) in self.kinds.items()}
        return {
            "pairs": len(self.verdicts),
            "followed": round(float(np.mean(self.verdicts)), 4),
            "preserved_db": round(float(np.mean(self.preserved)), 2),
            "kinds": dict(sorted(kinds.items())),
        }


def evaluate(pipe, options: Options, folder: Path, report: Callable[[str], None] = print) -> dict:
    """Measure, write `evaluation.json` and the sheets into `folder`, return what was written."""
    if options.pairs < 1:
        raise TrainingError(f"At least one pair is needed. Received: {options.pairs}")
    if pipe.manifest.latent_inputs != "image":
        raise TrainingError(
            f"Edits are measured of an InstructPix2Pix export. Received: {pipe.manifest.family}"
        )
    if pipe.manifest.height != pipe.manifest.width:
        raise TrainingError(
            f"The oracle reads square pictures. The export's are "
            f"{pipe.manifest.width}×{pipe.manifest.height}."
        )
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
        plots.sweep(content, folder / "sweep.png")
    (folder / RESULT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def _measured(pipe, split: str, options: Options, guidance_scale, image_guidance_scale):
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

    return measure(edit, WorldPairs(options.pairs, pipe.manifest.height, EVALUATION_SEED, split))


def measure(edit: Callable[[list[str], np.ndarray], np.ndarray], pairs: WorldPairs):
    """`edit`: instructions and pictures → pictures. Score, pictures before and after."""
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
        f"({kinds}), {record['preserved_db']:.1f} dB where nothing was to change"
    )
