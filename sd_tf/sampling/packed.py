"""All samplers and step counts in a few arrays, so that a call can choose among them."""

import functools
from dataclasses import dataclass

import numpy as np

from sd_tf.config import SAMPLERS, ConfigError, ScheduleConfig
from sd_tf.sampling.tables import check_sampler, steps


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of all runs behind one another; a run is found by sampler and step count.

    Samplers that cannot walk the schedule keep their place, with no calls and no rows.
    """

    rows: np.ndarray  # (all calls, VARIANTS, len(COLUMNS))
    signals: np.ndarray  # (all calls,)
    sigmas: np.ndarray  # (all calls,)
    starts: np.ndarray  # (samplers, max_steps): a run's first row
    calls: np.ndarray  # (samplers, max_steps): its number of rows, 0 where there is no such run
    scales: np.ndarray  # (samplers, max_steps)

    @property
    def numbers(self) -> dict[str, int]:
        """Each sampler's number, its row of `starts`, `calls` and `scales`."""
        return {name: i for i, name in enumerate(SAMPLERS) if self.calls[i].any()}

    def calls_by_sampler(self) -> dict[str, list[int]]:
        """Return the model calls for 1…max_steps steps; 0 where a sampler has no such run."""
        return {name: self.calls[number].tolist() for name, number in self.numbers.items()}


@functools.lru_cache(maxsize=8)  # an export asks several times for the tables of each size
def pack(schedule: ScheduleConfig, max_steps: int) -> Packed:
    """Make the tables of every sampler that can walk the schedule, for 1…max_steps steps.

    Where the shift depends on the pictures' size, the schedule is one size's (`for_patches`); all
    sizes have the same runs, only their rows differ.

    Raises:
        ConfigError: the schedule's own sampler has no run of so few steps.
    """
    check_sampler(schedule, schedule.sampler)
    _check_most(schedule, max_steps)
    rows, starts, calls, scales, signals, sigmas = [], [], [], [], [], []
    offset = 0
    for sampler in SAMPLERS:
        for count in range(1, max_steps + 1):
            starts.append(offset)
            try:
                run = steps(schedule, sampler, count)
            except ConfigError:  # not every sampler has every schedule and step count
                calls.append(0)
                scales.append(1.0)
                continue
            calls.append(run.calls)
            scales.append(run.initial_scale)
            rows.append(run.rows)
            signals.append(run.signal)
            sigmas.append(run.sigma)
            offset += run.calls
    shape = (len(SAMPLERS), max_steps)
    return Packed(
        np.concatenate(rows).astype("float32"),
        np.concatenate(signals).astype("float32"),
        np.concatenate(sigmas).astype("float32"),
        np.reshape(starts, shape).astype("int32"),
        np.reshape(calls, shape).astype("int32"),
        np.reshape(scales, shape).astype("float32"),
    )


def _check_most(schedule: ScheduleConfig, max_steps: int) -> None:
    for count in range(1, schedule.num_train_timesteps):
        try:
            steps(schedule, schedule.sampler, count)
        except ConfigError:
            continue
        if count > max_steps:
            raise ConfigError(
                f"max_steps must be at least {count} for this schedule, whose scheduler "
                f"{schedule.sampler} has no run of fewer steps. Received: {max_steps}"
            )
        return
