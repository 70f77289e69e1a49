"""Generalized normal laws with a zero atom: samples in, a law or symbol probabilities out.

The law is fitted to the samples, the probabilities are those of a format's symbols.

The law of a tensor's entries is ``zero_fraction * delta_0 + (1 - zero_fraction) * GenNorm(alpha,
beta)``, location 0, with density ``beta / (2 alpha Gamma(1/beta)) * exp(-(|x| / alpha)**beta)``.
The atom matters: many entries of real gradients are exactly zero, and a fit without it collapses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from co3_flower import kernels
from co3_flower.formats import FloatFormat


@dataclass(frozen=True)
class GenNorm:
    """A generalized normal law, location 0, with an atom at zero.

    Parameters
    ----------
    alpha : float
        Scale of the law, in units of the entries; 0 where all entries are zero.
    beta : float
        Shape: 1 is Laplace's law, 2 the normal law, large values approach a uniform law.
    zero_fraction : float
        Probability in [0, 1] that an entry is exactly zero.

    References
    ----------
    arXiv 2111.07599, the GenNorm model of gradients (without the atom).
    """

    alpha: float
    beta: float
    zero_fraction: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the entries, zeros included."""
        if self.alpha <= 0.0:
            return 0.0
        return math.sqrt(1.0 - self.zero_fraction) * float(kernels.law_std(self.alpha, self.beta))

    def pmf(self, fmt: FloatFormat, scale: float) -> NDArray[np.float64]:
        """Return the probability of each symbol of `fmt` when entries are converted at `scale`.

        Parameters
        ----------
        fmt : FloatFormat
            The format, K values.
        scale : float
            Multiplier applied before rounding to the nearest value.

        Returns
        -------
        float64 [K]
            Probabilities of the cells between midpoints of adjacent values; they sum to 1.

        Examples
        --------
        >>> GenNorm(1.0, 2.0).pmf(FloatFormat.parse("e1m1"), 1.0).round(4).tolist()
        [0.2398, 0.5205, 0.2398]
        """
        pmf = np.zeros(fmt.num_values, np.float64)
        needed = np.ones(fmt.num_values, np.int64)
        positive = fmt.values[fmt.zero :]
        kernels.law_cells(
            self.alpha, self.beta, self.zero_fraction, float(scale), positive, needed, pmf
        )
        return pmf


def fit_gennorm(x: ArrayLike) -> GenNorm:
    """Fit a generalized normal law with a zero atom by maximum likelihood, in one data pass.

    The likelihood is that of a histogram of the top bits of |x|; beta is bounded to [0.1, 16].
    Subnormal float32 numbers count as zeros.

    Parameters
    ----------
    x : array of floats
        Any shape; used as float32.

    Returns
    -------
    GenNorm
        alpha is 0 (and beta 1) where no entry differs from zero.

    Raises
    ------
    ValueError
        If an entry is NaN or infinite.

    Examples
    --------
    >>> fit = fit_gennorm(np.random.default_rng(0).laplace(size=100_000))
    >>> round(fit.alpha, 1), round(fit.beta, 1), fit.zero_fraction
    (1.0, 1.0, 0.0)

    References
    ----------
    arXiv 2111.07599, the maximum-likelihood fit of alpha and beta.
    """
    flat = _flat_float32(x)
    alpha, beta, zeros, _, _, _ = fit_flat(flat)
    return GenNorm(float(alpha), float(beta), float(zeros / flat.size) if flat.size else 1.0)


def fit_norm(x: ArrayLike) -> GenNorm:
    """Fit a normal law with a zero atom: beta 2, alpha = sqrt(2) * RMS of the non-zero entries.

    Parameters
    ----------
    x : array of floats
        Any shape; used as float32.

    Examples
    --------
    >>> round(fit_norm([0.0, 3.0, -3.0, 0.0]).std, 4)
    2.1213
    """
    return _moment_fit(x, beta=2.0)


def fit_laplace(x: ArrayLike) -> GenNorm:
    """Fit a Laplace law with a zero atom: beta 1, alpha = mean magnitude of the non-zero entries.

    Parameters
    ----------
    x : array of floats
        Any shape; used as float32.

    Examples
    --------
    >>> fit_laplace([0.0, 3.0, -1.0, 0.0])
    GenNorm(alpha=2.0, beta=1.0, zero_fraction=0.5)
    """
    return _moment_fit(x, beta=1.0)


def _moment_fit(x: ArrayLike, beta: float) -> GenNorm:
    """Fit by maximum likelihood at a fixed beta.

    alpha**beta = beta * mean(|x|**beta) over the entries that are not zero.
    """
    flat = _flat_float32(x)
    magnitudes = np.abs(flat[flat != 0]).astype(np.float64)
    if not np.isfinite(magnitudes).all():
        bad = int((~np.isfinite(magnitudes)).sum())
        raise ValueError(f"x must be finite, got {bad} entries that are NaN or infinite")
    if magnitudes.size == 0:
        return GenNorm(0.0, beta, 1.0)
    alpha = (beta * float(np.mean(magnitudes**beta))) ** (1.0 / beta)
    return GenNorm(alpha, beta, 1.0 - magnitudes.size / flat.size)


def _flat_float32(x: ArrayLike) -> NDArray[np.float32]:
    return np.ascontiguousarray(x, dtype=np.float32).reshape(-1)


def fit_flat(
    flat: NDArray[np.float32],
) -> tuple[float, float, int, NDArray[np.float64], int, int]:
    """Return alpha, beta, zeros, the folded histogram, its first bin and its last + 1.

    Raises
    ------
    ValueError
        If an entry is NaN or infinite.
    """
    bins = 256 << kernels.COARSE_BITS
    histogram, folded = np.zeros((4, bins), np.uint32), np.zeros(bins, np.float64)
    work = np.zeros(2 << kernels.COARSE_BITS, np.float64)
    alpha, beta, zeros, bad, first, last = kernels.fit_histogram(
        flat.view(np.uint32), histogram, folded, work
    )
    if bad:
        raise ValueError(f"x must be finite, got {bad} entries that are NaN or infinite")
    return alpha, beta, zeros, folded, first, last
