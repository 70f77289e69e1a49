"""Numba loops of the side information, in integers: no policy, no validation, no exceptions.

An adaptive binary coder (of which the row x column factors make use too), laws as code tables, code
lengths, which tensor uses which table, stream lengths. Both ends run the same integers, so no float
decides a code. See `kernels`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import int64 as i64

from co3_flower.jit import njit as _njit
from co3_flower.kernels import LN2, WINDOW_BITS, huffman_lengths
from co3_flower.law_table import ATOMS, BETAS, MEANS, PROBABILITIES

# --- an adaptive binary coder ---------------------------------------------------------------------
#
# `state` int64 [3]: the interval's ends (32 bits each) and the byte position; `odds` int64: the
# chance of a 1 per context in 1/65536, moving by 1/16 towards each bit seen. Integers only, so both
# ends agree everywhere.


@_njit
def start_coding():
    """State of a coder that has written nothing."""
    return np.array([0, 0xFFFFFFFF, 0], np.int64)


@_njit
def end_coding(state, data):
    """Write the last byte; returns how many there are."""
    data[state[2]] = (state[0] >> 24) + 1 if state[0] > 0 else 0
    return state[2] + 1


@_njit
def start_reading(data):
    """State of a decoder in front of the first bit; bytes behind the end read as 0."""
    state = np.array([0, 0xFFFFFFFF, 4, 0], np.int64)
    for b in range(4):
        state[3] = (state[3] << 8) | (i64(data[b]) if b < data.size else 0)
    return state


@_njit
def code_bit(bit, odds, context, state, data):
    """Encode one bit into uint8 data."""
    low, high = state[0], state[1]
    middle = low + ((high - low) >> 16) * odds[context]
    if bit:
        high = middle
        odds[context] += (65536 - odds[context]) >> 4
    else:
        low = middle + 1
        odds[context] -= odds[context] >> 4
    while (low ^ high) & 0xFF000000 == 0:
        data[state[2]] = high >> 24
        state[2] += 1
        low = (low << 8) & 0xFFFFFFFF
        high = ((high << 8) & 0xFFFFFFFF) | 255
    state[0], state[1] = low, high
    return bit


@_njit
def read_bit(odds, context, state, data):
    """Decode one bit; state[3] holds the 32 bits that are being looked at.

    Bytes behind the end read as 0.
    """
    low, high, value = state[0], state[1], state[3]
    middle = low + ((high - low) >> 16) * odds[context]
    bit = 1 if value <= middle else 0
    if bit:
        high = middle
        odds[context] += (65536 - odds[context]) >> 4
    else:
        low = middle + 1
        odds[context] -= odds[context] >> 4
    while (low ^ high) & 0xFF000000 == 0:
        low = (low << 8) & 0xFFFFFFFF
        high = ((high << 8) & 0xFFFFFFFF) | 255
        value = (value << 8) & 0xFFFFFFFF
        if state[2] < data.size:
            value |= i64(data[state[2]])
        state[2] += 1
    state[0], state[1], state[3] = low, high, value
    return bit


@_njit
def number_width(limit):
    """Bits that a number below `limit` takes."""
    width = 0
    while (1 << width) < limit:
        width += 1
    return width


@_njit
def code_number(value, width, odds, first, state, data):
    """Encode a number of `width` bits, from the highest, with a context for each prefix.

    They are the 2**width contexts from `first` on.
    """
    prefix = 1
    for b in range(width - 1, -1, -1):
        prefix = 2 * prefix + code_bit((value >> b) & 1, odds, first + prefix, state, data)


@_njit
def read_number(width, odds, first, state, data):
    """Decode a number of `width` bits; see `code_number`."""
    prefix = 1
    for _ in range(width):
        prefix = 2 * prefix + read_bit(odds, first + prefix, state, data)
    return prefix - (1 << width)


# --- code tables by law ---------------------------------------------------------------------------
#
# A law is int64 [4]: position of beta in BETAS, or -1 where the table is explicit; eighths of
# log2(scale * E|x|), E|x| the mean of what is not zero; position of the zero atom's share in ATOMS;
# the last magnitude that has a code. `edges` int64 [K // 2] are log2 of the borders between a
# format's magnitudes in 1/65536 (see `laws.log2_edges`).

LAW_BETAS = np.array(BETAS, np.int64)
LAW_MEANS = np.array(MEANS, np.int64)
LAW_ATOMS = np.array(ATOMS, np.int64)
LAW_PROBABILITIES = np.array(
    [[int(row[i : i + 6], 16) for i in range(0, len(row), 6)] for row in PROBABILITIES], np.int64
)
CERTAIN = 1 << 24
BETA_ONE, BETA_TWO = 13, 17  # positions of the Laplace and the normal law
MAX_RATIO = 1 << 10  # eighths of octaves, in both directions
BETA_BITS, ATOM_BITS, RATIO_BITS = 5, 5, 12


@_njit
def law_probability(beta, log_x):
    """P(|x| <= 2**(log_x / 65536) * alpha) in 1/2**24; linear between the table's entries.

    Below the first one the density is flat: half of |x| has half of the probability.
    """
    at = ((log_x * LAW_BETAS[beta]) >> 16) + (6 << 16)
    if at < 0:
        octaves = (-at << 16) // LAW_BETAS[beta]
        whole = octaves >> 16
        if whole > 40:
            return i64(0)
        part = octaves & 65535  # 2**-part by a parabola through its ends
        power = 65536 - ((part * 44007) >> 16) + ((((part * part) >> 16) * 11239) >> 16)
        return (LAW_PROBABILITIES[beta, 0] * power) >> (16 + whole)
    i = at >> 13
    if i >= LAW_PROBABILITIES.shape[1] - 1:
        return i64(CERTAIN)
    low, high = LAW_PROBABILITIES[beta, i], LAW_PROBABILITIES[beta, i + 1]
    return low + (((high - low) * (at & 8191)) >> 13)


@_njit
def table_by_law(law, edges, weights):
    """Write the weights, int64 [K], that a law stands for: at least 1 up to its last magnitude."""
    beta, last, zero = law[0], law[3], weights.size // 2
    atom = LAW_ATOMS[law[2]]
    shift = (law[1] << 13) - LAW_MEANS[beta]
    weights[:] = 0
    below = i64(0)
    for j in range(last + 1):
        above = law_probability(beta, edges[j] - shift) if j < zero else i64(CERTAIN)
        mass = max(0, above - below) * (65536 - atom)
        below = max(above, below)
        if j == 0:
            weights[zero] = max(i64(1), 2 * mass + (atom << 25))
        else:
            weights[zero - j] = weights[zero + j] = max(i64(1), mass)


@_njit
def tables_by_law(laws, edges, weights):
    """`table_by_law` for each row of laws [T, 4]; zeros for explicit tables."""
    for t in range(laws.shape[0]):
        weights[t, :] = 0
        if laws[t, 0] >= 0:
            table_by_law(laws[t], edges, weights[t])


@_njit
def last_magnitude(counts):
    """Position of the largest magnitude that occurs."""
    zero = counts.size // 2
    for j in range(zero, 0, -1):
        if counts[zero + j] > 0 or counts[zero - j] > 0:
            return i64(j)
    return i64(0)


@_njit
def nearest_laws(alphas, betas, zero_fractions, scales, counts, laws):
    """Write the laws, int64 [T, 4], nearest to fitted ones."""
    for t in range(laws.shape[0]):
        laws[t, 0], laws[t, 1], laws[t, 2], laws[t, 3] = BETA_ONE, 0, LAW_ATOMS.size - 1, 0
        if alphas[t] <= 0.0:
            continue
        beta = i64(math.floor(4.0 * math.log(betas[t]) / LN2 + BETA_ONE + 0.5))
        beta = min(i64(LAW_BETAS.size - 1), max(i64(0), beta))
        log_mean = math.log(alphas[t] * np.float64(scales[t])) / LN2 + LAW_MEANS[beta] / 65536.0
        ratio = i64(math.floor(8.0 * log_mean + 0.5))
        atom = i64(math.floor(math.asin(math.sqrt(zero_fractions[t])) * 64.0 / math.pi + 0.5))
        laws[t, 0] = beta
        laws[t, 1] = min(MAX_RATIO - 1, max(-MAX_RATIO, ratio))
        laws[t, 2] = min(LAW_ATOMS.size - 1, atom)
        laws[t, 3] = last_magnitude(counts[t])


@_njit
def ideal_bits(counts, weights):
    """Bits of symbols counted in [K] under probabilities proportional to weights [K]."""
    total, bits = 0.0, 0.0
    for k in range(counts.size):
        total += weights[k]
        if counts[k] > 0:
            bits -= counts[k] * math.log2(float(weights[k]))
    return bits + counts.sum() * math.log2(total)


@_njit
def fit_law(counts, edges, low_beta, high_beta, law):
    """Search the law int64 [4] of least code for counts [K], its shape within the given positions.

    Coordinate descent from the best spread for a shape in the middle, no atom.
    """
    weights = np.zeros(counts.size, np.int64)
    law[:] = 0
    law[0], law[3] = (low_beta + high_beta) // 2, last_magnitude(counts)
    least, spread = 1e300, i64(0)
    first, last = (edges[0] >> 13) - 32, (edges[edges.size - 1] >> 13) + 32
    for ratio in range(max(-MAX_RATIO, first), min(MAX_RATIO - 1, last) + 1, 4):
        law[1] = ratio
        table_by_law(law, edges, weights)
        bits = ideal_bits(counts, weights)
        if bits < least:
            least, spread = bits, i64(ratio)
    law[1] = spread
    lows = np.array([low_beta, -MAX_RATIO, 0], np.int64)
    highs = np.array([high_beta, MAX_RATIO - 1, LAW_ATOMS.size - 1], np.int64)
    better = True
    while better:
        better = False
        for i in range(3):
            for step in (-4, -1, 1, 4):
                before = law[i]
                law[i] = min(highs[i], max(lows[i], before + step))
                table_by_law(law, edges, weights)
                bits = ideal_bits(counts, weights)
                if bits < least:
                    least, better = bits, True
                else:
                    law[i] = before


# --- code tables on the wire ----------------------------------------------------------------------

BY_LAW = 1024  # context of a table's kind, behind those of explicit tables; then those of laws
LAST_CONTEXTS = BY_LAW + 1
ATOM_CONTEXTS = LAST_CONTEXTS + 128
BETA_CONTEXTS = ATOM_CONTEXTS + (1 << ATOM_BITS)
SIZE_CONTEXTS = BETA_CONTEXTS + (1 << BETA_BITS)
DIGIT_CONTEXTS = SIZE_CONTEXTS + RATIO_BITS
NUMBER_CONTEXTS = DIGIT_CONTEXTS + RATIO_BITS  # of the coder's own numbers, the last ones


@_njit
def code_law(law, ratio_before, num_magnitudes, odds, state, data):
    """Code a law; the spread as the difference to the last law's."""
    code_number(law[3], number_width(num_magnitudes), odds, LAST_CONTEXTS, state, data)
    code_number(law[2], ATOM_BITS, odds, ATOM_CONTEXTS, state, data)
    code_number(law[0], BETA_BITS, odds, BETA_CONTEXTS, state, data)
    difference = law[1] - ratio_before
    number = 2 * difference if difference >= 0 else -2 * difference - 1
    size = number_width(number + 1)
    for b in range(size):
        code_bit(1, odds, SIZE_CONTEXTS + b, state, data)
    if size < RATIO_BITS:
        code_bit(0, odds, SIZE_CONTEXTS + size, state, data)
    for b in range(size - 1):  # its highest bit is 1
        code_bit((number >> b) & 1, odds, DIGIT_CONTEXTS + b, state, data)


@_njit
def read_law(law, ratio_before, num_magnitudes, odds, state, data):
    """Read what `code_law` wrote; tells whether it is in range."""
    law[3] = read_number(number_width(num_magnitudes), odds, LAST_CONTEXTS, state, data)
    law[2] = read_number(ATOM_BITS, odds, ATOM_CONTEXTS, state, data)
    law[0] = read_number(BETA_BITS, odds, BETA_CONTEXTS, state, data)
    size = 0
    while size < RATIO_BITS and read_bit(odds, SIZE_CONTEXTS + size, state, data):
        size += 1
    number = i64(1) << (size - 1) if size > 0 else i64(0)
    for b in range(size - 1):
        number |= read_bit(odds, DIGIT_CONTEXTS + b, state, data) << b
    law[1] = ratio_before + (number // 2 if number % 2 == 0 else -(number + 1) // 2)
    in_range = -MAX_RATIO <= law[1] < MAX_RATIO
    return in_range and law[0] < LAW_BETAS.size and law[3] < num_magnitudes


MAX_STEPS = (
    24  # a code length and its neighbour differ by at most 12, in zigzag order by at most 24
)


@_njit
def used_context(sign, j, neighbour, partner):
    """Return the context of "this symbol has a code".

    It is made of the symbol's sign, its magnitude (up to 7), and who beside it has a code.
    """
    return ((sign * 8 + min(j, 7)) * 2 + neighbour) * 2 + partner


@_njit
def step_context(sign, j, step):
    """Context of one more step in the difference of code lengths."""
    return 64 + (sign * 8 + min(j, 7)) * 25 + step


@_njit
def encode_tables(lengths, laws, sizes, table_of, num_tables, data):
    """Code all tables' laws or code lengths, then each tensor's table number, into uint8 data.

    Returns the number of bytes. `sizes` [T] is each table's alphabet, `table_of` the numbers (below
    num_tables) to send. A bit says whether a table is a law's. Lengths go by ascending magnitude,
    the positive symbol before the negative one: whether it has a code, and if so the difference to
    the last length of the same sign (for a negative symbol: to its positive partner's, if that has
    one).
    """
    width = number_width(num_tables)
    odds = np.full(NUMBER_CONTEXTS + (1 << width), 32768, np.int64)
    state = start_coding()
    ratio = i64(0)
    for t in range(lengths.shape[0]):
        zero = sizes[t] // 2
        if code_bit(1 if laws[t, 0] >= 0 else 0, odds, BY_LAW, state, data):
            code_law(laws[t], ratio, zero + 1, odds, state, data)
            ratio = laws[t, 1]
            continue
        before, neighbour = i64(2), 1
        for j in range(zero + 1):
            partner = 0
            for sign in range(2 if j > 0 else 1):
                length = i64(lengths[t, zero - j if sign else zero + j])
                has = 1 if length > 0 else 0
                code_bit(has, odds, used_context(sign, j, neighbour, partner), state, data)
                if has:
                    difference = length - before
                    steps = 2 * difference if difference >= 0 else -2 * difference - 1
                    for step in range(steps):
                        code_bit(1, odds, step_context(sign, j, step), state, data)
                    if steps < MAX_STEPS:
                        code_bit(0, odds, step_context(sign, j, steps), state, data)
                    before = length
                    partner = 1
                if sign == 0:
                    now = has
            neighbour = now
    for i in range(table_of.size):
        code_number(table_of[i], width, odds, NUMBER_CONTEXTS, state, data)
    return end_coding(state, data)


@_njit
def decode_tables(data, sizes, edges, edges_of, num_tables, lengths, laws, table_of):
    """Read what `encode_tables` wrote; return -1, or the number of an unsound table.

    Table t is of the format whose borders are edges[edges_of[t]].

    The lengths of an unsound table are such as no code can have. A sound table has codes for one
    symbol (of length 1), or for more and a Kraft sum of exactly 1. Table numbers may come out too
    large: the caller checks them.
    """
    width = number_width(num_tables)
    odds = np.full(NUMBER_CONTEXTS + (1 << width), 32768, np.int64)
    state = start_reading(data)
    ratio = i64(0)
    for t in range(lengths.shape[0]):
        zero = sizes[t] // 2
        if read_bit(odds, BY_LAW, state, data):
            if not read_law(laws[t], ratio, zero + 1, odds, state, data):
                return t
            ratio = laws[t, 1]
            weights = np.zeros(sizes[t], np.int64)
            table_by_law(laws[t], edges[edges_of[t]], weights)
            huffman_lengths(weights, WINDOW_BITS, lengths[t, : sizes[t]])
            continue
        before, neighbour = i64(2), 1
        kraft, used = i64(0), 0
        for j in range(zero + 1):
            partner = 0
            for sign in range(2 if j > 0 else 1):
                has = read_bit(odds, used_context(sign, j, neighbour, partner), state, data)
                if has:
                    steps = i64(0)
                    while steps < MAX_STEPS and read_bit(
                        odds, step_context(sign, j, steps), state, data
                    ):
                        steps += 1
                    length = before + (steps // 2 if steps % 2 == 0 else -(steps + 1) // 2)
                    if length < 1 or length > WINDOW_BITS:
                        return t
                    lengths[t, zero - j if sign else zero + j] = length
                    kraft += i64(1) << (WINDOW_BITS - length)
                    used += 1
                    before = length
                    partner = 1
                if sign == 0:
                    now = has
            neighbour = now
        if used == 0 or (used == 1 and before != 1) or (used > 1 and kraft != 1 << WINDOW_BITS):
            return t
    for i in range(table_of.size):
        table_of[i] = read_number(width, odds, NUMBER_CONTEXTS, state, data)
    return -1


# --- framing --------------------------------------------------------------------------------------


@_njit
def write_varints(values, data):
    """Write int64 values as little-endian base-128 numbers into uint8 data; returns the bytes."""
    n = 0
    for i in range(values.size):
        value = values[i]
        while value >= 128:
            data[n] = (value & 127) | 128
            value >>= 7
            n += 1
        data[n] = value
        n += 1
    return n


@_njit
def read_varints(data, values):
    """Read values.size numbers of at most 35 bits; return the bytes taken, or -1 if unsound."""
    n = 0
    for i in range(values.size):
        value, shift = i64(0), 0
        while True:
            if n >= data.size or shift > 28:
                return -1
            byte = i64(data[n])
            n += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        values[i] = value
    return n
