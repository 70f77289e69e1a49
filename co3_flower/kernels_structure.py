"""Numba loops of the row x column structure: no policy, no validation, no exceptions.

The entries of a tensor are not alike: their spread follows rows (output channels) and columns
(input channels, taps). Every entry gets a *class*, its expected magnitude in cells of the format,
E|s v|, on a grid of quarter octaves that is common to all tensors; all entries of a class share one
code table of the update. The class of entry (i, j) is row[i] + column[j]: sums of logarithms, in
integers. A dead row or column holds zeros only and takes no code.
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

from co3_flower.jit import njit as _njit
from co3_flower.kernels import WINDOW, law_cells, put, tensor_at, window_at
from co3_flower.kernels_rans import (
    FOUR,
    FREQUENCY_BITS,
    LOW,
    ONE,
    SLOT,
    STATE_WORDS,
    THREE,
    TOTAL,
    push,
    read_states,
    refill,
    write_states,
)
from co3_flower.kernels_side import code_bit, code_number, read_bit, read_number, start_reading

NONE, ROW, ROW_TAP, ROW_CHANNEL_TAP, ROW_COLUMN = 0, 1, 2, 3, 4  # modes of a tensor
CENTRE = 64  # what stands for "as the row says" in a column
MAX_ROW = 255  # a row's class; 4 log2 E|s v| + ORIGIN
ORIGIN = 160
NUM_CLASSES = MAX_ROW + 2 * CENTRE
DEAD = 512  # of a row or a column: sums from here on are the dead class
NUM_SUMS = DEAD + DEAD + 1
MAX_TABLES = 200  # of classes; their numbers take a byte
DENSE = 0.02  # gain of a class from which on a sample of rows tells the modes apart,
MIN_SAMPLE, MIN_SAMPLE_ROWS = 4096, 8  # of at least so many entries and rows
COST_UNIT = 65536.0  # of bits, in the integers that modes are compared by
SHAPE = 1.8  # beta of the laws by which modes are chosen: given its row and column an entry is
# nearly normal


# --- classes --------------------------------------------------------------------------------------


@_njit
def class_laws(positive, costs, gains):
    """Bits of each magnitude under each class's law, and what a step of the grid is worth.

    costs float32 [NUM_CLASSES, K // 2 + 1], sign included, are whole numbers of 1 / COST_UNIT
    bits: float64 sums of them are exact, in any order. gains float64 [NUM_CLASSES]: bits an entry
    that coding with the neighbouring class's table would lose.
    """
    top = positive.size - 1
    pmf = np.zeros(2 * top + 1, np.float64)
    needed = np.ones(2 * top + 1, np.int64)
    before = np.zeros(2 * top + 1, np.float64)
    ratio = math.exp(math.lgamma(2.0 / SHAPE) - math.lgamma(1.0 / SHAPE))
    for q in range(NUM_CLASSES):
        mean = 2.0 ** ((q - ORIGIN - CENTRE) / 4.0)
        law_cells(mean / ratio, SHAPE, 0.0, 1.0, positive, needed, pmf)
        loss = 0.0
        for k in range(2 * top + 1):
            p = max(pmf[k], 1e-7)
            if q > 0 and pmf[k] > 0.0:
                loss += pmf[k] * math.log2(p / max(before[k], 1e-7))
            before[k] = pmf[k]
            if k >= top:
                costs[q, k - top] = math.floor(0.5 - math.log2(p) * COST_UNIT)
        gains[q] = max(0.0, loss)
    gains[0] = gains[1]


@_njit
def magnitude_sums(symbols, residual, values, scale, unit, cols, row_sums, col_sums):
    """Sum |v| in units of `unit` over rows and columns, in integers; v is value / scale + residual.

    row_sums int64 [rows] and col_sums int64 [cols] are 0 before.
    """
    table = values / scale
    factor = f32(4096.0 / unit)
    fixed = np.zeros(cols, np.int32)
    for i in range(row_sums.size):
        row = symbols[i * cols : (i + 1) * cols]
        rest = residual[i * cols : (i + 1) * cols]
        for j in range(cols):
            fixed[j] = i32(min(abs(table[row[j]] + rest[j]) * factor, f32(1e9)))
        total = i64(0)
        for j in range(cols):
            total += i64(fixed[j])
            col_sums[j] += i64(fixed[j])
        row_sums[i] = total


@_njit
def live_flags(symbols, cols, zero, row_live, col_live):
    """Set row_live [rows] and col_live [cols] to 1 where a symbol other than zero occurs."""
    dead = u8(zero)
    for i in range(row_live.size):
        row = symbols[i * cols : (i + 1) * cols]
        any_live = u8(0)
        for j in range(cols):
            live = u8(row[j] != dead)
            col_live[j] |= live
            any_live |= live
        row_live[i] = any_live


LOG_BITS = 8  # mantissa bits that the table of logarithms knows
LOGS = np.log2(1.0 + np.arange((1 << LOG_BITS) + 1) / (1 << LOG_BITS))
BELOW_LOG_BITS = i64((1 << (52 - LOG_BITS)) - 1)


@_njit
def log_class(mean):
    """Quarter octaves of a mean magnitude in cells, to 1e-5 by a table: there are many to take."""
    bits = np.float64(max(mean, 1e-12)).view(np.int64)
    i = (bits >> (52 - LOG_BITS)) & ((1 << LOG_BITS) - 1)
    rest = (bits & BELOW_LOG_BITS) / (BELOW_LOG_BITS + 1.0)
    return 4.0 * ((bits >> 52) - 1023 + LOGS[i] + rest * (LOGS[i + 1] - LOGS[i]))


@_njit
def round_to(x, step):
    """Round x to the nearest multiple of step."""
    return i64(math.floor(x / step + 0.5)) * step


@_njit
def best_step(num, entries, gain, spread):
    """Return 1, 2 or 4 quarter octaves: the step below which coding finer no longer pays.

    A step h loses gain * h**2 / 12 bits an entry; half the step takes a bit more for each of `num`
    factors, each of which governs entries / num entries.
    """
    per_factor = entries / max(1, num)
    best, least = i64(1), 1e300
    for step in (1, 2, 4):
        cost = per_factor * gain * step * step / 12.0 + math.log2(1.0 + 2.0 * spread / step)
        if cost < least:
            best, least = i64(step), cost
    return best


@_njit
def spread_of(logs, live):
    """Return the standard deviation of the live ones."""
    n, total, square = 0, 0.0, 0.0
    for i in range(logs.size):
        if live[i]:
            n += 1
            total += logs[i]
            square += logs[i] * logs[i]
    if n == 0:
        return 0.0
    return math.sqrt(max(0.0, square / n - (total / n) ** 2))


@_njit
def set_factors(logs, live, step, base, low, high, out):
    """Round log factors to base + multiples of step within [low, high]; dead ones to DEAD."""
    for i in range(logs.size):
        if live[i]:
            value = base + round_to(logs[i] - base, step)
            while value < low:
                value += step
            while value > high:
                value -= step
            out[i] = value
        else:
            out[i] = DEAD


@_njit
def settle_factors(logs, live, per_factor, gains, offset, out):
    """Move factors to values that are cheaper to send where the code loses less than that saves.

    A factor that is off by d quarter octaves loses d**2 * gain bits on each of the `per_factor`
    entries that it governs; a value's bits are those of its share among the factors.
    """
    bits = np.zeros(MAX_ROW + 1, np.float64)
    for _ in range(2):
        counts = np.zeros(MAX_ROW + 1, np.int64)
        n, low, high = 0, MAX_ROW, 0
        for i in range(out.size):
            if live[i]:
                value = i64(out[i])
                counts[value] += 1
                n += 1
                low, high = min(low, value), max(high, value)
        fewest = 1e300
        for value in range(low, high + 1):
            bits[value] = math.log2(n / counts[value]) if counts[value] > 0 else 1e300
            fewest = min(fewest, bits[value])
        for i in range(out.size):
            if not live[i]:
                continue
            at = min(NUM_CLASSES - 1, max(0, i64(logs[i]) + offset))
            weight = per_factor * gains[at]
            middle = min(high, max(low, i64(logs[i] + 0.5)))
            best, least = i64(out[i]), weight * (logs[i] - out[i]) ** 2 + bits[out[i]]
            for away in range(high - low + 1):
                if away > 0 and weight * (away - 0.5) ** 2 + fewest >= least:
                    break  # farther off loses more than any value saves
                for value in (middle - away, middle + away):
                    if low <= value <= high:
                        cost = weight * (logs[i] - value) ** 2 + bits[value]
                        if cost < least:
                            best, least = i64(value), cost
            out[i] = best


@_njit
def structure_cost(symbols, cols, zero, row_class, col_class, costs, every):
    """Costs of the symbols of every so many rows under the classes' laws; of dead ones none."""
    total = 0.0
    rows = row_class.size
    for i in range(0, rows, every):
        r = i64(row_class[i])
        if r >= DEAD:
            continue
        row = symbols[i * cols : (i + 1) * cols]
        for j in range(cols):
            q = r + i64(col_class[j])
            if q < NUM_CLASSES:
                position = i64(row[j]) - zero
                total += np.float64(costs[q, position if position >= 0 else -position])
    return i64(total)


@_njit
def rows_sampled(rows, cols, density):
    """Return every how many rows are looked at, given the gain of a step in the tensor's class."""
    if density <= DENSE:
        return 1
    return max(1, min(8, rows // MIN_SAMPLE_ROWS, rows * cols // MIN_SAMPLE))


@_njit
def factor_bits(values):
    """Roughly the bits that factors take: the entropy of their values, and a bit for dead ones."""
    counts = np.zeros(DEAD + 1, np.int64)
    for i in range(values.size):
        counts[values[i]] += 1
    bits = 8.0
    for k in range(DEAD + 1):
        if counts[k] > 0:
            bits += counts[k] * math.log2(values.size / counts[k]) + 1.0
    return bits


@_njit
def propose_factors(
    row_sums,
    col_sums,
    row_live,
    col_live,
    cells,
    gains,
    taps,
    row_class,
    channel_class,
    tap_class,
    col_class,
    bits,
    sent,
):
    """Propose the factors of one tensor for every mode, from its sums of magnitudes.

    row_sums, col_sums int64 in units of `cells` cells; row_live, col_live uint8: 1 where a symbol
    is not zero. All zero, or too small: only row_class[0] is set and False returned. Else row_class
    uint16 [rows], channel_class [channels], tap_class [taps] and col_class [cols] get the factors
    of all modes, bits float64 [5] what a mode's factors take (infinite where it is not to be
    tried), and sent int64 [5] the steps of rows, channels and columns, the base of the rows, and
    every how many rows are to be looked at.
    """
    rows, cols = row_sums.size, col_sums.size
    bits[:] = np.inf
    if row_live.sum() == 0:
        row_class[0] = DEAD
        return False
    # at a low rate rows of zeros are chance: telling them apart would cost more than it saves
    row_live |= row_sums > 0
    col_live |= col_sums > 0
    whole = float(row_sums.sum()) * cells
    level = log_class(whole / (rows * cols))
    base = min(MAX_ROW, max(0, i64(math.floor(level + ORIGIN + 0.5))))
    row_class[0] = base
    if rows == 1 or cols == 1 or rows * cols < 256:
        return False
    sent[3], sent[4] = base, rows_sampled(rows, cols, gains[base + CENTRE])
    n_rows, n_cols, channels = i64(row_live.sum()), i64(col_live.sum()), cols // taps
    bits[NONE] = 0.0

    row_logs = np.zeros(rows, np.float64)
    for i in range(rows):
        row_logs[i] = log_class(row_sums[i] * cells / max(1, n_cols)) + ORIGIN
    gain = gains[min(NUM_CLASSES - 1, max(0, base + CENTRE))]
    live_entries = float(n_rows) * n_cols
    sent[0] = best_step(n_rows, live_entries, gain, spread_of(row_logs, row_live))
    set_factors(row_logs, row_live, sent[0], base, 0, MAX_ROW, row_class)
    settle_factors(row_logs, row_live, live_entries / max(1, n_rows), gains, CENTRE, row_class)
    bits[ROW] = factor_bits(row_class)

    channel_sums, tap_sums = np.zeros(channels, np.int64), np.zeros(taps, np.int64)
    channel_live, tap_live = np.zeros(channels, np.uint8), np.zeros(taps, np.uint8)
    for j in range(cols):
        channel_sums[j // taps] += col_sums[j]
        tap_sums[j % taps] += col_sums[j]
        channel_live[j // taps] |= col_live[j]
        tap_live[j % taps] |= col_live[j]
    n_channels, n_taps = i64(channel_live.sum()), i64(tap_live.sum())
    channel_logs, tap_logs = np.zeros(channels, np.float64), np.zeros(taps, np.float64)
    for c in range(channels):
        channel_logs[c] = log_class(channel_sums[c] * max(1, n_channels) * cells / whole) + CENTRE
    for k in range(taps):
        tap_logs[k] = log_class(tap_sums[k] * max(1, n_taps) * cells / whole) + CENTRE
    low, high = CENTRE // 2, CENTRE + CENTRE // 2 - 1  # so that a channel and a tap add up in range
    set_factors(tap_logs, tap_live, i64(1), CENTRE, low, high, tap_class)
    tap_bits = factor_bits(tap_class) if taps > 1 else 0.0
    if taps > 1:
        bits[ROW_TAP] = bits[ROW] + tap_bits
    sent[1] = best_step(n_channels, live_entries, gain, spread_of(channel_logs, channel_live))
    set_factors(channel_logs, channel_live, sent[1], CENTRE, low, high, channel_class)
    settle_factors(
        channel_logs, channel_live, live_entries / max(1, n_channels), gains, base, channel_class
    )
    bits[ROW_CHANNEL_TAP] = bits[ROW] + factor_bits(channel_class) + tap_bits
    if taps > 1:
        col_logs = np.zeros(cols, np.float64)
        for j in range(cols):
            col_logs[j] = log_class(col_sums[j] * max(1, n_cols) * cells / whole) + CENTRE
        sent[2] = best_step(n_cols, live_entries, gain, spread_of(col_logs, col_live))
        set_factors(col_logs, col_live, sent[2], CENTRE, 0, 2 * CENTRE - 1, col_class)
        settle_factors(col_logs, col_live, live_entries / max(1, n_cols), gains, base, col_class)
        bits[ROW_COLUMN] = bits[ROW] + factor_bits(col_class)
    return True


@_njit
def mode_classes(mode, base, row_class, channel_class, tap_class, col_class, out_rows, out_cols):
    """Write the classes of rows and columns, uint16, that a mode gives by the factors proposed."""
    if mode == NONE:
        out_rows[:] = base
    else:
        out_rows[:] = row_class
    if mode in (NONE, ROW):
        out_cols[:] = CENTRE
    elif mode == ROW_TAP:
        join_factors(np.full(channel_class.size, CENTRE, np.uint16), tap_class, out_cols)
    elif mode == ROW_CHANNEL_TAP:
        join_factors(channel_class, tap_class, out_cols)
    else:
        out_cols[:] = col_class


@_njit
def cheapest_mode(costs, rows, every, bits):
    """Return the mode of least bits, given costs int64 [5] of the rows that were looked at."""
    share = rows / ((rows + every - 1) // every)
    best, mode = 1e300, NONE
    for m in range(bits.size):
        if bits[m] < np.inf:
            total = costs[m] / COST_UNIT * share + bits[m]
            if total < best:
                best, mode = total, m
    return mode


@_njit
def choose_mode(
    symbols,
    residual,
    values,
    scale,
    unit,
    rows,
    cols,
    taps,
    costs,
    gains,
    row_class,
    channel_class,
    tap_class,
    col_class,
    out_rows,
    out_cols,
    sent,
):
    """Choose how the classes of one tensor are given, and return the mode.

    Arguments are those of `propose_factors`; out_rows and out_cols get the classes.
    """
    zero = values.size // 2
    row_sums, col_sums = np.zeros(rows, np.int64), np.zeros(cols, np.int64)
    row_live, col_live = np.zeros(rows, np.uint8), np.zeros(cols, np.uint8)
    live_flags(symbols, cols, zero, row_live, col_live)
    if row_live.any():
        magnitude_sums(symbols, residual, values, scale, unit, cols, row_sums, col_sums)
    cells = np.float64(scale) * unit / 4096.0
    bits, totals = np.zeros(5, np.float64), np.zeros(5, np.int64)
    factors = row_class, channel_class, tap_class, col_class
    mode = NONE
    if propose_factors(
        row_sums, col_sums, row_live, col_live, cells, gains, taps, *factors, bits, sent
    ):
        for m in range(5):
            if bits[m] < np.inf:
                mode_classes(m, sent[3], *factors, out_rows, out_cols)
                totals[m] = structure_cost(symbols, cols, zero, out_rows, out_cols, costs, sent[4])
        mode = cheapest_mode(totals, rows, sent[4], bits)
        if mode == NONE:
            row_class[0] = sent[3]
    mode_classes(mode, i64(row_class[0]), *factors, out_rows, out_cols)
    return mode


@_njit
def join_factors(channel_class, tap_class, col_class):
    """Column classes [channels * taps] from those of channels and of taps; dead where either is."""
    taps = tap_class.size
    for c in range(channel_class.size):
        for k in range(taps):
            a, b = i64(channel_class[c]), i64(tap_class[k])
            joint = min(MAX_ROW, max(0, a + b - CENTRE))
            col_class[c * taps + k] = DEAD if a >= DEAD or b >= DEAD else joint


@_njit
def class_range(row_class, col_class):
    """First and last sum of a live row's and a live column's class; (0, -1) where all is dead."""
    r_low, r_high, c_low, c_high = i64(DEAD), i64(-1), i64(DEAD), i64(-1)
    for i in range(row_class.size):
        if row_class[i] < DEAD:
            r_low, r_high = min(r_low, i64(row_class[i])), max(r_high, i64(row_class[i]))
    for j in range(col_class.size):
        if col_class[j] < DEAD:
            c_low, c_high = min(c_low, i64(col_class[j])), max(c_high, i64(col_class[j]))
    if r_high < 0 or c_high < 0:
        return i64(0), i64(-1)
    return r_low + c_low, r_high + c_high


@_njit
def count_classes(symbols, cols, row_class, col_class, first, counts):
    """Count the symbols of one tensor by class, from class `first` on, into int32 counts [2, n, K].

    Neighbours are counted apart, in the two halves, as they mostly are alike and would have to wait
    for each other. Dead rows and columns are not counted.
    """
    n = counts.shape[1]
    for i in range(row_class.size):
        r = i64(row_class[i]) - first
        if row_class[i] >= DEAD:
            continue
        row = symbols[i * cols : (i + 1) * cols]
        for j in range(0, cols - cols % 2, 2):
            q, p = r + i64(col_class[j]), r + i64(col_class[j + 1])
            if q < n:
                counts[0, q, row[j]] += 1
            if p < n:
                counts[1, p, row[j + 1]] += 1
        if cols % 2 == 1:
            q = r + i64(col_class[cols - 1])
            if q < n:
                counts[0, q, row[cols - 1]] += 1


# --- factors on the wire --------------------------------------------------------------------------
#
# One adaptive binary code for all tensors (see `kernels_side.code_bit`). Deviations go in zigzag
# order, in unary up to ESCAPE; contexts know the kind of factor and how far the last two lay from
# zero.

ROWS, CHANNELS, TAPS, COLUMNS = 0, 1, 2, 3  # kinds of factors
ESCAPE = 20
NUMBER_BITS = 10  # of what is beyond
DEAD_CONTEXTS = 0  # [kind, was the last dead]
MODE_CONTEXTS = 16  # [mode bits]
STEP_CONTEXTS = 32  # [kind, bits]
STATE_CONTEXTS = 64  # [kind, last two, unary step]
NUM_STATES = 5
NUMBER_CONTEXTS = 1024
NUM_CONTEXTS = NUMBER_CONTEXTS + (1 << NUMBER_BITS)


@_njit
def new_odds():
    """Contexts that know nothing yet."""
    return np.full(NUM_CONTEXTS, 32768, np.int64)


@_njit
def state_context(kind, near, step):
    """Context of one more unary step, given how far the last two factors were from zero."""
    level = near if near < 3 else 3 if near < 6 else 4
    return STATE_CONTEXTS + (kind * NUM_STATES + level) * (ESCAPE + 1) + step


@_njit
def code_step(step, kind, odds, state, data):
    """Code a step of 1, 2 or 4."""
    code_bit(1 if step > 1 else 0, odds, STEP_CONTEXTS + 2 * kind, state, data)
    if step > 1:
        code_bit(1 if step > 2 else 0, odds, STEP_CONTEXTS + 2 * kind + 1, state, data)


@_njit
def read_step(kind, odds, state, data):
    """Read a step; see `code_step`."""
    if read_bit(odds, STEP_CONTEXTS + 2 * kind, state, data) == 0:
        return i64(1)
    return i64(4) if read_bit(odds, STEP_CONTEXTS + 2 * kind + 1, state, data) else i64(2)


@_njit
def code_factors(values, stride, base, step, kind, odds, state, data):
    """Code every stride-th of uint16 values: dead, or base + a multiple of step."""
    last_dead, one, two = 0, i64(1), i64(1)
    for i in range(0, values.size, stride):
        dead = 1 if values[i] >= DEAD else 0
        code_bit(dead, odds, DEAD_CONTEXTS + 2 * kind + last_dead, state, data)
        last_dead = dead
        if dead:
            continue
        difference = (i64(values[i]) - base) // step
        number = 2 * difference if difference >= 0 else -2 * difference - 1
        near = one + two
        for u in range(min(number, ESCAPE)):
            code_bit(1, odds, state_context(kind, near, u), state, data)
        if number < ESCAPE:
            code_bit(0, odds, state_context(kind, near, number), state, data)
        else:
            code_number(number - ESCAPE, NUMBER_BITS, odds, NUMBER_CONTEXTS, state, data)
        two = one
        one = abs(difference)


@_njit
def read_factors(values, stride, base, step, kind, odds, state, data):
    """Read what `code_factors` wrote; tells whether all are in [0, MAX_ROW] or dead."""
    last_dead, one, two = 0, i64(1), i64(1)
    for i in range(0, values.size, stride):
        last_dead = read_bit(odds, DEAD_CONTEXTS + 2 * kind + last_dead, state, data)
        if last_dead:
            values[i] = DEAD
            continue
        number, near = i64(0), one + two
        while number < ESCAPE and read_bit(odds, state_context(kind, near, number), state, data):
            number += 1
        if number == ESCAPE:
            number += read_number(NUMBER_BITS, odds, NUMBER_CONTEXTS, state, data)
        difference = number // 2 if number % 2 == 0 else -(number + 1) // 2
        value = base + difference * step
        if value < 0 or value > MAX_ROW:
            return False
        values[i] = value
        two = one
        one = abs(difference)
    return True


@_njit
def code_mode(mode, odds, state, data):
    """Code a mode in unary."""
    for m in range(min(mode, ROW_COLUMN)):
        code_bit(1, odds, MODE_CONTEXTS + m, state, data)
    if mode < ROW_COLUMN:
        code_bit(0, odds, MODE_CONTEXTS + mode, state, data)


@_njit
def read_mode(odds, state, data):
    """Read a mode; see `code_mode`."""
    mode = 0
    while mode < ROW_COLUMN and read_bit(odds, MODE_CONTEXTS + mode, state, data):
        mode += 1
    return mode


@_njit
def code_tensor(mode, row_class, channel_class, tap_class, col_class, sent, odds, state, data):
    """Code how the classes of one tensor are given (see `propose_factors`)."""
    code_mode(mode, odds, state, data)
    if mode == NONE:
        dead = 1 if row_class[0] >= DEAD else 0
        code_bit(dead, odds, MODE_CONTEXTS + 8, state, data)
        if not dead:
            code_number(i64(row_class[0]), 8, odds, NUMBER_CONTEXTS, state, data)
        return
    base = sent[3]
    code_number(base, 8, odds, NUMBER_CONTEXTS, state, data)
    code_step(sent[0], ROWS, odds, state, data)
    code_factors(row_class, 1, base, sent[0], ROWS, odds, state, data)
    if mode == ROW_CHANNEL_TAP:
        code_step(sent[1], CHANNELS, odds, state, data)
        code_factors(channel_class, 1, CENTRE, sent[1], CHANNELS, odds, state, data)
    if (mode in (ROW_TAP, ROW_CHANNEL_TAP)) and tap_class.size > 1:
        code_factors(tap_class, 1, CENTRE, 1, TAPS, odds, state, data)
    if mode == ROW_COLUMN:
        code_step(sent[2], COLUMNS, odds, state, data)
        code_factors(col_class, 1, CENTRE, sent[2], COLUMNS, odds, state, data)


@_njit
def read_tensor(row_class, col_class, tap_class, odds, state, data):
    """Read what `code_tensor` wrote, columns joined; returns the mode, or -1 where it is unsound.

    col_class [channels * taps] is complete afterwards. For NONE, only row_class[0] is set.
    """
    mode = read_mode(odds, state, data)
    if mode == NONE:
        row_class[0] = DEAD
        if read_bit(odds, MODE_CONTEXTS + 8, state, data) == 0:
            row_class[0] = read_number(8, odds, NUMBER_CONTEXTS, state, data)
        return mode
    base = read_number(8, odds, NUMBER_CONTEXTS, state, data)
    step = read_step(ROWS, odds, state, data)
    sound = read_factors(row_class, 1, base, step, ROWS, odds, state, data)
    col_class[:] = CENTRE
    if mode == ROW_COLUMN:
        step = read_step(COLUMNS, odds, state, data)
        sound &= read_factors(col_class, 1, CENTRE, step, COLUMNS, odds, state, data)
        return mode if sound else -1
    taps = tap_class.size
    if mode == ROW_CHANNEL_TAP:
        step = read_step(CHANNELS, odds, state, data)
        sound &= read_factors(col_class, taps, CENTRE, step, CHANNELS, odds, state, data)
    if mode != ROW and taps > 1:
        sound &= read_factors(tap_class, 1, CENTRE, 1, TAPS, odds, state, data)
        join_factors(col_class[::taps].copy(), tap_class, col_class)
    return mode if sound else -1


@_njit
def choose_structure(
    symbols,
    residual,
    offsets,
    scales,
    units,
    rows,
    cols,
    taps,
    values,
    costs,
    gains,
    row_at,
    row_class,
    col_at,
    col_class,
    modes,
    counts,
    of_tensor,
    data,
    state,
    odds,
):
    """Choose the modes of all coded tensors, code them into data, and count symbols by class.

    row_class and col_class are flat, tensor t's from row_at[t] and col_at[t] on; the columns are
    joined afterwards. counts int64 [DEAD, K] gets the update's counts; of_tensor is a list that
    gets each tensor's, int32 [classes, K + 1], whose last column holds the class of the row.
    """
    sent = np.zeros(5, np.int64)
    for t in range(rows.size):
        begin, end = offsets[t], offsets[t + 1]
        if end == begin:
            of_tensor.append(np.zeros((0, counts.shape[1] + 1), np.int32))
            continue
        of_rows = row_class[row_at[t] : row_at[t + 1]]
        of_cols = col_class[col_at[t] : col_at[t + 1]]
        factors = (
            np.zeros(rows[t], np.uint16),
            np.zeros(cols[t] // taps[t], np.uint16),
            np.zeros(taps[t], np.uint16),
            np.zeros(cols[t], np.uint16),
        )
        part = symbols[begin:end]
        mode = choose_mode(
            part,
            residual[begin:end],
            values,
            scales[t],
            units[t],
            rows[t],
            cols[t],
            taps[t],
            costs,
            gains,
            *factors,
            of_rows,
            of_cols,
            sent,
        )
        code_tensor(mode, *factors, sent, odds, state, data)
        modes[t] = mode
        low, high = class_range(of_rows, of_cols)
        halves = np.zeros((2, max(0, high - low + 1), counts.shape[1]), np.int32)
        count_classes(part, cols[t], of_rows, of_cols, low, halves)
        mine = np.zeros((halves.shape[1], counts.shape[1] + 1), np.int32)
        for q in range(mine.shape[0]):
            mine[q, counts.shape[1]] = low + q
            for k in range(counts.shape[1]):
                mine[q, k] = halves[0, q, k] + halves[1, q, k]
        add_classes(mine, counts)
        of_tensor.append(mine)


@_njit
def add_classes(mine, counts):
    """Add one tensor's symbols by class, int32 [classes, K + 1], to counts [DEAD, K]."""
    k_max = counts.shape[1]
    for q in range(mine.shape[0]):
        for k in range(k_max):
            counts[mine[q, k_max], k] += mine[q, k]


@_njit
def tensor_bits(of_tensor, class_map, symbol_bits, bits):
    """Bits, float64 [tensors], of the symbols that `choose_structure` counted by class.

    symbol_bits float64 [tables, K] are those of each symbol in each table.
    """
    for t in range(bits.size):
        counted = of_tensor[t]
        k_max = counted.shape[1] - 1
        for q in range(counted.shape[0]):
            table = class_map[counted[q, k_max]]
            for k in range(k_max):
                bits[t] += counted[q, k] * symbol_bits[table, k]


@_njit
def read_structure(offsets, taps, row_at, row_class, col_at, col_class, modes, class_map, data):
    """Read what `choose_structure` and `code_class_map` wrote.

    Returns the number of tables and -1, or 0 and the first tensor that is unsound.
    """
    odds = new_odds()
    state = start_reading(data)
    for t in range(modes.size):
        if offsets[t + 1] == offsets[t]:
            continue
        mode = read_tensor(
            row_class[row_at[t] : row_at[t + 1]],
            col_class[col_at[t] : col_at[t + 1]],
            np.zeros(taps[t], np.uint16),
            odds,
            state,
            data,
        )
        if mode < 0:
            return 0, t
        modes[t] = mode
    return read_class_map(class_map, odds, state, data), -1


@_njit
def code_class_map(class_map, odds, state, data):
    """Code which table each class uses: ascending, each the same as the last one's or the next."""
    for q in range(1, class_map.size):
        new = 1 if class_map[q] != class_map[q - 1] else 0
        code_bit(new, odds, MODE_CONTEXTS + 9, state, data)


@_njit
def read_class_map(class_map, odds, state, data):
    """Read what `code_class_map` wrote; returns the number of tables."""
    class_map[0] = 0
    for q in range(1, class_map.size):
        class_map[q] = class_map[q - 1] + read_bit(odds, MODE_CONTEXTS + 9, state, data)
    return i64(class_map[class_map.size - 1]) + 1


@_njit
def entropy_of(counts):
    """Entropy in bits of symbols counted in [K], times their number."""
    total, bits = 0.0, 0.0
    for k in range(counts.size):
        if counts[k] > 0:
            total += counts[k]
            bits -= counts[k] * math.log2(float(counts[k]))
    return bits + total * math.log2(total) if total > 0.0 else 0.0


@_njit
def merge_classes(counts, symbol_bits, class_map):
    """Let neighbouring classes share a table where that costs less code than a table takes.

    A table takes about symbol_bits for each magnitude in use. class_map uint8 [NUM_CLASSES] gets
    ascending table numbers from 0.
    """
    n, k_max = counts.shape
    used = np.flatnonzero(counts.sum(axis=1))
    groups = used.size
    merged = counts[used].copy()
    firsts = used.copy()
    own = np.zeros(groups, np.float64)
    for g in range(groups):
        own[g] = entropy_of(merged[g])
    joint = np.zeros(groups, np.float64)
    for g in range(groups - 1):
        joint[g] = entropy_of(merged[g] + merged[g + 1])
    while groups > 1:
        best, saving = -1, 0.0
        for g in range(groups - 1):
            in_use = 0
            for k in range(k_max // 2, k_max):
                in_use += merged[g, k] > 0 or merged[g, k_max - 1 - k] > 0
            gain = 8.0 + symbol_bits * in_use - (joint[g] - own[g] - own[g + 1])
            if gain > saving or (best < 0 and groups > MAX_TABLES):
                best, saving = g, gain
        if best < 0:
            break
        merged[best] += merged[best + 1]
        own[best] = joint[best]
        for g in range(best + 1, groups - 1):
            merged[g] = merged[g + 1]
            own[g] = own[g + 1]
            joint[g] = joint[g + 1]
            firsts[g] = firsts[g + 1]
        groups -= 1
        for g in (best - 1, best):
            if 0 <= g < groups - 1:
                joint[g] = entropy_of(merged[g] + merged[g + 1])
    table = -1
    for q in range(n):
        while table + 1 < groups and firsts[table + 1] <= q:
            table += 1
        class_map[q] = max(0, table)


# --- symbols, each with the table of its class ----------------------------------------------------


@_njit
def fill_keys(
    begin,
    end,
    offsets,
    num_coded,
    modes,
    cols,
    row_at,
    row_class,
    col_at,
    col_class,
    sum_map,
    other,
    width,
    out,
):
    """First position (table * width) in flat tables [tables, width] for each entry of begin..end-1.

    `sum_map` [NUM_SUMS] gives the table of a sum of row and column class; tensors from num_coded
    on use the table `other`.
    """
    t = tensor_at(offsets, begin)
    i = begin
    while i < end:
        stop = min(end, offsets[t + 1])
        if t >= num_coded:
            out[i - begin : stop - begin] = other * width
        elif modes[t] == NONE:
            out[i - begin : stop - begin] = i64(sum_map[row_class[row_at[t]] + CENTRE]) * width
        else:
            columns = col_class[col_at[t] : col_at[t + 1]]
            n = cols[t]
            while i < stop:
                row, first = (i - offsets[t]) // n, (i - offsets[t]) % n
                count = min(n - first, stop - i)
                r = i64(row_class[row_at[t] + row])
                part = out[i - begin : i - begin + count]
                chosen = columns[first : first + count]
                for j in range(count):
                    part[j] = i64(sum_map[r + i64(chosen[j])]) * width
                i += count
        i = stop
        t += 1


@_njit
def encode_rans(begin, end, symbols, keys, steps, words):
    """`kernels_rans.encode_chunk` with a table an entry: keys [end - begin], flat steps."""
    x0 = x1 = x2 = x3 = u64(LOW)
    w = u64(words.size)
    part = symbols[begin:end]
    i = u64(part.size)  # the next symbol is that before i
    while i & THREE != u64(0):
        lane = i & THREE
        i -= ONE
        step = steps[u64(keys[i]) + u64(part[i])]
        if lane == ONE:
            x0, w = push(x0, step, words, w)
        elif lane == u64(2):
            x1, w = push(x1, step, words, w)
        else:
            x2, w = push(x2, step, words, w)
    while i > u64(0):
        step3 = steps[u64(keys[i - ONE]) + u64(part[i - ONE])]
        step2 = steps[u64(keys[i - u64(2)]) + u64(part[i - u64(2)])]
        step1 = steps[u64(keys[i - THREE]) + u64(part[i - THREE])]
        step0 = steps[u64(keys[i - FOUR]) + u64(part[i - FOUR])]
        x3, w = push(x3, step3, words, w)
        x2, w = push(x2, step2, words, w)
        x1, w = push(x1, step1, words, w)
        x0, w = push(x0, step0, words, w)
        i -= FOUR
    return i64(write_states(x0, x1, x2, x3, words, w))


@_njit
def pull_key(x, at, symbol_of, steps, width):
    """Decode one symbol with flat tables; `at` is the table's number."""
    slot = x & u64(SLOT)
    symbol = symbol_of[at * u64(TOTAL) + slot]
    step = u64(steps[at * width + u64(symbol)])
    return (step & u64(0xFFFF)) * (x >> u64(FREQUENCY_BITS)) + slot - (step >> u64(16)), symbol


@_njit
def decode_rans(begin, end, words, w, last, keys, symbol_of, steps, width, out):
    """`kernels_rans.decode_chunk` with a table an entry: keys hold table numbers."""
    w, last, width = u64(w), u64(last), u64(width)
    sound, x0, x1, x2, x3 = read_states(words, w, last)
    if not sound:
        return False
    w += u64(STATE_WORDS)
    part = out[begin:end]
    i, size = u64(0), u64(part.size)
    while i + FOUR <= size and w + FOUR <= last:
        x0, s0 = pull_key(x0, u64(keys[i]), symbol_of, steps, width)
        x1, s1 = pull_key(x1, u64(keys[i + ONE]), symbol_of, steps, width)
        x2, s2 = pull_key(x2, u64(keys[i + u64(2)]), symbol_of, steps, width)
        x3, s3 = pull_key(x3, u64(keys[i + THREE]), symbol_of, steps, width)
        part[i], part[i + ONE], part[i + u64(2)], part[i + THREE] = s0, s1, s2, s3
        x0, w = refill(x0, words, w)
        x1, w = refill(x1, words, w)
        x2, w = refill(x2, words, w)
        x3, w = refill(x3, words, w)
        i += FOUR
    while i < size:
        x = x0
        x, symbol = pull_key(x, u64(keys[i]), symbol_of, steps, width)
        part[i] = symbol
        if x < u64(LOW):
            if w >= last:
                return False
            x, w = refill(x, words, w)
        x0, x1, x2, x3 = x1, x2, x3, x  # the next symbol's state comes first
        i += ONE
    return w == last and x0 == u64(LOW) and x1 == u64(LOW) and x2 == u64(LOW) and x3 == u64(LOW)


@_njit
def encode_huffman(begin, end, symbols, keys, entries, words, w):
    """Code one stream with a table an entry (keys [end - begin], flat entries)."""
    acc, num_bits = u64(0), u64(0)
    part = symbols[begin:end]
    for i in range(part.size):
        w, acc, num_bits = put(words, w, acc, num_bits, entries[i64(keys[i]) + part[i]])
    if num_bits > u64(0):
        words[w] = u32(acc & u64(0xFFFFFFFF))
        w += 1
    return w


@_njit
def decode_huffman_two(size, words, p0, keys0, out0, p1, keys1, out1, single):
    """Decode the first `size` symbols of two streams side by side; returns the bits behind them."""
    limit = 32 * (words.size - 1) - 1
    i = 0
    while ((size - 1 - i) | (limit - p0) | (limit - p1)) >= 0:
        window0, window1 = i64(window_at(words, p0) & WINDOW), i64(window_at(words, p1) & WINDOW)
        entry0, entry1 = i64(single[keys0[i], window0]), i64(single[keys1[i], window1])
        out0[i], out1[i] = entry0 & 255, entry1 & 255
        p0 += entry0 >> 8
        p1 += entry1 >> 8
        i += 1
    return i, p0, p1


@_njit
def decode_huffman(begin, end, words, p, keys, single, out):
    """Decode one stream from bit p with a table an entry; returns the bit behind it."""
    part = out[begin:end]
    limit = 32 * (words.size - 1) - 1
    i = 0
    while i < part.size and p <= limit:
        window = i64(window_at(words, p) & WINDOW)
        entry = i64(single[keys[i], window])
        part[i] = entry & 255
        p += entry >> 8
        i += 1
    while i < part.size:  # only tables of a single symbol need no bits of what is not there
        entry = i64(single[keys[i], 0])
        part[i] = entry & 255
        p += entry >> 8
        i += 1
    return p


@_njit
def encode_chunks(
    first,
    last,
    chunk_symbols,
    num_streams,
    symbols,
    layout,
    sum_map,
    other,
    width,
    steps,
    entries,
    scratch,
    words16,
    words32,
    sizes,
):
    """Code chunks first..last-1, each entry with the table of its class; returns how many words.

    With num_streams 0 it is rANS (into uint16 words16), else Huffman codes (into words32).
    """
    offsets, num_coded, modes, cols, row_at, row_class, col_at, col_class = layout
    keys = np.zeros(chunk_symbols, np.uint32)
    used = i64(0)
    for c in range(first, last):
        begin = c * chunk_symbols
        end = min(symbols.size, begin + chunk_symbols)
        fill_keys(
            begin, end, offsets, num_coded, modes, cols, row_at, row_class, col_at, col_class,
            sum_map, other, width, keys,
        )  # fmt: skip
        if num_streams == 0:
            w = encode_rans(begin, end, symbols, keys, steps, scratch)
            n = scratch.size - w
            words16[used : used + n] = scratch[w:]
            sizes[c] = n
            used += n
        else:
            size = end - begin
            for k in range(num_streams):
                a, b = size * k // num_streams, size * (k + 1) // num_streams
                w = encode_huffman(begin + a, begin + b, symbols, keys[a:b], entries, words32, used)
                sizes[c * num_streams + k] = w - used
                used = w
    return used


@_njit
def decode_chunks(
    first,
    last,
    chunk_symbols,
    num_streams,
    words,
    starts,
    layout,
    sum_map,
    other,
    width,
    symbol_of,
    steps,
    single,
    out,
):
    """Decode chunks first..last-1; returns the first stream that is not sound, or -1.

    With num_streams 0 it is rANS, else Huffman codes.
    """
    offsets, num_coded, modes, cols, row_at, row_class, col_at, col_class = layout
    keys = np.zeros(chunk_symbols, np.uint32)
    for c in range(first, last):
        begin = c * chunk_symbols
        end = min(out.size, begin + chunk_symbols)
        fill_keys(
            begin, end, offsets, num_coded, modes, cols, row_at, row_class, col_at, col_class,
            sum_map, other, 1, keys,
        )  # fmt: skip
        if num_streams == 0:
            if not decode_rans(
                begin, end, words, starts[c], starts[c + 1], keys, symbol_of, steps, width, out
            ):
                return c
        else:
            size = end - begin
            done, p0, p1 = 0, i64(0), i64(0)
            for k in range(num_streams):
                stream = c * num_streams + k
                a, b = size * k // num_streams, size * (k + 1) // num_streams
                if k % 2 == 0:
                    done, p0 = 0, 32 * starts[stream]
                    if k + 1 < num_streams:
                        p1 = 32 * starts[stream + 1]
                        behind = size * (k + 2) // num_streams
                        done, p0, p1 = decode_huffman_two(
                            min(b - a, behind - b),
                            words,
                            p0,
                            keys[a:b],
                            out[begin + a : begin + b],
                            p1,
                            keys[b:behind],
                            out[begin + b : begin + behind],
                            single,
                        )
                p = p0 if k % 2 == 0 else p1
                p = decode_huffman(
                    begin + a + done, begin + b, words, p, keys[a + done : b], single, out
                )
                if (p + 31) >> 5 != starts[stream + 1]:
                    return stream
    return -1
