"""Which code tables an update gets: counts and fitted laws in, code lengths out.

This is part of the *compress* stage. Each large tensor has a table; small tensors share one,
buffers another. Equal tables are sent once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels
from co3_flower.bitstream import CHUNK_BITS, NUM_STREAMS, pack_tables
from co3_flower.formats import FloatFormat
from co3_flower.huffman import MAX_LENGTH
from co3_flower.layout import Plan

LAWS = ("gennorm", "norm", "laplace")


@dataclass(frozen=True)
class Converted:
    """Some tensors of an update after conversion to one format of K values.

    Each array has a row per tensor.

    Attributes
    ----------
    fmt : FloatFormat
        Their format.
    sizes : int64 [tensors]
        Entries.
    scales : float32 [tensors]
        Multipliers before conversion.
    fits : float64 [tensors, 5]
        alpha, beta and zero fraction of the fitted law; alpha of the Laplace and of the normal law.
    counts : int64 [tensors, K]
        How often each symbol occurs.
    sums : float64 [tensors, 4]
        Sums of |g|, v**2, m'**2 and |m'|.
    events : int64 [tensors, 3]
        Entries that saturated, underflowed, or were not finite.
    """

    fmt: FloatFormat
    sizes: NDArray[np.int64]
    scales: NDArray[np.float32]
    fits: NDArray[np.float64]
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]
    events: NDArray[np.int64]

    @classmethod
    def empty(cls, fmt: FloatFormat, sizes: NDArray[np.int64]) -> Converted:
        """Return arrays for the given tensors, scales 1 and all else 0."""
        n = sizes.size
        return cls(
            fmt,
            sizes,
            np.ones(n, np.float32),
            np.zeros((n, 5), np.float64),
            np.zeros((n, fmt.num_values), np.int64),
            np.zeros((n, 4), np.float64),
            np.zeros((n, 3), np.int64),
        )

    def law(
        self, prior: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return alpha, beta and zero fraction [tensors] of the law that a prior stands for."""
        alphas = self.fits[:, {"gennorm": 0, "laplace": 3, "norm": 4}[prior]].copy()
        fixed = {"laplace": 1.0, "norm": 2.0}.get(prior)
        betas = self.fits[:, 1].copy() if fixed is None else np.full(alphas.size, fixed)
        return alphas, betas, self.fits[:, 2].copy()

    def own_lengths(self, num: int, prior: str) -> NDArray[np.uint8]:
        """Return code lengths [num, K] of the first tensors, a table each."""
        counts = self.counts[:num]
        weights = counts
        if prior in LAWS and num:
            weights = np.empty_like(counts)
            laws = [x[:num] for x in self.law(prior)]
            positive = self.fmt.values[self.fmt.zero :]
            kernels.law_weights(*laws, self.scales[:num], positive, counts, weights)
        lengths = np.zeros(counts.shape, np.uint8)
        kernels.huffman_tables(weights, MAX_LENGTH, lengths)
        return lengths

    def shared_lengths(self, first: int, prior: str) -> NDArray[np.uint8]:
        """Return code lengths [1, K] of one table for the tensors from `first` on."""
        counts = self.counts[first:].sum(axis=0)
        weights = counts
        if prior in LAWS:
            weights = np.empty_like(counts)
            laws = [x[first:] for x in self.law(prior)]
            positive = self.fmt.values[self.fmt.zero :]
            kernels.pooled_law_weights(
                *laws, self.scales[first:], self.sizes[first:], positive, counts, weights
            )
        lengths = np.zeros((1, counts.size), np.uint8)
        kernels.huffman_tables(weights[None], MAX_LENGTH, lengths)
        return lengths


@dataclass(frozen=True)
class CodeTables:
    """The code tables of an update.

    Attributes
    ----------
    lengths : uint8 [tables, K]
        The distinct tables of large tensors, that of the small ones, that of the buffers.
    table_of : int64 [tensors]
        Table of each tensor in coding order.
    num_own : int
        How many of the tables are large tensors'.
    code_bits : int64 [tensors]
        Bits that each tensor's symbols take.
    """

    lengths: NDArray[np.uint8]
    table_of: NDArray[np.int64]
    num_own: int
    code_bits: NDArray[np.int64]


def choose_tables(plan: Plan, coded: Converted, buffers: Converted, prior: str) -> list[CodeTables]:
    """Make the code tables by a prior.

    For ``auto``, they are of all priors those that may make the smallest payload.

    Parameters
    ----------
    plan : Plan
        Order of coding.
    coded, buffers : Converted
        The two groups of tensors.
    prior : str
        One of the priors of `CodecConfig`.

    Returns
    -------
    list of CodeTables
        One, or for ``auto`` all whose code and tables are so close that only the streams' padding
        decides.
    """
    if prior != "auto":
        return [_tables(plan, coded, buffers, prior)]
    choices = [_tables(plan, coded, buffers, each) for each in ("empirical", *LAWS)]
    sizes = [_size_bits(plan, coded, buffers, tables) for tables in choices]
    padding = 40 * NUM_STREAMS * (1 + min(sizes) // CHUNK_BITS)
    return [
        tables for tables, size in zip(choices, sizes, strict=True) if size <= min(sizes) + padding
    ]


def _tables(plan: Plan, coded: Converted, buffers: Converted, prior: str) -> CodeTables:
    own = coded.own_lengths(plan.num_own, prior)
    numbers: dict[bytes, int] = {}
    table_of = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in own], np.int64)
    distinct = np.frombuffer(b"".join(numbers), np.uint8).reshape(
        len(numbers), coded.fmt.num_values
    )
    groups = [distinct]
    if plan.has_pool:
        groups.append(coded.shared_lengths(plan.num_own, prior))
    if plan.has_buffers:
        groups.append(buffers.shared_lengths(0, prior))
    width = max(group.shape[1] for group in groups)
    lengths = np.concatenate(
        [np.pad(group, ((0, 0), (0, width - group.shape[1]))) for group in groups]
    )
    pool, last = len(numbers), len(numbers) + int(plan.has_pool)
    table_of = np.concatenate(
        [
            table_of,
            np.full(plan.num_pooled, pool, np.int64),
            np.full(plan.num_buffers, last, np.int64),
        ]
    )
    bits = [_code_bits(coded, lengths, table_of[: plan.num_coded])]
    bits.append(_code_bits(buffers, lengths, table_of[plan.num_coded :]))
    return CodeTables(lengths, table_of, len(numbers), np.concatenate(bits))


def _code_bits(
    group: Converted, lengths: NDArray[np.uint8], table_of: NDArray[np.int64]
) -> NDArray[np.int64]:
    bits = np.zeros(table_of.size, np.int64)
    filled = group.sizes > 0
    rows = lengths[table_of[filled]][:, : group.fmt.num_values]
    of_filled = np.zeros(rows.shape[0], np.int64)
    kernels.table_bits(group.counts[filled], rows, of_filled)
    bits[filled] = of_filled
    return bits


def _size_bits(plan: Plan, coded: Converted, buffers: Converted, tables: CodeTables) -> int:
    num_coded = tables.num_own + int(plan.has_pool)
    alphabets = np.full(tables.lengths.shape[0], buffers.fmt.num_values, np.int64)
    alphabets[:num_coded] = coded.fmt.num_values
    packed = pack_tables(tables.lengths, alphabets, tables.table_of[: plan.num_own], tables.num_own)
    return int(tables.code_bits.sum()) + 8 * len(packed)
