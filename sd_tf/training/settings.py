"""What a training run is, as data. A run is its settings: the same ones give the same weights."""

import dataclasses
from dataclasses import dataclass


class TrainingError(ValueError):
    """Settings, data or a checkpoint that a run cannot work with, and how to mend it."""


@dataclass(frozen=True)
class Averaging:
    """The exponential moving average of the weights: whether, since when, how slow."""

    start: float | None = 0.0  # share of the run before it begins; None: no average at all
    half_life: float = 1000.0  # in steps; early on shorter, a tenth of the average's age

    def first_step(self, steps: int) -> int:
        """Of a run of so many."""
        return round(self.start * steps)


@dataclass(frozen=True)
class Settings:
    """One stage of training."""

    steps: int
    batch_size: int = 32  # examples of one optimizer update, all devices together
    accumulate: int = 1  # parts in which that batch is computed, to save memory
    learning_rate: float = 1e-4
    warm_up: int = 500  # steps from zero to the learning rate
    final_learning_rate: float = 0.0  # where the cosine ends, as a share of the learning rate
    weight_decay: float = 0.01  # of matrices and kernels; never of norms, biases, embeddings
    beta_2: float = 0.99
    clip_norm: float | None = 1.0  # of the whole gradient
    averaging: Averaging = Averaging()
    precision: str = "float32"  # float32 | mixed_bfloat16: variables stay float32
    gradient_checkpointing: bool = False  # of the UNet's blocks: less memory, more time
    jit_compile: bool = True
    seed: int = 0
    log_every: int = 20
    save_every: int = 500
    sample_every: int = 0  # 0: no sample sheets

    def check(self) -> "Settings":
        """Refuse what cannot be meant; returns self."""

        def refuse(rule, received):
            raise TrainingError(f"{rule} Received: {received}")

        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                refuse(f"{name} is at least 1.", getattr(self, name))
        if self.batch_size % self.accumulate:
            refuse("accumulate divides batch_size.", f"{self.batch_size} / {self.accumulate}")
        if not self.learning_rate > 0:
            refuse("The learning rate is above 0.", self.learning_rate)
        if self.warm_up >= self.steps:
            refuse(f"warm_up is below the number of steps, {self.steps}.", self.warm_up)
        if self.precision not in PRECISIONS:
            refuse(f"The precision is one of {', '.join(PRECISIONS)}.", self.precision)
        start = self.averaging.start
        if start is not None and not 0.0 <= start < 1.0:
            refuse("The average starts at a share of the run from 0 to below 1.", start)
        if not self.averaging.half_life > 0:
            refuse("The average's half-life is above 0 steps.", self.averaging.half_life)
        return self

    def record(self) -> dict:
        return dataclasses.asdict(self)


PRECISIONS = ("float32", "mixed_bfloat16")
