"""Range asymmetric numeral systems (the *compress* stage): counts or a pmf in, frequencies out.

A Huffman code spends at least one bit on every symbol; rANS spends -log2 of the symbol's frequency,
which may be a hundredth of a bit. Frequencies sum to 2**14. What is sent of a table is a weight of
5 significant bits per magnitude, or a law, from which both ends derive the same frequencies in
integers; the former costs 0.1 % of the code at 1 bit per symbol and above, and about 1 % at 0.006.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels_rans
from co3_flower.huffman import pad_columns
from co3_flower.laws import no_laws


@dataclass(frozen=True)
class RansTables:
    """The frequency tables of an update.

    Attributes
    ----------
    exponents, mantissas : int8 [tables, K]
        Weights (16 + mantissa) << exponent, as sent; exponent -1 for unused symbols.
    frequencies : uint32 [tables, K]
        Each row sums to 2**14.
    alphabets : int64 [tables]
        Size of each table's alphabet.
    laws : int64 [tables, 4]
        The law by which a table is sent (see `laws`); its first entry is -1 where the weights are.
    """

    exponents: NDArray[np.int8]
    mantissas: NDArray[np.int8]
    frequencies: NDArray[np.uint32]
    alphabets: NDArray[np.int64]
    laws: NDArray[np.int64]

    @classmethod
    def from_weights(
        cls, weights: NDArray[np.int64], laws: NDArray[np.int64] | None = None
    ) -> RansTables:
        """Return tables for weights [tables, K]: counts, probabilities, or those of laws."""
        exponents = np.full(weights.shape, -1, np.int8)
        mantissas = np.zeros(weights.shape, np.int8)
        frequencies = np.zeros(weights.shape, np.uint32)
        if laws is None:
            laws = no_laws(weights.shape[0])
            for row, exponent, mantissa in zip(weights, exponents, mantissas, strict=True):
                kernels_rans.coarse_weights(row, exponent, mantissa)
            kernels_rans.explicit_frequencies(exponents, mantissas, frequencies)
        else:
            kernels_rans.law_frequencies(weights, frequencies)
        alphabets = np.full(weights.shape[0], weights.shape[1], np.int64)
        return cls(exponents, mantissas, frequencies, alphabets, laws)

    @classmethod
    def joined(cls, groups: Sequence[RansTables]) -> RansTables:
        """Return all tables of several groups, whose alphabets may differ."""
        return cls(
            pad_columns([group.exponents for group in groups], fill=-1),
            pad_columns([group.mantissas for group in groups]),
            pad_columns([group.frequencies for group in groups]),
            np.concatenate([group.alphabets for group in groups]),
            np.concatenate([group.laws for group in groups]),
        )

    def take(self, rows: NDArray[np.int64]) -> RansTables:
        """Return the tables of the given numbers."""
        return RansTables(
            self.exponents[rows],
            self.mantissas[rows],
            self.frequencies[rows],
            self.alphabets[rows],
            self.laws[rows],
        )

    def distinct(self) -> tuple[RansTables, NDArray[np.int64]]:
        """Return the tables and their numbers; they hardly ever repeat, so each is kept."""
        return self, np.arange(self.alphabets.size)

    def symbol_bits(self) -> NDArray[np.float64]:
        """Return the ideal bits [tables, K] of each symbol, 0 where it has no frequency."""
        used = np.maximum(self.frequencies, 1).astype(np.float64)
        bits: NDArray[np.float64] = kernels_rans.FREQUENCY_BITS - np.log2(used)
        return np.where(self.frequencies > 0, bits, 0.0)

    def code_bits(
        self, counts: NDArray[np.int64], table_of: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the ideal bits [tensors] of symbols counted in [tensors, K], states apart."""
        bits = np.zeros(table_of.size, np.float64)
        kernels_rans.tensor_bits(counts, self.frequencies, table_of, bits)
        return bits
