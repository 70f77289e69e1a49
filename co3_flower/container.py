"""The self-describing .co3 file: the layout of some tensors and one payload.

It is little-endian: a fixed part, a section that gives the layout, and one payload.

| bytes | what |
|---|---|
| 4 | magic `CO3A` |
| 2 | version, 0 |
| 2 | 0 |
| 4 | tensors |
| 4 | bytes of the layout section |
| 8 | bytes of the payload |
| | layout section: for each tensor, in order, |
| 1 | dtype: a position in `DTYPES` |
| 1 | axes |
| 2 | bytes of the name |
| 8 each | shape |
| | name, UTF-8 |
| 4 | CRC-32 of everything before |
| | the payload, with a checksum of its own |
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower.codec import decode_update
from co3_flower.errors import PayloadError
from co3_flower.files import DTYPES, FileError
from co3_flower.layout import Layout

MAGIC = b"CO3A"
VERSION = 0

_HEAD = struct.Struct("<4sHHIIQ")
_TENSOR = struct.Struct("<BBH")
_CRC = struct.Struct("<I")
_MAX_ENTRIES = 2**40


def pack_file(layout: Layout, payload: bytes) -> bytes:
    """Return the bytes of a .co3 file.

    Parameters
    ----------
    layout : Layout
        Names, shapes and dtypes that the payload was made of.
    payload : bytes
        What `encode_update` made.

    Raises
    ------
    FileError
        If a name is longer than 65,535 bytes or a tensor has more than 255 axes.

    Examples
    --------
    >>> layout = Layout.of({"w": np.zeros((2, 3), np.float32)})
    >>> len(pack_file(layout, b"..."))  # 24 + (4 + 16 + 1) + 4 + 3
    52
    """
    section = bytearray()
    for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True):
        text = name.encode()
        if len(text) > 0xFFFF or len(shape) > 0xFF:
            raise FileError(
                f"a tensor must have a name of at most 65535 bytes and at most 255 axes, "
                f"got {len(text)} and {len(shape)}"
            )
        section += _TENSOR.pack(DTYPES.index(dtype), len(shape), len(text))
        section += struct.pack(f"<{len(shape)}Q", *shape) + text
    head = _HEAD.pack(MAGIC, VERSION, 0, len(layout), len(section), len(payload)) + section
    return head + _CRC.pack(zlib.crc32(head)) + payload


def unpack_file(data: bytes) -> tuple[Layout, memoryview]:
    """Take a .co3 file apart: the layout and the payload.

    Raises
    ------
    PayloadError
        If it is no sound .co3 file; the payload's own bytes are not checked here.

    Examples
    --------
    >>> layout = Layout.of({"w": np.zeros((2, 3), np.float32)})
    >>> unpacked, payload = unpack_file(pack_file(layout, b"..."))
    >>> unpacked == layout, bytes(payload)
    (True, b'...')
    """
    if len(data) < _HEAD.size + _CRC.size or data[:4] != MAGIC:
        raise PayloadError(
            f"a .co3 file must start with {MAGIC!r} and hold {_HEAD.size + _CRC.size} bytes "
            f"or more, got {bytes(data[:4])!r} and {len(data)}"
        )
    _, version, zero, count, section_bytes, payload_bytes = _HEAD.unpack_from(data)
    if (version, zero) != (VERSION, 0):
        raise PayloadError(f"a .co3 file must be of version {VERSION}, got {version}")
    end = _HEAD.size + section_bytes
    if len(data) != end + _CRC.size + payload_bytes:
        raise PayloadError(
            f"a .co3 file must hold {end + _CRC.size + payload_bytes} bytes, got {len(data)}; "
            "it was truncated"
        )
    (crc,) = _CRC.unpack_from(data, end)
    if zlib.crc32(data[:end]) != crc:
        raise PayloadError(
            f"layout section must have checksum {crc:#010x}, got {zlib.crc32(data[:end]):#010x}; "
            "it was damaged"
        )
    return _read_layout(data[_HEAD.size : end], count), memoryview(data)[end + _CRC.size :]


def decode_file(data: bytes, num_threads: int = 1) -> dict[str, NDArray[Any]]:
    """Decode a .co3 file; each tensor gets the dtype that it had.

    Parameters
    ----------
    data : bytes
        The file's bytes.
    num_threads : int
        Threads that decode.

    Returns
    -------
    dict of str to array
        In the file's order. Float16 entries are clamped to the largest finite one.

    Raises
    ------
    PayloadError
        If the bytes are no sound .co3 file.
    """
    layout, payload = unpack_file(data)
    try:
        decoded = decode_update(payload, layout, num_threads)
    except MemoryError:
        raise PayloadError(
            f"tensors must fit into memory, got {4 * sum(layout.numels):,} bytes"
        ) from None
    dtypes = dict(zip(layout.names, layout.dtypes, strict=True))
    return {name: _cast(array, dtypes[name]) for name, array in decoded.items()}


def _read_layout(section: bytes, count: int) -> Layout:
    names, shapes, dtypes = [], [], []
    at = 0
    for i in range(count):
        if len(section) - at < _TENSOR.size:
            raise PayloadError(f"layout section must describe {count} tensors, got {i}")
        code, axes, name_bytes = _TENSOR.unpack_from(section, at)
        at += _TENSOR.size
        if len(section) - at < 8 * axes + name_bytes or code >= len(DTYPES) or axes > 32:
            raise PayloadError(
                f"tensor {i} must have a known dtype, at most 32 axes and a whole name, "
                f"got dtype {code}, {axes} axes, {len(section) - at} bytes left"
            )
        shapes.append(struct.unpack_from(f"<{axes}Q", section, at))
        at += 8 * axes
        try:
            names.append(section[at : at + name_bytes].decode())
        except UnicodeDecodeError:
            raise PayloadError(f"names must be UTF-8, got other bytes in tensor {i}") from None
        at += name_bytes
        dtypes.append(DTYPES[code])
        # The product of the positive axes too: NumPy refuses what it cannot index.
        if math.prod(max(1, axis) for axis in shapes[-1]) > _MAX_ENTRIES:
            raise PayloadError(
                f"a tensor must have at most 2**40 entries, got shape {shapes[-1]} in {names[-1]!r}"
            )
    if at != len(section) or len(set(names)) != count:
        raise PayloadError(
            f"layout section must end with its last tensor and names must differ, "
            f"got {len(section) - at} bytes more and {len(set(names))} names of {count}"
        )
    return Layout(tuple(names), tuple(shapes), tuple(dtypes))


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype == np.float16 and array.dtype != dtype:
        largest = float(np.finfo(np.float16).max)
        array = np.clip(array, -largest, largest)
    return array.astype(dtype, copy=False)
