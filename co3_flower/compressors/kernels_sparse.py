"""Numba loops of the sparse coder: gaps between positions as Rice codes, and back.

No policy, no exceptions. A Rice code of parameter b is a Golomb code with divisor 2**b: the
quotient as that many 0 bits and a 1, then the b low bits. Bits fill each byte from its highest.
"""

from __future__ import annotations

import numpy as np
from numpy import int64 as i64
from numpy import uint8 as u8

from co3_flower.jit import njit as _njit

MAX_PARAMETER = 31


@_njit
def best_parameter(gaps):
    """Return the parameter that gives int64 gaps [k] the fewest bits, and these bits.

    Of several it is the smallest.
    """
    largest = i64(0)
    for j in range(gaps.size):
        largest = max(largest, gaps[j])
    best, fewest = i64(0), i64(-1)
    for parameter in range(MAX_PARAMETER + 1):
        bits = i64(gaps.size) * (1 + parameter)
        for j in range(gaps.size):
            bits += gaps[j] >> parameter
        if fewest < 0 or bits < fewest:
            best, fewest = i64(parameter), bits
        if largest >> parameter == 0:  # from here on each gap takes one bit more
            break
    return best, fewest


@_njit
def pack_gaps(gaps, parameter, data):
    """Write int64 gaps [k] into uint8 data, which is all zeros and large enough."""
    bit = i64(0)
    for j in range(gaps.size):
        bit += gaps[j] >> parameter
        data[bit >> 3] |= u8(128 >> (bit & 7))
        bit += 1
        for place in range(parameter - 1, -1, -1):
            if gaps[j] >> place & 1:
                data[bit >> 3] |= u8(128 >> (bit & 7))
            bit += 1


@_njit
def unpack_positions(data, parameter, num_entries, positions):
    """Read int64 positions [k] from uint8 data of any content; parameter is at most 31.

    Returns the bits read, or -1 where they end early or a position is not below num_entries.
    """
    num_bits = i64(data.size) * 8
    bit, position = i64(0), i64(-1)
    for j in range(positions.size):
        start = bit
        while bit < num_bits and np.int64(data[bit >> 3]) & (128 >> (bit & 7)) == 0:
            bit += 1
        quotient = bit - start
        bit += 1
        if bit + parameter > num_bits or quotient > num_entries >> parameter:
            return i64(-1)
        gap = quotient
        for _ in range(parameter):
            gap = gap << 1 | (np.int64(data[bit >> 3]) >> (7 - (bit & 7)) & 1)
            bit += 1
        position += gap + 1
        if position >= num_entries:
            return i64(-1)
        positions[j] = position
    return bit
