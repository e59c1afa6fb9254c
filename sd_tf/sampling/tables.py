"""A named sampler's table for a schedule and a number of steps, and where a walk starts in it."""

from sd_tf.config import SAMPLERS, ConfigError, ScheduleConfig
from sd_tf.sampling.methods import METHODS
from sd_tf.sampling.rows import Steps
from sd_tf.sampling.schedules import KINDS, lookup


def steps(schedule: ScheduleConfig, sampler: str, num_steps: int) -> Steps:
    """Return a named sampler's table for `num_steps`; its number of rows is `Steps.calls`."""
    check_sampler(schedule, sampler)
    if num_steps not in range(1, schedule.num_train_timesteps):
        raise ConfigError(
            "num_steps must be a whole number, at least 1 and below the schedule's "
            f"{schedule.num_train_timesteps} training timesteps. Received: {num_steps}"
        )
    spec = SAMPLERS[sampler]
    return METHODS[spec.method].table(schedule, spec, int(num_steps))


def check_sampler(schedule: ScheduleConfig, sampler: str) -> None:
    """Raise ConfigError if the sampler asks for what its method or the schedule does not honour."""
    spec = lookup(SAMPLERS, "scheduler", sampler)
    rule = lookup(METHODS, "method", spec.method)
    kind = lookup(KINDS, "kind of schedule", schedule.kind)
    if schedule.prediction not in kind.predictions:
        raise ConfigError(
            f"A {schedule.kind} schedule goes with the prediction "
            f"{' or '.join(kind.predictions)}. Received: {schedule.prediction!r}"
        )
    method = f"the method {spec.method}"
    problems = []
    if schedule.kind not in rule.kinds:
        problems.append(f"{method} does not honour {schedule.kind} schedules")
    for name, honours in ((method, rule), (f"a {schedule.kind} schedule", kind)):
        if spec.spacing not in honours.spacings:
            known = " or ".join(honours.spacings)
            problems.append(f"{name} honours the spacing {known}, not {spec.spacing}")
        if spec.karras and not honours.karras:
            problems.append(f"{name} does not honour Karras")
    if problems:
        raise ConfigError(
            f"The scheduler {sampler!r} cannot be used: {'; '.join(problems)}. Choose another."
        )


def start_row(sampler: str, num_steps: int, strength: float) -> int:
    """Return the row where image-to-image starts: `strength` of the steps are made, not more."""
    if not 0 < strength <= 1:
        raise ConfigError(f"strength must be above 0 and at most 1. Received: {strength}")
    remaining = int(num_steps * strength)
    if remaining < 1:
        raise ConfigError(
            "num_steps × strength must be at least 1, or nothing is left to denoise. "
            f"Received: num_steps={num_steps}, strength={strength}"
        )
    spec = lookup(SAMPLERS, "scheduler", sampler)
    return (num_steps - remaining) * METHODS[spec.method].calls_per_step
