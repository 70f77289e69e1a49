"""What one encoded update cost and lost.

The cost is sizes in bits counted from the payload's bytes, the loss is the conversion's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from co3_flower.layout import FLOAT_DTYPES, Kind, Layout, Plan
from co3_flower.tables import Converted


class TensorStats(NamedTuple):
    """One coded tensor or buffer.

    Attributes
    ----------
    name : str
        As in the update.
    numel : int
        Entries.
    scale : float
        Multiplier before conversion (a float32 number).
    alpha, beta, zero_fraction : float
        The fitted law of the compensated tensor.
    code_bits : int
        Bits that its symbols take (with rANS, their ideal, rounded).
    entropy_bits : float
        Entropy of its symbols times numel: a bound for any code with one table for the tensor, not
        a rate.
    """

    name: str
    numel: int
    scale: float
    alpha: float
    beta: float
    zero_fraction: float
    code_bits: int
    entropy_bits: float


@dataclass(frozen=True)
class UpdateStats:
    """One encoded update.

    Attributes
    ----------
    num_parameters : int
        Entries of the float tensors that are not buffers, coded or raw.
    bits_per_parameter : float
        payload_bits / num_parameters (NaN without parameters).
    payload_bits : int
        8 * len(payload) = code_bits + side_info_bits + structure_bits + raw_bits.
    code_bits : int
        Bits of the code section.
    side_info_bits : int
        Header, kinds, scales, code tables, stream lengths, padding and checksum.
    structure_bits : int
        Row and column factors, and which classes share tables.
    raw_bits : int
        The raw tensors' bytes.
    entropy_bits : float
        Sum of the coded tensors' and buffers' empirical entropies: theory, never a rate.
    sqnr_db : float
        Power of the compensated update over that of the residual, in decibels; infinite without
        error.
    residual_ratio : float
        Sum of |m'| over sum of |g| (0 for an update of zeros that left no residual). Like sqnr_db
        without buffers.
    num_saturated, num_underflowed : int
        Entries clamped to the largest value; entries that became 0 and were not.
    tensors : tuple of TensorStats
        Coded tensors and buffers, in layout order; made when they are asked for.
    """

    num_parameters: int
    bits_per_parameter: float
    payload_bits: int
    code_bits: int
    side_info_bits: int
    structure_bits: int
    raw_bits: int
    entropy_bits: float
    sqnr_db: float
    residual_ratio: float
    num_saturated: int
    num_underflowed: int
    _make_tensors: Callable[[], tuple[TensorStats, ...]] = field(repr=False, compare=False)

    @cached_property
    def tensors(self) -> tuple[TensorStats, ...]:
        """Coded tensors and buffers, in layout order."""
        return self._make_tensors()


def entropy_bits(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the empirical entropy in bits [tensors] of all symbols counted in [tensors, K].

    It is the entropy per symbol times the number of symbols.

    Examples
    --------
    >>> entropy_bits(np.array([[2, 2], [4, 0]])).tolist()
    [4.0, 0.0]
    """
    totals = counts.sum(axis=1)
    rows, columns = np.nonzero(counts)
    c = counts[rows, columns].astype(np.float64)
    bits = np.zeros(totals.size, np.float64)
    np.add.at(bits, rows, c * np.log2(totals[rows] / c))
    return bits


def count_parameters(layout: Layout, plan: Plan) -> int:
    """Return the entries of all float tensors that are not buffers, coded or raw."""
    numels = layout.numels
    return sum(
        numels[i]
        for i, kind in enumerate(plan.kinds)
        if kind != Kind.BUFFER and layout.dtypes[i] in FLOAT_DTYPES
    )


def update_stats(
    layout: Layout,
    plan: Plan,
    coded: Converted,
    buffers: Converted,
    tensor_code_bits: NDArray[np.float64],
    payload_bytes: int,
    code_bytes: int,
    structure_bytes: int,
    raw_bytes: int,
) -> UpdateStats:
    """Put together the statistics of an update from what its stages counted."""
    num_parameters = count_parameters(layout, plan)
    entropies = np.concatenate([entropy_bits(coded.counts), entropy_bits(buffers.counts)])
    fits = np.concatenate([coded.fits, buffers.fits])
    scales = np.concatenate([coded.scales, buffers.scales])
    update, power, noise, residual = coded.sums.sum(axis=0).tolist()
    events = coded.events.sum(axis=0) + buffers.events.sum(axis=0)
    payload_bits = 8 * payload_bytes
    return UpdateStats(
        num_parameters=num_parameters,
        bits_per_parameter=payload_bits / num_parameters if num_parameters else math.nan,
        payload_bits=payload_bits,
        code_bits=8 * code_bytes,
        side_info_bits=payload_bits - 8 * (code_bytes + structure_bytes + raw_bytes),
        structure_bits=8 * structure_bytes,
        raw_bits=8 * raw_bytes,
        entropy_bits=float(entropies.sum()),
        sqnr_db=10.0 * math.log10(power / noise) if power > 0.0 and noise > 0.0 else math.inf,
        residual_ratio=residual / update
        if update > 0.0
        else (0.0 if residual == 0.0 else math.inf),
        num_saturated=int(events[0]),
        num_underflowed=int(events[1]),
        _make_tensors=partial(
            _tensor_rows, layout, plan, scales, fits, tensor_code_bits, entropies
        ),
    )


def _tensor_rows(
    layout: Layout,
    plan: Plan,
    scales: NDArray[np.float32],
    fits: NDArray[np.float64],
    code_bits: NDArray[np.float64],
    entropies: NDArray[np.float64],
) -> tuple[TensorStats, ...]:
    rows = list(
        map(
            TensorStats,
            [layout.names[i] for i in plan.order],
            np.diff(plan.offsets).tolist(),
            scales.astype(np.float64).tolist(),
            fits[:, 0].tolist(),
            fits[:, 1].tolist(),
            fits[:, 2].tolist(),
            np.rint(code_bits).astype(np.int64).tolist(),
            entropies.tolist(),
        )
    )
    return tuple(rows[j] for j in np.argsort(np.array(plan.order, np.int64)).tolist())
