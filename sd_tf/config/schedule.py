"""The configuration of the noise schedule, and the named samplers that walk it."""

import math
from dataclasses import dataclass, replace

from sd_tf.config.errors import ConfigError

SCALED_LINEAR = "scaled_linear"


@dataclass(frozen=True)
class SamplerSpec:
    """A way to walk a noise schedule: the update rule and how its timesteps are chosen.

    Each method in `sampling/methods.py` declares which spacings it honours, and whether Karras.
    """

    method: str
    spacing: str = "leading"  # leading | linspace | trailing; flow: the schedule's own
    karras: bool = False

    @property
    def is_flow(self) -> bool:
        return self.spacing == "flow"


SAMPLERS = {
    "ddim": SamplerSpec("ddim"),
    "ddim_trailing": SamplerSpec("ddim", "trailing"),
    "pndm": SamplerSpec("pndm"),
    "euler": SamplerSpec("euler"),
    "euler_linspace": SamplerSpec("euler", "linspace"),
    "euler_trailing": SamplerSpec("euler", "trailing"),
    "euler_ancestral": SamplerSpec("euler_ancestral"),
    "euler_ancestral_linspace": SamplerSpec("euler_ancestral", "linspace"),
    "euler_ancestral_trailing": SamplerSpec("euler_ancestral", "trailing"),
    "heun": SamplerSpec("heun", "linspace"),
    "dpmpp_2m": SamplerSpec("dpmpp_2m", "linspace"),
    "dpmpp_2m_karras": SamplerSpec("dpmpp_2m", "linspace", karras=True),
    "dpmpp_2m_sde": SamplerSpec("dpmpp_2m_sde", "linspace"),
    "unipc": SamplerSpec("unipc", "linspace"),
    "lms": SamplerSpec("lms", "linspace"),
    "lcm": SamplerSpec("lcm"),
    "kerascv": SamplerSpec("kerascv"),
    "kerascv-2022": SamplerSpec("kerascv-2022"),
    "flow_euler": SamplerSpec("euler", "flow"),
    "flow_heun": SamplerSpec("heun", "flow"),
    "flow_dpmpp_2m": SamplerSpec("dpmpp_2m", "flow"),
}


@dataclass(frozen=True)
class DynamicShift:
    """A shift of flow matching that grows with the picture, between two numbers of patches."""

    base_shift: float = 0.5
    max_shift: float = 1.15
    base_patches: int = 256
    max_patches: int = 4096
    exponential: bool = True  # the shift is e to the interpolated number, not the number itself

    def __post_init__(self):
        if not self.base_patches < self.max_patches:
            raise ConfigError(
                f"A dynamic shift needs base_patches below max_patches. Received: "
                f"{self.base_patches} and {self.max_patches}"
            )

    def at(self, patches: int) -> float:
        """Return the shift for a picture of so many patches."""
        slope = (self.max_shift - self.base_shift) / (self.max_patches - self.base_patches)
        mu = self.base_shift + slope * (patches - self.base_patches)
        return math.exp(mu) if self.exponential else mu


@dataclass(frozen=True)
class ScheduleConfig:
    """The noise schedule that the model was trained with, and the sampler its makers chose.

    A β schedule is described by its betas, flow matching by its spacing and shifts.
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = SCALED_LINEAR  # scaled_linear | linear
    prediction: str = "epsilon"  # epsilon | v_prediction, or flow
    sampler: str = "pndm"
    steps_offset: int = 1
    set_alpha_to_one: bool = False
    kind: str = "beta"  # beta | flow
    # Flow matching:
    shift: float = 1.0  # how much longer the walk stays at high noise
    spacing: str = "linspace"  # of the steps: linspace, as in SD3 | trailing, as in Flux
    dynamic_shift: DynamicShift | None = None  # in place of the one `shift` for all sizes
    patches: int | None = None  # of the pictures for which `dynamic_shift` is evaluated
    shift_terminal: float | None = None  # the last level's noise, to which all are stretched

    @property
    def is_flow(self) -> bool:
        return self.kind == "flow"

    @property
    def samplers(self) -> tuple[str, ...]:
        """The names of the samplers that walk this kind of schedule."""
        return tuple(name for name, spec in SAMPLERS.items() if spec.is_flow == self.is_flow)

    def check_kind_of(self, sampler: str) -> None:
        """Raise ConfigError if a sampler is for the other kind of schedule."""
        if sampler not in self.samplers:
            raise ConfigError(
                f"The scheduler of a {self.kind} schedule is one of {', '.join(self.samplers)}. "
                f"Received: {sampler!r}"
            )

    def for_patches(self, patches: int) -> "ScheduleConfig":
        """Return the schedule for pictures of one size, whose `shift_here` is known."""
        return self if self.dynamic_shift is None else replace(self, patches=patches)

    @property
    def shift_here(self) -> float:
        """The shift for the pictures' size; ConfigError where it depends on a size not given."""
        if self.dynamic_shift is None:
            return self.shift
        if self.patches is None:
            raise ConfigError(
                "The shift of this schedule depends on the pictures' size. Choose the size first, "
                "with schedule.for_patches(patches)"
            )
        return self.dynamic_shift.at(self.patches)
