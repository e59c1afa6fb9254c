"""Train an editor while it carries several averages of its weights, and measure each of them.

Each seed is one run: averages do not touch the weights that they follow, so one run yields what
separate runs would have had.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import averages_report
import numpy as np
from averages_report import ALWAYS, OFF, averaged_shares

from sd_tf.training import edit, evaluate_edits
from sd_tf.training.ema import Average
from sd_tf.training.pairs import WorldPairs
from sd_tf.training.settings import Averaging, Settings, TrainingError
from sd_tf.training.step import compiled_step
from sd_tf.training.task import TrainingTask
from sd_tf.training.trainer import Run, optimizer_for
from sd_tf.training.world.captions import EVALUATION_SEED
from sd_tf.training.world.scene import SPLITS
from sd_tf.weights import Checkpoint

RESULT_FILE, TABLE_FILE, PLOT_FILE = "ema.json", "ema.md", "ema.png"
COST_ROUNDS, COST_STEPS = 5, 4


@dataclass(frozen=True)
class Study:
    """Everything that the figures depend on, except the checkpoint that is trained."""

    settings: Settings
    half_life: float = 200.0
    late: tuple[float, ...] = (0.25, 0.10, 0.036)  # shares of the run, at its end
    seeds: int = 3
    learnt: int = 32_000  # pairs to learn from
    size: int = 64
    measured: int = 150  # pairs of each split, for each seed and average
    num_steps: int = 10
    guidance_scale: float = 4.0
    image_guidance_scale: float = 1.5

    def check(self) -> "Study":
        """Raise if a value is out of range; return self."""
        if self.seeds < 2:
            raise TrainingError(f"An interval needs at least 2 seeds. Received: {self.seeds}")
        self.settings.check()
        return self

    @property
    def averagings(self) -> dict[str, Averaging]:
        shares = averaged_shares(self.late)
        return {name: Averaging(1.0 - share, self.half_life) for name, share in shares.items()}

    @property
    def options(self) -> edit.EditOptions:
        return edit.EditOptions(self.size, flip=0.0, precompute=True, train_text_encoder=True)


# The learning rate stays constant, as in the published recipes: where it falls to zero, the last
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


class Averages:
    """Several averages carried by one run, each updated as a run of its own would update it."""

    def __init__(self, variables, averagings: dict[str, Averaging], steps: int):
        self.each = {name: Average(variables, a, steps) for name, a in averagings.items()}
        self.variables = [v for average in self.each.values() for v in average.variables]

    def update(self, step):
        for average in self.each.values():
            average.update(step)

    def exchange(self) -> None:
        """Do nothing: a run that carries several averages keeps its last weights in the models."""


def run(
    study: Study, checkpoint: Checkpoint, folder: Path, report: Callable[[str], None] = print
) -> dict:
    """Train and measure every seed; write figures, table and plot into `folder`.

    Seeds whose figures `folder` already holds are not run again.
    """
    study.check()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULT_FILE
    content = {"study": json.loads(json.dumps(asdict(study))), "seeds": {}}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if {**found["study"], "seeds": study.seeds} != content["study"]:
            raise TrainingError(
                f"{path} belongs to a study with other settings; choose another --out. "
                f"It holds: {found['study']}. This study: {content['study']}"
            )
        content = {**found, "study": content["study"]}

    def keep():
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    for seed in range(study.seeds):
        if str(seed) not in content["seeds"]:
            content["seeds"][str(seed)] = _train_seed(study, seed, checkpoint, folder, report)
            keep()
    if "cost" not in content:
        content["cost"] = _measure_cost(study, checkpoint, folder, report)
    content["variants"] = averages_report.summary(content)
    keep()
    table = averages_report.table(content)
    (folder / TABLE_FILE).write_text(table, encoding="utf-8")
    averages_report.plot(content, folder / PLOT_FILE)
    report(table)
    return content


def _prepare(study: Study, seed: int, checkpoint: Checkpoint, folder: Path, report) -> TrainingTask:
    pairs = WorldPairs(study.learnt, study.size)
    settings = replace(study.settings, seed=seed)
    return edit.prepare(checkpoint, pairs, settings, study.options, folder / edit.CACHE, report)


def _train_seed(study: Study, seed: int, checkpoint: Checkpoint, folder: Path, report) -> dict:
    """Train one seed, and return the figures of its last weights and of each average."""
    task = _prepare(study, seed, checkpoint, folder, report)
    settings = replace(study.settings, seed=seed)
    averages = Averages(task.loss.trainable_variables, study.averagings, settings.steps)
    run_folder = folder / f"seed-{seed}"
    Run(task.loss, task.batches, settings, run_folder, report, average=averages).train()
    figures = {OFF: _measure_edits(study, task)}
    for name, average in averages.each.items():
        average.exchange()
        figures[name] = _measure_edits(study, task)
        average.exchange()
    for name, found in figures.items():
        values = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
        report(f"seed {seed}, {name}: {values}")
    return figures


def _measure_edits(study: Study, task: TrainingTask) -> dict[str, float]:
    """Return how well the current weights follow instructions and preserve the rest, per split."""
    found = {}
    for split in SPLITS:
        pairs = WorldPairs(study.measured, study.size, EVALUATION_SEED, split)
        measured = evaluate_edits.measure(lambda *given: _edit(study, task, *given), pairs)
        score = measured[0].record()
        found[f"followed_{split}"] = 100.0 * score["followed"]
        found[f"preserved_db_{split}"] = score["preserved_db"]
    return found


def _edit(study: Study, task: TrainingTask, instructions, before) -> np.ndarray:
    size, pictures = study.settings.batch_size, []
    for start in range(0, len(instructions), size):
        part = slice(start, start + size)
        scales = (study.num_steps, study.guidance_scale, study.image_guidance_scale)
        pictures.append(task.painter.edit(instructions[part], before[part], *scales))
    return np.concatenate(pictures)


def _measure_cost(study: Study, checkpoint: Checkpoint, folder: Path, report) -> dict:
    """Time steps without and with an average, in turn, and count the bytes of state of each."""
    report("timing a step without and with an average")
    task = _prepare(study, 0, checkpoint, folder, report)
    trained = task.loss.trainable_variables
    settings, batch = study.settings, task.batches(0)
    average = Average(trained, study.averagings[ALWAYS], settings.steps)
    steps, seconds = {}, {OFF: [], ALWAYS: []}
    for name, chosen in ((OFF, None), (ALWAYS, average)):
        optimizer = optimizer_for(settings, trained)
        steps[name] = compiled_step(task.loss, optimizer, chosen, settings)
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
