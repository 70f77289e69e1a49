"""The rate as a setting: conversion at the scales for which a payload takes the bytes it may take.

One factor on the scales of all coded tensors decides the rate. Histograms of |v| foretell the size
at any factor; what they cannot see (row x column structure, tables by law) is corrected after a
conversion, when the size is known from exact counts before anything is coded. Nothing is coded
twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels_rate
from co3_flower.bitstream import CHUNK_BITS, chunk_size
from co3_flower.config import CodecConfig
from co3_flower.dense import Dense, Flat
from co3_flower.formats import FloatFormat
from co3_flower.huffman import MAX_LENGTH, HuffmanTables
from co3_flower.kernels_rans import NUM_STATES
from co3_flower.layout import Kind, Layout, Plan
from co3_flower.payload import BUFFER_FORMAT, NUM_FRAME_BYTES
from co3_flower.stats import entropy_bits
from co3_flower.tables import LAWS, CodeTables, Converted, choose_tables

TOLERANCE = 0.0125  # of the size after a conversion
LARGE_TOLERANCE = 0.0175  # where a conversion costs more and the code's size is known better
MAX_CONVERSIONS = 6
MAX_SMALL_CONVERSIONS = 12  # of an update so small that its sizes jump
_FINEST = 2.0  # times the scale that a rule chooses: beyond, nearly all that is finer is clamped
_SMALL = 1 << 18  # entries
_LARGE = 1 << 20  # entries, from where on a sample is worth its cost
_SAMPLE_SHARE = 0.3
_SAMPLE_CONVERSIONS = 2
_SAMPLE_TOLERANCE = 0.12  # of the size: what is nearer is not converted again
_SEARCH_TOLERANCE = 5e-4  # of the foretold size
_STEP = 1.05  # between factors whose foretold sizes give a slope
_MAX_REACH = 8.0  # such steps that the slope is trusted for
_MAX_STEPS = 200  # octaves and half octaves of the factor: more than float32 has
_STREAM_PADDING = 16.0  # bits: half a word at the end of each stream of Huffman codes
_STATE_BITS = 32.0 * NUM_STATES  # of a chunk's rANS states as sent
_EMPTY_STATE_BITS = 24.0 * NUM_STATES  # of them that carry no code, on average


@dataclass(frozen=True)
class Measured:
    """An update that is compensated and fitted, its coded tensors not converted yet.

    Attributes
    ----------
    dense : Dense
        Where it lives.
    layout, plan : Layout, Plan
        The update.
    config : CodecConfig
        Its settings.
    v : float32 [n]
        Compensated update in coding order; buffers are converted already and hold their residual.
    symbols : uint8 [n]
        Those of the buffers; the others' are not set.
    coded, buffers : Converted
        The two groups; the coded one's scales are those of factor 1, its symbols not counted.
    above : uint32 [rows, bins + 1]
        How many entries of a row are in each bin of magnitudes or above it. A row is a large
        tensor; the last one, all small tensors times their scales.
    """

    dense: Dense
    layout: Layout
    plan: Plan
    config: CodecConfig
    v: Flat
    symbols: Flat
    coded: Converted
    buffers: Converted
    above: NDArray[np.uint32]

    @property
    def fmt(self) -> FloatFormat:
        """Format of the coded tensors."""
        return self.coded.fmt

    @property
    def finest(self) -> float:
        """Largest factor that is tried.

        Scales that follow the spread may become so much finer and no more: when clamped entries
        pile up in the residual the spread grows, and with it what is sent of them.
        """
        return _FINEST if self.config.scale in ("mse", "std") else math.inf

    @cached_property
    def row_sizes(self) -> NDArray[np.int64]:
        """Entries of each row."""
        sizes, num_own = self.coded.sizes, self.plan.num_own
        return np.append(sizes[:num_own], sizes[num_own:].sum())

    @cached_property
    def row_scales(self) -> NDArray[np.float64]:
        """Scale of each row at factor 1."""
        return np.append(self.coded.scales[: self.plan.num_own].astype(np.float64), 1.0)

    @cached_property
    def buffer_bits(self) -> float:
        """About the bits of the buffers' code."""
        return float(entropy_bits(self.buffers.counts.sum(axis=0)[None]).sum())


def measure_update(
    dense: Dense,
    v: Flat,
    memory: Flat,
    gammas: NDArray[np.float32],
    layout: Layout,
    plan: Plan,
    config: CodecConfig,
    buffer_rule: str,
) -> Measured:
    """Compensate an update in place, fit it and count its magnitudes; convert its buffers.

    Parameters
    ----------
    dense : Dense
        Where the update lives.
    v, memory : float32 [n]
        Update and residual in coding order; the residual may be empty.
    gammas : float32 [tensors]
        Decay of each tensor's residual.
    layout, plan : Layout, Plan
        The update.
    config : CodecConfig
        How to encode.
    buffer_rule : str
        Scale rule of the buffers.

    Returns
    -------
    Measured
        With `events` that tell of entries that are not finite; what else it says is then not set.
    """
    sizes = np.diff(plan.offsets)
    fmt = config.float_format
    coded = Converted.empty(fmt, sizes[: plan.num_coded])
    buffers = Converted.empty(BUFFER_FORMAT, sizes[plan.num_coded :])
    symbols = dense.symbol_array(plan.num_symbols)
    above = np.zeros((plan.num_own + 1, kernels_rate.NUM_BINS + 1), np.uint32)
    split = plan.num_coded
    dense.measure(v, memory, gammas[:split], plan.offsets[: split + 1], coded, config.scale, above)
    dense.convert(
        v, memory, gammas[split:], plan.offsets[split:], buffers, buffer_rule, 1.0, symbols
    )
    return Measured(dense, layout, plan, config, v, symbols, coded, buffers, above)


@dataclass(frozen=True)
class Conversion:
    """An update converted, and the code tables it may get.

    Attributes
    ----------
    residual : float32 [n]
        What the conversion lost, flat.
    symbols : uint8 [n]
        Flat symbols.
    coded, buffers : Converted
        The two groups of tensors.
    choices : list of CodeTables
        As `choose_tables` gives them.
    """

    residual: Flat
    symbols: Flat
    coded: Converted
    buffers: Converted
    choices: list[CodeTables]


def convert_to_size(measured: Measured, num_bytes: float, raw_bytes: int) -> Conversion:
    """Convert at the factor on all scales for which the payload takes about `num_bytes`.

    Of several such factors it is the one of the coarsest cells. Where no factor does, the nearest
    size is taken: the smallest one, with all symbols 0, or about the largest one that the format
    reaches. Where the size jumps over the wanted one, tables are chosen as by prior ``auto`` (a law
    may fit badly), and if that does not do, one for each tensor (row and column factors come and
    go).

    Parameters
    ----------
    measured : Measured
        The update; not changed.
    num_bytes : float
        Size of the payload.
    raw_bytes : int
        Bytes of the raw tensors, which the size includes.

    Returns
    -------
    Conversion
        The update, converted.
    """
    full: dict[float, float] = {}  # factor -> size
    factor = last = _first_factor(measured, num_bytes, raw_bytes)
    is_small = measured.plan.num_symbols < _SMALL
    tolerance = (LARGE_TOLERANCE if measured.plan.num_symbols >= _LARGE else TOLERANCE) * num_bytes
    for _ in range(MAX_SMALL_CONVERSIONS if is_small else MAX_CONVERSIONS):
        conversion, last = convert_at(measured, factor), factor
        full[factor] = _size(conversion, measured, raw_bytes)
        best = min(full, key=lambda each: abs(full[each] - num_bytes))
        if abs(full[best] - num_bytes) <= tolerance:
            break
        factor = _next_factor(measured, full, num_bytes, raw_bytes)
        if factor in full:
            break
    config = measured.config
    jumps = min(full.values()) < num_bytes < max(full.values())
    steadier = None
    if jumps and abs(full[best] - num_bytes) > tolerance:
        if config.prior in LAWS:
            steadier = replace(config, prior="auto")
        elif config.structure == "auto":
            steadier = replace(config, structure="none")
    if steadier is not None:
        other = convert_to_size(replace(measured, config=steadier), num_bytes, raw_bytes)
        if abs(_size(other, measured, raw_bytes) - num_bytes) < abs(full[best] - num_bytes):
            return other
    return conversion if best == last else convert_at(measured, best)


def convert_at(measured: Measured, factor: float) -> Conversion:
    """Convert the coded tensors at `factor` times their scales, and choose code tables."""
    plan, config = measured.plan, measured.config
    base, fmt = measured.coded, measured.fmt
    coded = Converted(
        fmt, base.sizes, base.scales.copy(), base.fits, np.zeros_like(base.counts),
        base.sums.copy(), base.events.copy(),
    )  # fmt: skip
    residual, symbols = measured.dense.convert_scaled(
        measured.v, measured.symbols, plan.offsets[: plan.num_coded + 1], factor, base, coded
    )
    choices = choose_tables(
        measured.layout, plan, coded, measured.buffers, symbols, residual, config,
        measured.dense.choose_modes,
    )  # fmt: skip
    return Conversion(residual, symbols, coded, measured.buffers, choices)


def estimate_bytes(choice: CodeTables, plan: Plan, raw_bytes: int, num_streams: int) -> float:
    """Return about the bytes of a payload from its tables, before anything is coded."""
    num_chunks = -(-plan.num_symbols // chunk_size(plan.num_symbols, choice.num_code_bits))
    bits = float(choice.num_bits)
    is_huffman = isinstance(choice.tables, HuffmanTables)
    if is_huffman:
        bits += num_chunks * num_streams * _STREAM_PADDING
    else:
        bits += max(num_chunks * _EMPTY_STATE_BITS, num_chunks * _STATE_BITS - bits)
    lengths = num_chunks * _length_bytes(is_huffman, num_streams)
    return _fixed_bytes(plan, raw_bytes) + lengths + bits / 8.0


def _length_bytes(is_huffman: bool, num_streams: int) -> float:
    """About the bytes of a chunk's stream lengths."""
    return float(num_streams) if is_huffman else 2.0


def _size(conversion: Conversion, measured: Measured, raw_bytes: int) -> float:
    num_streams = measured.config.num_streams
    return min(
        estimate_bytes(choice, measured.plan, raw_bytes, num_streams)
        for choice in conversion.choices
    )


def least_bytes(plan: Plan, raw_bytes: int) -> int:
    """Return what every payload of an update is larger than: frame, scales and raw tensors."""
    return NUM_FRAME_BYTES + 4 * len(plan.order) + raw_bytes


def _fixed_bytes(plan: Plan, raw_bytes: int) -> float:
    kinds = -(-len(plan.kinds) // 4) if any(plan.kinds) else 0
    return least_bytes(plan, raw_bytes) + kinds + 1.5  # of padding, on average


def _foretell(measured: Measured, factor: float, raw_bytes: int) -> tuple[float, float, float]:
    """Bytes of the payload at a factor; entries that are not zero, and that are the largest."""
    is_huffman = measured.config.coder == "huffman"
    positive = measured.fmt.values[measured.fmt.zero :]
    foretold = kernels_rate.foretell_bits(
        measured.above, measured.row_sizes, measured.row_scales, factor, positive,
        is_huffman, MAX_LENGTH,
    )  # fmt: skip
    bits, live, largest = map(float, foretold)
    bits += measured.buffer_bits
    num_chunks = max(1.0, bits / CHUNK_BITS) if measured.plan.num_symbols else 0.0
    num_streams = measured.config.num_streams
    padding = num_streams * _STREAM_PADDING if is_huffman else _EMPTY_STATE_BITS
    bits += num_chunks * padding
    lengths = num_chunks * _length_bytes(is_huffman, num_streams)
    return _fixed_bytes(measured.plan, raw_bytes) + lengths + bits / 8.0, live, largest


def _first_factor(measured: Measured, num_bytes: float, raw_bytes: int) -> float:
    """Return the factor to convert at first: as foretold, corrected by what a sample takes."""
    factor = _find_factor(measured, num_bytes, raw_bytes)
    sample = _sample(measured)
    if sample is None:
        return factor
    points: dict[float, float] = {}
    for _ in range(_SAMPLE_CONVERSIONS):
        ratio = _size(convert_at(sample, factor), sample, 0) / _foretell(sample, factor, 0)[0]
        points[factor] = ratio * _foretell(measured, factor, raw_bytes)[0]
        off = abs(points[factor] - num_bytes)
        factor = _next_factor(measured, points, num_bytes, raw_bytes)
        if factor in points or off <= _SAMPLE_TOLERANCE * num_bytes:
            break
    return factor


def _next_factor(
    measured: Measured, points: dict[float, float], num_bytes: float, raw_bytes: int
) -> float:
    """Return the factor for a size from those of other factors.

    It lies between two points that enclose the size, in turn on the line in logarithms and in the
    middle; or on the line through the nearest point with the slope of the foretold size; where that
    leads far, the foretold size times the nearest point's error decides.
    """
    above = min((f for f in points if points[f] > num_bytes), default=None)
    below = max(
        (f for f in points if points[f] <= num_bytes and f < (above or math.inf)), default=None
    )
    if below is not None and above is not None:
        a, b = math.log(points[below] / num_bytes), math.log(points[above] / num_bytes)
        share = 0.5 if len(points) % 2 else a / (a - b)
        return below * float((above / below) ** share)
    nearest = min(points) if below is None else max(points)
    foretold = _foretell(measured, nearest, raw_bytes)[0]
    step = _STEP if points[nearest] < num_bytes else 1.0 / _STEP
    change = math.log(_foretell(measured, nearest * step, raw_bytes)[0] / foretold)
    wanted = math.log(num_bytes / points[nearest])
    if change * wanted > 0.0 and wanted / change < _MAX_REACH:
        return min(measured.finest, nearest * float(step ** (wanted / change)))
    return _find_factor(measured, num_bytes * foretold / points[nearest], raw_bytes)


def _sample(measured: Measured) -> Measured | None:
    """Return some of the large tensors as an update of their own, about a third of the entries.

    None where the update is small, or its code tables leave nothing to be learnt from a sample.
    """
    plan = measured.plan
    sizes = measured.coded.sizes[: plan.num_own]
    if plan.num_symbols < _LARGE or measured.config.structure == "none":
        return None
    chosen, due = [], 0.0
    for t in np.argsort(-sizes, kind="stable").tolist():
        due += _SAMPLE_SHARE * float(sizes[t])
        if due >= 0.5 * float(sizes[t]):
            chosen.append(t)
            due -= float(sizes[t])
    chosen.sort()
    if int(sizes[chosen].sum()) < 0.5 * _SAMPLE_SHARE * plan.num_symbols:
        return None
    names = [measured.layout.names[plan.order[t]] for t in chosen]
    shapes = [measured.layout.shapes[plan.order[t]] for t in chosen]
    layout = Layout(tuple(names), tuple(shapes), (np.dtype(np.float32),) * len(chosen))
    bounds = plan.offsets
    v = measured.dense.take(measured.v, [(int(bounds[t]), int(bounds[t + 1])) for t in chosen])
    base = measured.coded
    coded = Converted(
        base.fmt, base.sizes[chosen], base.scales[chosen], base.fits[chosen], base.counts[chosen],
        base.sums[chosen], base.events[chosen],
    )  # fmt: skip
    plan = layout.plan((Kind.CODED,) * len(chosen), plan.min_numel)
    return Measured(
        measured.dense, layout, plan, measured.config, v,
        measured.dense.symbol_array(plan.num_symbols), coded,
        Converted.empty(BUFFER_FORMAT, np.zeros(0, np.int64)),
        np.concatenate([measured.above[chosen], np.zeros_like(measured.above[:1])]),
    )  # fmt: skip


def _find_factor(measured: Measured, num_bytes: float, raw_bytes: int) -> float:
    """Return the smallest factor whose foretold size is num_bytes, or that of the nearest size."""
    peak = float(kernels_rate.largest_magnitude(measured.above, measured.row_scales))
    if peak == 0.0:
        return 1.0
    fmt = measured.fmt
    factor = float(fmt.max_finite) / peak  # nothing saturates: on the side of coarse cells
    size, live, largest = _foretell(measured, factor, raw_bytes)
    if size > num_bytes:
        none = 0.5 * float(fmt.min_subnormal) / peak  # everything becomes 0
        least = _foretell(measured, none, raw_bytes)[0]
        if least >= num_bytes:
            return none
        return _between(measured, (none, least), (factor, size), num_bytes, raw_bytes)
    best = factor, size
    for _ in range(_MAX_STEPS):
        low = factor, size
        if factor >= measured.finest:
            break
        factor = min(measured.finest, factor * (2.0 if size < 0.5 * num_bytes else math.sqrt(2.0)))
        size, live, largest = _foretell(measured, factor, raw_bytes)
        if size >= num_bytes:
            return _between(measured, low, (factor, size), num_bytes, raw_bytes)
        if size > best[1]:
            best = factor, size
        if live > 0 and largest == live:
            break
    return best[0]


def _between(
    measured: Measured,
    low: tuple[float, float],
    high: tuple[float, float],
    num_bytes: float,
    raw_bytes: int,
) -> float:
    """Return the factor between two whose sizes enclose num_bytes.

    Bisection of the logarithms, and false position where the sizes are near each other.
    """
    a, b = math.log(low[0]), math.log(high[0])
    f_a, f_b = math.log(low[1] / num_bytes), math.log(high[1] / num_bytes)
    t = b
    for step in range(40):
        halve = step % 3 == 2 or f_b - f_a > 1.0
        t = 0.5 * (a + b) if halve else a - f_a * (b - a) / (f_b - f_a)
        f = math.log(_foretell(measured, math.exp(t), raw_bytes)[0] / num_bytes)
        if abs(f) < _SEARCH_TOLERANCE or b - a < 1e-6:
            break
        if f < 0:
            a, f_a = t, f
        else:
            b, f_b = t, f
    return math.exp(t)
