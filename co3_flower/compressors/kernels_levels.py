"""Numba loops of the level coders and rotations: no policy, no validation, no exceptions.

Elias' recursive code (omega) of the integers from 1 on, after which a bit stream is a run of such
codes and signs; the fast Walsh-Hadamard transform. A reader never goes beyond the end of its data
and answers -1 to what is no stream, so foreign bytes may be given to it. Bits lie from the highest
of a byte to its lowest.
"""

from __future__ import annotations

import numpy as np

from co3_flower.jit import njit as _njit

LARGEST_WIDTH = 32  # bits of the largest number that a stream may hold


def make_omega(number: int) -> tuple[int, int]:
    """Return Elias' recursive code of an integer from 1 on, and how many bits it has.

    Examples
    --------
    >>> [format(code, f"0{length}b") for code, length in map(make_omega, (1, 2, 3, 4, 17))]
    ['0', '100', '110', '101000', '10100100010']
    """
    code, length = 0, 1
    while number > 1:
        code |= number << length
        width = 0
        while number >> width:
            width += 1
        length += width
        number = width - 1
    return code, length


_long_omega = _njit(make_omega)
_TABLE = np.array([(0, 0), *map(make_omega, range(1, 256))], np.int64)


@_njit
def omega(number):
    """`make_omega` of an integer from 1 to 2**32 - 1, short ones looked up."""
    if number < 256:
        return _TABLE[number, 0], _TABLE[number, 1]
    return _long_omega(number)


@_njit
def put(code, length, data, held, count, position):
    """Append up to 48 bits to uint8 data; returns the bits held, how many, bytes written."""
    held = (held << length) | code
    count += length
    while count >= 8:
        count -= 8
        data[position] = (held >> count) & 255
        position += 1
    return held & ((1 << count) - 1), count, position


@_njit
def count_bits(levels):
    """Bits of int32 levels written densely and sparsely, and how many of them are not zero."""
    dense, sparse, num_nonzero, last = 0, 0, 0, -1
    for i in range(levels.size):
        level = abs(np.int64(levels[i]))
        dense += omega(level + 1)[1]
        if level:
            dense += 1
            sparse += omega(i - last)[1] + 1 + omega(level)[1]
            num_nonzero += 1
            last = i
    return dense, sparse, num_nonzero


@_njit
def write_dense(levels, data):
    """Code |level| + 1 of every entry, and a sign behind those that are not zero."""
    held, count, position = 0, 0, 0
    for i in range(levels.size):
        level = np.int64(levels[i])
        code, length = omega(abs(level) + 1)
        if level:
            code, length = (code << 1) | (level < 0), length + 1
        held, count, position = put(code, length, data, held, count, position)
    put(0, -count & 7, data, held, count, position)


@_njit
def write_sparse(levels, data):
    """Code the distance from the last one, the sign and |level| of entries that are not zero."""
    held, count, position = 0, 0, 0
    last = -1
    for i in range(levels.size):
        level = np.int64(levels[i])
        if level:
            code, length = omega(i - last)
            code, length = (code << 1) | (level < 0), length + 1
            held, count, position = put(code, length, data, held, count, position)
            code, length = omega(abs(level))
            held, count, position = put(code, length, data, held, count, position)
            last = i
    put(0, -count & 7, data, held, count, position)


@_njit
def bit_at(data, position):
    """One bit of uint8 data, as an int64."""
    return (np.int64(data[position >> 3]) >> (7 - (position & 7))) & 1


@_njit
def read_omega(data, position):
    """Return the number whose code starts at a bit, or -1, and the bit behind it."""
    end = 8 * data.size
    number = 1
    while position < end:
        if bit_at(data, position) == 0:
            return number, position + 1
        width = number + 1
        if width > LARGEST_WIDTH or position + width > end:
            break
        number = 0
        for p in range(position, position + width):
            number = (number << 1) | bit_at(data, p)
        position += width
    return -1, end


@_njit
def read_dense(data, largest, levels):
    """Decode every entry of int32 levels; returns the bytes read, or -1."""
    position, end = 0, 8 * data.size
    for i in range(levels.size):
        number, position = read_omega(data, position)
        level = number - 1
        if level < 0 or level > largest:
            return -1
        if level > 0:
            if position >= end:
                return -1
            if bit_at(data, position):
                level = -level
            position += 1
        levels[i] = level
    return (position + 7) >> 3


@_njit
def read_sparse(data, largest, num_nonzero, levels):
    """Decode the entries that are not zero into int32 zeros; returns the bytes read, or -1."""
    position, end = 0, 8 * data.size
    i = -1
    for _ in range(num_nonzero):
        gap, position = read_omega(data, position)
        if gap < 0 or gap >= levels.size - i or position >= end:
            return -1
        i += gap
        negative = bit_at(data, position)
        level, position = read_omega(data, position + 1)
        if level < 0 or level > largest:
            return -1
        levels[i] = -level if negative else level
    return (position + 7) >> 3


@_njit
def hadamard(vector, sizes):
    """Transform consecutive blocks of a float32 vector in place; int64 sizes: powers of two.

    Sums and differences only, so a block's squared norm grows by its size and the transform is its
    own inverse but for that factor.
    """
    begin = 0
    for block in range(sizes.size):
        half = 1
        while half < sizes[block]:
            for start in range(begin, begin + sizes[block], 2 * half):
                for i in range(start, start + half):
                    x, y = vector[i], vector[i + half]
                    vector[i], vector[i + half] = x + y, x - y
            half *= 2
        begin += sizes[block]
