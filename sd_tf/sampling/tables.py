"""A named sampler's table for a schedule and a number of steps, and where a walk starts in it."""

from sd_tf.config import SAMPLERS, ConfigError, ScheduleConfig
from sd_tf.sampling.methods import METHODS
from sd_tf.sampling.rows import Steps
from sd_tf.sampling.schedules import FLOW_ENDS, KINDS, lookup


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
    predictions = lookup(KINDS, "kind of schedule", schedule.kind)
    if schedule.prediction not in predictions:
        raise ConfigError(
            f"A {schedule.kind} schedule goes with the prediction "
            f"{' or '.join(predictions)}. Received: {schedule.prediction!r}"
        )
    schedule.check_kind_of(sampler)
    problems = []
    if spec.spacing not in rule.spacings:
        known = " or ".join(rule.spacings)
        problems.append(f"the method {spec.method} honours the spacing {known}, not {spec.spacing}")
    if spec.karras and not rule.karras:
        problems.append(f"the method {spec.method} does not honour Karras")
    if spec.karras and spec.is_flow:
        problems.append("a flow schedule does not honour Karras")
    if problems:
        raise ConfigError(
            f"The scheduler {sampler!r} cannot be used: {'; '.join(problems)}. Choose another."
        )
    if schedule.is_flow:
        _check_flow(schedule)


def _check_flow(schedule: ScheduleConfig) -> None:
    lookup(FLOW_ENDS, "spacing of a flow schedule", schedule.spacing)
    if not schedule.shift_here > 0:
        raise ConfigError(f"A flow's shift must be above 0. Received: {schedule.shift_here}")
    terminal = schedule.shift_terminal
    if terminal is not None and not 0 < terminal < 1:
        raise ConfigError(f"shift_terminal must be above 0 and below 1. Received: {terminal}")


def start_row(sampler: str, num_steps: int, strength: float) -> int:
    """Return the row where image-to-image starts: `strength` of the steps are made.

    As in diffusers, a fraction of a step is left out, but in flow matching it is made.
    """
    if not 0 < strength <= 1:
        raise ConfigError(f"strength must be above 0 and at most 1. Received: {strength}")
    spec = lookup(SAMPLERS, "scheduler", sampler)
    made = num_steps * strength
    skipped = min(int(num_steps - made), num_steps - 1) if spec.is_flow else num_steps - int(made)
    if skipped == num_steps:
        raise ConfigError(
            "num_steps × strength must be at least 1, or nothing is left to denoise. "
            f"Received: num_steps={num_steps}, strength={strength}"
        )
    return skipped * METHODS[spec.method].calls_per_step
