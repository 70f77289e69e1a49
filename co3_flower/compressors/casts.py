"""Every entry by itself in fewer bits, nothing coded: the casts fp16, bf16 and fp8."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.compressors.interface import (
    BodyReader,
    Compressor,
    State,
    Tensors,
    flatten,
    unflatten,
)
from co3_flower.errors import PayloadError
from co3_flower.formats import FloatFormat
from co3_flower.layout import Layout
from co3_flower.quantize import dequantize, quantize

_E5M2 = FloatFormat.parse("e5m2")
_LARGEST_FP16 = np.float32(65504)
_LARGEST_BF16 = np.float32(2.0**127 * (2 - 2.0**-7))


@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Rounds each entry to the nearest value of a format; too large ones to its largest."""

    dtype: ClassVar[str]  # of the words in the body

    @abstractmethod
    def shorten(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Return one word an entry."""

    @abstractmethod
    def widen(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """Return what the words stand for; NaN where it is nothing."""

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return all words in order; there is no state."""
        return self.shorten(flatten(tensors)).astype(self.dtype, copy=False).tobytes(), {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the tensors; PayloadError unless there is a sound word for each entry."""
        reader = BodyReader(body)
        size = sum(layout.numels) * np.dtype(self.dtype).itemsize
        values = self.widen(np.frombuffer(reader.take(size, "entries"), self.dtype))
        reader.end()
        if not np.isfinite(values).all():
            raise PayloadError(f"entries must be finite values of {self.name}, got others")
        return unflatten(values, layout)


@dataclass(frozen=True, kw_only=True)
class Fp16(Cast):
    """IEEE binary16, 16 bits an entry.

    Examples
    --------
    >>> payload, state = Fp16().encode({"w": np.float32([1.0, 1e9])}, None, 0)
    >>> Fp16().decode(payload, {"w": np.zeros(2, np.float32)}, 0)["w"].tolist()
    [1.0, 65504.0]
    """

    name: ClassVar[str] = "fp16"
    scheme: ClassVar[int] = 2
    dtype: ClassVar[str] = "<f2"

    def shorten(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Round to nearest, ties to even."""
        return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype(np.float16)

    def widen(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """Return the float32 of the same value."""
        return words.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Bf16(Cast):
    """The upper half of a float32, rounded to nearest, ties to even; 16 bits an entry."""

    name: ClassVar[str] = "bf16"
    scheme: ClassVar[int] = 3
    dtype: ClassVar[str] = "<u2"

    def shorten(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Round to the upper half."""
        bits = np.clip(values, -_LARGEST_BF16, _LARGEST_BF16).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def widen(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """Fill the lower half with zeros."""
        return (words.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, kw_only=True)
class Fp8(Cast):
    """E5M2 without a scale, one byte an entry: what lies below 2**-17 becomes zero.

    References
    ----------
    arXiv 2209.05433 (FP8 formats for deep learning).
    """

    name: ClassVar[str] = "fp8"
    scheme: ClassVar[int] = 4
    dtype: ClassVar[str] = "u1"

    def shorten(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Return the position of the nearest value among all of the format."""
        return quantize(values, 1.0, _E5M2)

    def widen(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """Return the values at the positions."""
        if words.max(initial=0) >= _E5M2.num_values:
            return np.full(words.size, np.nan, np.float32)
        return dequantize(words, 1.0, _E5M2)
