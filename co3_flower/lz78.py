"""LZ78, the papers' rival of a Huffman code: symbols in, phrases and their cost in bits out.

A phrase is the longest earlier phrase that fits and one more symbol. Phrase j (from 1) is sent as
the number of an earlier phrase or 0 for the empty one, ceil(log2 j) bits, and a symbol, ceil(log2
K) bits. The number of phrases is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from co3_flower import kernels_analysis as kernels
from co3_flower.formats import FloatFormat

MAX_SYMBOLS = 2**kernels.NODE_BITS - 1  # phrases are numbered in so many bits


@dataclass(frozen=True)
class Phrases:
    """An LZ78 parse.

    Attributes
    ----------
    parents : uint32 [P]
        The earlier phrase (numbered from 1) that each phrase extends, 0 for the empty one.
    symbols : uint8 [P]
        The symbol that each phrase adds.
    """

    parents: NDArray[np.uint32]
    symbols: NDArray[np.uint8]

    def __len__(self) -> int:
        return self.parents.size


def parse_lz78(symbols: ArrayLike) -> Phrases:
    """Parse a sequence of symbols into LZ78 phrases.

    The dictionary is a hash table of 8-byte slots, at most half of them taken: with the phrases 21
    to 42 bytes per phrase, half as much again while it grows. 25 million E5M2 symbols of a gradient
    are about 6 million phrases: 0.18 GB, at most 0.26.

    Parameters
    ----------
    symbols : uint8 [...]
        The sequence, in C order; fewer than 2**28 symbols.

    Returns
    -------
    Phrases
        Where the sequence ends within a known phrase, the last phrase repeats that one.

    Raises
    ------
    ValueError
        If there are more symbols.

    Examples
    --------
    >>> phrases = parse_lz78([1, 1, 0, 1, 0, 1, 1])  # 1, 10, 101, 1
    >>> phrases.parents.tolist(), phrases.symbols.tolist()
    ([0, 1, 2, 0], [1, 0, 1, 1])
    """
    sequence = np.ascontiguousarray(symbols, dtype=np.uint8).reshape(-1)
    if sequence.size > MAX_SYMBOLS:
        raise ValueError(f"symbols must be fewer than 2**28, got {sequence.size}")
    return Phrases(*kernels.lz78_phrases(sequence))


def expand_lz78(phrases: Phrases) -> NDArray[np.uint8]:
    """Return the sequence of symbols that phrases stand for, the inverse of `parse_lz78`.

    Parameters
    ----------
    phrases : Phrases
        P phrases, each extending an earlier one.

    Returns
    -------
    uint8 [n]
        The sequence.

    Raises
    ------
    ValueError
        If a phrase extends itself or a later one.

    Examples
    --------
    >>> expand_lz78(parse_lz78([2, 2, 2, 0, 2])).tolist()
    [2, 2, 2, 0, 2]
    """
    if (phrases.parents > np.arange(len(phrases))).any():
        bad = int(np.argmax(phrases.parents > np.arange(len(phrases))))
        raise ValueError(
            f"phrases must extend earlier ones, got {phrases.parents[bad]} in phrase {bad + 1}"
        )
    lengths = np.zeros(len(phrases), np.int64)
    sequence = np.zeros(kernels.lz78_lengths(phrases.parents, lengths), np.uint8)
    kernels.lz78_expand(phrases.parents, phrases.symbols, lengths, sequence)
    return sequence


def lz78_bits(num_phrases: int, num_values: int) -> int:
    """Return the code length of LZ78 phrases: sum of ceil(log2 j) + ceil(log2 K), in bits.

    Parameters
    ----------
    num_phrases : int
        P; j runs from 1 to P.
    num_values : int
        K, the size of the alphabet.

    Examples
    --------
    >>> lz78_bits(4, 11)  # 0 + 1 + 2 + 2 bits of numbers, 4 symbols of 4 bits
    21
    """
    p, width = num_phrases, (num_phrases - 1).bit_length() if num_phrases else 0
    # sum of ceil(log2 j) for j = 1 .. p: each power of two below p saves one bit more of `width`
    numbers = p * width - ((1 << width) - 1)
    return numbers + p * (num_values - 1).bit_length()


def bit_codes(fmt: FloatFormat) -> NDArray[np.uint8]:
    """Return the bit pattern of each symbol of a format: sign, exponent, mantissa; zero is 0.

    Formats of fewer than 8 bits have zeros above the sign.

    Returns
    -------
    uint8 [K]
        A code per symbol.

    Examples
    --------
    >>> [f"{code:04b}" for code in bit_codes(FloatFormat.parse("e1m1"))]
    ['0101', '0000', '0001']
    """
    magnitudes = np.arange(fmt.num_values) - fmt.zero
    sign = np.where(magnitudes < 0, 1 << (fmt.exponent_bits + fmt.mantissa_bits), 0)
    return (np.abs(magnitudes) | sign).astype(np.uint8)


def lz78_bit_string_bits(symbols: ArrayLike, fmt: FloatFormat) -> int:
    """Return the papers' LZ78 cost of symbols: P * (floor(log2 P) + 2) bits.

    P counts the phrases of the string of all symbols' 8-bit codes (`bit_codes`), first bit highest.
    A phrase is charged the width of the last phrase's number, and one bit.

    Parameters
    ----------
    symbols : uint8 [...]
        Symbols of `fmt`, in C order.
    fmt : FloatFormat
        Their format.

    Examples
    --------
    >>> lz78_bit_string_bits([1, 1], FloatFormat.parse("e1m1"))  # 0 00 000 01 0000 000: 6 * 4
    24

    References
    ----------
    arXiv 2111.07599, the comparison of the GenNorm Huffman code with LZ78.
    """
    sequence = np.ascontiguousarray(symbols, dtype=np.uint8).reshape(-1)
    phrases = int(kernels.lz78_bit_phrases(sequence, bit_codes(fmt), 8))
    return phrases * (phrases.bit_length() + 1) if phrases else 0
