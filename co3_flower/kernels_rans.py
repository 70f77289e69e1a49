"""Numba loops of the rANS coder: no policy, no validation, no exceptions (see `kernels`).

Range asymmetric numeral systems with static frequencies that sum to 2**14. A chunk is one stream of
16-bit words: four states of 32 bits, then what the decoder reads as it goes. Symbol i of a chunk
belongs to state i mod 4, whatever tensor it is of, so that four states live side by side and are
flushed once per chunk. A state x stays in [2**15, 2**31):

    encode: write x mod 2**16 and drop it where x >= f * 2**17; x <- (x // f) * 2**14 + x % f + cum
    decode: slot = x mod 2**14 names the symbol; x <- f * (x // 2**14) + slot - cum;
            read a word where x < 2**15

Integers only on both ends. The decoder ends with every state at 2**15 on its last word, or the
stream was not sound.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import int64 as i64
from numpy import uint8 as u8
from numpy import uint16 as u16
from numpy import uint64 as u64

from co3_flower.jit import njit as _njit
from co3_flower.kernels import tensor_at
from co3_flower.kernels_side import (
    BY_LAW,
    NUMBER_CONTEXTS,
    code_bit,
    code_law,
    code_number,
    end_coding,
    read_bit,
    read_law,
    read_number,
    start_coding,
    start_reading,
    table_by_law,
    used_context,
)

FREQUENCY_BITS = 14
TOTAL = 1 << FREQUENCY_BITS
SLOT = TOTAL - 1
LOW = 1 << 15  # a state is never below; where both ends start and finish
NUM_STATES = 4
STATE_WORDS = 2 * NUM_STATES  # 16-bit words at the head of a chunk
ONE, THREE, FOUR = u64(1), u64(3), u64(4)  # positions count without sign: numba then never wraps

MANTISSA_BITS = 4  # of the weights that are sent; their exponents take the place of code lengths
TOP_EXPONENT = 20  # of the largest weight of a table
MAX_STEPS = 2 * TOP_EXPONENT
SPLIT_BITS = 14.0  # about what a second weight takes
NUM_CONTEXTS = NUMBER_CONTEXTS + (1 << MANTISSA_BITS)


@_njit
def coarse_weights(counts, exponents, mantissas):
    """Round counts [K] to weights (16 + mantissa) << exponent, the largest at TOP_EXPONENT.

    Opposite symbols share their mean where telling them apart would not save SPLIT_BITS of code.
    Symbols that do not occur get exponent -1.
    """
    zero = counts.size // 2
    largest = 1.0
    for k in range(counts.size):
        largest = max(largest, float(counts[k]))
    for j in range(zero + 1):
        a, b = float(counts[zero + j]), float(counts[zero - j])
        if a > 0.0 and b > 0.0:
            mean = 0.5 * (a + b)
            if a * math.log2(a / mean) + b * math.log2(b / mean) < SPLIT_BITS:
                a = b = mean
        for k, weight in ((zero + j, a), (zero - j, b)):
            exponent, mantissa = -1, 0
            if weight > 0.0:
                scaled = weight / largest * (1 << TOP_EXPONENT) * 31.0
                exponent = 0
                while exponent < TOP_EXPONENT and scaled >= 31.5 * (1 << exponent):
                    exponent += 1
                mantissa = min(15, max(0, int(scaled / (1 << exponent) + 0.5) - 16))
            exponents[k] = exponent
            mantissas[k] = mantissa


@_njit
def sent_weights(exponents, mantissas, weights):
    """Write the weights, int64 [K], that exponents and mantissas stand for."""
    for k in range(weights.size):
        weights[k] = 0
        if exponents[k] >= 0:
            weights[k] = (i64(16) + mantissas[k]) << i64(exponents[k])


@_njit
def frequencies(weights, out):
    """Frequencies [K] that sum to 2**14 from weights, in integers: the same on both ends.

    Each used symbol gets at least 1; what rounding leaves over or takes too much is settled with
    the most frequent symbols, in turn.
    """
    total = weights.sum()
    rest = i64(TOTAL)
    for k in range(out.size):
        out[k] = 0
        if weights[k] > 0:
            f = max(i64(1), (weights[k] * TOTAL + total // 2) // total)
            out[k] = f
            rest -= f
    while rest != 0:
        top = 0
        for k in range(out.size):
            if out[k] > out[top]:
                top = k
        f = i64(out[top])
        share = rest if rest > 0 else -min(-rest, max(i64(1), f // 2))
        out[top] = f + share
        rest -= share


@_njit
def explicit_frequencies(exponents, mantissas, out):
    """Frequencies of each explicit table [T, K]; those of others, without a symbol, stay."""
    weights = np.zeros(out.shape[1], np.int64)
    for t in range(out.shape[0]):
        sent_weights(exponents[t], mantissas[t], weights)
        if weights.any():
            frequencies(weights, out[t])


@_njit
def law_frequencies(weights, out):
    """`frequencies` for each row of weights [T, K]."""
    for t in range(out.shape[0]):
        frequencies(weights[t], out[t])


@_njit
def tensor_bits(counts, freqs, table_of, bits):
    """Ideal code bits float64 [tensors] of symbols counted in [tensors, K]."""
    for t in range(counts.shape[0]):
        total = 0.0
        for k in range(counts.shape[1]):
            if counts[t, k] > 0:
                f = float(freqs[table_of[t], k])
                total += counts[t, k] * (FREQUENCY_BITS - np.log2(f))
        bits[t] = total


# --- tables on the wire ---------------------------------------------------------------------------


@_njit
def exponent_context(j, step):
    """Context of one more step in the difference of exponents, by magnitude position."""
    return 64 + min(j, 7) * (MAX_STEPS + 1) + step


@_njit
def split_context(j):
    """Context of "the opposite symbol has a weight of its own"."""
    return 64 + 8 * (MAX_STEPS + 1) + min(j, 7)


@_njit
def encode_weight(exponent, mantissa, before, j, odds, state, data):
    """Code one weight: the difference of its exponent to the last one, and its mantissa."""
    difference = exponent - before
    steps = 2 * difference if difference >= 0 else -2 * difference - 1
    for step in range(steps):
        code_bit(1, odds, exponent_context(j, step), state, data)
    if steps < MAX_STEPS:
        code_bit(0, odds, exponent_context(j, steps), state, data)
    code_number(mantissa, MANTISSA_BITS, odds, NUMBER_CONTEXTS, state, data)


@_njit
def decode_weight(before, j, odds, state, data):
    """Read one weight; its exponent may come out of range."""
    steps = i64(0)
    while steps < MAX_STEPS and read_bit(odds, exponent_context(j, steps), state, data):
        steps += 1
    exponent = before + (steps // 2 if steps % 2 == 0 else -(steps + 1) // 2)
    return exponent, read_number(MANTISSA_BITS, odds, NUMBER_CONTEXTS, state, data)


@_njit
def encode_weights(exponents, mantissas, laws, sizes, data):
    """Code the laws or weights of all tables [T, K] into uint8 data; returns the bytes.

    A bit says whether a table is a law's. Magnitudes go in ascending order: whether each of the two
    symbols occurs, whether their weights differ, and the weight or weights.
    """
    odds = np.full(NUM_CONTEXTS, 32768, np.int64)
    state = start_coding()
    ratio = i64(0)
    for t in range(exponents.shape[0]):
        zero = sizes[t] // 2
        if code_bit(1 if laws[t, 0] >= 0 else 0, odds, BY_LAW, state, data):
            code_law(laws[t], ratio, zero + 1, odds, state, data)
            ratio = laws[t, 1]
            continue
        before, neighbour = i64(TOP_EXPONENT), 1
        for j in range(zero + 1):
            e, m = i64(exponents[t, zero + j]), i64(mantissas[t, zero + j])
            e_minus, m_minus = i64(exponents[t, zero - j]), i64(mantissas[t, zero - j])
            plus, minus = 1 if e >= 0 else 0, 1 if e_minus >= 0 else 0
            split = 1 if e != e_minus or m != m_minus else 0
            code_bit(plus, odds, used_context(0, j, neighbour, 0), state, data)
            if j > 0:
                code_bit(minus, odds, used_context(1, j, neighbour, plus), state, data)
                if plus & minus:
                    code_bit(split, odds, split_context(j), state, data)
            if plus:
                encode_weight(e, m, before, j, odds, state, data)
                before = e
            if minus and (split or not plus):
                encode_weight(e_minus, m_minus, before, j, odds, state, data)
                before = e_minus
            neighbour = plus | minus
    return end_coding(state, data)


@_njit
def decode_weights(data, sizes, edges, edges_of, exponents, mantissas, laws, freqs):
    """Read what `encode_weights` wrote; returns -1, or a table without symbols or out of range.

    Table t is of the format whose borders are edges[edges_of[t]]; `freqs` [T, K] gets those of
    laws.
    """
    odds = np.full(NUM_CONTEXTS, 32768, np.int64)
    state = start_reading(data)
    ratio = i64(0)
    for t in range(exponents.shape[0]):
        zero = sizes[t] // 2
        exponents[t, :] = -1
        if read_bit(odds, BY_LAW, state, data):
            if not read_law(laws[t], ratio, zero + 1, odds, state, data):
                return t
            ratio = laws[t, 1]
            weights = np.zeros(sizes[t], np.int64)
            table_by_law(laws[t], edges[edges_of[t]], weights)
            frequencies(weights, freqs[t, : sizes[t]])
            continue
        before, neighbour, used = i64(TOP_EXPONENT), 1, 0
        for j in range(zero + 1):
            plus = read_bit(odds, used_context(0, j, neighbour, 0), state, data)
            minus, split = 0, 0
            if j > 0:
                minus = read_bit(odds, used_context(1, j, neighbour, plus), state, data)
                if plus & minus:
                    split = read_bit(odds, split_context(j), state, data)
            m = i64(0)
            if plus:
                before, m = decode_weight(before, j, odds, state, data)
                if before < 0 or before > TOP_EXPONENT:
                    return t
                exponents[t, zero + j], mantissas[t, zero + j] = before, m
            if minus:
                if split or not plus:
                    before, m = decode_weight(before, j, odds, state, data)
                    if before < 0 or before > TOP_EXPONENT:
                        return t
                exponents[t, zero - j], mantissas[t, zero - j] = before, m
            neighbour = plus | minus
            used += neighbour
        if used == 0:
            return t
    return -1


# --- symbols --------------------------------------------------------------------------------------


@_njit
def encoder_steps(freqs, steps):
    """Per table and symbol, uint64 [T, K, 5]: what encoding needs.

    A reciprocal and a shift with which x // f is (x * reciprocal) >> shift for all x below 2**31
    (ceil(2**shift / f), shift = 31 + ceil(log2 f)), where the symbol's slots start, 2**14 - f, and
    the state from which on a word is written, f * 2**17.
    """
    for t in range(freqs.shape[0]):
        start = i64(0)
        for k in range(freqs.shape[1]):
            f = i64(freqs[t, k])
            if f > 0:
                shift = i64(31)
                while (i64(1) << (shift - 31)) < f:
                    shift += 1
                steps[t, k, 0] = u64(((i64(1) << shift) + f - 1) // f)
                steps[t, k, 1] = u64(shift)
                steps[t, k, 2] = u64(start)
                steps[t, k, 3] = u64(TOTAL - f)
                steps[t, k, 4] = u64(f << 17)
            start += f


@_njit
def push(x, step, words, w):
    """Encode one symbol into state x, writing a word downwards first where it is too large."""
    words[w - ONE] = u16(x & u64(0xFFFF))
    full = u64(x >= step[4])
    x >>= full << u64(4)
    return x + ((x * step[0]) >> step[1]) * step[3] + step[2], w - full


@_njit
def write_states(x0, x1, x2, x3, words, w):
    """Put the four states before words[w]; returns where they begin."""
    for x in (x3, x2, x1, x0):
        words[w - ONE] = u16(x >> u64(16))
        words[w - u64(2)] = u16(x & u64(0xFFFF))
        w -= u64(2)
    return w


@_njit
def read_states(words, w, last):
    """Read the four states at words[w:last]; tells whether they are there and in range."""
    if last < w + u64(STATE_WORDS):
        return False, u64(LOW), u64(LOW), u64(LOW), u64(LOW)
    x0 = u64(words[w]) | (u64(words[w + ONE]) << u64(16))
    x1 = u64(words[w + u64(2)]) | (u64(words[w + u64(3)]) << u64(16))
    x2 = u64(words[w + u64(4)]) | (u64(words[w + u64(5)]) << u64(16))
    x3 = u64(words[w + u64(6)]) | (u64(words[w + u64(7)]) << u64(16))
    highest, lowest = max(max(x0, x1), max(x2, x3)), min(min(x0, x1), min(x2, x3))
    return lowest >= u64(LOW) and highest < u64(LOW << 16), x0, x1, x2, x3


@_njit
def encode_chunk(begin, end, symbols, offsets, table_of, steps, words):
    """Code symbols[begin:end] into the upper end of uint16 words; returns where the stream begins.

    Symbols go in from the last to the first, so that they come out in order.
    """
    x0 = x1 = x2 = x3 = u64(LOW)
    w = u64(words.size)
    t = tensor_at(offsets, end - 1)
    first, stop = u64(begin), u64(end)
    while stop > first:
        start = max(first, u64(offsets[t]))
        s = steps[table_of[t]]
        i = stop  # the next symbol is that before i
        while i > start and (i - first) & THREE != u64(0):
            lane = (i - first) & THREE
            i -= ONE
            if lane == ONE:
                x0, w = push(x0, s[symbols[i]], words, w)
            elif lane == u64(2):
                x1, w = push(x1, s[symbols[i]], words, w)
            else:
                x2, w = push(x2, s[symbols[i]], words, w)
        while i >= start + FOUR:
            x3, w = push(x3, s[symbols[i - ONE]], words, w)
            x2, w = push(x2, s[symbols[i - u64(2)]], words, w)
            x1, w = push(x1, s[symbols[i - THREE]], words, w)
            x0, w = push(x0, s[symbols[i - FOUR]], words, w)
            i -= FOUR
        while i > start:
            lane = (i - first) & THREE
            i -= ONE
            if lane == u64(0):
                x3, w = push(x3, s[symbols[i]], words, w)
            elif lane == THREE:
                x2, w = push(x2, s[symbols[i]], words, w)
            else:
                x1, w = push(x1, s[symbols[i]], words, w)
        stop = start
        t -= 1
    return i64(write_states(x0, x1, x2, x3, words, w))


@_njit
def encode_chunks(
    first,
    last,
    chunk_symbols,
    symbols,
    offsets,
    table_of,
    steps,
    scratch,
    words,
    sizes,
):
    """Code chunks first..last-1 one after another into uint16 words; returns how many words."""
    used = i64(0)
    for c in range(first, last):
        begin = c * chunk_symbols
        end = min(symbols.size, begin + chunk_symbols)
        w = encode_chunk(begin, end, symbols, offsets, table_of, steps, scratch)
        n = scratch.size - w
        words[used : used + n] = scratch[w:]
        sizes[c] = n
        used += n
    return used


@_njit
def decoder_slots(freqs, symbol_of, steps):
    """Per table: uint8 symbol of each slot [T, 2**14], and frequency | start << 16 [T, K]."""
    for t in range(freqs.shape[0]):
        start = i64(0)
        for k in range(freqs.shape[1]):
            f = i64(freqs[t, k])
            steps[t, k] = f | (start << 16)
            symbol_of[t, start : start + f] = u8(k)
            start += f


@_njit
def pull(x, symbol_of, steps):
    """Decode one symbol from state x; the state is not refilled."""
    slot = x & u64(SLOT)
    symbol = symbol_of[slot]
    step = u64(steps[symbol])
    return (step & u64(0xFFFF)) * (x >> u64(FREQUENCY_BITS)) + slot - (step >> u64(16)), symbol


@_njit
def refill(x, words, w):
    """Read a word into a state that has become too small."""
    low = u64(x < u64(LOW))  # without a branch, which could not be predicted
    return (x << (low << u64(4))) | (u64(words[w]) & (u64(0) - low)), w + low


@_njit
def decode_chunk(begin, end, words, w, last, offsets, table_of, symbol_of, steps, out):
    """Decode out[begin:end] from words[w:last]; tells whether the stream was sound.

    Words behind the last one read as 0; one word behind it must exist.
    """
    w, last = u64(w), u64(last)
    sound, x0, x1, x2, x3 = read_states(words, w, last)
    if not sound:
        return False
    w += u64(STATE_WORDS)
    t = tensor_at(offsets, begin)
    first, i, behind = u64(begin), u64(begin), u64(end)
    while i < behind:
        stop = min(behind, u64(offsets[t + 1]))
        table = table_of[t]
        of, st = symbol_of[table], steps[table]
        while i < stop:
            if (i - first) & THREE == u64(0):
                while i + FOUR <= stop and w + FOUR <= last:
                    x0, s0 = pull(x0, of, st)
                    x1, s1 = pull(x1, of, st)
                    x2, s2 = pull(x2, of, st)
                    x3, s3 = pull(x3, of, st)
                    out[i], out[i + ONE], out[i + u64(2)], out[i + THREE] = s0, s1, s2, s3
                    x0, w = refill(x0, words, w)
                    x1, w = refill(x1, words, w)
                    x2, w = refill(x2, words, w)
                    x3, w = refill(x3, words, w)
                    i += FOUR
                if i >= stop:
                    break
            lane = (i - first) & THREE
            x = x0 if lane == u64(0) else x1 if lane == ONE else x2 if lane == u64(2) else x3
            x, symbol = pull(x, of, st)
            out[i] = symbol
            if x < u64(LOW):
                if w >= last:
                    return False
                x, w = refill(x, words, w)
            if lane == u64(0):
                x0 = x
            elif lane == ONE:
                x1 = x
            elif lane == u64(2):
                x2 = x
            else:
                x3 = x
            i += ONE
        t += 1
    return w == last and x0 == u64(LOW) and x1 == u64(LOW) and x2 == u64(LOW) and x3 == u64(LOW)


@_njit
def decode_chunks(
    first, last, chunk_symbols, words, starts, offsets, table_of, symbol_of, steps, out
):
    """Decode chunks first..last-1; returns the first that is not sound, or -1."""
    for c in range(first, last):
        begin = c * chunk_symbols
        end = min(out.size, begin + chunk_symbols)
        if not decode_chunk(
            begin,
            end,
            words,
            starts[c],
            starts[c + 1],
            offsets,
            table_of,
            symbol_of,
            steps,
            out,
        ):
            return c
    return -1
