"""What an average of the weights is worth to a model that learns to edit, and what it costs: none,
from the first step on, and only at the end of the run.

Every seed is one run that carries all the averages along, which leaves its weights as they are.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sd_tf.training import edit, evaluate_edits, plots
from sd_tf.training.ema import Average, Averages
from sd_tf.training.lesson import Lesson
from sd_tf.training.pairs import WorldPairs
from sd_tf.training.settings import Averaging, Settings, TrainingError
from sd_tf.training.step import compiled_step
from sd_tf.training.trainer import Run, optimizer_for
from sd_tf.training.world.captions import EVALUATION_SEED
from sd_tf.training.world.scene import SPLITS
from sd_tf.weights import Checkpoint

RESULT_FILE, TABLE_FILE, PLOT_FILE = "ema.json", "ema.md", "ema.png"
OFF, ALWAYS = "off", "always"
# The 97.5 % quantile of Student's t with so many degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
COST_ROUNDS, COST_STEPS = 5, 4


@dataclass(frozen=True)
class Study:
    """Everything that the figures depend on, but the checkpoint that is taught."""

    settings: Settings
    half_life: float = 200.0
    late: tuple[float, ...] = (0.25, 0.10, 0.036)  # shares of the run, at its end
    seeds: int = 3
    learnt: int = 32_000  # pairs that it learns from
    size: int = 64
    measured: int = 150  # pairs of each split, for each seed and average
    num_steps: int = 10
    guidance_scale: float = 4.0
    image_guidance_scale: float = 1.5

    def check(self) -> "Study":
        """Refuse what cannot be meant; returns self."""
        if self.seeds - 1 not in STUDENT:
            raise TrainingError(
                f"An interval takes from 2 to {max(STUDENT) + 1} seeds. Received: {self.seeds}"
            )
        self.settings.check()
        return self

    @property
    def averagings(self) -> dict[str, Averaging]:
        shares = averaged_shares(self.late)
        return {name: Averaging(1.0 - share, self.half_life) for name, share in shares.items()}

    @property
    def options(self) -> edit.Options:
        return edit.Options(self.size, flip=0.0, precompute=True, train_text_encoder=True)


def averaged_shares(late) -> dict[str, float]:
    """Variant → the share of the run, at its end, that it averages."""
    return {ALWAYS: 1.0, **{f"last {share:.1%}": share for share in late}}


# The rate stays what it is, as in the published recipes: under one that falls to zero the last
# weights are close to an average already.
STUDY = Study(
    Settings(
        steps=1500,
        batch_size=32,
        learning_rate=1e-3,
        final_learning_rate=1.0,
        warm_up=100,
        averaging=Averaging(start=None),
    )
)


def run(
    study: Study, checkpoint: Checkpoint, folder: Path, report: Callable[[str], None] = print
) -> dict:
    """Train, measure, and write table, plot and figures; goes on from what is in the folder."""
    study.check()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULT_FILE
    content = {"study": json.loads(json.dumps(asdict(study))), "seeds": {}}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["study"] != content["study"]:
            raise TrainingError(
                f"{path} belongs to another study. Choose another --out. It was: {found['study']}"
            )
        content = found

    def keep():
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    for seed in range(study.seeds):
        if str(seed) not in content["seeds"]:
            content["seeds"][str(seed)] = _seed(study, seed, checkpoint, folder, report)
            keep()
    if "cost" not in content:
        content["cost"] = _cost(study, checkpoint, folder, report)
    content["variants"] = summary(content)
    keep()
    (folder / TABLE_FILE).write_text(table(content), encoding="utf-8")
    plots.averages(content, folder / PLOT_FILE)
    report(table(content))
    return content


def _lesson(study: Study, seed: int, checkpoint: Checkpoint, folder: Path, report) -> Lesson:
    pairs = WorldPairs(study.learnt, study.size)
    settings = replace(study.settings, seed=seed)
    return edit.prepare(checkpoint, pairs, settings, study.options, folder / edit.CACHE, report)


def _seed(study: Study, seed: int, checkpoint: Checkpoint, folder: Path, report) -> dict:
    """Figures of each variant."""
    lesson = _lesson(study, seed, checkpoint, folder, report)
    settings = replace(study.settings, seed=seed)
    averages = Averages(lesson.loss.trainable_variables, study.averagings, settings.steps)
    place = folder / f"seed-{seed}"
    Run(lesson.loss, lesson.batches, settings, place, report, average=averages).train()
    figures = {OFF: _measured(study, lesson)}
    for name, average in averages.each.items():
        average.exchange()
        figures[name] = _measured(study, lesson)
        average.exchange()
    for name, found in figures.items():
        values = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
        report(f"seed {seed}, {name}: {values}")
    return figures


def _measured(study: Study, lesson: Lesson) -> dict[str, float]:
    found = {}
    for split in SPLITS:
        pairs = WorldPairs(study.measured, study.size, EVALUATION_SEED, split)
        record = evaluate_edits.measure(lambda *given: _edited(study, lesson, *given), pairs)
        score = record[0].record()
        found[f"followed_{split}"] = 100.0 * score["followed"]
        found[f"preserved_db_{split}"] = score["preserved_db"]
    return found


def _edited(study: Study, lesson: Lesson, instructions, before) -> np.ndarray:
    size, pictures = study.settings.batch_size, []
    for start in range(0, len(instructions), size):
        part = slice(start, start + size)
        scales = (study.num_steps, study.guidance_scale, study.image_guidance_scale)
        pictures.append(lesson.painter.edit(instructions[part], before[part], *scales))
    return np.concatenate(pictures)


def _cost(study: Study, checkpoint: Checkpoint, folder: Path, report) -> dict:
    """Seconds of a step without and with an average, in turn, and what each holds in memory."""
    report("timing a step without and with an average")
    lesson = _lesson(study, 0, checkpoint, folder, report)
    trained = lesson.loss.trainable_variables
    settings, batch = study.settings, lesson.batches(0)
    average = Average(trained, study.averagings[ALWAYS], settings.steps)
    steps, seconds = {}, {OFF: [], ALWAYS: []}
    for name, chosen in ((OFF, None), (ALWAYS, average)):
        optimizer = optimizer_for(settings, trained)
        steps[name] = compiled_step(lesson.loss, optimizer, chosen, settings)
        steps[name](batch)  # compiles
    for _ in range(COST_ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(COST_STEPS):
                step(batch)
            seconds[name].append((time.perf_counter() - start) / COST_STEPS)
    weights = sum(int(np.prod(v.shape)) * 4 for v in trained)
    return {
        "step_seconds": {name: float(np.median(values)) for name, values in seconds.items()},
        "rounds": seconds,
        "state_bytes": {OFF: 3 * weights, ALWAYS: 4 * weights},  # weights, two moments, average
    }


# What came of it


def summary(content: dict) -> dict:
    """variant → its figures over all seeds, their differences from no average, what it costs."""
    seeds, study, cost = content["seeds"], content["study"], content["cost"]
    per_step, bytes_ = cost["step_seconds"], cost["state_bytes"]
    surplus = per_step[ALWAYS] - per_step[OFF]
    shares = {OFF: 0.0, **averaged_shares(study["late"])}
    variants = {}
    for name, share in shares.items():
        figures, differences = {}, {}
        for key in seeds["0"][OFF]:
            values = [figures_of[name][key] for figures_of in seeds.values()]
            without = [figures_of[OFF][key] for figures_of in seeds.values()]
            figures[key] = _interval(values)
            differences[key] = _interval(np.subtract(values, without).tolist())
        variants[name] = {
            "figures": figures,
            "differences": differences,
            "step_seconds": per_step[OFF] + share * surplus,  # on average over the run
            "state_bytes": bytes_[ALWAYS if share else OFF],  # at its end
        }
    return variants


def _interval(values: list[float]) -> dict:
    """Mean over seeds and the half width of its 95 % interval."""
    half = STUDENT[len(values) - 1] * np.std(values, ddof=1) / np.sqrt(len(values))
    return {"mean": float(np.mean(values)), "interval": float(half), "seeds": values}


COLUMNS = {
    "followed, seen, %": "followed_train",
    "held out, %": "followed_held_out",
    "kept, seen, dB": "preserved_db_train",
    "held out, dB": "preserved_db_held_out",
}


def table(content: dict) -> str:
    """Markdown: figures with intervals, beneath them the differences from no average."""
    head = ["average", *COLUMNS, "step, ms", "state, MB"]
    lines = [head, ["---"] * len(head)]
    for name, variant in content["variants"].items():
        figures = [_text(variant["figures"][key]) for key in COLUMNS.values()]
        cost = [f"{1e3 * variant['step_seconds']:.0f}", f"{variant['state_bytes'] / 1e6:.0f}"]
        lines.append([name, *figures, *cost])
    for name, variant in content["variants"].items():
        if name != OFF:
            figures = [_text(variant["differences"][key], "+") for key in COLUMNS.values()]
            lines.append([f"{name} − {OFF}", *figures, "", ""])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(figures: dict, sign: str = "") -> str:
    return f"{figures['mean']:{sign}.1f} ± {figures['interval']:.1f}"
