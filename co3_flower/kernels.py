"""Numba loops of the codec, and nothing else: no policy, no validation, no exceptions.

The wrappers in the modules below this one in the reading order check their arguments; these
functions trust them. Every float32 step rounds as written (no fastmath, no fused multiply-add), and
every statistic that decides a byte comes from integers, so that a plain NumPy reference, any number
of threads and any machine give the same bytes. Compiled code is cached on disk. With
``NUMBA_DISABLE_JIT=1`` all of it runs as plain, slow Python.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import float32 as f32
from numpy import int32 as i32
from numpy import int64 as i64
from numpy import uint8 as u8
from numpy import uint32 as u32
from numpy import uint64 as u64

from co3_flower.jit import drop_stale_cache
from co3_flower.jit import njit as _njit

drop_stale_cache()

BLOCK = 4096  # float32 entries that stay in the first-level cache between passes
MAGNITUDE = u32(0x7FFFFFFF)  # all bits of a float32 but its sign
SIGN = u32(0x80000000)
EXPONENT = u32(0x7F800000)
COARSE_BITS = 3  # mantissa bits of the histogram that every fit starts from: 2,048 bins
FINE_BITS = 7  # mantissa bits of the second histogram, for near-uniform tensors only
FINE_FROM_BETA = 2.5  # above it |x|**beta bends too much within a coarse bin
MIN_BETA, MAX_BETA = 0.1, 16.0
LN2 = math.log(2.0)
# The scale rules, by the number that the kernels know.
RULES = ("mse", "std", "absmax", "unit", "paper")


# --- correct: v = f32(g + f32(gamma * m)) ---------------------------------------------------------


@_njit
def add_scaled(v, m, gamma):
    """Add gamma * m to float32 v [n] in place; the product rounds before the sum."""
    for j in range(v.size):
        v[j] = v[j] + gamma * m[j]


LANES = (
    256  # partial sums in a fixed order, side by side, so that they vectorize without reassociation
)


@_njit
def compensate_block(v, m, gamma, absolute, square):
    """Add gamma * m to float32 v [n] in place; sum |v| before, v**2 after it in float64 lanes."""
    for start in range(0, v.size, LANES):
        row, memory = v[start : start + LANES], m[start : start + LANES]
        for k in range(row.size):
            g = row[k]
            c = g + gamma * memory[k]
            row[k] = c
            absolute[k] += abs(np.float64(g))
            square[k] += np.float64(c) * np.float64(c)


@_njit
def measure_block(x, absolute, square):
    """Sum |x| and x**2 of float32 x [n] into float64 lanes (for reports; they decide no byte)."""
    for start in range(0, x.size, LANES):
        row = x[start : start + LANES]
        for k in range(row.size):
            value = np.float64(row[k])
            absolute[k] += abs(value)
            square[k] += value * value


# --- model: a generalized normal law from a histogram of the top bits of |v| ----------------------


@_njit
def add_to_histogram(x_bits, histogram):
    """Count exponent and top 3 mantissa bits of |x| into four copies, uint32 [4, 2048].

    The copies are to be summed.
    """
    n = x_bits.size - x_bits.size % 4
    for j in range(0, n, 4):
        histogram[0, (x_bits[j] & MAGNITUDE) >> u32(20)] += u32(1)
        histogram[1, (x_bits[j + 1] & MAGNITUDE) >> u32(20)] += u32(1)
        histogram[2, (x_bits[j + 2] & MAGNITUDE) >> u32(20)] += u32(1)
        histogram[3, (x_bits[j + 3] & MAGNITUDE) >> u32(20)] += u32(1)
    for j in range(n, x_bits.size):
        histogram[0, (x_bits[j] & MAGNITUDE) >> u32(20)] += u32(1)


@_njit
def add_to_fine_histogram(x_bits, histogram):
    """Count exponent and top 7 mantissa bits of |x| into the first row of uint32 [4, 32768]."""
    for j in range(x_bits.size):
        histogram[0, (x_bits[j] & MAGNITUDE) >> u32(16)] += u32(1)


@_njit
def fold_histogram(histogram, mantissa_bits, counts):
    """Sum the four copies into float64 counts and count the kinds of numbers.

    Returns (zeros, normals, not finite, first bin, last bin + 1). Subnormal float32 numbers count
    as zeros. The bins of zeros and of the top exponent are left empty.
    """
    bins = 1 << mantissa_bits
    zeros = i64(0)
    normals = i64(0)
    bad = i64(0)
    first, last = i64(0), i64(0)
    for j in range(256 << mantissa_bits):
        c = (
            i64(histogram[0, j])
            + i64(histogram[1, j])
            + i64(histogram[2, j])
            + i64(histogram[3, j])
        )
        counts[j] = 0.0
        if c == 0:
            continue
        if j < bins:
            zeros += c
        elif j >= 255 << mantissa_bits:
            bad += c
        else:
            counts[j] = float(c)
            normals += c
            if last == 0:
                first = i64(j)
            last = i64(j + 1)
    return zeros, normals, bad, first, last


@_njit
def digamma(x):
    """Return the derivative of log gamma at x > 0."""
    r = 0.0
    while x < 6.0:
        r -= 1.0 / x
        x += 1.0
    f = 1.0 / (x * x)
    tail = f * (1.0 / 12 - f * (1.0 / 120 - f * (1.0 / 252 - f * (1.0 / 240 - f / 132))))
    return r + math.log(x) - 0.5 / x - tail


@_njit
def gamma_cdf(a, x):
    """Return the regularized lower incomplete gamma function P(a, x).

    It is a series for x below a + 1, a continued fraction above.
    """
    if x <= 0.0:
        return 0.0
    if x > 700.0:  # a <= 10 here: what is left is below the smallest float64
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = 1.0 / a
        total = term
        for i in range(1, 500):
            term *= x / (a + i)
            total += term
            if term < total * 1e-16:
                break
        return min(1.0, total * front)
    b = x + 1.0 - a
    c = 1e300
    d = 1.0 / b
    h = d
    for i in range(1, 500):
        an = -i * (i - a)
        b += 2.0
        d = 1.0 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return max(0.0, 1.0 - front * h)


@_njit
def power_sums(counts, mantissa_bits, first, last, beta, work):
    """Return S = sum of c * x**beta and D = sum of c * x**beta * ln x over bin centres x.

    x is in units of the top exponent.
    """
    bins = 1 << mantissa_bits
    for j in range(bins):
        x = 1.0 + (j + 0.5) / bins
        work[j] = x**beta
        work[bins + j] = work[j] * math.log(x)
    e_first, e_last = first >> mantissa_bits, (last - 1) >> mantissa_bits
    step = 2.0**-beta
    factor, shift = 1.0, 0.0
    s, d = 0.0, 0.0
    for e in range(e_last, e_first - 1, -1):
        row = counts[e << mantissa_bits : (e + 1) << mantissa_bits]
        s_row, d_row = 0.0, 0.0
        for j in range(bins):
            s_row += row[j] * work[j]
            d_row += row[j] * work[bins + j]
        s += factor * s_row
        d += factor * (d_row + shift * s_row)
        factor *= step
        shift -= LN2
    return s, d


@_njit
def guess_beta(linear, square):
    """Return a start for `solve_beta` from mean |x| and mean x**2.

    The ratio of the first's square to the second is 0.30, 0.50, 0.64, 0.70 at beta 0.5, 1, 2, 4.
    """
    ratio = linear * linear / square
    if ratio < 0.5:
        return math.exp2((ratio - 0.5) / 0.2)
    if ratio < 0.637:
        return math.exp2((ratio - 0.5) / 0.137)
    return min(MAX_BETA, 2.0 * math.exp2((ratio - 0.637) / 0.063))


@_njit
def solve_beta(counts, mantissa_bits, first, last, n, start, work):
    """Fit (alpha, beta) of a zero-mean generalized normal law to a histogram of |x|.

    The fit is of maximum likelihood: a safeguarded secant in log beta on d LL / d log beta = 1 +
    (log(beta S / n) + digamma(1 / beta)) / beta - D / S, the profile likelihood with alpha**beta =
    beta S / n put in; beta stays within [MIN_BETA, MAX_BETA].
    """
    low, high = math.log(MIN_BETA), math.log(MAX_BETA)
    t = min(high, max(low, math.log(start)))
    t_before, slope_before = 0.0, 0.0
    beta, s = start, 1.0
    for iteration in range(60):
        beta = math.exp(t)
        s, d = power_sums(counts, mantissa_bits, first, last, beta, work)
        slope = 1.0 + (math.log(beta * s / n) + digamma(1.0 / beta)) / beta - d / s
        if slope > 0:
            low = t
        else:
            high = t
        if abs(slope) < 1e-6 or high - low < 1e-7:
            break
        if iteration == 0:
            t_next = t + (0.08 if slope > 0 else -0.08)
        elif t != t_before and (slope - slope_before) / (t - t_before) < 0:
            t_next = t - slope * (t - t_before) / (slope - slope_before)
        else:
            t_next = 0.5 * (low + high)
        t_before, slope_before = t, slope
        if low < t_next < high:
            t = t_next
        elif (
            t_next >= high
            and high == math.log(MAX_BETA)
            or t_next <= low
            and low == math.log(MIN_BETA)
        ):
            t = high if t_next >= high else low
            if t == t_before:
                break
        else:
            t = 0.5 * (low + high)
    alpha = math.exp(math.log(beta * s / n) / beta + LN2 * (((last - 1) >> mantissa_bits) - 127))
    return alpha, beta


@_njit
def law_std(alpha, beta):
    """Return the standard deviation of a law: alpha * sqrt(gamma(3 / beta) / gamma(1 / beta))."""
    return alpha * math.exp(0.5 * (math.lgamma(3.0 / beta) - math.lgamma(1.0 / beta)))


@_njit
def histogram_moments(counts, first, last):
    """Return mean |x| and sqrt(2 * mean x**2) of the normal numbers of a coarse histogram.

    They are the alphas of the Laplace and the normal law.
    """
    n, linear, square = 0.0, 0.0, 0.0
    unit = math.ldexp(1.0, int((last >> COARSE_BITS) - 127))
    for j in range(first, last):
        if counts[j] > 0.0:
            m = 1.0 + ((j & ((1 << COARSE_BITS) - 1)) + 0.5) / (1 << COARSE_BITS)
            x = math.ldexp(m, int((j >> COARSE_BITS) - 127)) / unit
            n += counts[j]
            linear += counts[j] * x
            square += counts[j] * x * x
    if n == 0.0:
        return 0.0, 0.0
    return linear / n * unit, math.sqrt(2.0 * square / n) * unit


@_njit
def fit_coarse(histogram, counts, work):
    """Fit a law to a coarse histogram, uint32 [4, 2048].

    Returns (alpha, beta, zeros, normals, not finite, first bin, last bin + 1). `counts` keeps the
    folded histogram. alpha is 0 where no normal number occurs.
    """
    zeros, normals, bad, first, last = fold_histogram(histogram, COARSE_BITS, counts)
    if normals == 0 or bad > 0:
        return 0.0, 1.0, zeros, normals, bad, first, last
    linear, normal = histogram_moments(counts, first, last)
    start = guess_beta(linear, 0.5 * normal * normal)
    alpha, beta = solve_beta(counts, COARSE_BITS, first, last, float(normals), start, work)
    return alpha, beta, zeros, normals, bad, first, last


@_njit
def fit_fine(histogram, normals, start):
    """Fit a law to a fine histogram, uint32 [4, 32768]; returns (alpha, beta)."""
    counts = np.zeros(256 << FINE_BITS, np.float64)
    work = np.zeros(2 << FINE_BITS, np.float64)
    _, _, _, first, last = fold_histogram(histogram, FINE_BITS, counts)
    return solve_beta(counts, FINE_BITS, first, last, float(normals), start, work)


@_njit
def fit_from_histogram(x_bits, histogram, counts, work):
    """Fit a law to the coarse histogram of x, refined where needed.

    Returns (alpha, beta, zeros, not finite, first bin, last bin + 1). `counts` keeps the folded
    coarse histogram. alpha is 0 where no normal number occurs.
    """
    alpha, beta, zeros, normals, bad, first, last = fit_coarse(histogram, counts, work)
    if beta > FINE_FROM_BETA:
        fine = np.zeros((4, 256 << FINE_BITS), np.uint32)
        add_to_fine_histogram(x_bits, fine)
        alpha, beta = fit_fine(fine, normals, beta)
    return alpha, beta, zeros, bad, first, last


@_njit
def fit_histogram(x_bits, histogram, counts, work):
    """Fit one float32 tensor given as bits; see `fit_from_histogram`."""
    add_to_histogram(x_bits, histogram)
    return fit_from_histogram(x_bits, histogram, counts, work)


@_njit
def law_cells(alpha, beta, zero_fraction, scale, positive, needed, pmf):
    """Probabilities of a format's symbols under the law with a zero atom, into float64 pmf [K].

    `positive` holds the K // 2 + 1 magnitudes in ascending order. Symbols with needed[k] == 0 may
    be left at 0.
    """
    top = positive.size - 1
    pmf[:] = 0.0
    if alpha <= 0.0 or zero_fraction >= 1.0:
        pmf[top] = 1.0
        return
    unit = np.float64(scale) * alpha
    below = 0.0
    known = -1  # the magnitude whose upper edge `below` belongs to
    for j in range(top + 1):
        if j > 0 and needed[top + j] == 0 and needed[top - j] == 0:
            continue
        if known != j - 1:
            edge = 0.5 * (np.float64(positive[j - 1]) + np.float64(positive[j])) / unit
            below = gamma_cdf(1.0 / beta, edge**beta)
        above = 1.0
        if j < top:
            edge = 0.5 * (np.float64(positive[j]) + np.float64(positive[j + 1])) / unit
            above = gamma_cdf(1.0 / beta, edge**beta)
        mass = (1.0 - zero_fraction) * max(0.0, above - below)
        if j == 0:
            pmf[top] = mass + zero_fraction
        else:
            pmf[top + j] = 0.5 * mass
            pmf[top - j] = 0.5 * mass
        below = above
        known = j


# --- convert: scale, nearest symbol, residual -----------------------------------------------------
#
# `fmt` is the tuple that `quantize.kernel_format` makes: (largest value, bits of the smallest
# normal value, exponent bits to add for the rounding constant, 2**(bias - 1 + M), 23 - M, (127 -
# bias) << M, symbol of zero, M == 0).


@_njit
def round_magnitude(a, fmt):
    """Round float32 a in [0, max_finite] to the format's nearest magnitude, ties to even positions.

    Adding and subtracting 2**(exponent + 23 - M) rounds to M mantissa bits, ties to even mantissas,
    which for M >= 1 are even positions; below the smallest normal value its exponent serves. For M
    = 0 positions are exponents.
    """
    bits = f32(a).view(u32)
    if fmt[7]:
        if bits < fmt[1]:
            return f32(0.0) if a <= u32(fmt[1]).view(f32) * f32(0.5) else u32(fmt[1]).view(f32)
        odd = ((bits >> u32(23)) - u32(fmt[5])) & u32(1)
        return u32((bits + u32(0x003FFFFF) + odd) & EXPONENT).view(f32)
    exponent = max(bits & EXPONENT, fmt[1])
    rounder = u32(exponent + fmt[2]).view(f32)
    return f32(f32(a + rounder) - rounder)


@_njit
def magnitude_position(q, fmt):
    """Position of magnitude q in the ascending list of the format's magnitudes, zero first."""
    bits = f32(q).view(u32)
    if bits < fmt[1]:
        return i32(q * fmt[3])
    return i32(bits >> fmt[4]) - fmt[5]


@_njit
def quantize_block(v, symbols, scale, fmt):
    """Write the symbols of scale * v, replace v by its residual v - value / scale, count events.

    Returns how many entries saturated (|scale * v| above the largest value) and how many
    underflowed (v != 0 became 0).
    """
    saturated = i32(0)
    underflowed = i32(0)
    largest = fmt[0]
    for j in range(v.size):
        x = v[j]
        bits = f32(x * scale).view(u32)
        sign = bits & SIGN
        a = u32(bits & MAGNITUDE).view(f32)
        saturated += i32(a > largest)
        q = round_magnitude(min(a, largest), fmt)
        position = magnitude_position(q, fmt)
        underflowed += i32((q == f32(0.0)) & (x != f32(0.0)))
        flip = -i32(sign >> u32(31))
        symbols[j] = u8(fmt[6] + ((position ^ flip) - flip))
        signed = u32(f32(q).view(u32) | sign).view(f32) + f32(
            0.0
        )  # -0 becomes +0, as in the table of values
        v[j] = x - signed / scale
    return saturated, underflowed


@_njit
def conversion_error(x, weights, scale, fmt):
    """Return the weighted mean squared error of converting float64 magnitudes x at `scale`.

    It is relative to the weighted mean square of x.
    """
    error, power = 0.0, 0.0
    for j in range(x.size):
        a = min(f32(x[j] * scale), fmt[0])
        d = x[j] - np.float64(round_magnitude(a, fmt)) / scale
        error += weights[j] * d * d
        power += weights[j] * x[j] * x[j]
    return error / power


@_njit
def error_curve(x, weights, fmt, log_scales, errors):
    """`conversion_error` at each of several scales."""
    for i in range(log_scales.size):
        errors[i] = conversion_error(x, weights, math.exp(log_scales[i]), fmt)


@_njit
def refine_log_scale(x, weights, fmt, a, b):
    """Return the log scale of least conversion error on [a, b], by golden section; that error."""
    g = 0.6180339887498949
    c, d = b - g * (b - a), a + g * (b - a)
    e_c = conversion_error(x, weights, math.exp(c), fmt)
    e_d = conversion_error(x, weights, math.exp(d), fmt)
    while b - a > 1e-3:
        if e_c < e_d:
            b, d, e_d = d, c, e_c
            c = b - g * (b - a)
            e_c = conversion_error(x, weights, math.exp(c), fmt)
        else:
            a, c, e_c = c, d, e_d
            d = a + g * (b - a)
            e_d = conversion_error(x, weights, math.exp(d), fmt)
    return (c, e_c) if e_c < e_d else (d, e_d)


@_njit
def histogram_points(counts, first, last, unit, x, weights):
    """Write two points a coarse bin to float64 x and weights; return how many.

    The points are multiples of `unit`.
    """
    n = 0
    for j in range(first, last):
        if counts[j] > 0.0:
            base = math.ldexp(1.0, int((j >> COARSE_BITS) - 127)) / unit
            for q in range(2):
                m = (j & ((1 << COARSE_BITS) - 1)) + 0.25 + 0.5 * q
                x[n] = base * (1.0 + m / (1 << COARSE_BITS))
                weights[n] = counts[j]
                n += 1
    return n


@_njit
def least_error_scale(alpha, beta, counts, first, last, fmt, table):
    """Scale with the least mean squared error of conversion under the fitted law, before any clamp.

    `table` [n, 2] holds, for beta on a logarithmic grid over [MIN_BETA, MAX_BETA], log(scale * std)
    and the relative error there. Where the law's standard deviation is far from the data's (an
    outlier that no generalized normal law describes), the scale is searched on the histogram
    itself, if that at least halves the error.
    """
    steps = table.shape[0] - 1
    position = (
        (math.log(beta) - math.log(MIN_BETA)) / (math.log(MAX_BETA) - math.log(MIN_BETA)) * steps
    )
    i = min(steps - 1, max(0, int(position)))
    share = min(1.0, max(0.0, position - i))
    if (
        abs(table[i + 1, 0] - table[i, 0]) > 0.3
    ):  # two branches of a wide format's optimum: no blend of them
        share = 1.0 if share > 0.5 else 0.0
    law = law_std(alpha, beta)
    log_scale = table[i, 0] * (1.0 - share) + table[i + 1, 0] * share - math.log(law)
    unit = histogram_moments(counts, first, last)[1] / math.sqrt(2.0)
    if 0.6 < (unit / law) ** 2 < 1.6:
        return math.exp(log_scale)
    x = np.zeros(2 * (last - first), np.float64)
    weights = np.zeros(2 * (last - first), np.float64)
    m = histogram_points(counts, first, last, unit, x, weights)
    at_law = conversion_error(x[:m], weights[:m], math.exp(log_scale) * unit, fmt)
    best, least = 0.0, 1e300
    for i in range(-60, 121):
        error = conversion_error(x[:m], weights[:m], math.exp(0.2 * i), fmt)
        if error < least:
            best, least = 0.2 * i, error
    best, least = refine_log_scale(x[:m], weights[:m], fmt, best - 0.2, best + 0.2)
    if least < 0.5 * at_law:
        return math.exp(best) / unit
    return math.exp(log_scale)


@_njit
def fixed_point_power(v, top_exponent):
    """Return the mean of v**2 from integers.

    They are |v| in units of 2**(top_exponent - 23), truncated, squared and summed exactly.
    """
    unit = math.ldexp(1.0, int(23 - top_exponent))
    high, low = i64(0), i64(0)
    for start in range(0, v.size, BLOCK):
        block = v[start : start + BLOCK]
        total = i64(0)
        for j in range(block.size):
            t = i64(abs(np.float64(block[j])) * unit)
            total += t * t
        high += total >> 32
        low += total & 0xFFFFFFFF
    return mean_power(high, low, top_exponent, v.size)


@_njit
def mean_power(high, low, top_exponent, size):
    """Return the mean of `size` squares in units of 2**(top_exponent - 23), squared.

    Their sum is 2**32 * high + low.
    """
    unit = math.ldexp(1.0, int(23 - top_exponent))
    return (float(high) * 4294967296.0 + float(low)) / unit / unit / size


@_njit
def paper_polynomial(beta):
    """Return scale * alpha by the CO3 authors' rule for e2m1: positive for every beta.

    It is near the optimum for beta in 0.5 to 2.
    """
    return 0.46 + beta * (-2.85 + beta * (5.37 + beta * (-2.85 + beta * 0.52)))


@_njit
def pick_scale(v, rule, multiplier, alpha, beta, counts, first, last, fmt, table):
    """Return the clamped float32 scale of one tensor by `rule`; 1 where all entries are 0.

    `rule` is a position in RULES.
    """
    power, peak = 0.0, f32(0.0)
    if last > 0 and rule == 1:
        power = fixed_point_power(v, ((last - 1) >> COARSE_BITS) - 127)
    elif last > 0 and rule == 2:
        for j in range(v.size):
            peak = max(peak, abs(v[j]))
    return scale_by_rule(
        rule, multiplier, alpha, beta, power, peak, counts, first, last, fmt, table
    )


@_njit
def scale_by_rule(rule, multiplier, alpha, beta, power, peak, counts, first, last, fmt, table):
    """`pick_scale` from what a rule needs to know: the law, or the mean of v**2, or the peak."""
    largest = np.float64(fmt[0])
    scale = 1.0
    if last == 0:
        return f32(1.0)
    if rule == 0:
        scale = least_error_scale(alpha, beta, counts, first, last, fmt, table)
    elif rule == 1:
        scale = 1.0 / math.sqrt(power)
    elif rule == 2:
        scale = largest / np.float64(peak)
    elif rule == 4:
        scale = paper_polynomial(beta) / alpha
    low = max(2.0**-120, largest * 2.0**-127)
    return f32(min(2.0**120, max(low, scale * multiplier)))


@_njit
def count_symbols(symbols, num_values, counts):
    """Count uint8 symbols into int64 counts [num_values], by pairs where the alphabet is small."""
    n = symbols.size
    counts[:] = 0
    if num_values <= 16:
        pairs = np.zeros((4, num_values * num_values), np.uint32)
        done = n - n % 8
        for j in range(0, done, 8):
            pairs[0, i64(symbols[j]) * num_values + symbols[j + 1]] += u32(1)
            pairs[1, i64(symbols[j + 2]) * num_values + symbols[j + 3]] += u32(1)
            pairs[2, i64(symbols[j + 4]) * num_values + symbols[j + 5]] += u32(1)
            pairs[3, i64(symbols[j + 6]) * num_values + symbols[j + 7]] += u32(1)
        for a in range(num_values):
            for b in range(num_values):
                k = a * num_values + b
                c = i64(pairs[0, k]) + i64(pairs[1, k]) + i64(pairs[2, k]) + i64(pairs[3, k])
                counts[a] += c
                counts[b] += c
    else:
        lanes = np.zeros((4, 256), np.uint32)
        done = n - n % 4
        for j in range(0, done, 4):
            lanes[0, symbols[j]] += u32(1)
            lanes[1, symbols[j + 1]] += u32(1)
            lanes[2, symbols[j + 2]] += u32(1)
            lanes[3, symbols[j + 3]] += u32(1)
        for k in range(num_values):
            counts[k] = i64(lanes[0, k]) + i64(lanes[1, k]) + i64(lanes[2, k]) + i64(lanes[3, k])
    for j in range(done, n):
        counts[symbols[j]] += 1


@_njit
def compensate_and_fit(v, residual, gamma, histogram, folded, work, lanes, fit):
    """Compensate one tensor in place and fit it; `residual` [n] is empty in the first round.

    lanes float64 [2 or more, LANES] get the sums of |g| and v**2, `folded` the histogram of |v|,
    fit float64 [5] what `convert_tensors` says of fits, unless an entry is not finite. Returns
    (alpha, beta, not finite, first bin, last bin + 1).
    """
    bits = v.view(np.uint32)
    histogram[:] = u32(0)
    for start in range(0, v.size, BLOCK):
        stop = min(v.size, start + BLOCK)
        if residual.size > 0:
            compensate_block(v[start:stop], residual[start:stop], gamma, lanes[0], lanes[1])
        else:
            measure_block(v[start:stop], lanes[0], lanes[1])
        add_to_histogram(bits[start:stop], histogram)
    alpha, beta, zeros, bad, low, high = fit_from_histogram(bits, histogram, folded, work)
    if bad == 0:
        fit[0], fit[1] = alpha, beta
        fit[2] = zeros / v.size if v.size > 0 else 1.0
        fit[3], fit[4] = histogram_moments(folded, low, high)
    return alpha, beta, bad, low, high


@_njit
def convert_tensors(
    first,
    last,
    v,
    residual,
    gammas,
    offsets,
    fmt,
    rule,
    multiplier,
    table,
    symbols,
    scales,
    fits,
    counts,
    sums,
    events,
):
    """Compensate, fit, scale and convert tensors first..last-1 of v, which becomes the residual.

    v is flat float32; `residual` is flat like it, or empty in the first round. Per tensor: scales
    float32 (where one is below 0, minus it is given and not chosen by the rule), fits float64 [5]
    (alpha, beta, zero fraction, alpha of the Laplace law, alpha of the normal law), counts int64
    [K], sums float64 [4] (|g|, v**2, m'**2, |m'|), events int64 [3] (saturated, underflowed, not
    finite). A tensor with an entry that is not finite is compensated and counted, no more.
    """
    histogram = np.zeros((4, 256 << COARSE_BITS), np.uint32)
    folded = np.zeros(256 << COARSE_BITS, np.float64)
    work = np.zeros(2 << COARSE_BITS, np.float64)
    lanes = np.zeros((4, LANES), np.float64)
    for t in range(first, last):
        begin, end = offsets[t], offsets[t + 1]
        lanes[:] = 0.0
        alpha, beta, bad, low, high = compensate_and_fit(
            v[begin:end], residual[begin:end], gammas[t], histogram, folded, work, lanes, fits[t]
        )
        events[t, 2] = bad
        if bad > 0:
            continue
        if scales[t] < 0:
            scale = -scales[t]
        else:
            scale = pick_scale(
                v[begin:end], rule, multiplier, alpha, beta, folded, low, high, fmt, table
            )
        scales[t] = scale
        for start in range(begin, end, BLOCK):
            stop = min(end, start + BLOCK)
            saturated, underflowed = quantize_block(v[start:stop], symbols[start:stop], scale, fmt)
            events[t, 0] += saturated
            events[t, 1] += underflowed
            measure_block(v[start:stop], lanes[3], lanes[2])
        count_symbols(symbols[begin:end], counts.shape[1], counts[t])
        for i in range(4):
            sums[t, i] = lanes[i].sum()


# --- compress: length-limited Huffman codes -------------------------------------------------------


@_njit
def package_merge(weights, max_length, depths):
    """Find depths [n] of an optimal code no longer than max_length, for ascending weights [n].

    2 <= n <= 2**max_length. The coin collector's algorithm: the list of level l merges the leaves
    with the pairs of the list of level l + 1; of each level the 2 (n - 1), then as many as the
    taken pairs hold, cheapest items are taken.
    """
    n = weights.size
    is_pair = np.zeros((max_length, 2 * n), np.uint8)
    costs, merged = np.zeros(2 * n, np.int64), np.zeros(2 * n, np.int64)
    size = 0
    for level in range(max_length):
        pairs = size // 2
        leaf, pair, size = 0, 0, 0
        while leaf < n or pair < pairs:
            cost = costs[2 * pair] + costs[2 * pair + 1] if pair < pairs else 0
            if pair >= pairs or (leaf < n and weights[leaf] <= cost):
                merged[size] = weights[leaf]
                is_pair[level, size] = 0
                leaf += 1
            else:
                merged[size] = cost
                is_pair[level, size] = 1
                pair += 1
            size += 1
        costs[:size] = merged[:size]
    depths[:] = 0
    take = 2 * (n - 1)
    for level in range(max_length - 1, -1, -1):
        pairs = 0
        for i in range(take):
            pairs += i64(is_pair[level, i])
        for i in range(take - pairs):
            depths[i] += 1
        take = 2 * pairs


@_njit
def huffman_lengths(weights, max_length, lengths):
    """Code lengths [K] of an optimal code no longer than max_length; symbols of weight 0 get none.

    A single used symbol gets length 1. Ties are broken by symbol, so equal weights give equal
    lengths everywhere.
    """
    k_max = weights.size
    order = np.zeros(k_max, np.int64)
    n = 0
    for k in range(k_max):
        lengths[k] = 0
        if weights[k] > 0:
            j = n - 1
            while j >= 0 and weights[order[j]] > weights[k]:
                order[j + 1] = order[j]
                j -= 1
            order[j + 1] = k
            n += 1
    if n == 0:
        return
    if n == 1:
        lengths[order[0]] = 1
        return
    node = np.zeros(
        2 * n, np.int64
    )  # leaves by weight, then internal nodes in the order of their making
    parent = np.zeros(2 * n, np.int64)
    for i in range(n):
        node[i] = weights[order[i]]
    leaf, inner = 0, n
    for made in range(n, 2 * n - 1):
        for _ in range(2):
            if leaf < n and (inner >= made or node[leaf] <= node[inner]):
                node[made] += node[leaf]
                parent[leaf] = made
                leaf += 1
            else:
                node[made] += node[inner]
                parent[inner] = made
                inner += 1
    depth = np.zeros(2 * n, np.int64)
    for i in range(2 * n - 3, -1, -1):
        depth[i] = depth[parent[i]] + 1
    if depth[0] > max_length:
        package_merge(node[:n], max_length, depth[:n])
    for i in range(n):
        lengths[order[i]] = depth[i]


@_njit
def law_weights(alphas, betas, zero_fractions, scales, positive, counts, weights):
    """Write integer weights [T, K] for Huffman codes under laws.

    A weight is 2**40 times the symbol's probability, at least 1, for each symbol that occurs.
    """
    pmf = np.zeros(counts.shape[1], np.float64)
    for t in range(counts.shape[0]):
        law_cells(alphas[t], betas[t], zero_fractions[t], scales[t], positive, counts[t], pmf)
        for k in range(pmf.size):
            weights[t, k] = max(i64(1), i64(pmf[k] * 1099511627776.0)) if counts[t, k] > 0 else 0


@_njit
def pooled_law_weights(alphas, betas, zero_fractions, scales, sizes, positive, counts, weights):
    """Write integer weights [K] of a table for several tensors.

    They are the probabilities of the tensors' laws, weighted by the tensors' sizes.
    """
    pmf, mean = np.zeros(counts.size, np.float64), np.zeros(counts.size, np.float64)
    total = 0.0
    for t in range(alphas.size):
        law_cells(alphas[t], betas[t], zero_fractions[t], scales[t], positive, counts, pmf)
        mean += sizes[t] * pmf
        total += sizes[t]
    for k in range(counts.size):
        weights[k] = max(i64(1), i64(mean[k] / total * 1099511627776.0)) if counts[k] > 0 else 0


@_njit
def huffman_tables(weights, max_length, lengths):
    """`huffman_lengths` for each row of int64 weights [T, K]."""
    for t in range(weights.shape[0]):
        huffman_lengths(weights[t], max_length, lengths[t])


@_njit
def table_bits(counts, lengths, bits):
    """Write the code bits, int64 [T], of symbols counted in [T, K].

    The symbols of a table with a single used symbol take none.
    """
    for t in range(counts.shape[0]):
        total, used = i64(0), 0
        for k in range(counts.shape[1]):
            total += counts[t, k] * lengths[t, k]
            used += lengths[t, k] > 0
        bits[t] = total if used > 1 else 0


@_njit
def canonical_codes(lengths, codes):
    """Write canonical codewords [K]: shorter ones first, then by symbol.

    Bits are as sent, the most significant first.
    """
    number = np.zeros(34, np.int64)
    for k in range(lengths.size):
        if lengths[k] > 0:
            number[lengths[k] + 1] += 1
    code = i64(0)
    for length in range(1, 34):
        code = (code + number[length]) << 1
        number[length] = code  # from here on: the next codeword of this length
    for k in range(lengths.size):
        codes[k] = 0
        if lengths[k] > 0:
            codes[k] = number[lengths[k]]
            number[lengths[k]] += 1


@_njit
def encoder_entries(lengths, entries):
    """Write each codeword, first bit lowest, and its length from bit 32 into uint64 [T, K].

    The symbols of a table with a single used symbol take no bits.
    """
    codes = np.zeros(lengths.shape[1], np.uint32)
    for t in range(lengths.shape[0]):
        canonical_codes(lengths[t], codes)
        used = 0
        for k in range(lengths.shape[1]):
            used += lengths[t, k] > 0
        for k in range(lengths.shape[1]):
            code, reverse = i64(codes[k]), i64(0)
            for _ in range(lengths[t, k]):
                reverse = (reverse << 1) | (code & 1)
                code >>= 1
            entries[t, k] = u64(reverse | (i64(lengths[t, k]) << 32)) if used > 1 else u64(0)


PAIR_ALPHABET = 16  # up to this many symbols, pairs of them are coded through one table


@_njit
def pair_entries(entries, num_values, pairs):
    """Per table, the code of two symbols in a row, into uint64 [T, K * K]."""
    for t in range(entries.shape[0]):
        for a in range(num_values):
            first = entries[t, a]
            bits = first >> u64(32)
            for b in range(num_values):
                second = entries[t, b]
                code = (first & u64(0xFFFFFFFF)) | ((second & u64(0xFFFFFFFF)) << bits)
                pairs[t, a * num_values + b] = code | ((bits + (second >> u64(32))) << u64(32))


@_njit
def put(words, w, acc, num_bits, entry):
    """Append a code of up to 24 bits to the bit buffer; write a 32-bit word when there is one."""
    acc |= (entry & u64(0xFFFFFFFF)) << num_bits
    num_bits += entry >> u64(32)
    words[w] = u32(acc & u64(0xFFFFFFFF))
    full = num_bits >> u64(5)
    return w + i64(full), acc >> (full << u64(5)), num_bits & u64(31)


@_njit
def put_symbols(symbols, entries, words, w, acc, num_bits):
    """Append the codes of symbols one by one."""
    for j in range(symbols.size):
        w, acc, num_bits = put(words, w, acc, num_bits, entries[symbols[j]])
    return w, acc, num_bits


@_njit
def put_pairs(symbols, num_values, pairs, entries, words, w, acc, num_bits):
    """Append the codes of symbols two at a time."""
    n = symbols.size - symbols.size % 4
    for j in range(0, n, 4):
        one = pairs[i64(symbols[j]) * num_values + symbols[j + 1]]
        two = pairs[i64(symbols[j + 2]) * num_values + symbols[j + 3]]
        w, acc, num_bits = put(words, w, acc, num_bits, one)
        w, acc, num_bits = put(words, w, acc, num_bits, two)
    return put_symbols(symbols[n:], entries, words, w, acc, num_bits)


@_njit
def tensor_at(offsets, position):
    """Index of the tensor that holds a position of the flat symbols (empty tensors hold none)."""
    low, high = 0, offsets.size - 2
    while low < high:
        middle = (low + high + 1) // 2
        if offsets[middle] <= position:
            low = middle
        else:
            high = middle - 1
    return low


@_njit
def encode_streams(
    first,
    last,
    chunk_symbols,
    num_streams,
    symbols,
    offsets,
    table_of,
    entries,
    num_paired,
    pair_size,
    pairs,
    words,
    sizes,
):
    """Code the streams of chunks first..last-1 in turn into uint32 words; return how many words.

    A chunk is `chunk_symbols` symbols in a row, whatever tensors they belong to, cut in
    `num_streams` equal parts; each part is a stream that starts on a word of its own. `sizes`
    [chunks * num_streams] gets its words. Tensors with table_of < num_paired take the pair tables.
    """
    total = symbols.size
    w = i64(0)
    for c in range(first, last):
        begin = c * chunk_symbols
        size = min(total, begin + chunk_symbols) - begin
        for k in range(num_streams):
            position = begin + size * k // num_streams
            end = begin + size * (k + 1) // num_streams
            start = w
            acc, num_bits = u64(0), u64(0)
            t = tensor_at(offsets, position)
            while position < end:
                stop = min(end, offsets[t + 1])
                table = table_of[t]
                part = symbols[position:stop]
                if table < num_paired:
                    w, acc, num_bits = put_pairs(
                        part, pair_size, pairs[table], entries[table], words, w, acc, num_bits
                    )
                else:
                    w, acc, num_bits = put_symbols(part, entries[table], words, w, acc, num_bits)
                position = stop
                t += 1
            if num_bits > u64(0):
                words[w] = u32(acc & u64(0xFFFFFFFF))
                w += 1
            sizes[c * num_streams + k] = w - start
    return w


# --- and back -------------------------------------------------------------------------------------

WINDOW_BITS = 12  # no code is longer, so that one look-up of so many bits always yields a symbol
WINDOW = u64((1 << WINDOW_BITS) - 1)
PER_LOOKUP = 6  # symbols that a look-up yields at the most
MARGIN = 2 * PER_LOOKUP + 2  # two look-ups of 8 stored bytes each must fit before the end of a part


@_njit
def decoder_windows(lengths, single):
    """Fill the look-up tables [T, 4096] of every code table with symbol | bits << 8.

    The windows of a table with a single used symbol yield it for no bits. Complete tables fill
    every window.
    """
    size = lengths.shape[1]
    codes = np.zeros(size, np.uint32)
    for t in range(lengths.shape[0]):
        canonical_codes(lengths[t], codes)
        used, symbol = 0, 0
        for k in range(size):
            if lengths[t, k] > 0:
                used += 1
                symbol = k
        if used == 1:
            single[t, :] = symbol
            continue
        for k in range(size):
            length = i64(lengths[t, k])
            if length > 0:
                code, reverse = i64(codes[k]), i64(0)
                for _ in range(length):
                    reverse = (reverse << 1) | (code & 1)
                    code >>= 1
                for window in range(reverse, 1 << WINDOW_BITS, 1 << length):
                    single[t, window] = k | (length << 8)


@_njit
def decoder_tables(lengths, single, several):
    """Fill `single` as `decoder_windows` does, and `several` [T, 4096] from it.

    `several` holds up to 6 symbols, their number and their bits.
    """
    decoder_windows(lengths, single)
    for t in range(lengths.shape[0]):
        for window in range(1 << WINDOW_BITS):
            packed, number, bits = i64(0), 0, i64(0)
            while number < PER_LOOKUP:
                entry = i64(single[t, window >> bits])
                if bits + (entry >> 8) > WINDOW_BITS:
                    break
                packed |= (entry & 255) << (8 * number)
                number += 1
                bits += entry >> 8
            several[t, window] = u64(packed) | (u64(number) << u64(48)) | (u64(bits) << u64(56))


@_njit
def store8(out, position, entry):
    """Write the 8 bytes of an entry; those behind its symbols are overwritten by what follows."""
    for b in range(8):
        out[u64(position + b)] = u8((entry >> u64(8 * b)) & u64(255))


@_njit
def window_at(words, bit):
    """At least 33 bits of the stream from a bit position on."""
    w = u64(bit >> 5)
    return (u64(words[w]) | (u64(words[w + u64(1)]) << u64(32))) >> u64(bit & 31)


@_njit
def decode_one(words, limit, out, o, end, p, several):
    """Decode from bit p into out[o:end], far from the ends of both; return where it stopped."""
    last = end - MARGIN
    while ((last - o) | (limit - p)) >= 0:
        bits = window_at(words, p)
        entry = several[bits & WINDOW]
        store8(out, o, entry)
        o += i64((entry >> u64(48)) & u64(255))
        used = entry >> u64(56)
        entry = several[(bits >> used) & WINDOW]
        store8(out, o, entry)
        o += i64((entry >> u64(48)) & u64(255))
        p += i64(used + (entry >> u64(56)))
    return o, p


@_njit
def decode_two(words, limit, out, o0, end0, p0, several0, o1, end1, p1, several1):
    """Decode two streams side by side: it keeps the processor busier than one; see `decode_one`."""
    last0, last1 = end0 - MARGIN, end1 - MARGIN
    while ((last0 - o0) | (last1 - o1) | (limit - p0) | (limit - p1)) >= 0:
        bits0, bits1 = window_at(words, p0), window_at(words, p1)
        entry0, entry1 = several0[bits0 & WINDOW], several1[bits1 & WINDOW]
        store8(out, o0, entry0)
        store8(out, o1, entry1)
        o0 += i64((entry0 >> u64(48)) & u64(255))
        o1 += i64((entry1 >> u64(48)) & u64(255))
        used0, used1 = entry0 >> u64(56), entry1 >> u64(56)
        entry0, entry1 = several0[(bits0 >> used0) & WINDOW], several1[(bits1 >> used1) & WINDOW]
        store8(out, o0, entry0)
        store8(out, o1, entry1)
        o0 += i64((entry0 >> u64(48)) & u64(255))
        o1 += i64((entry1 >> u64(48)) & u64(255))
        p0 += i64(used0 + (entry0 >> u64(56)))
        p1 += i64(used1 + (entry1 >> u64(56)))
    return o0, p0, o1, p1


@_njit
def decode_rest(words, out, o, end, p, single):
    """Decode into out[o:end] symbol by symbol; return the position of the bit behind.

    Bits behind the last word read as 0.
    """
    if single[0] >> 8 == 0:  # a table with a single used symbol
        out[o:end] = u8(single[0])
        return p
    while o < end:
        w, shift = p >> 5, p & 31
        bits = i64(words[w]) >> shift if w < words.size else i64(0)
        if w + 1 < words.size:
            bits |= i64(words[w + 1]) << (32 - shift)
        entry = i64(single[bits & ((1 << WINDOW_BITS) - 1)])
        out[o] = entry & 255
        o += 1
        p += entry >> 8
    return p


@_njit
def decode_streams(
    first,
    last,
    chunk_symbols,
    num_streams,
    words,
    starts,
    offsets,
    table_of,
    single,
    several,
    symbols,
):
    """Decode the streams of chunks first..last-1; return the first unsound stream, or -1.

    A stream is unsound where its code does not end on its last word. `starts` [streams + 1] are
    word positions. -1 means that all streams are sound. Neighbouring streams are decoded in pairs;
    the rest of the longer one, and an odd last stream, alone.
    """
    limit = 32 * (words.size - 1) - 1
    for c in range(first, last):
        begin = c * chunk_symbols
        size = min(symbols.size, begin + chunk_symbols) - begin
        for k in range(0, num_streams, 2):
            stream = c * num_streams + k
            paired = k + 1 < num_streams
            o0, end0 = begin + size * k // num_streams, begin + size * (k + 1) // num_streams
            o1, end1 = end0, begin + size * (k + 2) // num_streams if paired else end0
            p0 = 32 * starts[stream]
            p1 = 32 * starts[stream + 1]
            t0, t1 = tensor_at(offsets, o0), tensor_at(offsets, o1)
            while o0 < end0 and o1 < end1:
                stop0, stop1 = min(end0, offsets[t0 + 1]), min(end1, offsets[t1 + 1])
                a, b = table_of[t0], table_of[t1]
                o0, p0, o1, p1 = decode_two(
                    words, limit, symbols, o0, stop0, p0, several[a], o1, stop1, p1, several[b]
                )
                if stop0 - o0 < MARGIN or p0 > limit:
                    p0 = decode_rest(words, symbols, o0, stop0, p0, single[a])
                    o0 = stop0
                    t0 += 1
                if stop1 - o1 < MARGIN or p1 > limit:
                    p1 = decode_rest(words, symbols, o1, stop1, p1, single[b])
                    o1 = stop1
                    t1 += 1
            while o0 < end0:
                stop0 = min(end0, offsets[t0 + 1])
                o0, p0 = decode_one(words, limit, symbols, o0, stop0, p0, several[table_of[t0]])
                p0 = decode_rest(words, symbols, o0, stop0, p0, single[table_of[t0]])
                o0 = stop0
                t0 += 1
            while o1 < end1:
                stop1 = min(end1, offsets[t1 + 1])
                o1, p1 = decode_one(words, limit, symbols, o1, stop1, p1, several[table_of[t1]])
                p1 = decode_rest(words, symbols, o1, stop1, p1, single[table_of[t1]])
                o1 = stop1
                t1 += 1
            if (p0 + 31) >> 5 != starts[stream + 1]:
                return stream
            if paired and (p1 + 31) >> 5 != starts[stream + 2]:
                return stream + 1
    return -1


@_njit
def accumulate(out, symbols, table):
    """Add table[symbol] to float32 out [n] in place."""
    for j in range(symbols.size):
        out[j] = out[j] + table[symbols[j]]


@_njit
def look_up(out, symbols, table):
    """Write table[symbol] to float32 out [n]."""
    for j in range(symbols.size):
        out[j] = table[symbols[j]]
