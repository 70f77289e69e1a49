"""What users would pick instead, as fast as their Python interfaces allow.

The NumPy rival converts with `searchsorted` and compresses with zstd or zlib. It is given the
product's scales for nothing, so that all compress (but for ties) the same symbols.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import bitarray
import bitarray.util
import constriction
import numpy as np
import zstandard

from co3_flower import FloatFormat

Compress = Callable[[np.ndarray], bytes]
Decompress = Callable[[bytes], bytes]
ZSTD_LEVELS = (-1, 1, 19)
ZLIB_LEVEL = 6
SLOW_REPEATS = {"zstd 19": 1, "zlib 6": 3}  # seconds each, on a whole update

AnsModel = tuple[slice, object]


def byte_compressors() -> dict[str, tuple[Compress, Decompress]]:
    """Return general-purpose compressors and their inverses, by name and level."""
    unpack = zstandard.ZstdDecompressor().decompress
    found: dict[str, tuple[Compress, Decompress]] = {
        f"zstd {level}": (zstandard.ZstdCompressor(level=level).compress, unpack)
        for level in ZSTD_LEVELS
    }
    found[f"zlib {ZLIB_LEVEL}"] = (lambda data: zlib.compress(data, ZLIB_LEVEL), zlib.decompress)
    return found


def midpoints(fmt: FloatFormat) -> np.ndarray:
    """Return the cell boundaries of a format, float32 [K - 1]."""
    return (fmt.values[1:] + fmt.values[:-1]) / np.float32(2)


def numpy_convert(
    update: Iterable[np.ndarray],
    residual: Iterable[np.ndarray],
    scales: np.ndarray,
    gamma: float,
    fmt: FloatFormat,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Compensate and convert tensor by tensor: flat symbols uint8 [n], the new residuals."""
    edges, decay = midpoints(fmt), np.float32(gamma)
    parts, kept = [], []
    for g, m, scale in zip(update, residual, scales, strict=True):
        v = g + decay * m
        symbols = np.searchsorted(edges, v * scale)
        kept.append(v - (fmt.values / scale)[symbols])
        parts.append(symbols.astype(np.uint8).reshape(-1))
    return np.concatenate(parts), kept


def numpy_accumulate(
    symbols: np.ndarray,
    accumulator: Iterable[np.ndarray],
    scales: np.ndarray,
    weight: float,
    fmt: FloatFormat,
) -> None:
    """Add weight * value / scale to each tensor in place."""
    start = 0
    for total, scale in zip(accumulator, scales, strict=True):
        part = symbols[start : start + total.size].reshape(total.shape)
        total += (np.float32(weight) * (fmt.values / scale))[part]
        start += total.size


class ConstrictionAns:
    """constriction's ANS coder with one categorical model per part of the symbols.

    Parameters
    ----------
    symbols : uint8 [n]
        All symbols; the models are their frequencies in each part.
    bounds : int [parts + 1]
        Where the parts begin.
    num_values : int
        Size of the alphabet.
    """

    def __init__(self, symbols: np.ndarray, bounds: np.ndarray, num_values: int) -> None:
        self.symbols = symbols.astype(np.int32)  # what its interface takes
        self.models: list[AnsModel] = []
        categorical = constriction.stream.model.Categorical
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            counts = np.bincount(symbols[begin:end], minlength=num_values)
            model = categorical(counts.astype(np.float64) / counts.sum(), perfect=False)
            self.models.append((slice(begin, end), model))

    def encode(self) -> np.ndarray:
        """Return the code, uint32."""
        coder = constriction.stream.stack.AnsCoder()
        for part, model in reversed(self.models):
            coder.encode_reverse(self.symbols[part], model)
        return coder.get_compressed()

    def decode(self, code: np.ndarray) -> list[np.ndarray]:
        """Return the symbols of each part, int32."""
        coder = constriction.stream.stack.AnsCoder(code)
        return [coder.decode(model, part.stop - part.start) for part, model in self.models]


class ConstrictionHuffman:
    """constriction's Huffman coder with one code for all symbols; a call per symbol."""

    def __init__(self, symbols: np.ndarray, num_values: int) -> None:
        self.symbols = symbols.tolist()
        counts = np.bincount(symbols, minlength=num_values).astype(np.float64)
        self.encoder_tree = constriction.symbol.huffman.EncoderHuffmanTree(counts)
        self.decoder_tree = constriction.symbol.huffman.DecoderHuffmanTree(counts)

    def encode(self) -> np.ndarray:
        """Return the code, uint32."""
        coder = constriction.symbol.QueueEncoder()
        for symbol in self.symbols:
            coder.encode_symbol(symbol, self.encoder_tree)
        return coder.get_compressed()[0]

    def decode(self, code: np.ndarray) -> list[int]:
        """Return the symbols."""
        coder = constriction.symbol.QueueDecoder(code)
        return [coder.decode_symbol(self.decoder_tree) for _ in self.symbols]


class BitarrayHuffman:
    """bitarray's canonical Huffman code, one for all symbols."""

    def __init__(self, symbols: np.ndarray) -> None:
        self.symbols = symbols.tobytes()
        values, counts = np.unique(symbols, return_counts=True)
        frequencies = dict(zip(values.tolist(), counts.tolist(), strict=True))
        self.code, self.counts, self.order = bitarray.util.canonical_huffman(frequencies)

    def encode(self) -> bitarray.bitarray:
        """Return the code."""
        bits = bitarray.bitarray()
        bits.encode(self.code, self.symbols)
        return bits

    def decode(self, bits: bitarray.bitarray) -> bytes:
        """Return the symbols."""
        return bytes(bitarray.util.canonical_decode(bits, self.counts, self.order))
