"""A payload taken apart into its sections and put together again, with whatever lies in it."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass, field

HEADER = struct.Struct("<4s6BH8s5IQ")  # as the README's table of bytes says
FIELDS = (
    "magic", "version", "scheme", "flags", "coder", "format", "streams", "tables", "digest",
    "min_numel", "chunk_symbols", "structure_bytes", "table_bytes", "num_words", "raw_bytes",
)  # fmt: skip
WIDTHS = {
    "version": 1, "scheme": 1, "flags": 1, "coder": 1, "format": 1, "streams": 1, "tables": 2,
    "min_numel": 4, "chunk_symbols": 4, "structure_bytes": 4, "table_bytes": 4, "num_words": 4,
    "raw_bytes": 8,
}  # fmt: skip
CRC = struct.Struct("<I")
HAS_KINDS, HAS_STRUCTURE = 1, 2
RANS = 1  # the coder byte


@dataclass(frozen=True)
class Sections:
    """What a payload holds, byte strings as they lie; `sizes` are the stream lengths."""

    header: dict[str, int | bytes]
    kinds: bytes
    scales: bytes
    structure: bytes
    tables: bytes
    sizes: list[int]
    code: bytes
    raw: bytes
    tail: bytes = b""
    stored_sizes: bytes | None = None  # instead of `sizes` as they should be written
    padding: bytes | None = None
    lies: frozenset[str] = field(default_factory=frozenset)  # header fields that are not put right

    def number(self, name: str) -> int:
        """A header field that is a number."""
        value = self.header[name]
        assert isinstance(value, int)
        return value

    def telling(self, **header: int | bytes) -> Sections:
        """The same with other header fields, right or wrong."""
        return dataclasses.replace(
            self, header=self.header | header, lies=self.lies | frozenset(header)
        )

    @property
    def word_bytes(self) -> int:
        """Bytes of a word of code."""
        return 2 if self.header["coder"] == RANS else 4

    def joined(self) -> bytes:
        """The body, all but the checksum."""
        honest = {
            "structure_bytes": len(self.structure),
            "table_bytes": len(self.tables),
            "num_words": len(self.code) // self.word_bytes,
            "raw_bytes": len(self.raw),
        }
        header = self.header | {k: v for k, v in honest.items() if k not in self.lies}
        sizes = write_varints(self.sizes) if self.stored_sizes is None else self.stored_sizes
        frame = b"".join(
            [
                HEADER.pack(*(header[name] for name in FIELDS)),
                self.kinds, self.scales, self.structure, self.tables, sizes,
            ]
        )  # fmt: skip
        padding = bytes(-len(frame) % 4) if self.padding is None else self.padding
        return frame + padding + self.code + self.raw + self.tail


def take_apart(payload: bytes, numels: tuple[int, ...]) -> Sections:
    """Sections of a sound payload of tensors of so many entries."""
    header = dict(zip(FIELDS, HEADER.unpack_from(payload), strict=True))
    at = HEADER.size

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return payload[at - size : at]

    kinds = take(-(-len(numels) // 4)) if header["flags"] & HAS_KINDS else b""
    of_tensor = read_kinds(kinds, len(numels))
    coded = [n for n, kind in zip(numels, of_tensor, strict=True) if kind < 2]
    scales = take(4 * len(coded))
    structure, tables = take(header["structure_bytes"]), take(header["table_bytes"])
    chunk = min(header["chunk_symbols"], max(1, sum(coded)))
    stored = 1 if header["coder"] == RANS else header["streams"]
    sizes, used = read_varints(payload[at:], stored * -(-sum(coded) // chunk))
    take(used + -(at + used) % 4)
    code = take(header["num_words"] * (2 if header["coder"] == RANS else 4))
    raw = payload[at : -CRC.size]
    return Sections(header, kinds, scales, structure, tables, sizes, code, raw)


def sealed(body: bytes) -> bytes:
    """The body with its checksum."""
    return body + CRC.pack(zlib.crc32(body))


def read_kinds(kinds: bytes, count: int) -> list[int]:
    """Kind of each tensor; without the section all are coded."""
    if not kinds:
        return [0] * count
    return [kinds[i // 4] >> 2 * (i % 4) & 3 for i in range(count)]


def write_kinds(kinds: list[int]) -> bytes:
    """Pack kinds, four to a byte."""
    packed = bytearray(-(-len(kinds) // 4))
    for i, kind in enumerate(kinds):
        packed[i // 4] |= kind << 2 * (i % 4)
    return bytes(packed)


def write_varints(values: list[int]) -> bytes:
    """Base-128 numbers, little-endian."""
    data = bytearray()
    for value in values:
        while value >= 128:
            data.append(value & 127 | 128)
            value >>= 7
        data.append(value)
    return bytes(data)


def read_varints(data: bytes, count: int) -> tuple[list[int], int]:
    """`count` numbers and the bytes they take."""
    values, at = [], 0
    for _ in range(count):
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        values.append(value)
    return values, at
