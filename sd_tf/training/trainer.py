"""Run a training: steps, figures, checkpoints that can be resumed, and sample sheets."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sd_tf.files import atomic, locks
from sd_tf.training.batches import Batch
from sd_tf.training.ema import Average
from sd_tf.training.hosts import check_settings, this_host
from sd_tf.training.origin import Record, check_same
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.step import compiled_step, state_of

STATE, STATE_SUFFIX = "state", ".safetensors"
LOG_FILE, BOARD_FOLDER = "log.jsonl", "tensorboard"
KEPT_STATES = 2

Report = Callable[[str], None]


def optimizer_for(settings: Settings, variables) -> keras.optimizers.Optimizer:
    """Return AdamW with warm-up and cosine decay; norms, biases and embeddings do not decay."""
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


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a run's folder, and keep other processes of this host out of it in this context."""
    folder.mkdir(parents=True, exist_ok=True)
    busy = TrainingError(f"Another process trains in {folder}. Choose another `folder`.")
    with locks.held(folder / f".{this_host().named('lock')}", busy):
        yield


@dataclass
class Run:
    """A loss that is trained in a folder. `train` resumes from the checkpoint in it, if any."""

    loss: keras.layers.Layer
    batches: Callable[[int], Batch]
    settings: Settings
    folder: Path
    report: Report = print
    sample: Callable[[int], None] | None = None  # called with the step and the averaged weights
    average: Average | None = None  # the caller's own average, if the settings have none
    depends_on: Record = field(default_factory=dict)  # beside the settings; see `origin`

    def __post_init__(self):
        self.host = this_host()
        check_settings(self.settings, self.host)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.optimizer = optimizer_for(self.settings, self.loss.trainable_variables)
        self._compile()
        self._begin_average(0)

    def _compile(self) -> None:
        self.run_step = compiled_step(self.loss, self.optimizer, self.average, self.settings)

    def _begin_average(self, step: int) -> None:
        """Create the average at its first step; until then it costs neither time nor memory."""
        averaging, steps = self.settings.averaging, self.settings.steps
        if self.average is not None or averaging.start is None:
            return
        if step >= averaging.first_step(steps):
            self.average = Average(self.loss.trainable_variables, averaging, steps)
            self._compile()

    def train(self) -> None:
        """Train to the last step, and leave the averaged weights, if any, in the models."""
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
                    with progress.paused(), self.averaged():
                        self.sample(done)
        self._exchange()

    def _prefetched(self, first: int, last: int) -> Iterator[Batch]:
        """Yield the batches of steps [first, last), each prepared one step ahead."""
        with ThreadPoolExecutor(1) as ahead:
            pending = ahead.submit(self.batches, first) if first < last else None
            for step in range(first, last):
                batch = pending.result()
                pending = ahead.submit(self.batches, step + 1) if step + 1 < last else None
                yield batch

    @contextmanager
    def averaged(self):
        """Put the averaged weights into the models inside this context."""
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
        """Write the state to a file of its own in one atomic step; keep the one before, too."""
        if not self.host.is_first:
            return
        variables = state_of(self.loss, self.optimizer, self.average)
        arrays = {f"{i:05d}": np.array(v) for i, v in enumerate(variables)}
        kept = states(self.folder)
        for variable, array in zip(variables, arrays.values(), strict=True):
            if not np.isfinite(array).all():
                last = f"The last good one is {kept[-1]}." if kept else "There is no earlier one."
                raise TrainingError(
                    f"The state at step {step} is not saved: {variable.path} has values that are "
                    f"not finite. Lower `learning_rate`. {last}"
                )
        metadata = {"step": str(step), "depends_on": json.dumps(self._origin())}
        path = self.folder / f"{STATE}-{step:08d}{STATE_SUFFIX}"
        with atomic.new_file(path, durable=True) as part:
            save_file(arrays, part, metadata=metadata)
        for old in states(self.folder)[:-KEPT_STATES]:
            old.unlink()

    def _origin(self) -> Record:
        return {**self.settings.record(), **self.depends_on}

    def resume(self) -> int:
        """Load the folder's latest state, if any; return the step to continue from."""
        kept = states(self.folder)
        if not kept:
            return 0
        path = kept[-1]
        try:
            with safe_open(path, framework="numpy") as stored:
                step = self._load(path, stored)
        except SafetensorError as error:
            raise TrainingError(
                f"{path} is damaged: {error}. Delete it, to continue from the state before it "
                f"or else from the beginning."
            ) from error
        self.report(f"resumed at step {step} from {path}")
        return step

    def _load(self, path: Path, stored) -> int:
        metadata = stored.metadata() or {}
        mend = "Give what the run was begun with, or choose another `folder`."
        check_same(metadata.get("depends_on"), self._origin(), path, mend)
        step = int(metadata["step"])
        self._begin_average(step - 1)
        variables = state_of(self.loss, self.optimizer, self.average)
        if len(stored.keys()) != len(variables):
            raise TrainingError(
                f"{path} belongs to another model: it holds {len(stored.keys())} tensors, but "
                f"this run has {len(variables)}. Choose another `folder`."
            )
        for key, variable in zip(sorted(stored.keys()), variables, strict=True):
            variable.assign(stored.get_tensor(key))
        return step


def states(folder: Path) -> list[Path]:
    """List the states that are kept in a run's folder, the latest last."""
    return sorted(folder.glob(f"{STATE}*{STATE_SUFFIX}"))


class Progress:
    """Reports a run's figures, averaged since the last report: text, a log and TensorBoard."""

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
            self.board.close()

    def add(self, figures: dict) -> None:
        self.seen.append(figures)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of this context out of the training speed."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def tell(self, done: int) -> None:
        figures = {k: float(np.mean([f[k] for f in self.seen])) for k in self.seen[0]}
        if not np.isfinite(figures["loss"]):
            raise TrainingError(
                f"The loss is {figures['loss']} at step {done}. Lower `learning_rate`. The last "
                f"states are in {self.folder}."
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
    """Writes TensorBoard's event files."""

    def __init__(self, folder: Path):
        import tensorflow as tf
        from tensorboard.summary.v2 import scalar  # TensorFlow's own misses it at the first figure

        self.writer, self.scalar = tf.summary.create_file_writer(str(folder)), scalar

    def write(self, step: int, figures: dict[str, float]) -> None:
        with self.writer.as_default(step=step):
            for name, value in figures.items():
                self.scalar(name, value)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
