"""Length-limited Huffman codes: counts or a pmf in, code lengths and codewords out.

This is part of the *compress* stage. Codes are canonical: the lengths alone say them all. A table
in which a single symbol occurs has length 1 for that symbol (Kraft sum 1/2) and takes no bits in a
payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from co3_flower import kernels
from co3_flower.laws import no_laws

T = TypeVar("T", bound=np.generic)

MAX_LENGTH = kernels.WINDOW_BITS  # bits; the decoder looks up windows of so many


def code_lengths(weights: ArrayLike, max_length: int = MAX_LENGTH) -> NDArray[np.uint8]:
    """Return the code lengths of an optimal prefix code no longer than `max_length`.

    Parameters
    ----------
    weights : int64 [K]
        Counts of the symbols, or scaled probabilities; symbols of weight 0 get no code.
    max_length : int
        Longest codeword allowed, in bits; at most 12 can be sent.

    Returns
    -------
    uint8 [K]
        Lengths in bits, 0 for unused symbols.

    Raises
    ------
    ValueError
        If a weight is negative, or more symbols are used than codewords of `max_length` bits exist.

    Examples
    --------
    >>> code_lengths([5, 0, 2, 1]).tolist()
    [1, 0, 2, 2]
    >>> code_lengths([8, 4, 2, 1], max_length=2).tolist()
    [2, 2, 2, 2]
    """
    w = np.ascontiguousarray(weights, dtype=np.int64)
    if w.ndim != 1 or (w.size and w.min() < 0):
        raise ValueError(
            f"weights must be a vector of counts >= 0, "
            f"got shape {w.shape}, least {w.min(initial=0)}"
        )
    used = int(np.count_nonzero(w))
    if not 1 <= max_length <= 32 or used > 2**max_length:
        raise ValueError(
            f"max_length must be in [1, 32] and give {used} symbols a code, got {max_length}"
        )
    lengths = np.zeros(w.size, np.uint8)
    kernels.huffman_lengths(w, max_length, lengths)
    return lengths


def canonical_codes(lengths: ArrayLike) -> NDArray[np.uint32]:
    """Return the canonical codewords of the given lengths: shorter ones first, then by symbol.

    Parameters
    ----------
    lengths : uint8 [K]
        Code lengths in bits, 0 for unused symbols.

    Returns
    -------
    uint32 [K]
        Codewords whose most significant bit (of `length` bits) goes first.

    Examples
    --------
    >>> [f"{c:0{n}b}" for c, n in zip(canonical_codes([2, 1, 3, 3]), [2, 1, 3, 3])]
    ['10', '0', '110', '111']
    """
    array = np.ascontiguousarray(lengths, dtype=np.uint8)
    codes = np.zeros(array.size, np.uint32)
    kernels.canonical_codes(array, codes)
    return codes


def kraft_sum(lengths: ArrayLike) -> float:
    """Return the sum of 2**-length over the used symbols.

    It is 1 for a complete code, 1/2 for a single symbol.

    Examples
    --------
    >>> kraft_sum([2, 1, 3, 3])
    1.0
    """
    used = np.asarray(lengths, dtype=np.int64)
    return float((2.0 ** -used[used > 0]).sum())


@dataclass(frozen=True)
class HuffmanTables:
    """The Huffman codes of an update.

    Attributes
    ----------
    lengths : uint8 [tables, K]
        Code lengths in bits, 0 for unused symbols; K is the largest alphabet.
    alphabets : int64 [tables]
        Size of each table's alphabet.
    laws : int64 [tables, 4]
        The law by which a table is sent (see `laws`); its first entry is -1 where the lengths are.
    """

    lengths: NDArray[np.uint8]
    alphabets: NDArray[np.int64]
    laws: NDArray[np.int64]

    @classmethod
    def from_weights(
        cls, weights: NDArray[np.int64], laws: NDArray[np.int64] | None = None
    ) -> HuffmanTables:
        """Return optimal codes for weights [tables, K]: counts, probabilities, or those of laws."""
        lengths = np.zeros(weights.shape, np.uint8)
        kernels.huffman_tables(weights, MAX_LENGTH, lengths)
        num, size = weights.shape
        return cls(lengths, np.full(num, size, np.int64), no_laws(num) if laws is None else laws)

    @classmethod
    def joined(cls, groups: Sequence[HuffmanTables]) -> HuffmanTables:
        """Return all tables of several groups, whose alphabets may differ."""
        return cls(
            pad_columns([group.lengths for group in groups]),
            np.concatenate([group.alphabets for group in groups]),
            np.concatenate([group.laws for group in groups]),
        )

    def take(self, rows: NDArray[np.int64]) -> HuffmanTables:
        """Return the tables of the given numbers."""
        return HuffmanTables(self.lengths[rows], self.alphabets[rows], self.laws[rows])

    def distinct(self) -> tuple[HuffmanTables, NDArray[np.int64]]:
        """Return the different tables in order of appearance, and the number of each of these."""
        rows = np.ascontiguousarray(self.lengths).view(f"V{self.lengths.shape[1]}").reshape(-1)
        _, firsts, sorted_numbers = np.unique(rows, return_index=True, return_inverse=True)
        appearance = np.argsort(firsts)
        numbers = np.empty(firsts.size, np.int64)
        numbers[appearance] = np.arange(firsts.size)
        return self.take(firsts[appearance]), numbers[sorted_numbers]

    def symbol_bits(self) -> NDArray[np.float64]:
        """Return the bits [tables, K] of each symbol; a table's only one takes none."""
        is_lone = np.count_nonzero(self.lengths, axis=1) == 1
        return np.where(is_lone[:, None], 0, self.lengths).astype(np.float64)

    def code_bits(
        self, counts: NDArray[np.int64], table_of: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the bits [tensors] that symbols counted in [tensors, K] take in their tables."""
        bits = np.zeros(table_of.size, np.int64)
        kernels.table_bits(counts, self.lengths[table_of][:, : counts.shape[1]], bits)
        return bits.astype(np.float64)


def pad_columns(groups: Sequence[NDArray[T]], fill: int = 0) -> NDArray[T]:
    """Stack arrays [rows, K] of different widths, filled up at the right."""
    width = max(group.shape[1] for group in groups)
    if all(group.shape[1] == width for group in groups):
        return np.concatenate(groups)
    return np.concatenate(
        [
            np.pad(group, ((0, 0), (0, width - group.shape[1])), constant_values=fill)
            for group in groups
        ]
    )
