"""How well a law fits a tensor: entries in; W2 distance, divergence and kurtosis out.

The measures of arXiv 2111.07599, with the zero atom: an entry that is exactly zero belongs to the
atom of `GenNorm`, and the law's quantile function is flat there.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from co3_flower import kernels_analysis as kernels
from co3_flower.formats import FloatFormat
from co3_flower.gennorm import GenNorm

_NODES = 4096  # of the law's integrated quantile function; cubics between them
_SMALLEST_PMF = 2.0**-40  # the weight that the codec gives a symbol that occurs but has no mass


def w2_distance(x: ArrayLike, law: GenNorm) -> float:
    """Return the 2-Wasserstein distance between standardised entries and a law.

    Both are divided by the entries' standard deviation sigma = sqrt(mean x**2), zeros included, so
    the distance has no unit. It is the usual one, with the square inside the integral::

        W2**2 = integral over u in (0, 1) of (Q_x(u) - Q_law(u))**2 / sigma**2

    with the quantile functions of the sample (a step function: nothing is interpolated) and of the
    law, where a share `zero_fraction` of all u has quantile 0.

    Parameters
    ----------
    x : array of floats
        Any shape; used as float32.
    law : GenNorm
        The law, in units of x.

    Returns
    -------
    float
        0 where all entries are zero.

    Examples
    --------
    >>> round(w2_distance([1.0, -1.0], GenNorm(math.sqrt(2.0), 2.0)), 4)  # 2 - 2 * sqrt(2 / pi)
    0.6358

    References
    ----------
    arXiv 2111.07599 prints the distance without the square inside the integral.
    """
    ordered = np.sort(np.ascontiguousarray(x, dtype=np.float32).reshape(-1))
    sigma = math.sqrt(float(np.mean(np.square(ordered, dtype=np.float64)))) if ordered.size else 0.0
    if sigma == 0.0:
        return 0.0
    cross = 0.0
    if law.alpha > 0.0 and law.zero_fraction < 1.0:
        cross = kernels.lorenz_cross(ordered, *_integrated_quantiles(law)) / sigma**2
    return math.sqrt(max(0.0, 1.0 + (law.std / sigma) ** 2 - 2.0 * cross))


def divergence_bits(counts: ArrayLike, law: GenNorm, fmt: FloatFormat, scale: float) -> float:
    """Return the Kullback-Leibler divergence of the symbols' frequencies from a law, in bits.

    It is what an ideal code made for the law pays per entry above the entropy of the counts. The
    cells are those of the format's symbols, not of a histogram; probabilities below 2**-40 count as
    that, as they do in the codec's tables.

    Parameters
    ----------
    counts : int64 [K]
        How often each symbol occurs.
    law : GenNorm
        The law of the entries.
    fmt : FloatFormat
        Format of K values.
    scale : float
        Scale of the conversion.

    Returns
    -------
    float
        Bits per entry, 0 without entries.

    Examples
    --------
    >>> round(divergence_bits([1, 2, 1], GenNorm(1.0, 2.0), FloatFormat.parse("e1m1"), 1.0), 4)
    0.0012
    """
    c = np.asarray(counts, dtype=np.float64)
    used = c > 0
    if not used.any():
        return 0.0
    p = c[used] / c.sum()
    q = np.maximum(law.pmf(fmt, scale)[used], _SMALLEST_PMF)
    return float(np.sum(p * np.log2(p / q)))


def sample_kurtosis(x: ArrayLike) -> float:
    """Return the fourth central moment over the square of the second: 3 for a normal law.

    Parameters
    ----------
    x : array of floats
        Any shape; used as float32.

    Returns
    -------
    float
        NaN where the entries do not differ.

    Examples
    --------
    >>> sample_kurtosis([-1.0, 0.0, 0.0, 1.0])
    2.0
    """
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
    if flat.size == 0 or flat.min() == flat.max():
        return math.nan
    # Entries of 1e-38 have fourth powers of 1e-152: within float64, and so are those of 1e38.
    _, second, fourth = kernels.central_moments(flat)
    return float(fourth / second**2)


def law_kurtosis(law: GenNorm) -> float:
    """Return the kurtosis of a law: gamma(5/b) gamma(1/b) / gamma(3/b)**2 / (1 - zero_fraction).

    Parameters
    ----------
    law : GenNorm
        The law, of shape b.

    Returns
    -------
    float
        NaN for a law that is all atom.

    Examples
    --------
    >>> round(law_kurtosis(GenNorm(1.0, 2.0)), 9), round(law_kurtosis(GenNorm(1.0, 1.0, 0.5)), 9)
    (3.0, 12.0)
    """
    if law.alpha <= 0.0 or law.zero_fraction >= 1.0:
        return math.nan
    b = law.beta
    log = math.lgamma(5.0 / b) + math.lgamma(1.0 / b) - 2.0 * math.lgamma(3.0 / b)
    return math.exp(log) / (1.0 - law.zero_fraction)


def _integrated_quantiles(
    law: GenNorm,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return u, the integral of the law's quantile function from 0 to u, and the quantile at u.

    float64 [nodes] each, u ascending from 0 to (1 - zero_fraction) / 2. For w = (|x| / alpha)**b,
    u = (1 - zero_fraction) / 2 * Q(1/b, w) and the integral is -(1 - zero_fraction) / 2 * alpha *
    gamma(2/b) / gamma(1/b) * Q(2/b, w), Q the regularized upper incomplete gamma function. Nodes
    are even in the cube root of w, for b > 3 in x, up to where nothing is left.
    """
    half, b = 0.5 * (1.0 - law.zero_fraction), law.beta
    root = max(3.0, b)
    top = 2.0 / b
    end = top + 10.0 * math.sqrt(top) + 60.0
    w = np.linspace(end ** (1.0 / root), 0.0, _NODES) ** root
    u = half * special.gammaincc(1.0 / b, w)
    mean = law.alpha * math.exp(math.lgamma(2.0 / b) - math.lgamma(1.0 / b))
    partial = -half * mean * special.gammaincc(top, w)
    u[0] = partial[0] = 0.0
    return u, partial, -law.alpha * w ** (1.0 / b)
