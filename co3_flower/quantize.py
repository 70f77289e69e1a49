"""Conversion to a tiny float format (the *convert* stage): scale, nearest symbols, values again.

``z = f32(scale * v)``, the symbol is that of the value nearest z (ties to the even position in the
ascending list of magnitudes, beyond the largest value it saturates), and what the server sees is
``y = f32(value / scale)``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from co3_flower import kernels
from co3_flower.errors import ConfigError
from co3_flower.formats import FloatFormat
from co3_flower.gennorm import fit_flat

KernelFormat: TypeAlias = tuple[
    np.float32, np.uint32, np.uint32, np.float32, np.uint32, np.int32, np.int32, bool
]

_TABLE_STEPS = 64  # betas per table of least-error scales, on a logarithmic grid
_BETA_RATIO = kernels.MAX_BETA / kernels.MIN_BETA
_GRID_STEP = 0.08  # between the log scales that are tried first
_POINTS = 3000  # quadrature points of such a law


@lru_cache(maxsize=256)
def kernel_format(fmt: FloatFormat) -> KernelFormat:
    """Return the constants of a format that the kernels' `round_magnitude` rounds with."""
    m, bias = fmt.mantissa_bits, fmt.bias
    return (
        np.float32(fmt.max_finite),
        np.float32(fmt.min_normal).view(np.uint32),
        np.uint32((23 - m) << 23),
        np.float32(2.0 ** (bias - 1 + m)),
        np.uint32(23 - m),
        np.int32((127 - bias) << m),
        np.int32(fmt.zero),
        m == 0,
    )


@lru_cache(maxsize=256)
def least_error_table(fmt: FloatFormat) -> NDArray[np.float64]:
    """Return log(scale * std) of least mean squared conversion error, that error, on a beta grid.

    Returns
    -------
    float64 [65, 2]
        Row i is for beta = 0.1 * 160**(i / 64). Wide formats have many nearly equal optima a factor
        2 apart; of those within 0.2 % of the best, the middle one is taken for the normal law,
        elsewhere the one nearest to the neighbouring row's, so that tensors of different shapes get
        like symbols.
    """
    table = np.empty((_TABLE_STEPS + 1, 2), np.float64)
    middle = round(_TABLE_STEPS * math.log(2.0 / kernels.MIN_BETA) / math.log(_BETA_RATIO))
    table[middle] = _good_scale(fmt, middle, None)
    for rows in (range(middle - 1, -1, -1), range(middle + 1, _TABLE_STEPS + 1)):
        last = table[middle, 0]
        for i in rows:
            table[i] = _good_scale(fmt, i, last)
            last = table[i, 0]
    table.setflags(write=False)
    return table


def _good_scale(fmt: FloatFormat, row: int, near: float | None) -> tuple[float, float]:
    """Return a local optimum of log(scale * std) for one shape, and its error.

    It is the good optimum nearest to `near`, or the middle one where `near` is None.
    """
    constants = kernel_format(fmt)
    x, weights = _law_points(kernels.MIN_BETA * _BETA_RATIO ** (row / _TABLE_STEPS))
    few = x[::5].copy(), weights[::5].copy()
    power = np.cumsum(weights * x * x)
    typical = math.log(x[np.searchsorted(power, 0.5 * power[-1])])
    low, high = math.log(fmt.min_subnormal) - 3.0, math.log(fmt.max_finite) + 3.0
    grid = np.arange(low, high, _GRID_STEP) - typical
    errors = np.empty(grid.size, np.float64)
    kernels.error_curve(*few, constants, grid, errors)
    inner = errors[1:-1]
    valleys = (inner <= errors[:-2]) & (inner <= errors[2:]) & (inner < 1.02 * errors.min())
    optima = [
        kernels.refine_log_scale(*few, constants, t - _GRID_STEP, t + _GRID_STEP)
        for t in grid[1:-1][valleys].tolist()
    ]
    least = min(error for _, error in optima)
    good = [t for t, error in optima if error <= 1.002 * least]
    chosen = good[len(good) // 2] if near is None else min(good, key=lambda t: abs(t - near))
    best: tuple[float, float] = kernels.refine_log_scale(
        x, weights, constants, chosen - 0.5 * _GRID_STEP, chosen + 0.5 * _GRID_STEP
    )
    return best


def rule_table(rule: str, fmt: FloatFormat) -> NDArray[np.float64]:
    """Return the table that a scale rule needs; rules but ``mse`` need none and get zeros."""
    return least_error_table(fmt) if rule == "mse" else np.zeros((2, 2), np.float64)


def _law_points(beta: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return magnitudes (in standard deviations) and weights that stand for a law of shape beta.

    The law is generalized normal. w = (|x| / alpha)**beta follows a gamma law of shape 1 / beta.
    The points are even in its cube root, where that law is nearly normal (for beta > 3 in |x|
    itself), from 0 to where both it and its second moment have faded.
    """
    top = 3.0 / beta
    root = max(3.0, beta)
    end = (top + 8.0 * math.sqrt(top) + 30.0) ** (1 / root)
    u = (np.arange(_POINTS) + 0.5) * (end / _POINTS)
    log_w = root * np.log(u)
    log_x = log_w / beta
    log_weight = (1.0 / beta - 1.0) * log_w - np.exp(log_w) + (root - 1.0) * np.log(u)
    weights = np.exp(log_weight - log_weight.max())
    weights /= weights.sum()
    log_std = 0.5 * (math.lgamma(3.0 / beta) - math.lgamma(1.0 / beta))
    return np.exp(log_x - log_std), weights


def choose_scale(
    x: ArrayLike, fmt: FloatFormat, rule: str = "mse", multiplier: float = 1.0
) -> np.float32:
    """Choose the multiplier that is applied to a tensor before conversion.

    Parameters
    ----------
    x : array of floats
        The tensor, any shape; used as float32.
    fmt : FloatFormat
        Target format.
    rule : str
        ``mse``: least mean squared error under the fitted generalized normal law; ``std``: 1 /
        sqrt(mean x**2); ``absmax``: the largest |x| lands on the largest value; ``unit``: 1;
        ``paper``: a polynomial in beta over alpha, the CO3 authors' fit for e2m1.
    multiplier : float
        Factor on top; below 1 it makes cells coarser.

    Returns
    -------
    numpy.float32
        In [max(2**-120, max_finite * 2**-127), 2**120]; 1 for an empty or all-zero tensor.

    Raises
    ------
    ConfigError
        If the rule is unknown.
    ValueError
        If an entry is NaN or infinite.

    Examples
    --------
    >>> choose_scale([0.5, -1.0, 0.25], FloatFormat.parse("e2m1"), "absmax")
    np.float32(3.0)
    """
    if rule not in kernels.RULES:
        raise ConfigError(
            f"scale must be one of {', '.join(map(repr, kernels.RULES))}, got {rule!r}"
        )
    v = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
    alpha, beta, _, folded, first, last = fit_flat(v)
    scale = kernels.pick_scale(
        v,
        kernels.RULES.index(rule),
        float(multiplier),
        alpha,
        beta,
        folded,
        first,
        last,
        kernel_format(fmt),
        rule_table(rule, fmt),
    )
    return np.float32(scale)


def quantize(v: ArrayLike, scale: float, fmt: FloatFormat) -> NDArray[np.uint8]:
    """Convert to the symbols of the nearest values; ties to the even position, saturating.

    Parameters
    ----------
    v : array of floats
        Any shape, finite; used as float32.
    scale : float
        Multiplier, used as float32.
    fmt : FloatFormat
        Target format, K values.

    Returns
    -------
    uint8 [...]
        Symbols in [0, K), in the shape of `v`.

    Examples
    --------
    >>> quantize([-9.0, 0.25, 0.26, 1.75], 1.0, FloatFormat.parse("e2m1")).tolist()
    [0, 5, 6, 9]

    Notes
    -----
    ml_dtypes and torch round alike but overflow to infinity (to NaN in e4m3fn) where this
    saturates.
    """
    compensated = np.array(v, dtype=np.float32, order="C")
    symbols = np.empty(compensated.shape, np.uint8)
    flat = compensated.reshape(-1)
    kernels.quantize_block(flat, symbols.reshape(-1), np.float32(scale), kernel_format(fmt))
    return symbols


def dequantize(symbols: NDArray[np.uint8], scale: float, fmt: FloatFormat) -> NDArray[np.float32]:
    """Return what symbols stand for, ``f32(value / scale)``.

    Parameters
    ----------
    symbols : uint8 [...]
        Symbols in [0, K).
    scale : float
        The scale they were converted at, used as float32.
    fmt : FloatFormat
        Their format.

    Returns
    -------
    float32 [...]
        In the shape of `symbols`.

    Examples
    --------
    >>> dequantize(np.uint8([0, 5, 10]), 2.0, FloatFormat.parse("e2m1")).tolist()
    [-1.5, 0.0, 1.5]
    """
    table: NDArray[np.float32] = fmt.values / np.float32(scale)
    return table[symbols]
