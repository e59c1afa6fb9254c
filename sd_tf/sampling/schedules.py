"""Noise levels: those that a model was trained on, and those that a walk visits.

A level is a pair (signal, noise): a sample there is x = signal x0 + noise ε. For a β schedule the
pair is (√ᾱ, √(1-ᾱ)), for flow matching (1-σ, σ). Samplers compute their rows from levels alone, so
they need not know which kind of schedule they walk.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sd_tf.config import ConfigError, SamplerSpec, ScheduleConfig

BETA_POWERS = {"linear": 1, "scaled_linear": 2}  # of the quantity that is evenly spaced
KARRAS_RHO = 7.0


class Level(NamedTuple):
    """A noise level, or an array of them: x = signal x0 + noise ε."""

    signal: np.ndarray
    noise: np.ndarray

    @property
    def log_snr(self) -> np.ndarray:
        """λ = ln(signal / noise); minus infinity where there is no signal."""
        with np.errstate(divide="ignore"):
            return np.log(self.signal) - np.log(self.noise)


# Kind of schedule → the predictions that go with it.
KINDS = {"beta": ("epsilon", "v_prediction"), "flow": ("flow",)}


def lookup(table, what: str, name: str):
    if name not in table:
        raise ConfigError(f"Unknown {what} {name!r}. Known: {', '.join(table)}.")
    return table[name]


# Predictions


# The model's output at a level as its parts of ε and of x0: output = α ε + β x0.
PREDICTIONS = {
    "epsilon": lambda level: (1.0, 0.0),
    "v_prediction": lambda level: (level.signal, -level.noise),
    "flow": lambda level: (1.0, -1.0),
}


def convert(prediction: str, level: Level, epsilon=0.0, x0=0.0, input_scale=1.0):
    """Return (p, q) such that p x + q output is the wanted `epsilon` ε + `x0` x0.

    The model is given input_scale x, which is at `level`. The two equations
    input_scale x = signal x0 + noise ε and output = α ε + β x0 are solved for x0 and ε.
    """
    signal, noise = level
    alpha, beta = PREDICTIONS[prediction](level)
    determinant = signal * alpha - noise * beta
    p = (x0 * alpha - epsilon * beta) / determinant
    q = (epsilon * signal - x0 * noise) / determinant
    return p * input_scale, q


# β schedules


@lru_cache(maxsize=8)
def abar(schedule: ScheduleConfig) -> np.ndarray:
    """Return ᾱ of every training timestep, (num_train_timesteps,), read-only.

    Rounded to float32 where diffusers rounds: σ(0) is 1e-5 off without, and the whole timesteps
    of the Karras grid then fall to the other side for one step count in four.
    """
    if schedule.is_flow:
        raise ConfigError(f"Only a beta schedule has ᾱ. Received: a {schedule.kind} schedule")
    power = lookup(BETA_POWERS, "beta_schedule", schedule.beta_schedule)
    ends = schedule.beta_start ** (1 / power), schedule.beta_end ** (1 / power)
    betas = np.linspace(*ends, schedule.num_train_timesteps).astype(np.float32) ** power
    alphas = (1 - betas).astype(np.float64)
    result = np.cumprod(alphas).astype(np.float32).astype(np.float64)
    result.flags.writeable = False
    return result


@lru_cache(maxsize=8)
def _ratios(schedule: ScheduleConfig) -> np.ndarray:
    """Return noise / signal of every training timestep, k-diffusion's σ."""
    alphas = abar(schedule)
    return np.sqrt((1.0 - alphas) / alphas)


def _level_of_abar(abar_t) -> Level:
    return Level(np.sqrt(abar_t), np.sqrt(1.0 - abar_t))


def level_at(schedule: ScheduleConfig, t) -> Level:
    """Return the levels of whole timesteps; a timestep below zero is the end of the walk."""
    alphas = abar(schedule)
    final = 1.0 if schedule.set_alpha_to_one else alphas[0]
    return _level_of_abar(np.where(t < 0, final, alphas[np.maximum(t, 0).astype(int)]))


def following(level: Level) -> Level:
    """Return each level's successor; the last one's is a sample without noise."""
    return Level(np.append(level.signal[1:], 1.0), np.append(level.noise[1:], 0.0))


# Spacings: timesteps, descending. Lin et al. 2023, "Common Diffusion Noise Schedules", table 2.


def leading(schedule: ScheduleConfig, num_steps: int) -> np.ndarray:
    stride = schedule.num_train_timesteps // num_steps
    return (np.arange(num_steps) * stride)[::-1] + float(schedule.steps_offset)


def linspace(schedule: ScheduleConfig, num_steps: int) -> np.ndarray:
    return np.linspace(0.0, schedule.num_train_timesteps - 1, num_steps)[::-1]


def trailing(schedule: ScheduleConfig, num_steps: int) -> np.ndarray:
    total = schedule.num_train_timesteps  # arange can round to one more: 61, 103, 121, 122, ...
    return np.arange(total, 0, -total / num_steps)[:num_steps].round() - 1.0


SPACINGS = {"leading": leading, "linspace": linspace, "trailing": trailing}


# Flow matching: σ, descending from 1. SD3's pipelines space it like linspace, Flux's like trailing.


def _shifted(schedule: ScheduleConfig, sigma):
    """Shift σ to keep the signal-to-noise ratio of larger pictures (Esser et al. 2024, eq. 23)."""
    scaled = schedule.shift_here * sigma
    return scaled / (scaled + (1.0 - sigma))  # exactly 1 where σ is


def _linspace_end(schedule, num_steps):
    """Return the σ of the last training timestep, from which diffusers' schedulers space.

    A shift that all sizes share has already shifted it, and shifts it again with the others.
    """
    lowest = 1.0 / schedule.num_train_timesteps
    return _shifted(schedule, lowest) if schedule.dynamic_shift is None else lowest


# Spacing → the last σ before the shift; those before it are evenly spaced.
FLOW_ENDS = {"linspace": _linspace_end, "trailing": lambda schedule, num_steps: 1.0 / num_steps}


def flow_sigmas(schedule: ScheduleConfig, num_steps: int) -> np.ndarray:
    """Return σ of every step: spaced, shifted, and stretched to end at `shift_terminal`."""
    end = FLOW_ENDS[schedule.spacing](schedule, num_steps)
    sigma = _shifted(schedule, np.linspace(1.0, end, num_steps))
    if schedule.shift_terminal is None:
        return sigma
    if num_steps == 1:
        raise ConfigError(
            "A schedule with shift_terminal takes at least 2 steps: the first is at full noise and "
            "the last at shift_terminal. Received: num_steps=1"
        )
    return 1.0 - (1.0 - sigma) * ((1.0 - schedule.shift_terminal) / (1.0 - sigma[-1]))


def training_levels(schedule: ScheduleConfig) -> Level:
    """Return the levels of all timesteps of training, the noisiest last."""
    count = schedule.num_train_timesteps
    if not schedule.is_flow:
        return _level_of_abar(abar(schedule))
    sigma = _shifted(schedule, np.arange(1, count + 1) / count)
    return Level(1.0 - sigma, sigma)


# Grids: the timesteps that a walk visits, and their levels


class Grid(NamedTuple):
    """The levels that a walk visits, the noisiest first; its end, without noise, is left out."""

    timestep: np.ndarray
    level: Level


def spaced_grid(schedule: ScheduleConfig, spec: SamplerSpec, num_steps: int) -> Grid:
    """Space timesteps as the sampler wants; levels between two of them are interpolated."""
    if schedule.is_flow:
        return _flow_grid(schedule, num_steps)
    return _beta_grid(schedule, SPACINGS[spec.spacing](schedule, num_steps))


def solver_grid(schedule: ScheduleConfig, spec: SamplerSpec, num_steps: int) -> Grid:
    """Return the grid of DPM-Solver and UniPC.

    They ask a model of a β schedule at whole timesteps only.
    """
    if schedule.is_flow:
        return _flow_grid(schedule, num_steps)
    if spec.karras:
        return _karras_grid(schedule, num_steps)
    return _beta_grid(schedule, linspace(schedule, num_steps + 1)[:-1].round())


def _flow_grid(schedule, num_steps) -> Grid:
    sigma = flow_sigmas(schedule, num_steps)
    return Grid(sigma * schedule.num_train_timesteps, Level(1.0 - sigma, sigma))


def _beta_grid(schedule, t) -> Grid:
    ratio = np.interp(t, np.arange(schedule.num_train_timesteps), _ratios(schedule))
    return Grid(t, _level_of_abar(1.0 / (ratio**2 + 1.0)))


def _karras_grid(schedule, num_steps) -> Grid:
    """Space σ by Karras et al. 2022, eq. 5; the model is asked at the nearest whole timestep."""
    ratios = _ratios(schedule)
    high, low = ratios[-1] ** (1.0 / KARRAS_RHO), ratios[0] ** (1.0 / KARRAS_RHO)
    ratio = (high + np.linspace(0.0, 1.0, num_steps) * (low - high)) ** KARRAS_RHO
    t = np.interp(np.log(ratio), np.log(ratios), np.arange(len(ratios))).round()
    return Grid(t, _level_of_abar(1.0 / (ratio**2 + 1.0)))


class Line(NamedTuple):
    """A grid on which a sample with fixed x0 and ε moves along a straight line over the noise."""

    timestep: np.ndarray
    level: Level  # of the sample as the sampler keeps it
    input_scale: np.ndarray | float  # from there to what the model is given
    slope: tuple  # (p, q) of dx / dnoise = p x + q output


def straight_line(schedule: ScheduleConfig, spec: SamplerSpec, num_steps: int) -> Line:
    """Scale a grid's samples such that Euler's, Heun's and Adams' methods can walk it.

    Flow matching is straight by itself: x = (1-σ) x0 + σ ε, so the slope is ε - x0. Samples of a β
    schedule are divided by their signal, x = x0 + σ ε, so it is ε (Karras et al. 2022).
    """
    t, level = spaced_grid(schedule, spec, num_steps)
    if schedule.is_flow:
        return Line(t, level, 1.0, convert(schedule.prediction, level, epsilon=1.0, x0=-1.0))
    slope = convert(schedule.prediction, level, epsilon=1.0, input_scale=level.signal)
    scaled = Level(np.ones(len(t)), level.noise / level.signal)
    return Line(t, scaled, level.signal, slope)
