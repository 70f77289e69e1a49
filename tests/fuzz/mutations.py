"""What an attacker may do to a payload: damage, and lies that are built to measure.

Each mutation takes a generator, a base and all bases, and returns a body without its checksum.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from co3_flower import kernels_rans, kernels_side, kernels_structure
from co3_flower.bitstream import pack_tables
from co3_flower.huffman import HuffmanTables
from co3_flower.layout import Layout
from co3_flower.rans import RansTables

from .bases import Base
from .container import (
    HAS_STRUCTURE,
    HEADER,
    RANS,
    WIDTHS,
    Sections,
    read_kinds,
    write_kinds,
)

Mutation = Callable[[np.random.Generator, Base, Sequence[Base]], bytes]

BUFFER_VALUES = 239  # of e4m3
SECTIONS = ("kinds", "scales", "structure", "tables", "code", "raw")


def body_of(base: Base) -> bytes:
    return base.payload[:-4]


def number(rng: np.random.Generator, old: int, width: int) -> int:
    """A number that breaks checks of sizes: near a power of two, near the old one, or any."""
    top = 1 << 8 * width
    choices = (
        0, 1, 2, 3, old + 1, old - 1, 2 * old, old // 2, top - 1, top // 2, top // 2 - 1,
        1 << int(rng.integers(8 * width)), int(rng.integers(min(top, 1 << 62))),
    )  # fmt: skip
    return choices[rng.integers(len(choices))] % top


# Damage


def truncation(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    return base.payload[: rng.integers(len(base.payload))]


def header_bit(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    body = bytearray(body_of(base))
    bit = int(rng.integers(8 * HEADER.size))
    body[bit // 8] ^= 1 << bit % 8
    return bytes(body)


def any_bytes(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """A few bytes behind the header."""
    body = bytearray(body_of(base))
    if len(body) == HEADER.size:
        return bytes(body)
    for at in rng.integers(HEADER.size, len(body), rng.integers(1, 9)):
        body[at] = rng.integers(256)
    return bytes(body)


def any_bits(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """One bit in one section: the least damage there is."""
    name = SECTIONS[rng.integers(len(SECTIONS))]
    section = bytearray(getattr(base.sections, name))
    if not section:
        return any_bytes(rng, base, bases)
    bit = int(rng.integers(8 * len(section)))
    section[bit // 8] ^= 1 << bit % 8
    return dataclasses.replace(base.sections, **{name: bytes(section)}).joined()


def insertion(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    body = body_of(base)
    first, last = sorted(rng.integers(0, len(body) + 1, 2).tolist())
    way = rng.integers(3)
    if way == 0:
        return body[:first] + body[last:]
    if way == 1:
        return body[:last] + body[first:last] + body[last:]
    return body[:first] + rng.bytes(int(rng.integers(1, 40))) + body[first:]


def splice(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """The head of one payload on the tail of another."""
    other = bases[rng.integers(len(bases))].payload[:-4]
    at = int(rng.integers(4, min(len(other), len(base.payload) - 4) + 1))
    return body_of(base)[:at] + other[at:]


def tail(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    return body_of(base) + rng.bytes(int(rng.integers(1, 64)))


# Lies


def header_field(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """A field that says something else than the sections do."""
    names = list(WIDTHS)
    name = names[rng.integers(len(names))]
    value = number(rng, base.sections.number(name), WIDTHS[name])
    return base.sections.telling(**{name: value}).joined()


def two_fields(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Fields that decide how the rest is read, in a range that gets past the header."""
    return base.sections.telling(
        min_numel=max(1, number(rng, base.sections.number("min_numel"), 4)),
        chunk_symbols=max(1, number(rng, base.sections.number("chunk_symbols"), 4)),
        streams=int(rng.integers(1, 17)) if base.sections.header["coder"] != RANS else 4,
        format=base.sections.number("format") ^ int(rng.choice([0, 0, 1, 8, 64])),
        tables=int(number(rng, base.sections.number("tables"), 2)),
    ).joined()


def other_coder(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """The code of one coder read by the other, with or without the structure's flag."""
    sections = base.sections
    coder = 1 - sections.number("coder")
    flags = sections.number("flags") ^ int(rng.choice([0, HAS_STRUCTURE]))
    return sections.telling(coder=coder, streams=4, flags=flags).joined()


def section(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """One section replaced, its length told right: by noise, by zeros, by ones, by another's."""
    name = SECTIONS[rng.integers(len(SECTIONS))]
    old = getattr(base.sections, name)
    size = len(old) if rng.random() < 0.6 else int(rng.integers(0, 2 * len(old) + 9))
    fills = (
        rng.bytes(size),
        bytes(size),
        b"\xff" * size,
        old[:size],
        getattr(bases[rng.integers(len(bases))].sections, name),
    )
    new = fills[rng.integers(len(fills))]
    return dataclasses.replace(base.sections, **{name: new}).joined()


def scales(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """One scale that none can have, or the least and largest that one can."""
    if not base.sections.scales:
        return header_field(rng, base, bases)
    bad = (
        0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"), 2.0**-121, 2.0**121, 1e-45,
        2.0**-120, 2.0**120, 2.0**-64, -(2.0**-120),
    )  # fmt: skip
    packed = bytearray(base.sections.scales)
    at = 4 * int(rng.integers(len(packed) // 4))
    if rng.random() < 0.2:
        packed[at : at + 4] = rng.bytes(4)
    else:
        packed[at : at + 4] = struct.pack("<f", bad[rng.integers(len(bad))])
    return dataclasses.replace(base.sections, scales=bytes(packed)).joined()


def stream_lengths(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Lengths that add up where they should not, do not add up, or are written at odd length."""
    sizes = list(base.sections.sizes)
    if not sizes:
        return tail(rng, base, bases)
    i, j = rng.integers(len(sizes), size=2).tolist()
    way = rng.integers(6)
    if way == 0 and sizes[i]:  # from one to another: still the right sum
        moved = int(rng.integers(1, sizes[i] + 1))
        sizes[i], sizes[j] = sizes[i] - moved, sizes[j] + (moved if i != j else 0)
    elif way == 1:
        sizes[i] = number(rng, sizes[i], 4)
    elif way == 2:
        sizes.insert(i, sizes[j])
    elif way == 3:
        del sizes[i]
    elif way == 4:
        sizes = [int(n) for n in rng.multinomial(sum(sizes), np.full(len(sizes), 1 / len(sizes)))]
    else:
        overlong = b"".join(
            bytes(
                [n & 127 | 128, n >> 7 & 127 | 128, n >> 14 | 128, 128, int(rng.choice([0, 128]))]
            )
            for n in sizes
        )
        return dataclasses.replace(base.sections, stored_sizes=overlong).joined()
    return dataclasses.replace(base.sections, sizes=sizes).joined()


def many_chunks(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """As many streams as a header can claim, each with its length."""
    num_symbols = sum(
        n for n, kind in zip(base.layout.numels, kinds_of(base), strict=True) if kind < 2
    )
    chunk = int(rng.choice([1, 2, 7, 100, 1023, 1024, max(1, num_symbols - 1)]))
    is_rans = base.sections.header["coder"] == RANS
    streams = 4 if is_rans else int(rng.integers(1, 17))
    count = -(-num_symbols // chunk) * (1 if is_rans else streams)
    sizes = [0] * count
    if count:
        sizes[rng.integers(count)] = sum(base.sections.sizes)
    return dataclasses.replace(
        base.sections.telling(chunk_symbols=chunk, streams=streams), sizes=sizes
    ).joined()


def code_tables(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Tables that are packed well and are no code: over-full, incomplete, out of range, empty."""
    num_values = alphabet(base)
    count = int(rng.choice([1, base.sections.number("tables"), rng.integers(1, 300)])) or 1
    alphabets = np.full(count, num_values, np.int64)
    data = np.zeros(count * num_values * 80 + 64, np.uint8)
    shape = (count, num_values)
    sparse = rng.random(shape) < rng.random()
    laws = np.stack(  # of those that a packer can write, any; most are out of range somewhere
        [
            rng.integers(-1, 32, count),
            rng.integers(-1024, 1024, count) * rng.integers(0, 2, count),
            rng.integers(0, 32, count),
            rng.integers(0, num_values // 2 + 1, count),
        ],
        axis=1,
    )
    laws[rng.random(count) < rng.choice([0.0, 0.5, 1.0]), 0] = -1
    if base.sections.header["coder"] == RANS:
        exponents = np.where(sparse, rng.integers(0, 24, shape), -1).astype(np.int8)
        mantissas = rng.integers(0, 16, shape).astype(np.int8)
        mirrored = rng.random() < 0.5
        if mirrored:
            exponents, mantissas = np.maximum(exponents, exponents[:, ::-1]), mantissas * 0
        used = kernels_rans.encode_weights(exponents, mantissas, laws, alphabets, data)
    else:
        lengths = np.where(sparse, rng.integers(1, 14, shape), 0).astype(np.uint8)
        if rng.random() < 0.3:
            lengths[:] = 0
            lengths[:, rng.integers(num_values)] = 1
        numbers = rng.integers(0, count, len(base.layout)).astype(np.int64)
        used = kernels_side.encode_tables(lengths, laws, alphabets, numbers, count, data)
    sections = dataclasses.replace(base.sections, tables=data[:used].tobytes())
    if rng.random() < 0.5:
        sections = sections.telling(tables=count)
    return sections.joined()


def sound_tables(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Other tables than the code was made with."""
    return with_sound_tables(rng, base, base.sections)


def structure(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Factors and class maps out of range, packed as an encoder would."""
    packed, num_tables = hostile_structure(rng, base.layout)
    sections = dataclasses.replace(base.sections, structure=packed)
    flags = sections.number("flags") | HAS_STRUCTURE
    if rng.random() < 0.3:
        return sections.telling(flags=flags).joined()
    return with_sound_tables(rng, base, sections.telling(flags=flags, tables=num_tables))


def with_sound_tables(rng: np.random.Generator, base: Base, sections: Sections) -> bytes:
    """As many tables as the header says, all sound, before code that is noise, or is not there."""
    num_values, count = alphabet(base), sections.number("tables")
    sizes = [num_values] * (count + int(sections.number("flags") & HAS_STRUCTURE == 0))
    if 1 in kinds_of(base):
        sizes.append(BUFFER_VALUES)
    is_lone = rng.random() < 0.5
    groups: list[Any] = []
    make = RansTables if sections.header["coder"] == RANS else HuffmanTables
    for size in sizes:
        weights = np.zeros((1, size), np.int64)
        used = 1 if is_lone else int(rng.integers(1, size + 1))
        weights[0, rng.permutation(size)[:used]] = rng.integers(1, 1000, used)
        groups.append(make.from_weights(weights))
    joined: Any = make.joined(groups)
    numbers = np.zeros(len(base.layout), np.int64)
    tables = pack_tables(joined, numbers, max(1, count))
    code, sizes_of_streams = sections.code, sections.sizes
    if sections.header["coder"] == RANS:
        code = b"\0\x80\0\0" * 4 * len(sizes_of_streams)  # every state where it must end
        sizes_of_streams = [8] * len(sizes_of_streams)
    elif is_lone:
        code, sizes_of_streams = b"", [0] * len(sizes_of_streams)
    elif rng.random() < 0.5:
        code = rng.bytes(len(code))
    return dataclasses.replace(sections, tables=tables, code=code, sizes=sizes_of_streams).joined()


def hostile_structure(rng: np.random.Generator, layout: Layout) -> tuple[bytes, int]:
    """A structure for all tensors of a layout, and the number of tables that it names."""
    k = kernels_structure
    odds, state = k.new_odds(), np.array([0, 0xFFFFFFFF, 0], np.int64)
    data = np.zeros(4096 + 128 * (sum(layout.numels) + len(layout)), np.uint8)
    spread = int(rng.choice([1, 3, 10, 30, 30, 300]))

    def factors(size: int, centre: int) -> np.ndarray:
        values = np.abs(centre + rng.integers(-spread, spread + 1, size)).astype(np.uint16)
        values[rng.random(size) < rng.choice([0, 0.3, 1])] = k.DEAD
        return values

    sent = np.array([1, 1, 1, 128, 1], np.int64)
    for shape, numel in zip(layout.shapes, layout.numels, strict=True):
        if numel == 0:
            continue
        rows, cols, taps = 1, numel, 1
        if len(shape) > 1:
            rows, cols, taps = shape[0], numel // shape[0], int(np.prod(shape[2:], dtype=np.int64))
        mode = int(rng.integers(5)) if rng.random() < 0.9 else 0
        sent[0], sent[1] = rng.choice([1, 2, 4], 2)
        sent[2] = sent[1]
        sent[3] = rng.integers(256) if rng.random() < 0.1 else rng.integers(64, 192)
        of_rows, of_cols, of_taps = (
            factors(rows, int(sent[3])), factors(cols, 64), factors(taps, 64)
        )  # fmt: skip
        of_channels = of_cols[::taps].copy()
        k.code_tensor(mode, of_rows, of_channels, of_taps, of_cols, sent, odds, state, data)
    steps = rng.random(k.NUM_CLASSES) < rng.choice([0.0, 0.02, 0.02, 0.1, 1.0])
    steps[0] = False
    class_map = np.cumsum(steps).astype(np.int64)
    k.code_class_map(class_map, odds, state, data)
    data[int(state[2])] = (int(state[0]) >> 24) + 1 if state[0] > 0 else 0
    return data[: int(state[2]) + 1].tobytes(), int(class_map[-1]) + 1


def kinds(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Other kinds of tensors, with the digest of a layout that has them so."""
    kinds = kinds_of(base)
    if not kinds:
        return tail(rng, base, bases)
    for _ in range(rng.integers(1, 3)):
        kinds[rng.integers(len(kinds))] = int(rng.integers(3))
    raw = [i for i, kind in enumerate(kinds) if kind == 2]
    return (
        dataclasses.replace(base.sections, kinds=write_kinds(kinds))
        .telling(flags=base.sections.number("flags") | 1, digest=base.layout.digest(raw))
        .joined()
    )


def foreign(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """The frame of another layout's payload, with this layout's digest."""
    other = bases[rng.integers(len(bases))].sections
    return other.telling(
        digest=base.sections.header["digest"], flags=other.number("flags")
    ).joined()


def future(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """A later version, another scheme, other flags, or a wrong digest."""
    way = rng.integers(4)
    if way == 0:
        return base.sections.telling(digest=rng.bytes(8)).joined()
    name = ("version", "scheme", "flags")[way - 1]
    return base.sections.telling(**{name: int(rng.integers(1, 256))}).joined()


def twice(rng: np.random.Generator, base: Base, bases: Sequence[Base]) -> bytes:
    """Damage behind the header on top of a lie."""
    body = bytearray(pick(rng, DEEP)(rng, base, bases))
    for at in rng.integers(HEADER.size, max(len(body), HEADER.size + 1), rng.integers(1, 4)):
        if at < len(body):
            body[at] ^= 1 << int(rng.integers(8))
    return bytes(body)


DEEP: tuple[Mutation, ...] = (
    any_bytes, any_bits, section, scales, stream_lengths, many_chunks, code_tables, sound_tables,
    structure, two_fields, kinds,
)  # fmt: skip
MUTATIONS: tuple[Mutation, ...] = (
    *DEEP, any_bits, any_bytes, twice, other_coder, truncation, header_bit, header_field, insertion,
    splice, tail, foreign, future,
)  # fmt: skip


def pick(rng: np.random.Generator, among: Sequence[Mutation]) -> Mutation:
    return among[rng.integers(len(among))]


def kinds_of(base: Base) -> list[int]:
    return read_kinds(base.sections.kinds, len(base.layout))


def alphabet(base: Base) -> int:
    """Values of the base's format."""
    code = base.sections.number("format")
    exponent_bits, mantissa_bits, finite = code & 7, code >> 3 & 7, code >> 6 & 1
    codes = (2**exponent_bits - 1 + finite) * 2**mantissa_bits
    return 2 * codes - 1 - 2 * int(bool(finite) and (exponent_bits, mantissa_bits) == (4, 3))
