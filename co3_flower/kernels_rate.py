"""Numba loops that foretell the size of an update's code at any factor on its scales.

No policy, no validation, no exceptions (see `kernels`). A histogram of the top bits of |v|,
exponent and 3 mantissa bits, tells how often each symbol will occur at a scale that has not been
tried.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import float32 as f32
from numpy import int64 as i64
from numpy import uint32 as u32

from co3_flower.jit import njit as _njit
from co3_flower.kernels import (
    BLOCK,
    COARSE_BITS,
    LANES,
    MAGNITUDE,
    add_to_histogram,
    compensate_and_fit,
    count_symbols,
    huffman_lengths,
    measure_block,
    pick_scale,
    quantize_block,
)
from co3_flower.kernels_rans import TOTAL, coarse_weights, frequencies, sent_weights

NUM_BINS = 256 << COARSE_BITS
FIRST_BIN = 1 << COARSE_BITS  # smaller numbers are subnormal and count as zeros
BIN_SHIFT = u32(23 - COARSE_BITS)
WEIGHT_BITS, LENGTH_BITS = 8.0, 3.0  # about what a magnitude takes in a table: rANS, Huffman


@_njit
def measure_tensors(
    first,
    last,
    v,
    residual,
    gammas,
    offsets,
    fmt,
    rule,
    table,
    num_own,
    scales,
    fits,
    sums,
    events,
    above,
):
    """Compensate v in place, fit and choose scales, but convert nothing yet.

    Arguments are as for `kernels.convert_tensors`, the multiplier is 1. above uint32 [own tensors,
    NUM_BINS + 1] gets the number of entries in each bin of |v| or above it.
    """
    histogram = np.zeros((4, NUM_BINS), np.uint32)
    folded = np.zeros(NUM_BINS, np.float64)
    work = np.zeros(2 << COARSE_BITS, np.float64)
    lanes = np.zeros((2, LANES), np.float64)
    for t in range(first, last):
        begin, end = offsets[t], offsets[t + 1]
        lanes[:] = 0.0
        alpha, beta, bad, low, high = compensate_and_fit(
            v[begin:end], residual[begin:end], gammas[t], histogram, folded, work, lanes, fits[t]
        )
        sums[t, 0], sums[t, 1] = lanes[0].sum(), lanes[1].sum()
        events[t, 2] = bad
        if bad > 0:
            continue
        scales[t] = pick_scale(v[begin:end], rule, 1.0, alpha, beta, folded, low, high, fmt, table)
        if t < num_own:
            total = i64(0)
            for j in range(NUM_BINS - 1, -1, -1):
                total += i64(folded[j])
                above[t, j] = total


@_njit
def measure_pool(v, offsets, num_own, scales, above):
    """Count the entries of the small tensors, from num_own on, in bins of |scale * v|."""
    histogram = np.zeros((4, NUM_BINS), np.uint32)
    block = np.zeros(BLOCK, np.float32)
    for t in range(num_own, scales.size):
        for start in range(offsets[t], offsets[t + 1], BLOCK):
            part = v[start : min(offsets[t + 1], start + BLOCK)]
            scaled = block[: part.size]
            for j in range(part.size):
                scaled[j] = part[j] * scales[t]
            add_to_histogram(scaled.view(np.uint32), histogram)
    total = i64(0)
    for j in range(NUM_BINS - 1, -1, -1):
        if j >= FIRST_BIN:
            for copy in range(4):
                total += i64(histogram[copy, j])
        above[j] = total


@_njit
def convert_scaled(
    first,
    last,
    v,
    rest,
    offsets,
    fmt,
    factor,
    low,
    base,
    symbols,
    scales,
    fits,
    counts,
    sums,
    events,
):
    """Convert tensors first..last-1 of v at `factor` times their scales `base`.

    v stays; rest float32 [n] gets the residual. Scales are clamped to [low, 2**120]; an all-zero
    tensor keeps its own. Other arguments are as for `kernels.convert_tensors`.
    """
    lanes = np.zeros((2, LANES), np.float64)
    for t in range(first, last):
        begin, end = offsets[t], offsets[t + 1]
        scale = f32(base[t])
        if fits[t, 0] > 0.0:
            scale = f32(min(2.0**120, max(low, np.float64(base[t]) * factor)))
        scales[t] = scale
        lanes[:] = 0.0
        events[t, 0], events[t, 1] = 0, 0
        for start in range(begin, end, BLOCK):
            stop = min(end, start + BLOCK)
            rest[start:stop] = v[start:stop]
            saturated, underflowed = quantize_block(
                rest[start:stop], symbols[start:stop], scale, fmt
            )
            events[t, 0] += saturated
            events[t, 1] += underflowed
            measure_block(rest[start:stop], lanes[1], lanes[0])
        count_symbols(symbols[begin:end], counts.shape[1], counts[t])
        sums[t, 2], sums[t, 3] = lanes[0].sum(), lanes[1].sum()


@_njit
def number_above(above, x):
    """Return about how many entries have magnitude x or more, from the numbers above bins.

    Within a bin the density is taken as linear, its slope from the neighbours'.
    """
    if x < 2.0**-126:
        return float(above[FIRST_BIN])
    if x >= 2.0**127:
        return 0.0
    bits = f32(x).view(u32) & MAGNITUDE
    j = i64(bits >> BIN_SHIFT)
    u = float(bits & ((u32(1) << BIN_SHIFT) - u32(1))) / float(1 << i64(BIN_SHIFT))
    inside = float(above[j]) - float(above[j + 1])
    if inside == 0.0:
        return float(above[j])
    bins = 1 << COARSE_BITS
    lower = float(above[j - 1]) - float(above[j]) if j > FIRST_BIN else inside
    upper = float(above[j + 1]) - float(above[j + 2]) if j + 2 < above.size else 0.0
    before, behind = 1.0, 1.0  # widths of the neighbours in this bin's
    if j % bins == 0:
        before = 0.5
    if j % bins == bins - 1:
        behind = 2.0
    slope = (upper / behind - lower / before) / (1.0 + 0.5 * (before + behind))
    bend = min(1.0, max(-1.0, 0.5 * slope / inside))
    return float(above[j + 1]) + inside * (1.0 - u - bend * (u * u - u))


@_njit
def expected_counts(above, size, scale, positive, counts):
    """Write the expected number of each symbol, int64 [K], of `size` entries converted at `scale`.

    `positive` holds the K // 2 + 1 magnitudes in ascending order; signs are taken as even. Returns
    how many entries are not zero and how many of these have the largest magnitude.
    """
    top = positive.size - 1
    before, live, largest = float(size), i64(0), i64(0)
    for j in range(top + 1):
        behind = 0.0
        if j < top:
            edge = 0.5 * (np.float64(positive[j]) + np.float64(positive[j + 1])) / scale
            behind = min(before, number_above(above, edge))
        number = i64(before - behind + 0.5)
        before = behind
        if j == 0:
            counts[top] = number
        else:
            counts[top + j] = (number + 1) // 2
            counts[top - j] = number // 2
            live += number
            largest = number
    return live, largest


@_njit
def huffman_bits(counts, max_length, lengths):
    """Bits of symbols counted in [K] under their optimal code of limited lengths, and its table."""
    huffman_lengths(counts, max_length, lengths)
    bits, used = 0.0, 0
    for k in range(counts.size):
        bits += float(counts[k]) * lengths[k]
        used += lengths[k] > 0
    return (bits if used > 1 else 0.0) + 0.5 * LENGTH_BITS * used


@_njit
def rans_bits(counts, exponents, mantissas, weights, freqs):
    """Bits of symbols counted in [K] under the frequencies that are sent for them; their table."""
    coarse_weights(counts, exponents, mantissas)
    sent_weights(exponents, mantissas, weights)
    frequencies(weights, freqs)
    bits = 0.0
    for k in range(counts.size):
        if counts[k] > 0:
            bits += float(counts[k]) * math.log2(float(TOTAL) / float(freqs[k])) + 0.5 * WEIGHT_BITS
    return bits


@_njit
def foretell_bits(above, sizes, scales, factor, positive, is_huffman, max_length):
    """Bits of code and tables of all rows of a histogram, converted at factor times their scales.

    above uint32 [rows, NUM_BINS + 1]; sizes int64, scales float64 [rows]. Returns the bits, the
    number of entries that are not zero, and of those that have the largest magnitude.
    """
    num_values = 2 * positive.size - 1
    counts, weights = np.zeros(num_values, np.int64), np.zeros(num_values, np.int64)
    lengths, freqs = np.zeros(num_values, np.uint8), np.zeros(num_values, np.uint32)
    exponents, mantissas = np.zeros(num_values, np.int8), np.zeros(num_values, np.int8)
    bits, live, largest = 0.0, i64(0), i64(0)
    for t in range(sizes.size):
        if sizes[t] == 0:
            continue
        some, most = expected_counts(above[t], sizes[t], scales[t] * factor, positive, counts)
        live += some
        largest += most
        if some == 0 and not is_huffman:
            bits += WEIGHT_BITS
        elif is_huffman:
            bits += huffman_bits(counts, max_length, lengths)
        else:
            bits += rans_bits(counts, exponents, mantissas, weights, freqs)
    return bits, live, largest


@_njit
def largest_magnitude(above, scales):
    """Upper edge of the highest bin in use among all rows, times the row's scale; 0 without any."""
    largest = 0.0
    for t in range(above.shape[0]):
        j = NUM_BINS - 1
        while j >= FIRST_BIN and above[t, j] == 0:
            j -= 1
        if j >= FIRST_BIN:
            bins = 1 << COARSE_BITS
            edge = math.ldexp(1.0 + (j % bins + 1.0) / bins, int(j // bins - 127))
            largest = max(largest, edge * scales[t])
    return largest
