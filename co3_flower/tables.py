"""Which code tables an update gets: counts and fitted laws in, code lengths out.

This is part of the *compress* stage. Each large tensor has a table; small tensors share one,
buffers another. Equal tables are sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels
from co3_flower.bitstream import (
    CHUNK_BITS,
    Tables,
    pack_tables,
    structured_bits,
)
from co3_flower.config import CodecConfig
from co3_flower.formats import FloatFormat
from co3_flower.huffman import HuffmanTables
from co3_flower.laws import fit_law, law_weights, nearest_laws
from co3_flower.layout import Layout, Plan
from co3_flower.rans import RansTables
from co3_flower.structure import Structure, choose_structure, is_worth_a_try

LAWS = ("gennorm", "norm", "laplace")
_LAW_BITS = 20.0  # about what a table by law takes


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

    def own_laws(self, num: int, prior: str) -> NDArray[np.int64]:
        """Return the laws [num, 4] as which the tables of the first tensors may be sent."""
        alphas, betas, zeros = (x[:num] for x in self.law(prior))
        return nearest_laws(prior, alphas, betas, zeros, self.scales[:num], self.counts[:num])

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
        Those of large tensors, that of the small ones, that of the buffers; or, with a structure,
        those of its classes, that of the buffers.
    table_of : int64 [tensors]
        Table of each tensor in coding order; with a structure, of the buffers only.
    num_own : int
        How many of the tables are large tensors' or classes'.
    structure : Structure or None
        Classes of the coded tensors' entries.
    num_bits : int
        Bits of the code (for rANS their ideal), of the tables and of the structure.
    num_code_bits : int
        Those of the code.
    """

    tables: Tables
    table_of: NDArray[np.int64]
    num_own: int
    structure: Structure | None
    num_bits: int
    num_code_bits: int


def choose_tables(
    layout: Layout,
    plan: Plan,
    coded: Converted,
    buffers: Converted,
    symbols: Any,
    residual: Any,
    config: CodecConfig,
    choose_modes: Callable[..., None],
) -> list[CodeTables]:
    """Make the code tables that the settings ask for.

    Parameters
    ----------
    layout, plan : Layout, Plan
        The update, and its order of coding.
    coded, buffers : Converted
        The two groups of tensors.
    symbols : uint8 [n]
        Flat symbols.
    residual : float32 [n]
        What is left of each entry after conversion.
    config : CodecConfig
        Whose prior, coder, structure and streams count; ``auto`` takes what is smallest.
    choose_modes : callable
        As for `choose_structure`.

    Returns
    -------
    list of CodeTables
        All that may make the smallest payload: of one the size is clear, of several only the
        streams' padding decides.
    """
    coder = config.coder
    priors = ("empirical", *LAWS) if config.prior == "auto" else (config.prior,)
    choices = [_make_tables(plan, coded, buffers, (each,), coder) for each in priors]
    if len(priors) > 1:
        choices.append(_make_tables(plan, coded, buffers, priors, coder))
    if config.structure == "auto" and is_worth_a_try(layout, plan):
        classes, counts = choose_structure(
            layout, plan, coded.fmt, symbols, residual, coded.scales, coded.fits[:, 3],
            choose_modes,
        )  # fmt: skip
        choices.append(_structured_tables(classes, counts, buffers, coder))
    least = min(choice.num_bits for choice in choices)
    padding = 64 * config.num_streams * (1 + least // CHUNK_BITS)
    return [choice for choice in choices if choice.num_bits <= least + padding]


def code_bits(
    choice: CodeTables,
    plan: Plan,
    coded: Converted,
    buffers: Converted,
) -> NDArray[np.float64]:
    """Return the bits [tensors] that each tensor's symbols take (for rANS their ideal)."""
    of_buffers = choice.table_of[choice.table_of.size - plan.num_buffers :]
    if choice.structure is None:
        of_coded = _code_bits(coded, choice.tables, choice.table_of[: plan.num_coded])
    else:
        of_coded = structured_bits(choice.tables, choice.structure)
    return np.concatenate([of_coded, _code_bits(buffers, choice.tables, of_buffers)])


def _make_tables(
    plan: Plan, coded: Converted, buffers: Converted, priors: Sequence[str], coder: str
) -> CodeTables:
    """Return tables by the given priors: all explicit, or some by law if that is smaller."""
    make = _maker(coder)
    explicit = [make.from_weights(coded.own_weights(plan.num_own, prior)) for prior in priors]
    shared = [(coded, plan.num_own)] * plan.has_pool + [(buffers, 0)] * plan.has_buffers
    of_shared = [
        [make.from_weights(group.shared_weights(first, prior)) for prior in priors]
        for group, first in shared
    ]
    choices: list[CodeTables] = []
    for laws in (False, True):
        groups = [_own_tables(coded, explicit, priors, make, laws)]
        for (group, first), tables in zip(shared, of_shared, strict=True):
            groups.append(_shared_table(group, first, tables, priors, make, laws))
        if not laws or any((group.laws[:, 0] >= 0).any() for group in groups):
            choices.append(_joined_tables(plan, coded, buffers, groups, make))
    return min(choices, key=lambda choice: choice.num_bits)


def _joined_tables(
    plan: Plan, coded: Converted, buffers: Converted, groups: Sequence[Any], make: Any
) -> CodeTables:
    """Put a table for each large tensor together with those that tensors share."""
    own, table_of = groups[0].distinct()
    tables: Tables = make.joined([own, *groups[1:]])
    num_own = own.alphabets.size
    of_pool = np.full(plan.num_pooled, num_own, np.int64)
    of_buffers = np.full(plan.num_buffers, num_own + int(plan.has_pool), np.int64)
    of_coded = np.concatenate([table_of, of_pool])
    num_code_bits = (
        _code_bits(coded, tables, of_coded).sum() + _code_bits(buffers, tables, of_buffers).sum()
    )
    return CodeTables(
        tables,
        np.concatenate([of_coded, of_buffers]),
        num_own,
        None,
        int(num_code_bits) + _packed_bits(tables, table_of, num_own),
        int(num_code_bits),
    )


def _own_tables(
    coded: Converted, explicit: Sequence[Any], priors: Sequence[str], make: Any, laws: bool
) -> Any:
    """Return a table for each of the first tensors, of several options the one of least bits."""
    num = explicit[0].alphabets.size
    if num == 0 or (len(explicit) == 1 and not laws):
        return explicit[0]
    options = list(explicit)
    table_bits = [_bits_per_tensor(option) for option in options]
    for prior in priors:
        if laws and prior in LAWS:
            by_law = coded.own_laws(num, prior)
            options.append(make.from_weights(law_weights(by_law, coded.fmt), by_law))
            table_bits.append(np.full(num, _LAW_BITS))
    each, counts = np.arange(num), coded.counts[:num]
    filled = counts.any(axis=1)
    bits = np.array(table_bits)
    for i, option in enumerate(options):
        bits[i, filled] += option.code_bits(counts[filled], each[filled])
    return make.joined(options).take(bits.argmin(axis=0) * num + each)


def _shared_table(
    group: Converted,
    first: int,
    explicit: Sequence[Any],
    priors: Sequence[str],
    make: Any,
    laws: bool,
) -> Any:
    """Return one table for the tensors from `first` on: of several the one of least bits."""
    counts = group.counts[first:].sum(axis=0)
    options = list(explicit)
    for prior in priors:
        if laws and prior in LAWS:
            law = fit_law(prior, counts, group.fmt)
            options.append(make.from_weights(law_weights(law, group.fmt), law))
    one = np.zeros(1, np.int64)
    bits = [
        option.code_bits(counts[None], one)[0] + _packed_bits(option, one, 1) for option in options
    ]
    return options[int(np.argmin(bits))]


def _bits_per_tensor(tables: Any) -> NDArray[np.float64]:
    """Return about what each tensor's explicit table takes; equal tables share the bits of one."""
    distinct, table_of = tables.distinct()
    num = distinct.alphabets.size
    users = np.bincount(table_of, minlength=num)
    bits: NDArray[np.float64] = _packed_bits(distinct, table_of, num) / num / users[table_of]
    return bits


def _packed_bits(tables: Tables, table_of: NDArray[np.int64], num: int) -> int:
    return 8 * len(pack_tables(tables, table_of, num)) if tables.alphabets.size else 0


def _structured_tables(
    structure: Structure, counts: NDArray[np.int64], buffers: Converted, coder: str
) -> CodeTables:
    make = _maker(coder)
    of_classes = make.from_weights(counts)
    plan, groups = structure.plan, [of_classes]
    if plan.has_buffers:
        groups.append(make.from_weights(buffers.shared_weights(0, "empirical")))
    tables: Tables = make.joined(groups)
    of_buffers = np.full(plan.num_buffers, structure.num_tables, np.int64)
    num_code_bits = (
        of_classes.code_bits(counts, np.arange(structure.num_tables)).sum()
        + _code_bits(buffers, tables, of_buffers).sum()
    )
    packed = pack_tables(tables, np.zeros(0, np.int64), structure.num_tables)
    return CodeTables(
        tables,
        of_buffers,
        structure.num_tables,
        structure,
        int(num_code_bits) + 8 * (len(packed) + len(structure.packed)),
        int(num_code_bits),
    )


def _maker(coder: str) -> Any:
    return HuffmanTables if coder == "huffman" else RansTables


def _code_bits(
    group: Converted, tables: Tables, table_of: NDArray[np.int64]
) -> NDArray[np.float64]:
    bits = np.zeros(table_of.size, np.float64)
    filled = group.sizes > 0
    bits[filled] = tables.code_bits(group.counts[filled], table_of[filled])
    return bits
