"""A sampler as a table: NumPy, float64, computed once and gathered row by row in the loop.

Every sampler here is linear in the sample and in the last predictions. With r_i the model's raw
output at row i (after guidance), m_i what the sampler keeps of it, and fresh unit noise:

    m_i     = p_i x_i + q_i r_i
    x_{i+1} = a_i x_i + Σ_{j < HISTORY} b_{i,j} m_{i-j} + c_i noise_i

The model sees input_scale_i x_i at timestep_i. A table has one row per model call. Image-to-image
starts in the middle, where there is no history yet, so each row has VARIANTS: the one to take is
k = min(i - start, VARIANTS - 1), the number of earlier predictions. The loop shifts every m_i into
its history, starting from zeros.

PNDM sets both sizes. Its second call restarts from the saved sample and is left out of the
multistep formula, yet sits in the loop's history: order four then reaches back over it to m_{i-4}
in the fifth call (k = 4), and is the ordinary formula from the sixth (k = 5) on.

Values follow diffusers' schedulers and KerasCV's loop, quirks included, but for two bugs: LMS from
the middle (`_lms`) and a surplus row at timestep -1 (`_trailing`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sd_tf.config import SAMPLERS, ConfigError, ScheduleConfig

HISTORY = 5  # the current prediction and the four before it
VARIANTS = 6  # 0 to 4 earlier predictions, and more
COLUMNS = ("timestep", "input_scale", "p", "q", "a", *(f"b{j}" for j in range(HISTORY)), "c")

BETA_POWERS = {"linear": 1, "scaled_linear": 2}  # of what runs evenly from start to end
KARRAS_RHO = 7.0
LMS_ORDER = 4
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


@dataclass(frozen=True, eq=False)
class Steps:
    """A walk; image-to-image starts it at row i from signal_i latents + sigma_i noise."""

    rows: np.ndarray  # (calls, VARIANTS, len(COLUMNS))
    initial_scale: float  # of the unit noise that text-to-image starts from
    signal: np.ndarray  # (calls,)
    sigma: np.ndarray  # (calls,)

    @property
    def calls(self) -> int:
        return len(self.rows)


class Level(NamedTuple):
    """A noise level: x = signal x0 + noise ε, with signal² + noise² = 1."""

    signal: np.ndarray
    noise: np.ndarray


def steps(schedule: ScheduleConfig, sampler: str, num_steps: int) -> Steps:
    """The table of a named sampler for `num_steps`; its number of rows is `Steps.calls`."""
    spec = _lookup(SAMPLERS, "scheduler", sampler)
    if num_steps not in range(1, schedule.num_train_timesteps):
        raise ConfigError(
            "num_steps must be a whole number, at least 1 and below the schedule's "
            f"{schedule.num_train_timesteps} training timesteps. Received: {num_steps}"
        )
    return METHODS[spec.method](schedule, spec, int(num_steps))


def start_row(num_steps: int, strength: float) -> int:
    """The row where image-to-image starts: `strength` of the way is walked, the rest skipped."""
    if not 0 < strength <= 1:
        raise ConfigError(f"strength must be above 0 and at most 1. Received: {strength}")
    remaining = int(num_steps * strength)
    if remaining < 1:
        raise ConfigError(
            "num_steps × strength must be at least 1, or nothing is left to denoise. "
            f"Received: num_steps={num_steps}, strength={strength}"
        )
    return num_steps - remaining


def abar(schedule: ScheduleConfig) -> np.ndarray:
    """ᾱ of every training timestep: (num_train_timesteps,).

    Rounded to float32 where diffusers rounds: σ(0) is 1e-5 off without, and the whole timesteps
    of the Karras grid then fall to the other side for one step count in four.
    """
    power = _lookup(BETA_POWERS, "beta_schedule", schedule.beta_schedule)
    ends = schedule.beta_start ** (1 / power), schedule.beta_end ** (1 / power)
    betas = np.linspace(*ends, schedule.num_train_timesteps).astype(np.float32) ** power
    alphas = (1 - betas).astype(np.float64)
    return np.cumprod(alphas).astype(np.float32).astype(np.float64)


def _lookup(table, what, name):
    if name not in table:
        raise ConfigError(f"Unknown {what} {name!r}. Known: {', '.join(table)}.")
    return table[name]


def _level(abar_t) -> Level:
    return Level(np.sqrt(abar_t), np.sqrt(1.0 - abar_t))


def _level_of_sigma(sigma) -> Level:
    """σ = noise / signal."""
    return _level(1.0 / (sigma**2 + 1.0))


def _sigmas(schedule) -> np.ndarray:
    alphas = abar(schedule)
    return np.sqrt((1.0 - alphas) / alphas)


def _following(level) -> Level:
    """Every row's target where that is the next row's level, and in the end no noise."""
    return Level(np.append(level.signal[1:], 1.0), np.append(level.noise[1:], 0.0))


def _level_at(schedule, t) -> Level:
    """The level at whole timesteps; below zero lies the end of the walk."""
    alphas = abar(schedule)
    final = 1.0 if schedule.set_alpha_to_one else alphas[0]
    return _level(np.where(t < 0, final, alphas[np.maximum(t, 0).astype(int)]))


# Timesteps, descending: Lin et al. 2023, "Common Diffusion Noise Schedules", table 2.


def _leading(schedule, num_steps):
    stride = schedule.num_train_timesteps // num_steps
    return (np.arange(num_steps) * stride)[::-1] + float(schedule.steps_offset)


def _linspace(schedule, num_steps):
    return np.linspace(0.0, schedule.num_train_timesteps - 1, num_steps)[::-1]


def _trailing(schedule, num_steps):
    total = schedule.num_train_timesteps  # arange can round to one more: 61, 103, 121, 122, ...
    return np.arange(total, 0, -total / num_steps)[:num_steps].round() - 1.0


SPACINGS = {"leading": _leading, "linspace": _linspace, "trailing": _trailing}


def _epsilon(prediction, level, scale=1.0):
    """(p, q) of ε = p x + q r, where the model is given scale x = signal x0 + noise ε."""
    signal, noise = level
    conversions = {
        "epsilon": (0.0, 1.0),
        "v_prediction": (noise * scale, signal),  # v = signal ε - noise x0
    }
    return _lookup(conversions, "prediction", prediction)


def _x0(prediction, level):
    """(p, q) of x0 = p x + q r = (x - noise ε) / signal."""
    p, q = _epsilon(prediction, level)
    return (1.0 - level.noise * p) / level.signal, -level.noise * q / level.signal


def _rows(timestep, keep, a, b, c=0.0, input_scale=1.0):
    """From columns of shape (), (calls,) or (calls, VARIANTS); b lists those of its first j's."""
    calls, columns = len(timestep), (timestep, input_scale, *keep, a, *b)
    columns += (0.0,) * (HISTORY - len(b)) + (c,)
    columns = [col[:, None] if np.ndim(col) == 1 else col for col in columns]
    rows = np.stack([np.broadcast_to(col, (calls, VARIANTS)) for col in columns], axis=-1)
    # Row i has at most i earlier predictions: what lies beyond repeats its last variant.
    i, k = np.ogrid[:calls, :VARIANTS]
    return rows[i, np.minimum(i, k)]


def _variance_exploding(spec, sigma, rows) -> Steps:
    """x = x0 + σ ε. Only the leading spacing starts below the last σ and adds the data's 1."""
    top = sigma[0]
    initial_scale = np.sqrt(top**2 + 1.0) if spec.spacing == "leading" else top
    return Steps(rows, float(initial_scale), np.ones(len(rows)), sigma[: len(rows)])


def _transfer(level, target):
    """(a, b) of DDIM's x' = a x + b ε (Song et al. 2020, eq. 12, η = 0): x0 and ε are held."""
    a = target.signal / level.signal
    return a, target.noise - a * level.noise


def _ddim_steps(schedule, t, level, target) -> Steps:
    a, b = _transfer(level, target)
    rows = _rows(t, _epsilon(schedule.prediction, level), a, [b])
    return Steps(rows, 1.0, *level)


def _ddim(schedule, spec, num_steps) -> Steps:
    t = SPACINGS[spec.spacing](schedule, num_steps)
    target = t - schedule.num_train_timesteps // num_steps
    return _ddim_steps(schedule, t, _level_at(schedule, t), _level_at(schedule, target))


def _kerascv_steps(schedule, ascending) -> Steps:
    """KerasCV's walk down any list of timesteps."""
    t = ascending[::-1]
    level = _level_at(schedule, t)
    return _ddim_steps(schedule, t, level, _following(level))


def _kerascv(schedule, spec, num_steps) -> Steps:
    top = schedule.num_train_timesteps - 1
    return _kerascv_steps(schedule, (np.arange(num_steps) * (top / max(num_steps - 1, 1))).round())


def _kerascv_2022(schedule, spec, num_steps) -> Steps:
    """Releases before 2024. A step count that does not divide the total gives extra rows."""
    total = schedule.num_train_timesteps
    return _kerascv_steps(schedule, np.arange(1.0, total, total // num_steps))


def _pndm(schedule, spec, num_steps) -> Steps:
    """PLMS (Liu et al. 2022, algorithm 2), without Runge-Kutta steps. Its eq. 9 is DDIM's step."""
    t = _leading(schedule, num_steps)
    t = np.concatenate([t[:2], t[1:]])  # the second timestep is visited twice
    stride = schedule.num_train_timesteps // num_steps
    calls, level = len(t), _level_at(schedule, t)

    def transfer(t, target):
        """x' = a x + b r: the history holds raw outputs, only their sum is converted to ε."""
        level = _level_at(schedule, t)
        a, b = _transfer(level, _level_at(schedule, target))
        p, q = _epsilon(schedule.prediction, level)
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
    return Steps(_rows(t, (0.0, 1.0), a, b), 1.0, *level)


def _sigma_walk(schedule, spec, num_steps):
    """Timesteps, σ with the final 0, the model's input scale, and (p, q) of d = (x - x0) / σ."""
    t = SPACINGS[spec.spacing](schedule, num_steps)
    sigma = np.interp(t, np.arange(schedule.num_train_timesteps), _sigmas(schedule))
    level = _level_of_sigma(sigma)
    derivative = _epsilon(schedule.prediction, level, scale=level.signal)
    return t, np.append(sigma, 0.0), level.signal, derivative


def _euler(schedule, spec, num_steps) -> Steps:
    """Karras et al. 2022, algorithm 1, with Euler steps only."""
    t, sigma, scale, derivative = _sigma_walk(schedule, spec, num_steps)
    rows = _rows(t, derivative, 1.0, [np.diff(sigma)], input_scale=scale)
    return _variance_exploding(spec, sigma, rows)


def _euler_ancestral(schedule, spec, num_steps) -> Steps:
    """Ho et al. 2020's ancestral sampling in terms of σ, as in k-diffusion."""
    t, sigma, scale, derivative = _sigma_walk(schedule, spec, num_steps)
    above, below = sigma[:-1], sigma[1:]
    up = below * np.sqrt(above**2 - below**2) / above
    down = np.sqrt(below**2 - up**2)
    rows = _rows(t, derivative, 1.0, [down - above], c=up, input_scale=scale)
    return _variance_exploding(spec, sigma, rows)


def _lms(schedule, spec, num_steps) -> Steps:
    """Adams-Bashforth on uneven σ, as in k-diffusion.

    Its order rises with the history. diffusers' rises with the row, so that image-to-image there
    begins with coefficients of order four over a single prediction.
    """
    t, sigma, scale, derivative = _sigma_walk(schedule, spec, num_steps)
    b = np.zeros((LMS_ORDER, len(t), VARIANTS))
    for k in range(VARIANTS):
        order = min(k + 1, LMS_ORDER)
        for j in range(order):
            b[j, order - 1 :, k] = _lagrange_integral(sigma, order, j)
    rows = _rows(t, derivative, 1.0, b, input_scale=scale)
    return _variance_exploding(spec, sigma, rows)


def _lagrange_integral(sigma, order, j):
    """∫ from σ_i to σ_{i+1} of the basis polynomial of σ_{i-j}, for every i that has `order`."""
    i = np.arange(order - 1, len(sigma) - 1)
    start, end = sigma[i], sigma[i + 1]
    total = np.zeros(len(i))
    for node, weight in zip(*np.polynomial.legendre.leggauss(LMS_ORDER // 2), strict=True):
        tau = start + (end - start) * (node + 1.0) / 2.0
        others = [sigma[i - m] for m in range(order) if m != j]
        basis = [(tau - other) / (sigma[i - j] - other) for other in others]
        total += weight / 2.0 * np.prod(basis, axis=0)
    return (end - start) * total


def _dpmpp_grid(schedule, num_steps):
    t = _linspace(schedule, num_steps + 1)[:-1].round()
    return t, _sigmas(schedule)[t.astype(int)]


def _karras_grid(schedule, num_steps):
    """Karras et al. 2022, eq. 5; the model is asked at the nearest whole timestep."""
    sigmas = _sigmas(schedule)
    high, low = sigmas[-1] ** (1.0 / KARRAS_RHO), sigmas[0] ** (1.0 / KARRAS_RHO)
    sigma = (high + np.linspace(0.0, 1.0, num_steps) * (low - high)) ** KARRAS_RHO
    return np.interp(np.log(sigma), np.log(sigmas), np.arange(len(sigmas))).round(), sigma


def _dpmpp_2m(schedule, spec, num_steps) -> Steps:
    """DPM-Solver++(2M), midpoint (Lu et al. 2022, algorithm 2); λ = -ln σ."""
    t, sigma = (_karras_grid if spec.karras else _dpmpp_grid)(schedule, num_steps)
    level = _level_of_sigma(sigma)
    target = _following(level)
    gain = target.signal - level.signal * target.noise / level.noise  # -α_t (e^{-h} - 1)
    b = np.zeros((2, num_steps, VARIANTS))
    b[0] = gain[:, None]
    # Second order needs a predecessor, and a target with finite λ: never the last row.
    h = np.diff(-np.log(sigma))
    correction = gain[1:-1] * h[1:] / (2.0 * h[:-1])  # gain / (2 r0), r0 = h0 / h
    b[0, 1:-1, 1:] += correction[:, None]
    b[1, 1:-1, 1:] -= correction[:, None]
    rows = _rows(t, _x0(schedule.prediction, level), target.noise / level.noise, b)
    return Steps(rows, 1.0, *level)


def _lcm(schedule, spec, num_steps) -> Steps:
    """Latent consistency models (Luo et al. 2023, algorithm 3)."""
    if num_steps > LCM_ORIGINAL_STEPS:
        raise ConfigError(
            f"lcm takes at most {LCM_ORIGINAL_STEPS} steps, those it was distilled on. "
            f"Received: num_steps={num_steps}"
        )
    stride = schedule.num_train_timesteps // LCM_ORIGINAL_STEPS
    grid = np.arange(LCM_ORIGINAL_STEPS, 0, -1.0) * stride - 1.0
    t = grid[np.arange(num_steps) * LCM_ORIGINAL_STEPS // num_steps]
    level = _level_at(schedule, t)
    target = _following(level)  # to which a wholly denoised sample is noised again
    scaled_t = t * LCM_TIMESTEP_SCALING
    c_skip = LCM_SIGMA_DATA**2 / (scaled_t**2 + LCM_SIGMA_DATA**2)
    c_out = scaled_t / np.sqrt(scaled_t**2 + LCM_SIGMA_DATA**2)
    a, b = target.signal * c_skip, target.signal * c_out
    rows = _rows(t, _x0(schedule.prediction, level), a, [b], c=target.noise)
    return Steps(rows, 1.0, *level)


METHODS = {
    "ddim": _ddim,
    "pndm": _pndm,
    "euler": _euler,
    "euler_ancestral": _euler_ancestral,
    "dpmpp_2m": _dpmpp_2m,
    "lms": _lms,
    "lcm": _lcm,
    "kerascv": _kerascv,
    "kerascv-2022": _kerascv_2022,
}
