"""Numba loops of the analysis, and nothing else: no policy, no validation, no exceptions.

They decide no byte of a payload. With ``NUMBA_DISABLE_JIT=1`` all of it runs as plain, slow Python.
"""

from __future__ import annotations

import numpy as np

from co3_flower.jit import njit as _njit

NODE_BITS = 28  # a slot of the dictionary holds node, symbol and child: 28 + 8 + 28 bits
_MIN_SLOTS = 1 << 10
_GOLDEN = np.uint64(0x9E3779B)  # 2**28 / golden ratio, odd: spreads keys of 36 bits, no overflow
_KEY_SHIFT = np.uint64(NODE_BITS)
_CHILD = np.uint64((1 << NODE_BITS) - 1)
_SYMBOL_SHIFT = np.uint64(8)
_MIXED = np.uint64(20)  # lowest bit of the product that most bits of a key reach


# --- LZ78: phrases of a symbol sequence, of a bit string ------------------------------------------


@_njit
def slot_of(key, mask):
    """Return the first slot to try for a 36-bit key: middle bits of a product."""
    return np.int64(((key * _GOLDEN) >> _MIXED) & mask)


@_njit
def grow(slots, parents, symbols):
    """Return twice as large copies of the hash table and of the two arrays of phrases."""
    wide = np.zeros(2 * slots.size, np.uint64)
    mask = np.uint64(wide.size - 1)
    for i in range(slots.size):
        if slots[i] != 0:
            at = slot_of(slots[i] >> _KEY_SHIFT, mask)
            while wide[at] != 0:
                at = (at + 1) & (wide.size - 1)
            wide[at] = slots[i]
    more_parents = np.zeros(2 * parents.size, np.uint32)
    more_parents[: parents.size] = parents
    more_symbols = np.zeros(2 * symbols.size, np.uint8)
    more_symbols[: symbols.size] = symbols
    return wide, more_parents, more_symbols


@_njit
def lz78_phrases(sequence):
    """Parse uint8 sequence [n] into phrases: (parents uint32 [P], last symbols uint8 [P]).

    Phrase j (from 1) is phrase parents[j - 1] (0 is the empty one) and one more symbol. The last
    phrase may repeat an earlier one. Linear probing, at most half of the slots are taken.
    """
    slots = np.zeros(_MIN_SLOTS, np.uint64)
    parents = np.zeros(_MIN_SLOTS // 2, np.uint32)
    symbols = np.zeros(_MIN_SLOTS // 2, np.uint8)
    mask = np.uint64(slots.size - 1)
    count, node = 0, np.int64(0)
    for i in range(sequence.size):
        key = (np.uint64(node) << _SYMBOL_SHIFT) | np.uint64(sequence[i])
        at = slot_of(key, mask)
        while slots[at] != 0 and (slots[at] >> _KEY_SHIFT) != key:
            at = (at + 1) & (slots.size - 1)
        if slots[at] != 0:
            node = np.int64(slots[at] & _CHILD)
            continue
        parents[count] = node
        symbols[count] = sequence[i]
        count += 1
        slots[at] = (key << _KEY_SHIFT) | np.uint64(count)
        node = np.int64(0)
        if 2 * count == slots.size:
            slots, parents, symbols = grow(slots, parents, symbols)
            mask = np.uint64(slots.size - 1)
    if node > 0:
        parents[count] = parents[node - 1]
        symbols[count] = symbols[node - 1]
        count += 1
    return parents[:count].copy(), symbols[:count].copy()


@_njit
def lz78_lengths(parents, lengths):
    """Write the length of each phrase into int64 lengths [P]; return their sum."""
    total = 0
    for j in range(parents.size):
        lengths[j] = 1 if parents[j] == 0 else lengths[parents[j] - 1] + 1
        total += lengths[j]
    return total


@_njit
def lz78_expand(parents, symbols, lengths, sequence):
    """Write what phrases stand for into uint8 sequence [sum of lengths]."""
    end = 0
    for j in range(parents.size):
        end += lengths[j]
        at, node = end - 1, np.int64(j + 1)
        while node > 0:
            sequence[at] = symbols[node - 1]
            node = np.int64(parents[node - 1])
            at -= 1


@_njit
def lz78_bit_phrases(sequence, codes, num_bits):
    """Count the LZ78 phrases of the bits of codes[sequence], num_bits each, highest first."""
    children = np.zeros((_MIN_SLOTS, 2), np.uint32)
    count, node = 0, np.int64(0)
    for i in range(sequence.size):
        code = np.int64(codes[sequence[i]])
        for b in range(num_bits - 1, -1, -1):
            bit = (code >> b) & 1
            child = children[node, bit]
            if child != 0:
                node = np.int64(child)
                continue
            count += 1
            if count == children.shape[0]:
                more = np.zeros((2 * count, 2), np.uint32)
                more[:count] = children
                children = more
            children[node, bit] = count
            node = np.int64(0)
    return count + (1 if node > 0 else 0)


# --- goodness of fit ------------------------------------------------------------------------------


@_njit
def central_moments(x):
    """Return mean, second and fourth central moment of float32 x [n], n > 0."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i])
    mean = total / x.size
    second, fourth = 0.0, 0.0
    for i in range(x.size):
        d = np.float64(x[i]) - mean
        square = d * d
        second += square
        fourth += square * square
    return mean, second / x.size, fourth / x.size


@_njit
def hermite(u, left, right, f_left, f_right, slope_left, slope_right):
    """Return the cubic through two points with given slopes, at u."""
    width = right - left
    if width <= 0.0:
        return f_left
    t = (u - left) / width
    s = 1.0 - t
    return (
        f_left * (1.0 + 2.0 * t) * s * s
        + f_right * (1.0 + 2.0 * s) * t * t
        + width * t * s * (slope_left * s - slope_right * t)
    )


@_njit
def lorenz_cross(ordered, tail, partial, quantile):
    """Return the integral over u in [0, 1] of (sample's quantile) * (law's quantile).

    With L(u) the law's quantile function integrated from 0 to u, L(0) = L(1) = 0, it is the sum of
    (x[i] - x[i + 1]) * L((i + 1) / n) over the ordered sample. L is symmetric; its lower half is
    given at nodes: tail [m] ascending from 0 to (1 - zero_fraction) / 2, partial = L(tail) and
    quantile = L'(tail), between which cubics run; from the last node to 1/2 it is constant.
    """
    n = ordered.size
    last = tail.size - 1
    total = 0.0
    node = 0
    for i in range(1, n):
        low = min(i, n - i)
        u = low / n
        if u >= tail[last]:
            value = partial[last]
        else:
            while tail[node + 1] < u:
                node += 1
            while tail[node] > u:
                node -= 1
            value = hermite(
                u, tail[node], tail[node + 1], partial[node], partial[node + 1],
                quantile[node], quantile[node + 1],
            )  # fmt: skip
        total += (np.float64(ordered[i - 1]) - np.float64(ordered[i])) * value
    return total
