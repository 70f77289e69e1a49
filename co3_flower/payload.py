"""The byte layout of a payload, version 1, and every check on foreign bytes.

Little-endian; see the table in the README. What a field says is checked against the layout and the
length of the bytes before anything is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels_side, laws
from co3_flower.bitstream import (
    MAX_STREAMS,
    MIN_CHUNK_SYMBOLS,
    Tables,
    pack_tables,
    unpack_huffman_tables,
    unpack_rans_tables,
)
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.formats import FloatFormat
from co3_flower.huffman import HuffmanTables
from co3_flower.kernels_rans import NUM_STATES
from co3_flower.layout import FLOAT_DTYPES, Kind, Layout, Plan, max_tables
from co3_flower.rans import RansTables
from co3_flower.structure import Structure, read_structure

MAGIC = b"CO3F"
VERSION = 1
SCHEME_CO3, SCHEME_NONE = 0, 1
CODERS = (HuffmanTables, RansTables)  # by the header's coder byte
WORDS = (np.dtype("<u4"), np.dtype("<u2"))  # of their code
BUFFER_FORMAT = FloatFormat.parse("e4m3")

# magic, version, scheme, flags, coder, format, streams, tables, layout digest, min_numel, symbols
# per chunk, bytes of structure, bytes of tables, words of code, bytes of raw tensors
_HEADER = struct.Struct("<4s6BH8s5IQ")
_START = struct.Struct("<4sB")  # of every header: magic, version
_CRC = struct.Struct("<I")
NUM_CRC_BYTES = _CRC.size
NUM_FRAME_BYTES = _HEADER.size + NUM_CRC_BYTES
_FLAG_KINDS = 1  # a section says of each tensor: coded, buffer or raw; without it all are coded
_FLAG_STRUCTURE = 2  # code tables are those of classes of entries, not of tensors


@dataclass(frozen=True)
class Parts:
    """What a payload holds beside its frame, in terms of the plan's coding order.

    Attributes
    ----------
    fmt : FloatFormat
        Format of the coded tensors; buffers are in `BUFFER_FORMAT`.
    scales : float32 [coded tensors + buffers]
        In coding order.
    tables : HuffmanTables or RansTables
        The tables of large tensors, then that of the small ones, then that of the buffers.
    table_of : int64 [coded tensors + buffers]
        Code table of each tensor; with a structure, of the buffers only.
    structure : Structure or None
        Classes of the coded tensors' entries; the tables are then those of the classes and that of
        the buffers.
    num_streams, chunk_symbols : int
        Streams (for rANS, states in one stream) per chunk, and symbols per chunk.
    sizes : int64 [streams]
        Words of each stream.
    words : uint32 or, for rANS, uint16
        The code, in a payload that was read with at least one word behind it.
    raw : tuple of bytes-like
        The raw tensors' bytes, in layout order.
    scheme : int
        0 for co3, 1 for none (every tensor raw).
    """

    fmt: FloatFormat
    scales: NDArray[np.float32]
    tables: Tables
    table_of: NDArray[np.int64]
    structure: Structure | None
    num_streams: int
    chunk_symbols: int
    sizes: NDArray[np.int64]
    words: NDArray[Any]
    raw: tuple[bytes | memoryview, ...]
    scheme: int = SCHEME_CO3


def format_code(fmt: FloatFormat) -> int:
    """Return a format's byte: exponent bits, mantissa bits from bit 3, finite in bit 6."""
    return fmt.exponent_bits | fmt.mantissa_bits << 3 | int(fmt.finite) << 6


def scale_limits(fmt: FloatFormat) -> tuple[float, float]:
    """Return the least and largest scale of a payload: value / scale stays a finite float32."""
    return max(2.0**-120, fmt.max_finite * 2.0**-127), 2.0**120


def write_payload(parts: Parts, layout: Layout, plan: Plan) -> bytes:
    """Frame the parts; `parts.words` holds the code and nothing behind it."""
    coder = CODERS.index(type(parts.tables))
    num_tables = parts.tables.alphabets.size
    num_own_tables = num_tables - int(plan.has_buffers)
    tables, structure = b"", b""
    own = parts.table_of[:0]
    if parts.structure is not None:
        structure = parts.structure.packed
    else:
        num_own_tables -= int(plan.has_pool)
        own = parts.table_of[: plan.num_own]
    if num_tables:
        tables = pack_tables(parts.tables, own, num_own_tables)
    kinds = b""
    if any(plan.kinds):
        kinds = pack_kinds(plan.kinds)
    sizes = np.empty(5 * parts.sizes.size, np.uint8)
    frame = b"".join(
        [
            _HEADER.pack(
                MAGIC,
                VERSION,
                parts.scheme,
                (_FLAG_KINDS if kinds else 0) | (_FLAG_STRUCTURE if structure else 0),
                coder,
                format_code(parts.fmt),
                parts.num_streams,
                num_own_tables,
                layout.digest(plan.raw),
                plan.min_numel,
                parts.chunk_symbols,
                len(structure),
                len(tables),
                parts.words.size,
                sum(len(data) for data in parts.raw),
            ),
            kinds,
            parts.scales.astype("<f4").tobytes(),
            structure,
            tables,
            sizes[: kernels_side.write_varints(parts.sizes, sizes)].tobytes(),
        ]
    )
    code = parts.words.astype(WORDS[coder], copy=False).data
    return seal_frame([frame, bytes(-len(frame) % 4), code, *parts.raw])


def seal_frame(sections: Sequence[bytes | memoryview]) -> bytes:
    """Return the sections of a payload and the checksum of all of them."""
    crc = 0
    for section in sections:
        crc = zlib.crc32(section, crc)
    return b"".join([*sections, _CRC.pack(crc)])


def open_frame(data: memoryview, header_bytes: int) -> memoryview:
    """Return a payload without its checksum, once what every scheme has is found sound.

    That is magic and version, in front of a header of its own, and the checksum.

    Raises
    ------
    PayloadError
        If one of them is not.
    """
    if len(data) < header_bytes + _CRC.size:
        raise PayloadError(
            f"payload must hold at least {header_bytes + _CRC.size} bytes, got {len(data)}"
        )
    magic, version = _START.unpack_from(data)
    if magic != MAGIC:
        raise PayloadError(f"payload must start with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise PayloadError(
            f"payload must be of version {VERSION}, got {version}; a newer co3_flower may read it"
        )
    body = data[: -_CRC.size]
    (crc,) = _CRC.unpack_from(data, len(body))
    if (found := zlib.crc32(body)) != crc:
        raise PayloadError(
            f"payload must have checksum {crc:#010x}, got {found:#010x}; it was damaged"
        )
    return body


def read_payload(payload: bytes | memoryview, layout: Layout) -> tuple[Parts, Plan]:
    """Take a payload apart and check all of it but the code bits.

    Raises
    ------
    PayloadError
        If it is no sound payload of this layout.
    """
    data = memoryview(payload).cast("B")
    body = open_frame(data, _HEADER.size)
    (
        _, _, scheme, flags, coder, format_byte, num_streams, num_own_tables, digest, min_numel,
        chunk_symbols, structure_bytes, table_bytes, num_words, raw_bytes,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if scheme not in (SCHEME_CO3, SCHEME_NONE) or coder >= len(CODERS) or flags > 3:
        raise PayloadError(
            f"scheme, coder and flags must be known, got {scheme}, {coder} and {flags:#x}"
        )
    fmt = _read_format(format_byte)
    reader = _Reader(body, _HEADER.size)
    kinds = (Kind.CODED,) * len(layout)
    if flags & _FLAG_KINDS:
        kinds = unpack_kinds(reader.take(kinds_bytes(layout), "tensor kinds"), layout)
    check_kinds(kinds, layout, digest)
    if scheme == SCHEME_NONE and (num_raw := kinds.count(Kind.RAW)) < len(layout):
        raise PayloadError(f"scheme 1 must send all {len(layout)} tensors raw, got {num_raw}")
    fewest, most = (NUM_STATES, NUM_STATES) if CODERS[coder] is RansTables else (1, MAX_STREAMS)
    if min_numel < 1 or not fewest <= num_streams <= most or chunk_symbols < 1:
        raise PayloadError(
            f"min_numel and symbols per chunk must be positive and streams in [{fewest}, {most}], "
            f"got {min_numel}, {chunk_symbols} and {num_streams}"
        )
    plan = layout.plan(kinds, min_numel)
    scales = np.frombuffer(reader.take(4 * len(plan.order), "scales"), "<f4")
    _check_scales(scales, fmt, plan, layout)
    fewest = min(MIN_CHUNK_SYMBOLS, plan.num_symbols)
    if chunk_symbols < fewest:
        raise PayloadError(f"symbols per chunk must be at least {fewest}, got {chunk_symbols}")
    chunk_symbols = min(chunk_symbols, max(1, plan.num_symbols))
    structure = None
    packed_structure = reader.take(structure_bytes, "structure")
    if flags & _FLAG_STRUCTURE:
        structure = read_structure(packed_structure, layout, plan)
    elif structure_bytes:
        raise PayloadError(f"structure without its flag must take 0 bytes, got {structure_bytes}")
    packed = np.frombuffer(reader.take(table_bytes, "code tables"), np.uint8)
    tables, table_of = _read_tables(coder, packed, plan, fmt, structure, num_own_tables)
    num_chunks = -(-plan.num_symbols // chunk_symbols)
    stored = num_streams if CODERS[coder] is HuffmanTables else 1
    sizes = _read_sizes(reader, num_chunks * stored, num_words)
    reader.take(-reader.position % 4, "padding")
    code_at = reader.position
    word = WORDS[coder]
    reader.take(word.itemsize * num_words, "code")
    raw = tuple(
        reader.take(layout.numels[i] * layout.dtypes[i].itemsize, f"raw tensor {layout.names[i]!r}")
        for i in plan.raw
    )
    if sum(map(len, raw)) != raw_bytes or reader.position != len(body):
        raise PayloadError(
            f"raw tensors must take {sum(map(len, raw))} bytes and end the payload at "
            f"{reader.position}, got {raw_bytes} and {len(body)}"
        )
    words = np.frombuffer(data[code_at : code_at + word.itemsize * (num_words + 1)], word)
    if not words.flags.aligned:
        words = words.copy()
    parts = Parts(
        fmt, scales, tables, table_of, structure, num_streams, chunk_symbols, sizes, words, raw,
        scheme,
    )  # fmt: skip
    return parts, plan


def num_raw_bytes(payload: bytes | memoryview) -> int:
    """Return the bytes of raw tensors that a payload claims to hold; 0 where it has no header."""
    data = memoryview(payload).cast("B")
    return int(_HEADER.unpack_from(data)[-1]) if len(data) >= _HEADER.size else 0


class _Reader:
    """A position in the body of a payload; `take` never goes beyond its end."""

    def __init__(self, body: memoryview, position: int) -> None:
        self.body = body
        self.position = position

    def take(self, size: int, what: str) -> memoryview:
        """Return the next `size` bytes."""
        left = len(self.body) - self.position
        if size > left:
            raise PayloadError(
                f"payload must hold {size} bytes of {what}, got {left}; it was truncated"
            )
        self.position += size
        return self.body[self.position - size : self.position]

    @property
    def rest(self) -> memoryview:
        """All bytes from here on."""
        return self.body[self.position :]


def kinds_bytes(layout: Layout) -> int:
    """Return how many bytes `pack_kinds` takes for a layout."""
    return -(-len(layout) // 4)


def pack_kinds(kinds: tuple[Kind, ...]) -> bytes:
    """Return the kinds of a layout's tensors, four in a byte, the first lowest."""
    padded = np.zeros(-(-len(kinds) // 4) * 4, np.uint8)
    padded[: len(kinds)] = kinds
    quads = padded.reshape(-1, 4)
    return (
        (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6)
        .astype(np.uint8)
        .tobytes()
    )


def unpack_kinds(packed: memoryview, layout: Layout) -> tuple[Kind, ...]:
    """Return what `pack_kinds` was given; PayloadError where a number stands for no kind."""
    numbers = (
        np.frombuffer(packed, np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    ).reshape(-1)
    if (numbers[len(layout) :] != 0).any() or (numbers == 3).any():
        raise PayloadError("tensor kinds must be 0, 1 or 2 and their padding 0, got others")
    return tuple(map(Kind, numbers[: len(layout)].tolist()))


def check_kinds(kinds: tuple[Kind, ...], layout: Layout, digest: bytes) -> None:
    """Raise PayloadError for kinds that do not fit the layout, or a digest that is not theirs."""
    raw = [i for i, kind in enumerate(kinds) if kind == Kind.RAW]
    if layout.digest(raw) != digest:
        raise PayloadError(
            f"payload must be of a layout with digest {layout.digest(raw).hex()}, "
            f"got {digest.hex()}; it was made for another model"
        )
    for kind, dtype, name in zip(kinds, layout.dtypes, layout.names, strict=True):
        if kind != Kind.RAW and dtype not in FLOAT_DTYPES:
            raise PayloadError(
                f"a tensor of dtype {dtype} must travel raw, got kind {int(kind)} in {name!r}"
            )


def _read_format(code: int) -> FloatFormat:
    try:
        fmt = FloatFormat(code & 7, code >> 3 & 7, finite=bool(code >> 6 & 1))
    except ConfigError as error:
        raise PayloadError(
            f"format byte must stand for a format, got {code:#04x}: {error}"
        ) from None
    if code != format_code(fmt):
        raise PayloadError(f"format byte must be below 0x80, got {code:#04x}")
    return fmt


def _check_scales(
    scales: NDArray[np.float32], fmt: FloatFormat, plan: Plan, layout: Layout
) -> None:
    low = np.full(scales.size, scale_limits(fmt)[0])
    low[plan.num_coded :] = scale_limits(BUFFER_FORMAT)[0]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        good = (scales >= low) & (scales <= scale_limits(fmt)[1])
    if not good.all():
        i = int(np.argmin(good))
        name = layout.names[plan.order[i]]
        raise PayloadError(
            f"scale must be in [{low[i]:.8g}, 2**120], got {scales[i]!r} in {name!r}"
        )


def _read_tables(
    coder: int,
    data: NDArray[np.uint8],
    plan: Plan,
    fmt: FloatFormat,
    structure: Structure | None,
    num_tables: int,
) -> tuple[Tables, NDArray[np.int64]]:
    """Read the code tables and each tensor's (with a structure, each buffer's) table."""
    of_buffers = np.full(plan.num_buffers, num_tables, np.int64)
    sizes = [fmt.num_values] * num_tables
    num_own = plan.num_own
    if structure is not None:
        num_own, fewest, most = 0, structure.num_tables, structure.num_tables
    else:
        fewest, most = min(1, num_own), min(num_own, max_tables(plan.num_symbols))
        of_buffers += int(plan.has_pool)
        sizes += [fmt.num_values] * int(plan.has_pool)
        if CODERS[coder] is RansTables:
            fewest = num_own
    if not fewest <= num_tables <= most:
        raise PayloadError(f"code tables must be {fewest} to {most}, got {num_tables}")
    alphabets = np.array(sizes + [BUFFER_FORMAT.num_values] * int(plan.has_buffers), np.int64)
    tables: Tables
    edges = laws.edges_of((fmt, BUFFER_FORMAT))
    edges_of = np.zeros(alphabets.size, np.int64)
    edges_of[len(sizes) :] = 1
    if CODERS[coder] is HuffmanTables:
        tables, own = unpack_huffman_tables(data, alphabets, edges, edges_of, num_own, num_tables)
    else:
        tables = unpack_rans_tables(data, alphabets, edges, edges_of)
        own = np.arange(num_own)
    if structure is not None:
        return tables, of_buffers
    of_pool = np.full(plan.num_pooled, num_tables, np.int64)
    return tables, np.concatenate([own, of_pool, of_buffers])


def _read_sizes(reader: _Reader, count: int, num_words: int) -> NDArray[np.int64]:
    if count > len(reader.rest):
        raise PayloadError(
            f"payload must hold {count} stream lengths, got {len(reader.rest)} bytes; "
            "it was truncated"
        )
    sizes = np.zeros(count, np.int64)
    used = kernels_side.read_varints(np.frombuffer(reader.rest, np.uint8), sizes)
    if used < 0:
        raise PayloadError(f"stream lengths must be {count} numbers of at most 35 bits, got others")
    reader.take(used, "stream lengths")
    if int(sizes.sum()) != num_words:
        raise PayloadError(
            f"stream lengths must sum to {num_words} words of code, got {int(sizes.sum())}"
        )
    return sizes
