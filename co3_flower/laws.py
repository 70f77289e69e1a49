"""Generalized normal laws as code tables (the *compress* stage), from integers on both ends.

A table may be sent as a law: its shape, spread, zero atom and last magnitude, about two bytes, from
which encoder and decoder derive the same weights in integers (see `kernels_side` and `law_table`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels_side
from co3_flower.formats import FloatFormat

SHAPES = {  # first and last shape that a prior allows
    "gennorm": (0, kernels_side.LAW_BETAS.size - 1),
    "laplace": (kernels_side.BETA_ONE, kernels_side.BETA_ONE),
    "norm": (kernels_side.BETA_TWO, kernels_side.BETA_TWO),
}
_LOG_BITS = 16


def no_laws(num: int) -> NDArray[np.int64]:
    """Return laws, int64 [num, 4], that say: explicit table."""
    laws = np.zeros((num, 4), np.int64)
    laws[:, 0] = -1
    return laws


@lru_cache(maxsize=256)
def log2_edges(fmt: FloatFormat) -> NDArray[np.int64]:
    """Return log2 of the borders between a format's magnitudes, int64 [K // 2], in 1/65536.

    Examples
    --------
    >>> (log2_edges(FloatFormat.parse("e2m1")) / 65536).round(2).tolist()
    [-2.0, -0.42, 0.32, 0.81, 1.32]
    """
    magnitudes = fmt.values[fmt.zero :].astype(np.float64)
    edges = 0.5 * (magnitudes[1:] + magnitudes[:-1])  # exact
    logs = np.array([_log2(edge) for edge in edges.tolist()], np.int64)
    logs.setflags(write=False)
    return logs


def _log2(x: float) -> int:
    """Return floor(65536 * log2(x)), bit by bit from squares of integers."""
    fraction, exponent = math.frexp(x)
    square, result = int(math.ldexp(fraction, 54)), exponent - 1  # square / 2**53 is in [1, 2)
    for _ in range(_LOG_BITS):
        square = square * square >> 53
        high = square >> 54
        square >>= high
        result = 2 * result + high
    return result


def edges_of(formats: tuple[FloatFormat, ...]) -> NDArray[np.int64]:
    """Return the borders of several formats as rows, filled up at the right."""
    rows = [log2_edges(fmt) for fmt in formats]
    width = max(row.size for row in rows)
    return np.stack([np.pad(row, (0, width - row.size)) for row in rows])


def nearest_laws(
    prior: str,
    alphas: NDArray[np.float64],
    betas: NDArray[np.float64],
    zero_fractions: NDArray[np.float64],
    scales: NDArray[np.float32],
    counts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the laws, int64 [tensors, 4], nearest to fitted ones whose shape the prior allows.

    Parameters
    ----------
    prior : str
        ``gennorm``, ``norm`` or ``laplace``.
    alphas, betas, zero_fractions : float64 [tensors]
        The fitted laws.
    scales : float32 [tensors]
        Multipliers before conversion.
    counts : int64 [tensors, K]
        How often each symbol occurs.
    """
    laws = np.zeros((alphas.size, 4), np.int64)
    kernels_side.nearest_laws(alphas, betas, zero_fractions, scales, counts, laws)
    np.clip(laws[:, 0], *SHAPES[prior], out=laws[:, 0])
    return laws


def fit_law(prior: str, counts: NDArray[np.int64], fmt: FloatFormat) -> NDArray[np.int64]:
    """Return the law, int64 [1, 4], that codes symbols counted in [K] in the fewest bits.

    The search ends in a local optimum; the prior says which shapes it may take.
    """
    law = np.zeros(4, np.int64)
    kernels_side.fit_law(counts, log2_edges(fmt), *SHAPES[prior], law)
    return law[None]


def law_weights(laws: NDArray[np.int64], fmt: FloatFormat) -> NDArray[np.int64]:
    """Return the weights, int64 [tables, K], that laws stand for."""
    weights = np.zeros((laws.shape[0], fmt.num_values), np.int64)
    kernels_side.tables_by_law(laws, log2_edges(fmt), weights)
    return weights
