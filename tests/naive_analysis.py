"""Slow, obvious twins of the analysis: pure Python and quadrature, nothing shared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def lz78_phrases(sequence: Sequence[int]) -> list[tuple[int, int]]:
    """Parse into (number of an earlier phrase or 0, symbol); the last one may repeat a phrase."""
    numbers: dict[tuple[int, ...], int] = {(): 0}
    phrases = []
    phrase: tuple[int, ...] = ()
    for symbol in sequence:
        longer = (*phrase, symbol)
        if longer in numbers:
            phrase = longer
            continue
        phrases.append((numbers[phrase], symbol))
        numbers[longer] = len(phrases)
        phrase = ()
    if phrase:
        phrases.append((numbers[phrase[:-1]], phrase[-1]))
    return phrases


def lz78_expand(phrases: Sequence[tuple[int, int]]) -> list[int]:
    """Return the sequence that phrases stand for."""
    known: list[list[int]] = [[]]
    for parent, symbol in phrases:
        known.append([*known[parent], symbol])
    return [symbol for phrase in known for symbol in phrase]


def lz78_write(phrases: Sequence[tuple[int, int]], num_values: int) -> str:
    """Write phrases as a string of bits: phrase j has a number below j, then a symbol below K."""
    text = ""
    for j, (parent, symbol) in enumerate(phrases, start=1):
        text += binary(parent, math.ceil(math.log2(j)))
        text += binary(symbol, math.ceil(math.log2(num_values)))
    return text


def lz78_read(text: str, num_values: int) -> list[tuple[int, int]]:
    """Read a string of bits back to its end."""
    phrases = []
    at = 0
    while at < len(text):
        width = math.ceil(math.log2(len(phrases) + 1))
        last = math.ceil(math.log2(num_values))
        parent = int(text[at : at + width] or "0", 2)
        phrases.append((parent, int(text[at + width : at + width + last] or "0", 2)))
        at += width + last
    return phrases


def binary(number: int, width: int) -> str:
    """Write a number in `width` bits, none where width is 0."""
    return f"{number:0{width}b}" if width else ""


def law_quantile(u: np.ndarray, alpha: float, beta: float, zero_fraction: float) -> np.ndarray:
    """Return the quantile function of zero_fraction * delta_0 + the rest, by scipy's gennorm."""
    rest = 1.0 - zero_fraction
    below = u < 0.5 * rest
    above = u > 1.0 - 0.5 * rest
    quantile = np.zeros_like(u)
    quantile[below] = stats.gennorm.ppf(u[below] / rest, beta, scale=alpha)
    quantile[above] = stats.gennorm.isf((1.0 - u[above]) / rest, beta, scale=alpha)
    return quantile


def w2_distance(x: np.ndarray, alpha: float, beta: float, zero_fraction: float) -> float:
    """Integrate (sample's quantile - law's quantile)**2 / mean x**2 piece by piece.

    Pieces end where the sample's quantile function steps and at the edges of the law's atom. In a
    piece that begins at 0 or ends at 1, where the law's quantiles have no bound, u is replaced by a
    sixth power.
    """
    points, weights = np.polynomial.legendre.leggauss(64)
    points, weights = 0.5 * (points + 1.0), 0.5 * weights
    ordered = np.sort(x.astype(np.float64).reshape(-1))
    edges = {0.5 * (1.0 - zero_fraction), 0.5, 0.5 * (1.0 + zero_fraction)}
    ends = sorted(edges | {i / ordered.size for i in range(ordered.size + 1)})
    total = 0.0
    for left, right in zip(ends[:-1], ends[1:], strict=True):
        entry = ordered[int((left + right) / 2 * ordered.size)]
        t, w = points, weights
        if left == 0.0:
            t, w = points**6, weights * 6.0 * points**5
        u = left + (right - left) * t
        if right == 1.0:  # measured from the upper end: 1 - u would lose the digits of the tail
            t, w = points**6, weights * 6.0 * points**5
            quantiles = -law_quantile((right - left) * t, alpha, beta, zero_fraction)
        else:
            quantiles = law_quantile(u, alpha, beta, zero_fraction)
        total += (right - left) * float(np.sum(w * (entry - quantiles) ** 2))
    return math.sqrt(total / float(np.mean(ordered**2)))


def law_moment(order: int, alpha: float, beta: float, zero_fraction: float) -> float:
    """Return the mean of x**order under the law with its atom."""
    return (1.0 - zero_fraction) * float(stats.gennorm.moment(order, beta, scale=alpha))
