"""Slow twins of the row x column structure: how classes are read, and symbols with their tables.

Written from the docstrings of `co3_flower.kernels_structure`, with Python's integers and lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from naive import canonical_codes

CENTRE, LARGEST, DEAD, NUM_CLASSES = 64, 255, None, 255 + 128
CONTEXTS = {"rows": 0, "channels": 1, "taps": 2, "columns": 3}
Class = int | None  # None is dead


class BitReader:
    """Reads the adaptive binary code; every context starts at even odds."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.low, self.high, self.position = 0, 2**32 - 1, 4
        self.value = int.from_bytes((data + bytes(4))[:4], "big")
        self.odds: dict[object, int] = {}

    def bit(self, context: object) -> int:
        odds = self.odds.get(context, 2**15)
        middle = self.low + (self.high - self.low) // 2**16 * odds
        bit = int(self.value <= middle)
        if bit:
            self.high = middle
            self.odds[context] = odds + (2**16 - odds) // 16
        else:
            self.low = middle + 1
            self.odds[context] = odds - odds // 16
        while self.low >> 24 == self.high >> 24:
            byte = self.data[self.position] if self.position < len(self.data) else 0
            self.position += 1
            self.low = self.low * 256 % 2**32
            self.high = self.high * 256 % 2**32 + 255
            self.value = (self.value * 256 + byte) % 2**32
        return bit

    def number(self, width: int) -> int:
        """A number from its highest bit on; the context is what was read of it."""
        prefix = 1
        for _ in range(width):
            prefix = 2 * prefix + self.bit(("number", prefix))
        return prefix - 2**width

    def unary(self, contexts: Sequence[object]) -> int:
        """How many ones come before a zero, at most as many as there are contexts."""
        for i, context in enumerate(contexts):
            if not self.bit(context):
                return i
        return len(contexts)

    def step(self, kind: str) -> int:
        return 2 ** self.unary([("step", kind, 0), ("step", kind, 1)])

    def factors(self, count: int, base: int, step: int, kind: str) -> list[Class]:
        """Factors in zigzag order around a base; the last two that live tell the context."""
        values: list[Class] = []
        was_dead, last_two = 0, (1, 1)
        for _ in range(count):
            was_dead = self.bit(("dead", kind, was_dead))
            if was_dead:
                values.append(DEAD)
                continue
            near = sum(last_two)
            level = near if near < 3 else 3 if near < 6 else 4
            number = self.unary([("unary", kind, level, i) for i in range(20)])
            if number == 20:
                number += self.number(10)
            difference = -(number + 1) // 2 if number % 2 else number // 2
            values.append(base + difference * step)
            assert 0 <= base + difference * step <= LARGEST
            last_two = (abs(difference), last_two[0])
        return values


def add(row: Class, column: Class) -> Class:
    return None if row is None or column is None else row + column


def join(channels: list[Class], taps: list[Class]) -> list[Class]:
    """Columns' classes from those of channels and of taps, clipped to what a factor may be."""
    sums = [add(channel, tap) for channel in channels for tap in taps]
    return [s if s is None else min(LARGEST, max(0, s - CENTRE)) for s in sums]


def read_structure(
    data: bytes, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[list[Class]], list[int]]:
    """Class of every entry of every tensor, and the table of every class."""
    reader = BitReader(data)
    classes = []
    for shape in shapes:
        numel = math.prod(shape)
        rows, taps = (shape[0], math.prod(shape[2:])) if len(shape) > 1 else (1, 1)
        if numel == 0:
            classes.append([])
            continue
        cols = numel // rows
        mode = reader.unary([("mode", i) for i in range(4)])
        if mode == 0:
            is_dead = reader.bit("all dead")
            of_all = None if is_dead else reader.number(8) + CENTRE
            classes.append([of_all] * numel)
            continue
        base = reader.number(8)
        row_classes = reader.factors(rows, base, reader.step("rows"), "rows")
        col_classes: list[Class] = [CENTRE] * cols
        if mode == 4:
            col_classes = reader.factors(cols, CENTRE, reader.step("columns"), "columns")
        elif mode > 1:
            channels: list[Class] = [CENTRE] * (cols // taps)
            of_taps: list[Class] = [CENTRE] * taps
            if mode == 3:
                channels = reader.factors(cols // taps, CENTRE, reader.step("channels"), "channels")
            if taps > 1:
                of_taps = reader.factors(taps, CENTRE, 1, "taps")
            col_classes = join(channels, of_taps)
        classes.append([add(row, col) for row in row_classes for col in col_classes])
    tables = [0]
    while len(tables) < NUM_CLASSES:
        tables.append(tables[-1] + reader.bit("new table"))
    return classes, tables


def table_of_entries(
    classes: list[list[Class]], class_tables: list[int], num_buffered: int
) -> list[int | None]:
    """Table of every entry in coding order, the buffers' last; None where it is dead."""
    flat = [c for of_tensor in classes for c in of_tensor]
    tables = [None if c is None else class_tables[c] for c in flat]
    return tables + [class_tables[-1] + 1] * num_buffered


def decode_rans(
    words: list[int], tables: list[int | None], zero: int, freqs: list[list[int]]
) -> list[int]:
    """One chunk: four states, each symbol with its own table; dead entries take nothing."""
    states = [words[2 * i] + words[2 * i + 1] * 2**16 for i in range(4)]
    at, symbols = 8, []
    for i, table in enumerate(tables):
        if table is None:
            symbols.append(zero)
            continue
        slot, start, symbol = states[i % 4] % 2**14, 0, 0
        while start + freqs[table][symbol] <= slot:
            start += freqs[table][symbol]
            symbol += 1
        symbols.append(symbol)
        x = freqs[table][symbol] * (states[i % 4] // 2**14) + slot - start
        if x < 2**15:
            x = x * 2**16 + words[at]
            at += 1
        states[i % 4] = x
    assert at == len(words)
    assert states == [2**15] * 4
    return symbols


def decode_huffman(
    words: list[int], tables: list[int | None], zero: int, lengths: list[list[int]]
) -> list[int]:
    """One stream: codewords bit by bit, each with its own table; lone symbols take no bits."""
    bits = "".join(format(word, "032b")[::-1] for word in words)
    books = []
    for of_table in lengths:
        used = [k for k, length in enumerate(of_table) if length]
        codes = canonical_codes(of_table)
        books.append({"": used[0]} if len(used) == 1 else {codes[k]: k for k in used})
    at, symbols = 0, []
    for table in tables:
        if table is None:
            symbols.append(zero)
            continue
        end = at
        while bits[at:end] not in books[table]:
            end += 1
            assert end <= len(bits)
        symbols.append(books[table][bits[at:end]])
        at = end
    assert (at + 31) // 32 == len(words)
    return symbols
