"""The codec's work on whole tensors in operations of torch, on any device: no policy, no checks.

It is imported where tensors live on a device, or torch is asked for, and never before. Every
operation rounds as the numba loops of `kernels` do, and what decides a byte is counted in integers,
so that both give the same bytes. Streams and rANS states cannot be told apart by where they stand:
all of them take one step after another, side by side, and what is too short takes steps that change
nothing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from co3_flower.kernels import MAGNITUDE, WINDOW_BITS
from co3_flower.kernels_rans import FREQUENCY_BITS, LOW, NUM_STATES, SLOT, STATE_WORDS, TOTAL
from co3_flower.kernels_structure import DEAD, NUM_CLASSES

WORD = 0xFFFFFFFF
KernelFormat: TypeAlias = tuple[Any, ...]  # as `quantize.kernel_format` makes it
_EXPONENT = 0x7F800000
_HALF = 0xFFFF


def tensor_of(sizes: Tensor, num: int) -> Tensor:
    """Return the number of the tensor that each of `num` entries in a row belongs to, int64."""
    return torch.repeat_interleave(sizes, output_size=num)


def sum_parts(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the sums of consecutive parts of integers [n], exactly."""
    ends = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    return ends[torch.nn.functional.pad(sizes.cumsum(0), (1, 0))].diff()


def reduce_parts(values: Tensor, sizes: Tensor, how: str) -> Tensor:
    """Return ``sum`` or ``max`` of consecutive parts of floats [n]; 0 for an empty part."""
    if sizes.numel() == 0:
        return values.new_zeros(0)
    return torch.segment_reduce(values, how, lengths=sizes, initial=0)


# --- convert --------------------------------------------------------------------------------------


def magnitude_bins(v: Tensor, mantissa_bits: int) -> Tensor:
    """Return exponent and top mantissa bits of |v| as int32, v float32 [n]."""
    return (v.view(torch.int32) & int(MAGNITUDE)) >> (23 - mantissa_bits)


def count_bins(v: Tensor, of: Tensor, num: int, mantissa_bits: int) -> Tensor:
    """Return int64 [num, bins]: how often each bin of |v| occurs in each tensor."""
    bins = 256 << mantissa_bits
    keys = of * bins + magnitude_bins(v, mantissa_bits)
    return torch.bincount(keys, minlength=num * bins).reshape(num, bins)


def fixed_point_squares(v: Tensor, sizes: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Return each tensor's sum of squares, int64, as high and low halves of 32 bits to be joined.

    Entries are |v| * unit, truncated; units float64 [tensors].
    """
    fixed = (v.abs().double() * torch.repeat_interleave(units, sizes)).long()
    square = fixed * fixed
    return sum_parts(square >> 32, sizes), sum_parts(square & WORD, sizes)


def round_magnitude(a: Tensor, fmt: KernelFormat) -> Tensor:
    """Round float32 a in [0, max_finite] to the nearest magnitude; see `kernels`."""
    bits = a.view(torch.int32)
    smallest = torch.tensor(int(fmt[1]), dtype=torch.int32).view(torch.float32).item()
    if fmt[7]:
        odd = ((bits >> 23) - int(fmt[5])) & 1
        normal = ((bits + (0x003FFFFF + odd)) & _EXPONENT).view(torch.float32)
        small = torch.where(a <= 0.5 * smallest, 0.0, smallest).to(torch.float32)
        return torch.where(bits < int(fmt[1]), small, normal)
    exponent = (bits & _EXPONENT).clamp(min=int(fmt[1]))
    rounder = (exponent + int(fmt[2])).view(torch.float32)
    return (a + rounder) - rounder


def quantize(v: Tensor, scale: Tensor, fmt: KernelFormat) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convert float32 v [n] at scale [n].

    Returns symbols uint8, residuals float32, and bools: which entries saturated, which underflowed.
    """
    z = v * scale
    a = z.abs()
    largest = float(fmt[0])
    saturated = a > largest
    q = round_magnitude(a.clamp(max=largest), fmt)
    bits = q.view(torch.int32)
    below, above = (q * float(fmt[3])).int(), (bits >> int(fmt[4])) - int(fmt[5])
    position = torch.where(bits < int(fmt[1]), below, above)
    negative = z.view(torch.int32) < 0
    symbols = (int(fmt[6]) + torch.where(negative, -position, position)).to(torch.uint8)
    underflowed = (q == 0) & (v != 0)
    rest = v - (torch.where(negative, -q, q) + 0.0) / scale
    return symbols, rest, saturated, underflowed


def count_symbols(symbols: Tensor, of: Tensor, num: int, num_values: int) -> Tensor:
    """Return int64 [num, num_values]: how often each symbol occurs in each tensor."""
    keys = of * num_values + symbols
    return torch.bincount(keys, minlength=num * num_values).reshape(num, num_values)


# --- compress: classes ----------------------------------------------------------------------------


def magnitude_sums(
    symbols: Tensor,
    rest: Tensor,
    at: Tensor,
    values: Tensor,
    factors: Tensor,
    rows: Tensor,
    cols: Tensor,
    num_cols: int,
    row_sizes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return sums of |v| over rows and columns in fixed point, int64.

    v is values[at + symbol] + rest; factors float32 [n] are what it is multiplied with; rows and
    cols int64 [n] say where each entry stands, row_sizes [rows] how long rows are.
    """
    v = (values[at + symbols] + rest).abs() * factors
    fixed = v.clamp(max=1e9).int().long()
    of_cols = torch.zeros(num_cols, dtype=torch.int64, device=v.device)
    return sum_parts(fixed, row_sizes), of_cols.index_add_(0, cols, fixed)


def live_flags(
    live: Tensor, cols: Tensor, num_cols: int, row_sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return uint8 for rows and for columns: 1 where any entry is live (bool [n])."""
    ones = live.long()
    of_cols = torch.zeros(num_cols, dtype=torch.int64, device=live.device)
    of_cols.index_add_(0, cols, ones)
    return (sum_parts(ones, row_sizes) > 0).byte(), (of_cols > 0).byte()


def class_sums(row_class: Tensor, col_class: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Return int64 [n]: the class of each entry, DEAD or more in a dead row or column."""
    return row_class[rows] + col_class[cols]


def class_costs(classes: Tensor, magnitudes: Tensor, costs: Tensor, sizes: Tensor) -> Tensor:
    """Return each tensor's sum of costs [classes, magnitudes], whole numbers; 0 of dead ones."""
    at = classes.clamp(max=NUM_CLASSES - 1) * costs.shape[1] + magnitudes
    cost = torch.where(classes < NUM_CLASSES, costs.reshape(-1)[at], 0)
    return sum_parts(cost.long(), sizes)


def count_classes(
    symbols: Tensor, classes: Tensor, first: Tensor, num: int, num_values: int
) -> Tensor:
    """Return int64 [num, num_values]: symbols by class; a class's row is class + first."""
    live = classes < DEAD
    keys = (classes[live] + first[live]) * num_values + symbols[live]
    return torch.bincount(keys, minlength=num * num_values).reshape(num, num_values)


# --- compress: Huffman codes ----------------------------------------------------------------------


def pack_codes(at: Tensor, codes: Tensor, lengths: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codewords: those of streams bounds[s] .. bounds[s + 1] - 1, each on words of its own.

    codes and lengths int64 are those of every table and symbol, first bit lowest; at int64 [n] says
    which of them an entry takes. Returns words int64 (32 bits each) and each stream's number of
    them.
    """
    length = lengths[at]
    ends = length.cumsum(0)
    before = torch.nn.functional.pad(ends, (1, 0))[bounds]
    sizes = (before.diff() + 31) >> 5
    starts = sizes.cumsum(0) - sizes
    shift = torch.repeat_interleave(32 * starts - before[:-1], bounds.diff())
    position = ends - length + shift
    code = codes[at] << (position & 31)
    word = position >> 5
    num_words = int(sizes.sum())
    words = torch.zeros(num_words + 2, dtype=torch.int64, device=at.device)
    words.index_add_(0, word, code & WORD)  # no two codes share a bit: adding sets them
    words.index_add_(0, word + 1, code >> 32)
    return words[:num_words], sizes


def window_table(codes: Tensor, lengths: Tensor, used: Tensor) -> Tensor:
    """Return symbol | length << 8, int32 [tables * 4096], of each window of 12 bits.

    codes, lengths int64 and used bool are [tables, K]; the only symbol of a table has length 0.
    """
    num_values = codes.shape[1]
    number = torch.where(used, (1 << WINDOW_BITS) >> lengths, 0).reshape(-1)
    of = tensor_of(number, codes.shape[0] << WINDOW_BITS)
    nth = torch.arange(of.numel(), device=of.device) - (number.cumsum(0) - number)[of]
    length = lengths.reshape(-1)[of]
    window = codes.reshape(-1)[of] + (nth << length)
    table = torch.empty(of.numel(), dtype=torch.int32, device=of.device)
    table[(of // num_values << WINDOW_BITS) + window] = (of % num_values | length << 8).int()
    return table


def unpack_codes(
    words: Tensor, starts: Tensor, bounds: Tensor, keys: Tensor, dead: int, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Unpack what `pack_codes` packed.

    words int64, starts int64 [streams + 1] where streams begin among them; keys int64 [n] the
    table of each entry, `dead` one without bits. Returns symbols uint8 [n], and bool [streams]:
    whether a stream's code ends in its last word.
    """
    num = keys.numel()
    sizes = bounds.diff()
    steps = int(sizes.max()) if sizes.numel() else 0
    entry = bounds[:-1] + torch.arange(steps, device=keys.device)[:, None]
    entry = torch.where(entry < bounds[1:], entry, num)
    at = torch.nn.functional.pad(keys, (0, 1), value=dead)[entry] << WINDOW_BITS
    # zeros behind, so that an unsound stream, too, finds something to read
    words = torch.nn.functional.pad(words, (0, 2 + steps * WINDOW_BITS // 32))
    pairs = words[:-1] | (words[1:] & (WORD >> 1)) << 32
    bits = pairs[:, None] >> torch.arange(32, device=keys.device)
    window = (bits & ((1 << WINDOW_BITS) - 1)).to(torch.int16).reshape(-1)
    lengths = (windows >> 8).to(torch.int8)
    position = 32 * starts[:-1]
    for row in at:
        row += window[position]
        position += lengths[row]
    symbols = torch.empty(num + 1, dtype=torch.uint8, device=keys.device)
    symbols[entry] = (windows[at] & 255).to(torch.uint8)
    return symbols[:num], (position + 31) >> 5 == starts[1:]


# --- compress: rANS -------------------------------------------------------------------------------


def _side_by_side(entries: Tensor, chunk_symbols: int, fill: int) -> Tensor:
    """Return [steps, chunks, states] of entries [n] in chunks; `fill` where a chunk has none."""
    num_chunks = -(-entries.numel() // chunk_symbols)
    behind = num_chunks * chunk_symbols - entries.numel()
    chunks = torch.nn.functional.pad(entries, (0, behind), value=fill)
    chunks = chunks.reshape(num_chunks, chunk_symbols)
    chunks = torch.nn.functional.pad(chunks, (0, -chunk_symbols % NUM_STATES), value=fill)
    return chunks.reshape(num_chunks, -1, NUM_STATES).permute(1, 0, 2).contiguous()


def _one_by_one(steps: Tensor) -> Tensor:
    """Return [chunks, symbols] of what `_side_by_side` made."""
    return steps.permute(1, 0, 2).reshape(steps.shape[1], -1)


def encode_rans(at: Tensor, frequencies: Tensor, chunk_symbols: int) -> tuple[Tensor, Tensor]:
    """Code chunks of entries; at int64 [n] says which of frequencies [tables, K] one has.

    Returns words int64 (16 bits each) and each chunk's number of them.
    """
    nothing = frequencies.numel()  # a symbol that alone occurs leaves a state as it is
    frequency = torch.nn.functional.pad(frequencies.reshape(-1), (0, 1), value=TOTAL)
    start = torch.nn.functional.pad((frequencies.cumsum(1) - frequencies).reshape(-1), (0, 1))
    at = _side_by_side(at, chunk_symbols, nothing)
    f, cumulative = frequency[at], start[at]
    states = torch.empty((at.shape[0] + 1, *at.shape[1:]), dtype=torch.int64, device=at.device)
    states[-1] = LOW
    full = torch.empty_like(at, dtype=torch.bool)
    steps = zip(states[1:], f, TOTAL - f, cumulative, full, states, strict=False)
    for before, of, gap, first, too_large, after in reversed(list(steps)):
        torch.ge(before >> 17, of, out=too_large)
        kept = torch.where(too_large, before >> 16, before)
        number = torch.div(kept, of, rounding_mode="floor")
        torch.addcmul(kept + first, number, gap, out=after)
    words, state = states[1:], states[0]
    written, words = _one_by_one(full), _one_by_one(words) & _HALF
    rank = written.cumsum(1)
    sizes = STATE_WORDS + rank[:, -1] if rank.numel() else rank.new_zeros(rank.shape[0])
    starts = sizes.cumsum(0) - sizes
    out = torch.empty(int(sizes.sum()), dtype=torch.int64, device=at.device)
    out[(starts[:, None] + (STATE_WORDS - 1) + rank)[written]] = words[written]
    head = starts[:, None] + 2 * torch.arange(NUM_STATES, device=at.device)
    out[head], out[head + 1] = state & _HALF, state >> 16
    return out, sizes


def decode_rans(
    words: Tensor,
    starts: Tensor,
    keys: Tensor,
    dead: int,
    frequencies: Tensor,
    chunk_symbols: int,
) -> tuple[Tensor, Tensor]:
    """Decode what `encode_rans` coded; arguments are as for `unpack_codes`.

    Returns symbols uint8 [n], and bool [chunks]: whether a chunk was sound.
    """
    num, num_values = keys.numel(), frequencies.shape[1]
    of = tensor_of(frequencies.reshape(-1), frequencies.shape[0] << FREQUENCY_BITS)  # of a slot
    first = (frequencies.cumsum(1) - frequencies).reshape(-1)
    slot = torch.arange(of.numel(), device=keys.device) & SLOT
    slots = (frequencies.reshape(-1)[of] | (slot - first[of]) << 16).int()
    at = _side_by_side(keys << FREQUENCY_BITS, chunk_symbols, dead << FREQUENCY_BITS)
    words = torch.nn.functional.pad(words, (0, STATE_WORDS + NUM_STATES * at.shape[0]))
    position = starts[:-1].clone()
    head = position[:, None] + 2 * torch.arange(NUM_STATES, device=keys.device)
    state = words[head] | words[head + 1] << 16
    sound = (starts.diff() >= STATE_WORDS) & (state >= LOW).all(1) & (state < LOW << 16).all(1)
    position += STATE_WORDS
    for row in at:
        row += state & SLOT
        entry = slots[row]
        state = (state >> FREQUENCY_BITS) * (entry & _HALF) + (entry >> 16)
        low = state < LOW
        count = low.cumsum(1)
        word = words[position[:, None] + (count - 1)]
        state = torch.where(low, state << 16 | word, state)
        position += count[:, -1]
    symbols = _one_by_one((of[at] % num_values).to(torch.uint8))[:, :chunk_symbols]
    sound &= (position == starts[1:]) & (state == LOW).all(1)
    return symbols.reshape(-1)[:num], sound
