"""The samplers' update rules: each makes a table's rows (`rows.py`) from levels (`schedules.py`).

Values follow diffusers' schedulers and KerasCV's loop, quirks included, but for two bugs: LMS from
the middle (`lms`) and a surplus row at timestep -1 (`schedules.trailing`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sd_tf.config import ConfigError, SamplerSpec, ScheduleConfig
from sd_tf.sampling.rows import HISTORY, VARIANTS, Steps, stack_rows
from sd_tf.sampling.schedules import (
    SPACINGS,
    Level,
    Line,
    convert,
    following,
    leading,
    level_at,
    solver_grid,
    straight_line,
)

LMS_ORDER = 4
LMS_NODES = tuple(zip(*np.polynomial.legendre.leggauss(LMS_ORDER // 2), strict=True))
LCM_ORIGINAL_STEPS = 50  # the DDIM grid that latent consistency models are distilled on
LCM_SIGMA_DATA, LCM_TIMESTEP_SCALING = 0.5, 10.0
PLMS_WEIGHTS = (  # by k; zeros stand at the restart's place in the history
    np.array([1.0]),
    np.array([1, 1]) / 2,
    np.array([3, 0, -1]) / 2,
    np.array([23, -16, 0, 5]) / 12,
    np.array([55, -59, 37, 0, -9]) / 24,
    np.array([55, -59, 37, -9]) / 24,
)


@dataclass(frozen=True)
class Method:
    """An update rule, and which grids it honours; the spacing "flow" is flow matching's."""

    table: Callable[[ScheduleConfig, SamplerSpec, int], Steps]
    spacings: tuple[str, ...]
    karras: bool
    calls_per_step: int  # of the model; image-to-image skips so many rows for each step left out


METHODS: dict[str, Method] = {}


def method(name, *, spacings, karras=False, calls_per_step=1):
    """Enter the decorated table function into METHODS, with what it honours."""

    def enter(table):
        METHODS[name] = Method(table, spacings, karras, calls_per_step)
        return table

    return enter


# Samplers that hold x0 and ε over a step


def _transfer(level, target):
    """Return (a, b) of DDIM's x' = a x + b ε, with x0 and ε held (Song et al. 2020, eq. 12)."""
    a = target.signal / level.signal
    return a, target.noise - a * level.noise


def _ddim_steps(schedule, t, level, target) -> Steps:
    a, b = _transfer(level, target)
    rows = stack_rows(t, convert(schedule.prediction, level, epsilon=1.0), a, [b])
    return Steps(rows, 1.0, *level)


@method("ddim", spacings=("leading", "trailing"))
def ddim(schedule, spec, num_steps) -> Steps:
    """DDIM with η = 0 (Song et al. 2020)."""
    t = SPACINGS[spec.spacing](schedule, num_steps)
    target = t - schedule.num_train_timesteps // num_steps
    return _ddim_steps(schedule, t, level_at(schedule, t), level_at(schedule, target))


def _kerascv_steps(schedule, ascending) -> Steps:
    """Walk down any list of timesteps as KerasCV does, to a sample without noise."""
    t = ascending[::-1]
    level = level_at(schedule, t)
    return _ddim_steps(schedule, t, level, following(level))


@method("kerascv", spacings=("leading",))
def kerascv(schedule, spec, num_steps) -> Steps:
    """KerasCV since January 2024: timesteps evenly from the first to the last."""
    top = schedule.num_train_timesteps - 1
    return _kerascv_steps(schedule, (np.arange(num_steps) * (top / max(num_steps - 1, 1))).round())


@method("kerascv-2022", spacings=("leading",))
def kerascv_2022(schedule, spec, num_steps) -> Steps:
    """KerasCV before 2024. A step count that does not divide the total gives extra rows."""
    total = schedule.num_train_timesteps
    return _kerascv_steps(schedule, np.arange(1.0, total, total // num_steps))


@method("pndm", spacings=("leading",))
def pndm(schedule, spec, num_steps) -> Steps:
    """PLMS (Liu et al. 2022, algorithm 2), without Runge-Kutta steps. Its eq. 9 is DDIM's step."""
    t = leading(schedule, num_steps)
    t = np.concatenate([t[:2], t[1:]])  # the second timestep is visited twice
    stride = schedule.num_train_timesteps // num_steps
    calls, level = len(t), level_at(schedule, t)

    def transfer(t, target):
        """Return (a, b) of x' = a x + b r: raw outputs are kept, only their sum becomes ε."""
        level = level_at(schedule, t)
        a, b = _transfer(level, level_at(schedule, target))
        p, q = convert(schedule.prediction, level, epsilon=1.0)
        return a + b * p, b * q

    a, b = np.zeros((calls, VARIANTS)), np.zeros((HISTORY, calls, VARIANTS))
    plain_a, plain_b = transfer(t, t - stride)
    for k, weights in enumerate(PLMS_WEIGHTS):
        a[:, k] = plain_a
        b[: len(weights), :, k] = np.outer(weights, plain_b)
    # k = 1 goes again from the saved sample x_{i-1} = (x_i - plain_b m_{i-1}) / plain_a.
    again_a, again_b = transfer(t[1:] + stride, t[1:])
    a[1:, 1] = again_a / plain_a[:-1]
    b[:2, 1:, 1] = np.outer(PLMS_WEIGHTS[1], again_b)
    b[1, 1:, 1] -= a[1:, 1] * plain_b[:-1]
    return Steps(stack_rows(t, (0.0, 1.0), a, b), 1.0, *level)


@method("lcm", spacings=("leading",))
def lcm(schedule, spec, num_steps) -> Steps:
    """Latent consistency models (Luo et al. 2023, algorithm 3)."""
    if num_steps > LCM_ORIGINAL_STEPS:
        raise ConfigError(
            f"lcm takes at most {LCM_ORIGINAL_STEPS} steps, those it was distilled on. "
            f"Received: num_steps={num_steps}"
        )
    stride = schedule.num_train_timesteps // LCM_ORIGINAL_STEPS
    grid = np.arange(LCM_ORIGINAL_STEPS, 0, -1.0) * stride - 1.0
    t = grid[np.arange(num_steps) * LCM_ORIGINAL_STEPS // num_steps]
    level = level_at(schedule, t)
    target = following(level)  # the level to which the denoised sample is noised again
    scaled_t = t * LCM_TIMESTEP_SCALING
    c_skip = LCM_SIGMA_DATA**2 / (scaled_t**2 + LCM_SIGMA_DATA**2)
    c_out = scaled_t / np.sqrt(scaled_t**2 + LCM_SIGMA_DATA**2)
    a, b = target.signal * c_skip, target.signal * c_out
    rows = stack_rows(t, convert(schedule.prediction, level, x0=1.0), a, [b], c=target.noise)
    return Steps(rows, 1.0, *level)


# Samplers that walk a straight line: x' = x + slope · (change of noise)


def _line_steps(spec, line: Line, rows) -> Steps:
    """Make the steps along a line from its rows.

    The leading spacing alone starts below the highest noise, and so adds the data's own spread.
    """
    signal, noise = line.level
    initial_scale = np.hypot(signal[0], noise[0]) if spec.spacing == "leading" else noise[0]
    return Steps(rows, float(initial_scale), signal, noise)


@method("euler", spacings=("leading", "linspace", "trailing", "flow"))
def euler(schedule, spec, num_steps) -> Steps:
    """Euler's method (Karras et al. 2022, algorithm 1, with Euler steps only)."""
    line = straight_line(schedule, spec, num_steps)
    change = np.diff(line.level.noise, append=0.0)
    rows = stack_rows(line.timestep, line.slope, 1.0, [change], input_scale=line.input_scale)
    return _line_steps(spec, line, rows)


@method("euler_ancestral", spacings=("leading", "linspace", "trailing"))
def euler_ancestral(schedule, spec, num_steps) -> Steps:
    """Ancestral sampling (Ho et al. 2020) in terms of σ, as in k-diffusion."""
    line = straight_line(schedule, spec, num_steps)
    above, below = line.level.noise, following(line.level).noise
    up = below * np.sqrt(above**2 - below**2) / above
    down = np.sqrt(below**2 - up**2)
    rows = stack_rows(line.timestep, line.slope, 1.0, [down - above], up, line.input_scale)
    return _line_steps(spec, line, rows)


@method("heun", spacings=("leading", "linspace", "trailing", "flow"), calls_per_step=2)
def heun(schedule, spec, num_steps) -> Steps:
    """Heun's method (Karras et al. 2022, algorithm 1): repeat Euler's step with the mean slope.

    Odd rows correct. They find the step's first sample again as x - change · slope_{i-1}; without
    an earlier prediction there is no step to correct, and the sample stays as it is. The last step,
    to no noise at all, is Euler's.
    """
    line = straight_line(schedule, spec, num_steps)
    at = (np.arange(2 * num_steps - 1) + 1) // 2  # each level but the first is visited twice
    change = np.diff(line.level.noise, append=0.0)
    b = np.zeros((2, len(at), VARIANTS))
    b[0, ::2] = change[:, None]
    b[0, 1::2, 1:] = change[:-1, None] / 2.0
    b[1, 1::2, 1:] = -change[:-1, None] / 2.0

    def visited(column):
        return column[at] if np.ndim(column) else column

    scale, slope = visited(line.input_scale), map(visited, line.slope)
    rows = stack_rows(line.timestep[at], slope, 1.0, b, input_scale=scale)
    twice = line._replace(level=Level(*map(visited, line.level)))
    return _line_steps(spec, twice, rows)


@method("lms", spacings=("leading", "linspace", "trailing"))
def lms(schedule, spec, num_steps) -> Steps:
    """Adams-Bashforth on uneven σ, as in k-diffusion.

    The order rises with the history. In diffusers it rises with the row, so image-to-image begins
    there with coefficients of order four over a single prediction.
    """
    line = straight_line(schedule, spec, num_steps)
    sigma = np.append(line.level.noise, 0.0)
    b = np.zeros((LMS_ORDER, num_steps, VARIANTS))
    for k in range(LMS_ORDER):
        for j in range(k + 1):
            b[j, k:, k] = _lagrange_integral(sigma, k + 1, j)
    b[:, :, LMS_ORDER:] = b[:, :, LMS_ORDER - 1, None]
    rows = stack_rows(line.timestep, line.slope, 1.0, b, input_scale=line.input_scale)
    return _line_steps(spec, line, rows)


def _lagrange_integral(sigma, order, j):
    """Integrate σ_{i-j}'s basis polynomial from σ_i to σ_{i+1}, for every i that has `order`."""
    i = np.arange(order - 1, len(sigma) - 1)
    start, end = sigma[i], sigma[i + 1]
    total = np.zeros(len(i))
    for node, weight in LMS_NODES:
        tau = start + (end - start) * (node + 1.0) / 2.0
        others = [sigma[i - m] for m in range(order) if m != j]
        basis = [(tau - other) / (sigma[i - j] - other) for other in others]
        total += weight / 2.0 * np.prod(basis, axis=0)
    return (end - start) * total


# Samplers that solve for x0 over λ = ln(signal / noise)


def _second_order(gain, log_snr):
    """Return b of gain · (m_i + (m_i - m_{i-1}) h_i / (2 h_{i-1})), and h, the steps in λ.

    Second order needs a predecessor, and a target with finite λ: never the last row.
    """
    h = np.diff(log_snr)
    b = np.zeros((3, len(gain), VARIANTS))
    b[0] = gain[:, None]
    correction = gain[1:-1] * h[1:] / (2.0 * h[:-1])
    b[0, 1:-1, 1:] += correction[:, None]
    b[1, 1:-1, 1:] -= correction[:, None]
    return b, h


@method("dpmpp_2m", spacings=("linspace", "flow"), karras=True)
def dpmpp_2m(schedule, spec, num_steps) -> Steps:
    """DPM-Solver++(2M), midpoint (Lu et al. 2022, algorithm 2)."""
    t, level = solver_grid(schedule, spec, num_steps)
    target = following(level)
    a = target.noise / level.noise
    b, _ = _second_order(target.signal - a * level.signal, level.log_snr)
    rows = stack_rows(t, convert(schedule.prediction, level, x0=1.0), a, b)
    return Steps(rows, 1.0, *level)


@method("dpmpp_2m_sde", spacings=("linspace",), karras=True)
def dpmpp_2m_sde(schedule, spec, num_steps) -> Steps:
    """SDE-DPM-Solver++(2M), midpoint (Lu et al. 2022, section 5): each step adds noise."""
    t, level = solver_grid(schedule, spec, num_steps)
    target = following(level)
    decay = target.noise * level.signal / (target.signal * level.noise)  # e^{-h}
    a = target.noise / level.noise * decay
    b, _ = _second_order(target.signal * (1.0 - decay**2), level.log_snr)
    c = target.noise * np.sqrt(1.0 - decay**2)
    rows = stack_rows(t, convert(schedule.prediction, level, x0=1.0), a, b, c)
    return Steps(rows, 1.0, *level)


@method("unipc", spacings=("linspace",), karras=True)
def unipc(schedule, spec, num_steps) -> Steps:
    """UniPC with B2(h) and order 2 (Zhao et al. 2023, algorithms 7 and 8).

    The predictor, DPM-Solver++(2M), made x_i from the corrected sample before it. With m_i known,
    the corrector makes the step to x_i again. Both add their sums of m to the same multiple of that
    sample, so x_i is corrected by the difference of the sums; the predictor goes on from there.
    """
    t, level = solver_grid(schedule, spec, num_steps)
    target = following(level)
    a = target.noise / level.noise
    gain = target.signal - a * level.signal
    predicted, h = _second_order(gain, level.log_snr)
    corrected = _unipc_corrector(gain[:-1], h)
    corrected[1:, 1:, 1:] -= predicted[:2, :-1, :-1]  # what was predicted without m_i
    b = predicted.copy()
    b[:, 1:, 1:] += (a[:, None] * corrected)[:, 1:, 1:]
    rows = stack_rows(t, convert(schedule.prediction, level, x0=1.0), a, b)
    return Steps(rows, 1.0, *level)


def _unipc_corrector(gain, h):
    """Return the corrector's sum over m_i, m_{i-1}, m_{i-2} for the step that led to each row."""
    growth = np.expm1(-h)
    first = (-growth / h - 1.0) / growth
    second = -2.0 * (first / h + 0.5 / growth)
    b = np.zeros((3, len(h) + 1, VARIANTS))
    b[0, 1:, 1] = b[1, 1:, 1] = gain / 2.0
    # Order two, from the third row on: ρ solves ρ1 + ρ2 = first, r ρ1 + ρ2 = second.
    r = -h[:-1] / h[1:]
    rho = (first - second)[1:] / (1.0 - r)
    now, before = first[1:] - rho, rho / r
    for j, weight in enumerate((now, 1.0 - now - before, before)):
        b[j, 2:, 2:] = (gain[1:] * weight)[:, None]
    return b
