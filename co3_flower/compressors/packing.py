"""What level coders and rotations share: codes of a fixed width as bytes, and scaling back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower.compressors.interface import BodyReader

LARGEST = np.float32(np.finfo(np.float32).max)


def pack_codes(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Return codes of 1 to 8 bits as bit planes, the lowest bits of all codes first.

    Examples
    --------
    >>> pack_codes(np.uint8([1, 0, 3]), 2).hex()
    'a020'
    """
    return b"".join(np.packbits(codes >> bit & 1).tobytes() for bit in range(bits))


def unpack_codes(reader: BodyReader, count: int, bits: int) -> NDArray[np.uint8]:
    """Return the codes that `pack_codes` wrote; PayloadError where bytes are missing."""
    codes = np.zeros(count, np.uint8)
    for bit in range(bits):
        plane = np.frombuffer(reader.take(-(-count // 8), "codes"), np.uint8)
        codes |= np.unpackbits(plane, count=count) << bit
    return codes


def scaled(values: NDArray[Any], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the products as float32, too large ones as the largest number of their sign."""
    with np.errstate(over="ignore", under="ignore"):
        products: NDArray[np.float32] = values.astype(np.float32, copy=False) * factors
    np.clip(products, -LARGEST, LARGEST, out=products)
    return products


def as_float32(value: float) -> np.float32:
    """Return the nearest float32, the largest one for what lies above it."""
    return np.float32(min(value, float(LARGEST)))
