"""The configuration of the noise schedule, and the named samplers that walk it."""

from dataclasses import dataclass

SCALED_LINEAR = "scaled_linear"


@dataclass(frozen=True)
class SamplerSpec:
    """A way to walk a noise schedule: the update rule and how its timesteps are chosen.

    Each method in `sampling/methods.py` declares which spacings it honours, and whether Karras.
    """

    method: str
    spacing: str = "leading"  # leading | linspace | trailing
    karras: bool = False


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
}


@dataclass(frozen=True)
class ScheduleConfig:
    """The noise schedule that the model was trained with, and the sampler its makers chose.

    A β schedule is described by its betas, flow matching by `shift` alone.
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
    shift: float = 1.0  # flow: how much longer the walk stays at high noise
