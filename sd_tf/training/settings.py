"""The settings of a training run, as data. Equal settings give equal weights."""

import dataclasses
from dataclasses import dataclass

from sd_tf.errors import SdTfError


class TrainingError(SdTfError):
    """Settings, data or a checkpoint that a run cannot work with, and how to mend it."""


@dataclass(frozen=True)
class Averaging:
    """The settings of the exponential moving average of the weights."""

    start: float | None = 0.0  # share of the run before the average begins; None: no average
    half_life: float = 1000.0  # in steps; at first shorter, a tenth of the average's age

    def first_step(self, steps: int) -> int:
        """Return the first step that is averaged, in a run of `steps`."""
        return round(self.start * steps)


@dataclass(frozen=True)
class Settings:
    """The settings of one stage of training."""

    steps: int
    batch_size: int = 32  # examples of one optimizer update, on all devices together
    accumulate: int = 1  # parts in which the batch is computed one after another, to save memory
    learning_rate: float = 1e-4
    warm_up: int = 500  # steps from zero to the learning rate
    final_learning_rate: float = 0.0  # where the cosine ends, as a share of the learning rate
    weight_decay: float = 0.01  # for matrices and kernels; not for norms, biases, embeddings
    beta_2: float = 0.99
    clip_norm: float | None = 1.0  # greatest norm of the whole gradient
    averaging: Averaging = Averaging()
    precision: str = "float32"  # float32 | mixed_bfloat16: variables stay float32
    gradient_checkpointing: bool = False  # for the UNet's blocks: less memory, more time
    jit_compile: bool = True
    seed: int = 0
    log_every: int = 20
    save_every: int = 500
    sample_every: int = 0  # 0: no sample sheets

    def check(self) -> "Settings":
        """Raise if a value is out of range; return self."""

        def refuse(rule, received):
            raise TrainingError(f"{rule} Received: {received}")

        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                refuse(f"`{name}` must be at least 1.", getattr(self, name))
        if self.batch_size % self.accumulate:
            refuse(
                "`accumulate` must divide `batch_size`.", f"{self.batch_size} / {self.accumulate}"
            )
        if not self.learning_rate > 0:
            refuse("`learning_rate` must be above 0.", self.learning_rate)
        if self.warm_up >= self.steps:
            refuse(f"`warm_up` must be below the number of steps, {self.steps}.", self.warm_up)
        if self.precision not in PRECISIONS:
            refuse(f"`precision` must be one of {', '.join(PRECISIONS)}.", self.precision)
        start = self.averaging.start
        if start is not None and not 0.0 <= start < 1.0:
            refuse("The average's start must be a share of the run from 0 to below 1.", start)
        if not self.averaging.half_life > 0:
            refuse("The average's half-life must be above 0 steps.", self.averaging.half_life)
        return self

    def record(self) -> dict:
        """Return the settings that a resumed run must repeat, by name."""
        every = dataclasses.asdict(self)
        return {name: value for name, value in every.items() if name not in MAY_CHANGE}


# Settings that decide how and when a run computes, saves and reports, not what it learns.
MAY_CHANGE = (
    *("accumulate", "gradient_checkpointing", "jit_compile"),
    *("log_every", "save_every", "sample_every"),
)
PRECISIONS = ("float32", "mixed_bfloat16")
