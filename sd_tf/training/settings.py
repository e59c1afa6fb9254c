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


def setting(help: str, default=dataclasses.MISSING):
    """Return a field with the help text of the flag that sets it."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """The settings of one stage of training."""

    steps: int = setting("updates of the weights")
    batch_size: int = setting("examples of an update, on all devices together", 32)
    accumulate: int = setting(
        "parts in which a batch is computed, one after another, to save memory", 1
    )
    learning_rate: float = setting("the highest one, after the warm-up", 1e-4)
    warm_up: int = setting("steps from zero to the learning rate", 500)
    final_learning_rate: float = setting(
        "where the cosine ends, as a share of the learning rate", 0.0
    )
    weight_decay: float = setting(
        "AdamW's, for matrices and kernels; norms, biases and embeddings do not decay", 0.01
    )
    beta_2: float = setting("AdamW's, for the mean of squared gradients", 0.99)
    clip_norm: float | None = 1.0  # greatest norm of the whole gradient
    averaging: Averaging = Averaging()
    precision: str = "float32"  # float32 | mixed_bfloat16: what is trained stays float32
    gradient_checkpointing: bool = False  # for the denoiser's blocks: less memory, more time
    jit_compile: bool = True
    seed: int = setting("of the examples' order, noise, timesteps and dropped captions", 0)
    log_every: int = setting("steps between two lines of figures", 20)
    save_every: int = setting("steps between two states, from which a run goes on", 500)
    sample_every: int = setting("steps between two sheets of sample pictures; 0: none", 0)

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
        for name in ("warm_up", "weight_decay", "seed", "sample_every"):
            if not getattr(self, name) >= 0:
                refuse(f"`{name}` must not be below 0.", getattr(self, name))
        if not self.learning_rate > 0:
            refuse("`learning_rate` must be above 0.", self.learning_rate)
        if not 0.0 <= self.beta_2 < 1.0:
            refuse("`beta_2` must be from 0 to below 1.", self.beta_2)
        if self.warm_up >= self.steps:
            refuse(f"`warm_up` must be below the number of steps, {self.steps}.", self.warm_up)
        if self.precision not in PRECISIONS:
            refuse(f"`precision` must be one of {', '.join(PRECISIONS)}.", self.precision)
        start = self.averaging.start
        if start is not None and not 0.0 <= start < 1.0:
            refuse("The average's start must be a share of the run from 0 to below 1.", start)
        if start is not None and self.averaging.first_step(self.steps) >= self.steps:
            refuse(f"The average's start must leave it one of the {self.steps} steps.", start)
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


def frozen_precision(precision: str) -> str:
    """Return the precision of frozen models: no small updates need weights of float32."""
    return "bfloat16" if precision == "mixed_bfloat16" else precision


# The ends of the names of the layers that get a branch: all linear layers of the transformers, and
# 1×1 convolutions where they stand for one, as in kohya's scripts.
LORA_UNET = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
)
LORA_TEXT_ENCODER = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
# With `conv`, those of resnets and samplers, too, as LoCon has them.
LORA_UNET_CONV = (
    *("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
    *("downsamplers.0.conv", "upsamplers.0.conv"),
)


# The joint attention of SD3's blocks, as in diffusers' script; not the dual blocks' second one.
LORA_TRANSFORMER = tuple(
    f"attn.{name}"
    for name in (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    )
)


@dataclass(frozen=True)
class LoraOptions:
    """The options of an adapter. A branch is multiplied by alpha / rank."""

    rank: int
    alpha: float | None = None  # None: the rank
    conv: bool = False  # the UNet's resnets and samplers get branches, too

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self) -> "LoraOptions":
        """Raise if a value is out of range; return self."""
        if self.rank < 1:
            raise TrainingError(f"`lora_rank` must be at least 1. Received: {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise TrainingError(f"`lora_alpha` must be above 0. Received: {self.alpha}")
        return self

    def record(self) -> dict:
        return {f"lora_{name}": value for name, value in dataclasses.asdict(self).items()}

    def targets(self, component: str) -> tuple[str, ...]:
        """Return the ends of the names of the component's layers that get a branch."""
        if component.startswith("text_encoder"):
            return LORA_TEXT_ENCODER
        if component == "transformer":
            if self.conv:
                raise TrainingError(
                    "`lora_conv` is for the convolutions of a UNet. Received: a transformer"
                )
            return LORA_TRANSFORMER
        return LORA_UNET + LORA_UNET_CONV if self.conv else LORA_UNET
