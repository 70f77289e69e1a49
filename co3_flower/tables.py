"""Which code tables an update gets: counts and fitted laws in, code lengths out.

This is part of the *compress* stage. Each large tensor has a table; small tensors share one,
buffers another. Equal tables are sent once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels
from co3_flower.bitstream import CHUNK_BITS, NUM_STREAMS, Tables, pack_tables
from co3_flower.formats import FloatFormat
from co3_flower.huffman import HuffmanTables
from co3_flower.layout import Plan
from co3_flower.rans import RansTables

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

    def own_weights(self, num: int, prior: str) -> NDArray[np.int64]:
        """Return weights [num, K] for code tables of the first tensors: counts, or by a law."""
        counts: NDArray[np.int64] = self.counts[:num]
        if prior not in LAWS or num == 0:
            return counts
        weights = np.empty_like(counts)
        laws = [x[:num] for x in self.law(prior)]
        positive = self.fmt.values[self.fmt.zero :]
        kernels.law_weights(*laws, self.scales[:num], positive, counts, weights)
        return weights

    def shared_weights(self, first: int, prior: str) -> NDArray[np.int64]:
        """Return weights [1, K] for one code table of the tensors from `first` on."""
        counts: NDArray[np.int64] = self.counts[first:].sum(axis=0)
        if prior not in LAWS:
            return counts[None]
        weights = np.empty_like(counts)
        laws = [x[first:] for x in self.law(prior)]
        positive = self.fmt.values[self.fmt.zero :]
        kernels.pooled_law_weights(
            *laws, self.scales[first:], self.sizes[first:], positive, counts, weights
        )
        return weights[None]


@dataclass(frozen=True)
class CodeTables:
    """The code tables of an update.

    Attributes
    ----------
    tables : HuffmanTables or RansTables
        Those of large tensors, that of the small ones, that of the buffers.
    table_of : int64 [tensors]
        Table of each tensor in coding order.
    num_own : int
        How many of the tables are large tensors'.
    code_bits : float64 [tensors]
        Bits that each tensor's symbols take (for rANS their ideal).
    """

    tables: Tables
    table_of: NDArray[np.int64]
    num_own: int
    code_bits: NDArray[np.float64]


def choose_tables(
    plan: Plan, coded: Converted, buffers: Converted, prior: str, coder: str
) -> list[CodeTables]:
    """Make the code tables by a prior.

    For ``auto``, they are of all priors those that may make the smallest payload.

    Parameters
    ----------
    plan : Plan
        Order of coding.
    coded, buffers : Converted
        The two groups of tensors.
    prior, coder : str
        One of the priors and coders of `CodecConfig`.

    Returns
    -------
    list of CodeTables
        One, or for ``auto`` all whose code and tables are so close that only the streams' padding
        decides.
    """
    if prior != "auto":
        return [_make_tables(plan, coded, buffers, prior, coder)]
    choices = [_make_tables(plan, coded, buffers, each, coder) for each in ("empirical", *LAWS)]
    sizes = [_size_bits(plan, tables) for tables in choices]
    padding = 40 * NUM_STREAMS * (1 + min(sizes) // CHUNK_BITS)
    return [
        tables for tables, size in zip(choices, sizes, strict=True) if size <= min(sizes) + padding
    ]


def _make_tables(
    plan: Plan, coded: Converted, buffers: Converted, prior: str, coder: str
) -> CodeTables:
    make: type[HuffmanTables] | type[RansTables] = (
        HuffmanTables if coder == "huffman" else RansTables
    )
    own, table_of = make.from_weights(coded.own_weights(plan.num_own, prior)).distinct()
    groups: list[Any] = [own]
    if plan.has_pool:
        groups.append(make.from_weights(coded.shared_weights(plan.num_own, prior)))
    if plan.has_buffers:
        groups.append(make.from_weights(buffers.shared_weights(0, prior)))
    tables: Tables = make.joined(groups)
    num_own = own.alphabets.size
    of_pool = np.full(plan.num_pooled, num_own, np.int64)
    of_buffers = np.full(plan.num_buffers, num_own + int(plan.has_pool), np.int64)
    table_of = np.concatenate([table_of, of_pool, of_buffers])
    bits = [
        _code_bits(coded, tables, table_of[: plan.num_coded]),
        _code_bits(buffers, tables, table_of[plan.num_coded :]),
    ]
    return CodeTables(tables, table_of, num_own, np.concatenate(bits))


def _code_bits(
    group: Converted, tables: Tables, table_of: NDArray[np.int64]
) -> NDArray[np.float64]:
    bits = np.zeros(table_of.size, np.float64)
    filled = group.sizes > 0
    bits[filled] = tables.code_bits(group.counts[filled], table_of[filled])
    return bits


def _size_bits(plan: Plan, tables: CodeTables) -> int:
    packed = pack_tables(tables.tables, tables.table_of[: plan.num_own], tables.num_own)
    return int(tables.code_bits.sum()) + 8 * len(packed)
