"""Slow, obvious twins of the library: plain Python, exact fractions and scipy, no shared code.

Formats are given by name ("e2m1", "e4m3fn"), so that even the value tables are derived twice.
Arithmetic that the design rounds to float32 goes through `np.float32` one operation at a time.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
from scipy import optimize, special, stats

BETA_BOUNDS = (0.1, 16.0)

IEEE_FORMATS = tuple(
    f"e{e}m{m}" for e in range(1, 8) for m in range(8 - e) if (e, m) != (1, 0)
)  # e1m0 has the value 0 only
FN_FORMATS = ("e2m1fn", "e3m2fn", "e2m3fn", "e4m3fn")
ALL_FORMATS = IEEE_FORMATS + FN_FORMATS


# Formats


@cache
def magnitudes(name: str) -> tuple[Fraction, ...]:
    """Non-negative values of a format, ascending, from the meaning of its bit fields."""
    exponent_bits, mantissa_bits, finite = split_name(name)
    bias = 2 ** (exponent_bits - 1) - 1
    top = 2**exponent_bits - 1
    steps = 2**mantissa_bits
    found = []
    for exponent in range(top + 1):
        for mantissa in range(steps):
            if exponent == top and not finite:
                continue  # infinities and NaN
            if name == "e4m3fn" and exponent == top and mantissa == steps - 1:
                continue  # its only NaN
            fraction = Fraction(mantissa, steps)
            if exponent == 0:
                found.append(fraction * Fraction(2) ** (1 - bias))
            else:
                found.append((1 + fraction) * Fraction(2) ** (exponent - bias))
    return tuple(sorted(set(found)))


def values(name: str) -> list[Fraction]:
    """Return all values of a format, ascending, zero once."""
    positive = magnitudes(name)[1:]
    return [-value for value in reversed(positive)] + [Fraction(0)] + list(positive)


def split_name(name: str) -> tuple[int, int, bool]:
    """Exponent bits, mantissa bits, and whether the top exponent holds finite values."""
    fields = re.fullmatch(r"e(\d+)m(\d+)(fn)?", name)
    assert fields is not None, name
    return int(fields[1]), int(fields[2]), fields[3] is not None


# Quantizer and feedback


def nearest_symbol(z: float, name: str) -> int:
    """Find the symbol of the value nearest z exactly; ties to the even position, saturating."""
    ascending = magnitudes(name)
    zero = len(ascending) - 1
    if math.isinf(z):
        position = zero
    else:
        magnitude = abs(Fraction(z))
        distances = [abs(magnitude - value) for value in ascending]
        least = min(distances)
        nearest = [position for position, distance in enumerate(distances) if distance == least]
        position = nearest[0] if len(nearest) == 1 else next(p for p in nearest if p % 2 == 0)
    return zero - position if z < 0 else zero + position


def quantize(v: np.ndarray, scale: float, name: str) -> np.ndarray:
    """Quantize with one scan over the cells' borders, which float64 holds exactly."""
    ascending = [float(value) for value in magnitudes(name)]
    with np.errstate(over="ignore"):
        z = (np.float32(scale) * np.asarray(v, np.float32)).astype(np.float64)
    position = np.zeros(z.shape, np.int64)
    for index in range(1, len(ascending)):
        border = (ascending[index - 1] + ascending[index]) / 2
        tie_goes_up = index % 2 == 0
        position += (np.abs(z) > border) | ((np.abs(z) == border) & tie_goes_up)
    zero = len(ascending) - 1
    return np.where(z < 0, zero - position, zero + position)


def dequantize(symbols: np.ndarray, scale: float, name: str) -> np.ndarray:
    """y = f32(value / s)."""
    table = np.array([float(value) for value in values(name)], np.float32)
    return (table[symbols] / np.float32(scale)).astype(np.float32)


def compensate(update: np.ndarray, residual: np.ndarray | None, gamma: float) -> np.ndarray:
    """v = f32(g + f32(f32(gamma) * m))."""
    g = np.asarray(update, np.float32)
    if residual is None:
        return g
    carry = (np.float32(gamma) * np.asarray(residual, np.float32)).astype(np.float32)
    return (g + carry).astype(np.float32)


def carry(residual: np.ndarray | None, gamma: float, unused: np.ndarray | None) -> np.ndarray:
    """f32(f32(f32(gamma) * m) + c): what joins the next update; c is 0 where all was used."""
    parts = []
    if residual is not None:
        parts.append((np.float32(gamma) * np.asarray(residual, np.float32)).astype(np.float32))
    if unused is not None:
        parts.append(np.asarray(unused, np.float32))
    return (
        (parts[0] + parts[1]).astype(np.float32) if len(parts) == 2 else (*parts, np.float32(0))[0]
    )


def next_residual(compensated: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """m' = f32(v - y)."""
    return (compensated - decoded).astype(np.float32)


def naive_round(
    update: Mapping[str, np.ndarray],
    residual: Mapping[str, np.ndarray] | None,
    scales: Mapping[str, float],
    *,
    name: str,
    gamma: float,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Decoded values and next residual of one client's round, given each tensor's scale."""
    decoded, after = {}, {}
    for key, gradient in update.items():
        v = compensate(gradient, None if residual is None else residual[key], gamma)
        decoded[key] = dequantize(quantize(v, scales[key], name), scales[key], name)
        after[key] = next_residual(v, decoded[key])
    return decoded, after


def accumulate(accumulator: np.ndarray, decoded: np.ndarray, weight: float) -> np.ndarray:
    """acc = f32(acc + f32(f32(n) * y))."""
    product = (np.float32(weight) * decoded).astype(np.float32)
    return (accumulator + product).astype(np.float32)


def server_step(
    weights: np.ndarray, accumulator: np.ndarray, server_lr: float, total: float, sign: int
) -> np.ndarray:
    """w -+ f32(f32(server_lr / N) * acc): sign -1 in gradient mode, +1 in update mode."""
    step = (np.float32(server_lr / total) * accumulator).astype(np.float32)
    return (weights + step if sign > 0 else weights - step).astype(np.float32)


def least_mse(x: np.ndarray, name: str, *, steps_per_octave: int = 16) -> tuple[float, float]:
    """Scale with the least sum of squared errors on the data itself, and that sum, by trying all.

    Trial scales start where everything rounds to zero. They end where everything saturates, or
    after 40 octaves: beyond those a wide format only repeats itself in powers of two.
    """
    magnitude = np.abs(np.asarray(x, np.float64)).ravel()
    table = np.array([float(value) for value in magnitudes(name)])
    borders = (table[1:] + table[:-1]) / 2
    low = table[1] / magnitude.max() / 2
    high = table[-1] / magnitude[magnitude > 0].min() * 2
    octaves = min(40.0, math.log2(high / low))
    best = (1.0, math.inf)
    for scale in low * 2.0 ** np.linspace(0, octaves, int(octaves * steps_per_octave) + 2):
        rounded = table[np.searchsorted(borders, magnitude * scale)] / scale
        error = float(np.sum((magnitude - rounded) ** 2))
        if error < best[1]:
            best = (float(scale), error)
    return best


def law_error(name: str, scale: float, beta: float) -> float:
    """E[(x - Q(s x) / s)**2] / E[x**2] for x from GenNorm(alpha 1, beta), in closed form.

    Partial moments of |x| over a cell are differences of regularized incomplete gamma functions:
    E[|x|**k; |x| < t] = Gamma((k + 1) / beta) / Gamma(1 / beta) * P((k + 1) / beta, t**beta).
    """
    table = np.array([float(value) for value in magnitudes(name)])
    edges = np.concatenate([[0.0], (table[1:] + table[:-1]) / 2, [np.inf]]) / scale
    table = table / scale

    def partial_moments(k: int) -> np.ndarray:
        whole = math.exp(math.lgamma((k + 1) / beta) - math.lgamma(1 / beta))
        return whole * np.diff(special.gammainc((k + 1) / beta, edges**beta))

    squares = partial_moments(2)
    error = squares - 2 * table * partial_moments(1) + table**2 * partial_moments(0)
    return float(error.sum() / squares.sum())


@cache
def least_law_error(name: str, beta: float) -> float:
    """Least conversion error of a law over all scales, 32 of them an octave."""
    std = math.exp(0.5 * (math.lgamma(3 / beta) - math.lgamma(1 / beta)))
    low, high = float(magnitudes(name)[1]) / std / 16, float(magnitudes(name)[-1]) / std * 4
    octaves = min(24.0, math.log2(high / low))  # beyond, a wide format repeats itself
    scales = high * 2.0 ** -np.linspace(0, octaves, int(32 * octaves) + 1)
    return min(law_error(name, float(scale), beta) for scale in scales)


# Model


def mean_log_likelihood(x: np.ndarray, alpha: float, beta: float) -> float:
    """Mean log density of the non-zero entries, in nats."""
    nonzero = np.asarray(x, np.float64)[np.asarray(x) != 0]
    return float(np.mean(stats.gennorm.logpdf(nonzero, beta, scale=alpha)))


def alpha_given_beta(x: np.ndarray, beta: float) -> float:
    """Most likely alpha of the non-zero entries: (beta * mean |x|**beta) ** (1 / beta)."""
    nonzero = np.abs(np.asarray(x, np.float64)[np.asarray(x) != 0])
    largest = nonzero.max()
    return float(largest * (beta * np.mean((nonzero / largest) ** beta)) ** (1 / beta))


def fit_gennorm(x: np.ndarray) -> tuple[float, float]:
    """Most likely (alpha, beta) of the non-zero entries, beta bounded: a grid, then Brent."""

    def loss(log_beta: float) -> float:
        beta = math.exp(log_beta)
        return -mean_log_likelihood(x, alpha_given_beta(x, beta), beta)

    grid = np.linspace(math.log(BETA_BOUNDS[0]), math.log(BETA_BOUNDS[1]), 25)
    losses = [loss(point) for point in grid]
    best = int(np.argmin(losses))
    around = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    found = optimize.minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-7})
    log_beta = found.x if found.fun < losses[best] else grid[best]
    beta = math.exp(log_beta)
    return alpha_given_beta(x, beta), beta


def gennorm_pmf(
    name: str, scale: float, alpha: float, beta: float, zero_fraction: float
) -> np.ndarray:
    """Probability of each symbol: zero atom plus the GenNorm mass of its cell."""
    table = [float(value) for value in values(name)]
    borders = (
        [-math.inf] + [(a + b) / 2 for a, b in zip(table, table[1:], strict=False)] + [math.inf]
    )
    mass = []
    for low, high in zip(borders, borders[1:], strict=False):
        if low >= 0:  # the upper tail by the survival function, which loses no digits there
            tails = [stats.gennorm.sf(edge / scale, beta, scale=alpha) for edge in (low, high)]
            mass.append(tails[0] - tails[1])
        else:
            tails = [stats.gennorm.cdf(edge / scale, beta, scale=alpha) for edge in (low, high)]
            mass.append(tails[1] - tails[0])
    pmf = (1 - zero_fraction) * np.array(mass)
    pmf[len(table) // 2] += zero_fraction
    return pmf


# Entropy code


def entropy_bits(counts: Sequence[int]) -> float:
    """Empirical entropy of all the symbols together, in bits."""
    total = sum(int(count) for count in counts)
    return sum(-int(c) * math.log2(int(c) / total) for c in counts if c > 0)


def huffman_lengths(weights: Sequence[int]) -> list[int]:
    """Huffman's own algorithm on a heap, without a limit; a lone symbol costs nothing."""
    lengths = [0] * len(weights)
    heap = [(int(weight), index, [index]) for index, weight in enumerate(weights) if weight > 0]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        members = first[2] + second[2]
        for index in members:
            lengths[index] += 1
        heapq.heappush(heap, (first[0] + second[0], min(first[1], second[1]), members))
    return lengths


def package_merge(weights: Sequence[int], max_length: int) -> list[int]:
    """Optimal lengths of at most max_length bits (Larmore and Hirschberg's package-merge)."""
    lengths = [0] * len(weights)
    coins = sorted((int(weight), [index]) for index, weight in enumerate(weights) if weight > 0)
    if len(coins) < 2:
        return lengths
    assert len(coins) <= 2**max_length, "no such code"
    packages: list[tuple[int, list[int]]] = []
    for _ in range(max_length):
        merged = sorted(coins + packages)
        packages = [
            (merged[i][0] + merged[i + 1][0], merged[i][1] + merged[i + 1][1])
            for i in range(0, len(merged) - 1, 2)
        ]
    for _, members in packages[: len(coins) - 1]:
        for index in members:
            lengths[index] += 1
    return lengths


def code_bits(weights: Sequence[int], lengths: Sequence[int]) -> int:
    """Sum of weight * length."""
    return sum(int(weight) * int(length) for weight, length in zip(weights, lengths, strict=True))


def optimal_code_bits(weights: Sequence[int]) -> int:
    """Length of the best prefix code for these counts, without a limit."""
    return code_bits(weights, huffman_lengths(weights))


def kraft_sum(lengths: Sequence[int]) -> Fraction:
    """Exact sum of 2**-length over the used symbols."""
    return sum((Fraction(1, 2 ** int(length)) for length in lengths if length > 0), Fraction(0))


def canonical_codes(lengths: Sequence[int]) -> list[str]:
    """Codewords as bit strings: shorter first, then by symbol, counting up (RFC 1951, 3.2.2)."""
    codes = [""] * len(lengths)
    code, previous = 0, 0
    for length, symbol in sorted((int(n), symbol) for symbol, n in enumerate(lengths) if n > 0):
        code <<= length - previous
        codes[symbol] = format(code, f"0{length}b")
        code, previous = code + 1, length
    return codes


def rans_weights(exponents: list[int], mantissas: list[int]) -> list[int]:
    """Weights that a rANS table's exponents and mantissas stand for; 0 where the exponent is -1."""
    return [0 if e < 0 else (16 + m) * 2**e for e, m in zip(exponents, mantissas, strict=True)]


def rans_frequencies(weights: list[int], bits: int) -> list[int]:
    """Frequencies that sum to 2**bits: rounded shares, at least 1, the rest with the largest."""
    total = sum(weights)
    freqs = [max(1, (w * 2**bits + total // 2) // total) if w else 0 for w in weights]
    while (rest := 2**bits - sum(freqs)) != 0:
        top = freqs.index(max(freqs))
        freqs[top] += rest if rest > 0 else -min(-rest, max(1, freqs[top] // 2))
    return freqs


def rans_encode(symbols: list[int], freqs: list[int], bits: int) -> list[int]:
    """Encode one chunk with four states in exact integers; returns its 16-bit words."""
    starts = [sum(freqs[:k]) for k in range(len(freqs))]
    states, written = [2**15] * 4, []
    for i in reversed(range(len(symbols))):
        x, f = states[i % 4], freqs[symbols[i]]
        if x >= f * 2 ** (31 - bits):
            written.append(x % 2**16)
            x //= 2**16
        states[i % 4] = (x // f) * 2**bits + x % f + starts[symbols[i]]
    head = [half for x in states for half in (x % 2**16, x // 2**16)]
    return head + written[::-1]
