"""The run: steps, figures, checkpoints that can be resumed, sample sheets."""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from sd_tf.training.batches import Batch
from sd_tf.training.ema import Average
from sd_tf.training.hosts import this_host
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.step import compiled_step, state_of

STATE_FILE, LOG_FILE, BOARD_FOLDER = "state.safetensors", "log.jsonl", "tensorboard"

Report = Callable[[str], None]


def optimizer_for(settings: Settings, variables) -> keras.optimizers.Optimizer:
    """AdamW with warm-up and cosine; norms, biases and embeddings do not decay."""
    rate = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        decay_steps=max(settings.steps - settings.warm_up, 1),
        alpha=settings.final_learning_rate,
        warmup_target=settings.learning_rate,
        warmup_steps=settings.warm_up,
    )
    optimizer = keras.optimizers.AdamW(
        rate,
        weight_decay=settings.weight_decay,
        beta_2=settings.beta_2,
        global_clipnorm=settings.clip_norm,
    )
    fixed = [v for v in variables if len(v.shape) < 2 or "embedding" in v.path]
    optimizer.exclude_from_weight_decay(var_list=fixed)
    return optimizer


@dataclass
class Run:
    """A loss being trained in a folder. `train` goes on from whatever the folder holds."""

    loss: keras.layers.Layer
    batches: Callable[[int], Batch]
    settings: Settings
    folder: Path
    report: Report = print
    sample: Callable[[int], None] | None = None  # called with the step, averaged weights in place
    average: Average | None = None  # one of the caller's, where the settings have none

    def __post_init__(self):
        self.settings.check()
        self.host = this_host()
        if self.host.count > 1 and self.settings.sample_every:
            raise TrainingError("Sample sheets are drawn on one host: leave sample_every at 0.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.optimizer = optimizer_for(self.settings, self.loss.trainable_variables)
        self._compile()
        self._begin_average(0)

    def _compile(self) -> None:
        self.run_step = compiled_step(self.loss, self.optimizer, self.average, self.settings)

    def _begin_average(self, step: int) -> None:
        """From its first step on; until then it costs neither time nor memory."""
        averaging, steps = self.settings.averaging, self.settings.steps
        if self.average is not None or averaging.start is None:
            return
        if step >= averaging.first_step(steps):
            self.average = Average(self.loss.trainable_variables, averaging, steps)
            self._compile()

    def train(self) -> None:
        """Leaves the averaged weights, where there are any, in the models."""
        first, last = self.resume(), self.settings.steps
        with Progress(self, first) as progress:
            for done, batch in enumerate(self._prefetched(first, last), start=first + 1):
                self._begin_average(done - 1)
                progress.add(self.run_step(batch))
                if done % self.settings.log_every == 0 or done == last:
                    progress.tell(done)
                if done % self.settings.save_every == 0 or done == last:
                    self.save(done)
                every = self.settings.sample_every
                if self.sample is not None and every and done % every == 0:
                    with self.averaged():
                        self.sample(done)
                    progress.skip()
        self._exchange()

    def _prefetched(self, first: int, last: int) -> Iterator[Batch]:
        """The batches of steps [first, last), one ahead of its use."""
        with ThreadPoolExecutor(1) as ahead:
            pending = ahead.submit(self.batches, first) if first < last else None
            for step in range(first, last):
                batch = pending.result()
                pending = ahead.submit(self.batches, step + 1) if step + 1 < last else None
                yield batch

    # Averaged weights in place of the last ones

    @contextmanager
    def averaged(self):
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self):
        if self.average is not None:
            self.average.exchange()

    # Checkpoints

    def save(self, step: int) -> None:
        """All at once or not at all."""
        if not self.host.is_first:
            return
        variables = state_of(self.loss, self.optimizer, self.average)
        path = self.folder / STATE_FILE
        unfinished = path.with_suffix(".unfinished")
        metadata = {"step": str(step), "settings": json.dumps(self.settings.record())}
        arrays = {f"{i:05d}": np.array(v) for i, v in enumerate(variables)}
        save_file(arrays, unfinished, metadata=metadata)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)

    def resume(self) -> int:
        """The step to go on from: 0 in an empty folder."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return 0
        with safe_open(path, framework="numpy") as stored:
            metadata = stored.metadata()
            if json.loads(metadata["settings"]) != self.settings.record():
                raise TrainingError(
                    f"{path} belongs to a run with other settings. Choose another --out, or "
                    f"repeat the settings: {metadata['settings']}"
                )
            step = int(metadata["step"])
            self._begin_average(step - 1)
            variables = state_of(self.loss, self.optimizer, self.average)
            if len(stored.keys()) != len(variables):
                raise TrainingError(
                    f"{path} holds {len(stored.keys())} tensors, this run has {len(variables)}: "
                    f"it belongs to another model."
                )
            for key, variable in zip(sorted(stored.keys()), variables, strict=True):
                variable.assign(stored.get_tensor(key))
        self.report(f"resumed at step {step} from {path}")
        return step


class Progress:
    """The figures of a run: means since the last line, on the screen, in a log, in TensorBoard."""

    def __init__(self, run: Run, first: int):
        self.folder, self.settings, self.report = run.folder, run.settings, run.report
        self.first, self.seen = first, []
        self.is_told = run.host.is_first

    def __enter__(self):
        self.start = self.since = time.perf_counter()
        if self.is_told:
            self.board = Board(self.folder / BOARD_FOLDER)
            self.log = (self.folder / LOG_FILE).open("a", encoding="utf-8")
        return self

    def __exit__(self, *_):
        if self.is_told:
            self.log.close()

    def add(self, figures: dict) -> None:
        self.seen.append(figures)

    def skip(self) -> None:
        """What was done since the last line was not training."""
        self.since = time.perf_counter()

    def tell(self, done: int) -> None:
        figures = {k: float(np.mean([f[k] for f in self.seen])) for k in self.seen[0]}
        if not np.isfinite(figures["loss"]):
            raise TrainingError(
                f"The loss is {figures['loss']} at step {done}. Lower the learning rate; the last "
                f"checkpoint is in {self.folder}."
            )
        now, steps = time.perf_counter(), self.settings.steps
        examples = len(self.seen) * self.settings.batch_size
        figures["examples_per_second"] = examples / (now - self.since)
        self.seen, self.since = [], now
        if not self.is_told:
            return
        left = (now - self.start) / (done - self.first) * (steps - done)
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.report(f"step {done}/{steps}: {text}, {left / 60:.1f} min left")
        print(json.dumps({"step": done, **figures}), file=self.log, flush=True)
        self.board.write(done, figures)


class Board:
    """TensorBoard's event files."""

    def __init__(self, folder: Path):
        import tensorflow as tf

        self.writer = tf.summary.create_file_writer(str(folder))
        self.scalar = tf.summary.scalar

    def write(self, step: int, figures: dict[str, float]) -> None:
        with self.writer.as_default(step=step):
            for name, value in figures.items():
                self.scalar(name, value)
        self.writer.flush()
