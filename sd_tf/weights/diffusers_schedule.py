"""The scheduler_config.json of a diffusers folder ↔ `ScheduleConfig`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sd_tf.config import SAMPLERS, ConfigError, DynamicShift, SamplerSpec, ScheduleConfig
from sd_tf.weights.diffusers_fields import Fields

BETAS = (0.0001, 0.02, "linear")  # most classes' defaults: start, end, schedule
# Fields that not all classes have: from one that lacks them, diffusers ignores them.
SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
SWITCHES = ("rescale_betas_zero_snr", "use_flow_sigmas", "use_lu_lambdas", *SIGMAS)


@dataclass(frozen=True)
class Peer:
    """A scheduler class of diffusers that computes what one of our methods computes."""

    class_name: str
    method: str
    spacing: str = "linspace"  # the class's default; flow: of a flow schedule
    betas: tuple[float, float, str] = BETAS
    set_alpha_to_one: bool | None = None  # the class's default; None: it has no such field
    switches: tuple[str, ...] = ()  # those of SWITCHES that it has
    fixed_spacing: bool = False  # whether it ignores timestep_spacing
    karras_replaces_spacing: bool = False  # whether it ignores it with use_karras_sigmas
    fixed_shift: bool = True  # whether a flow has one shift for all sizes, and no shift_terminal
    # Field → the class's default, and the value that we compute.
    required: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def is_flow(self) -> bool:
        return self.spacing == "flow"

    @property
    def karras(self) -> bool:
        """Whether it has the field use_karras_sigmas, and we compute it."""
        return "use_karras_sigmas" in self.switches and not self.is_flow

    def matches(self, raw: Mapping) -> int:
        """Count the required fields of which a file has the value that we compute."""
        required = self.required.items()
        return sum(raw.get(name, default) == ours for name, (default, ours) in required)


def _unchanged(**defaults):
    """Require each field's default."""
    return {name: (value, value) for name, value in defaults.items()}


MULTISTEP = _unchanged(
    solver_order=2,
    lower_order_final=True,
    final_sigmas_type="zero",
    thresholding=False,
    use_dynamic_shifting=False,
)
DPM = {
    **MULTISTEP,
    **_unchanged(solver_type="midpoint", euler_at_final=False, variance_type=None),
}
PEERS = (
    Peer(
        "DDIMScheduler",
        "ddim",
        spacing="leading",
        set_alpha_to_one=True,
        switches=("rescale_betas_zero_snr",),
        required={"clip_sample": (True, False), **_unchanged(thresholding=False)},
    ),
    Peer(
        "PNDMScheduler",
        "pndm",
        spacing="leading",
        set_alpha_to_one=False,
        required={"skip_prk_steps": (False, True)},
    ),
    Peer(
        "EulerDiscreteScheduler",
        "euler",
        switches=("rescale_betas_zero_snr", *SIGMAS),
        required=_unchanged(
            interpolation_type="linear",
            final_sigmas_type="zero",
            timestep_type="discrete",
            sigma_min=None,
            sigma_max=None,
        ),
    ),
    Peer(
        "EulerAncestralDiscreteScheduler",
        "euler_ancestral",
        switches=("rescale_betas_zero_snr",),
    ),
    Peer(
        "HeunDiscreteScheduler",
        "heun",
        betas=(0.00085, 0.012, "linear"),
        switches=SIGMAS,
        required=_unchanged(clip_sample=False),
    ),
    Peer(
        "DPMSolverMultistepScheduler",
        "dpmpp_2m",
        switches=SWITCHES,
        karras_replaces_spacing=True,
        required={"algorithm_type": ("dpmsolver++", "dpmsolver++"), **DPM},
    ),
    Peer(
        "DPMSolverMultistepScheduler",
        "dpmpp_2m_sde",
        switches=SWITCHES,
        karras_replaces_spacing=True,
        required={"algorithm_type": ("dpmsolver++", "sde-dpmsolver++"), **DPM},
    ),
    Peer(
        "UniPCMultistepScheduler",
        "unipc",
        switches=("rescale_betas_zero_snr", "use_flow_sigmas", *SIGMAS),
        karras_replaces_spacing=True,
        required={
            **MULTISTEP,
            **_unchanged(solver_type="bh2", predict_x0=True, disable_corrector=[], solver_p=None),
            **_unchanged(sigma_min=None, sigma_max=None, shift_terminal=None),
        },
    ),
    Peer("LMSDiscreteScheduler", "lms", switches=SIGMAS),
    Peer(
        "LCMScheduler",
        "lcm",
        spacing="leading",
        betas=(0.00085, 0.012, "scaled_linear"),
        set_alpha_to_one=True,
        switches=("rescale_betas_zero_snr",),
        fixed_spacing=True,
        required=_unchanged(
            clip_sample=False,
            thresholding=False,
            original_inference_steps=50,
            timestep_scaling=10.0,
        ),
    ),
    Peer(
        "FlowMatchEulerDiscreteScheduler",
        "euler",
        spacing="flow",
        switches=SIGMAS,
        fixed_shift=False,
        required=_unchanged(use_karras_sigmas=False, stochastic_sampling=False),
    ),
    Peer("FlowMatchHeunDiscreteScheduler", "heun", spacing="flow"),
)
KERASCV_AS_DIFFUSERS = {"kerascv": "ddim", "kerascv-2022": "ddim"}
DYNAMIC_SHIFT = {  # field → ours
    "base_shift": "base_shift",
    "max_shift": "max_shift",
    "base_image_seq_len": "base_patches",
    "max_image_seq_len": "max_patches",
}
TIME_SHIFTS = {"exponential": True, "linear": False}

# Fields that qualify a switch which is off, and those that only another class reads, from whose
# file diffusers' `from_config` keeps them.
QUALIFIERS = (
    *("clip_sample_range", "dynamic_thresholding_ratio", "flow_shift", "lambda_min_clipped"),
    *("sample_max_value", "time_shift_type", *DYNAMIC_SHIFT),
)
HARMLESS = {*QUALIFIERS, "set_alpha_to_one"}.union(*(peer.required for peer in PEERS))


def read_schedule(
    raw,
    where: str,
    sampler: str | None = None,
    *,
    flow_spacing: str = "linspace",
    betas_fields: Mapping[str, Any] = MappingProxyType({}),
) -> ScheduleConfig:
    """Read a scheduler's file.

    Args:
        sampler: replaces the file's own choice, and with it the fields that only that one reads.
        flow_spacing: `ScheduleConfig.spacing` of flow matching, which depends on the pipeline's
            class and is not in the file: "trailing" for Flux, "linspace" for SD3.
        betas_fields: the fields of a β schedule that the pipeline's class sets, whatever is in the
            file.
    """
    class_name = raw.get("_class_name")
    is_flow = str(class_name).startswith("FlowMatch")
    if not is_flow:
        raw = {**raw, **betas_fields}
    peers = [peer for peer in PEERS if peer.class_name == class_name]
    if sampler is None and not peers:
        known = ", ".join(dict.fromkeys(peer.class_name for peer in PEERS))
        raise ConfigError(
            f"{where}: the scheduler {class_name!r} is unknown; known: {known}. "
            f"{_choose_another(SAMPLERS)}"
        )
    # Another sampler may have the switches that the file's own lacks.
    read = SWITCHES if sampler is not None else peers[0].switches
    ignored = set(SWITCHES) - set(read)
    fields = Fields({name: value for name, value in raw.items() if name not in ignored}, where)
    if is_flow:
        schedule = _read_flow(fields, bool(peers) and peers[0].fixed_shift, flow_spacing)
    else:
        schedule = _read_betas(fields, peers[0].betas if peers else BETAS)
    if sampler is not None:
        names = () if is_flow else ("steps_offset", "set_alpha_to_one")
        kept = {name: fields.take(name, getattr(schedule, name)) for name in names}
        return replace(schedule, sampler=sampler, **kept)

    peer = max(peers, key=lambda peer: peer.matches(raw))  # one class can stand for two methods
    for name, (default, ours) in peer.required.items():
        fields.require(name, ours, default=default)
    for name in ("use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"):
        fields.require(name, False, None, default=False)
    if is_flow:
        spec = SamplerSpec(peer.method, peer.spacing)
    else:
        spacing = fields.take("timestep_spacing", peer.spacing)
        karras = bool(fields.take("use_karras_sigmas", False))
        is_ignored = peer.fixed_spacing or (karras and peer.karras_replaces_spacing)
        spec = SamplerSpec(peer.method, peer.spacing if is_ignored else spacing, karras)
        schedule = replace(
            schedule,
            steps_offset=fields.take("steps_offset", 0),
            set_alpha_to_one=fields.take("set_alpha_to_one", bool(peer.set_alpha_to_one)),
        )
    schedule = replace(schedule, sampler=_name_of(spec, schedule, where, class_name))
    fields.finish(HARMLESS)
    return schedule


def _choose_another(samplers: Iterable[str]) -> str:
    return f"Choose another for this checkpoint with `scheduler`: one of {', '.join(samplers)}."


def _name_of(spec: SamplerSpec, schedule: ScheduleConfig, where: str, class_name: str) -> str:
    names = {spec: name for name, spec in SAMPLERS.items()}
    if spec not in names:
        raise ConfigError(
            f"{where}: {class_name} with timestep_spacing={spec.spacing!r} and "
            f"use_karras_sigmas={spec.karras} is not supported. "
            f"{_choose_another(schedule.samplers)}"
        )
    return names[spec]


def _read_betas(fields: Fields, defaults) -> ScheduleConfig:
    start, end, shape = defaults
    schedule = ScheduleConfig(
        num_train_timesteps=fields.take("num_train_timesteps", 1000),
        beta_start=fields.take("beta_start", start),
        beta_end=fields.take("beta_end", end),
        beta_schedule=fields.choose(
            "beta_schedule", {"scaled_linear": "scaled_linear", "linear": "linear"}, shape
        ),
        prediction=fields.choose(
            "prediction_type",
            {"epsilon": "epsilon", "v_prediction": "v_prediction"},
            "epsilon",
        ),
    )
    fields.require("trained_betas", None, default=None)
    for name in ("rescale_betas_zero_snr", "use_flow_sigmas"):
        fields.require(name, False, None, default=False)
    return schedule


def _read_flow(fields: Fields, fixed_shift: bool, spacing: str) -> ScheduleConfig:
    fields.require("invert_sigmas", False, None, default=False)
    dynamic_shift = shift_terminal = None
    if fixed_shift:  # a class that would not read these fields
        fields.require("use_dynamic_shifting", False, None, default=False)
        fields.require("shift_terminal", None, default=None)
    else:
        if fields.take("use_dynamic_shifting", False):
            dynamic_shift = _read_dynamic_shift(fields)
        shift_terminal = fields.take("shift_terminal", None)
    return ScheduleConfig(
        num_train_timesteps=fields.take("num_train_timesteps", 1000),
        kind="flow",
        prediction="flow",
        shift=fields.take("shift", 1.0),
        spacing=spacing,
        dynamic_shift=dynamic_shift,
        shift_terminal=None if shift_terminal == 0 else shift_terminal,  # diffusers has 0 for none
    )


def _read_dynamic_shift(fields: Fields) -> DynamicShift:
    default = DynamicShift()
    numbers = {
        ours: fields.take(theirs, getattr(default, ours)) for theirs, ours in DYNAMIC_SHIFT.items()
    }
    exponential = fields.choose("time_shift_type", TIME_SHIFTS, "exponential")
    return DynamicShift(**numbers, exponential=exponential)


def write_schedule(config: ScheduleConfig) -> dict:
    """Return the content of the file that `read_schedule` reads back."""
    spec = SAMPLERS[KERASCV_AS_DIFFUSERS.get(config.sampler, config.sampler)]
    peers = {(peer.method, peer.is_flow): peer for peer in PEERS}
    peer = peers.get((spec.method, spec.is_flow))
    if peer is None or peer.is_flow != config.is_flow:
        raise ConfigError(
            f"diffusers has no scheduler that walks a {config.kind} schedule as "
            f"{config.sampler} does. {_choose_another(config.samplers)}"
        )
    content = {"_class_name": peer.class_name, "num_train_timesteps": config.num_train_timesteps}
    if config.is_flow:
        content |= _flow_fields(config, peer)
    else:
        content |= {
            "beta_start": config.beta_start,
            "beta_end": config.beta_end,
            "beta_schedule": config.beta_schedule,
            "prediction_type": config.prediction,
            "timestep_spacing": spec.spacing,
            "steps_offset": config.steps_offset,
        }
    if peer.set_alpha_to_one is not None:
        content["set_alpha_to_one"] = config.set_alpha_to_one
    if peer.karras:
        content["use_karras_sigmas"] = spec.karras
    changed = {name: ours for name, (default, ours) in peer.required.items() if ours != default}
    return content | changed


def _flow_fields(config: ScheduleConfig, peer: Peer) -> dict:
    content = {"shift": config.shift}
    if peer.fixed_shift:
        if config.dynamic_shift is not None or config.shift_terminal is not None:
            raise ConfigError(
                f"diffusers' {peer.class_name} has no dynamic shift and no shift_terminal, so a "
                f"schedule with either cannot be written for {config.sampler}. "
                f"{_choose_another(['flow_euler'])}"
            )
        return content
    dynamic = config.dynamic_shift
    content |= {
        "use_dynamic_shifting": dynamic is not None,
        "shift_terminal": config.shift_terminal,
    }
    if dynamic is not None:
        content |= {theirs: getattr(dynamic, ours) for theirs, ours in DYNAMIC_SHIFT.items()}
        names = {ours: theirs for theirs, ours in TIME_SHIFTS.items()}
        content["time_shift_type"] = names[dynamic.exponential]
    return content
