"""Row x column structure (the *compress* stage): classes of entries that share code tables.

The spread of a tensor's entries follows its rows (output channels) and columns (input channels and
taps). The encoder sends coarse log factors of both where they save bits; the class of an entry is
the sum of its row's and its column's. One table per class, or run of classes, serves the whole
update. See `kernels_structure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba import int32
from numba.typed import List
from numpy.typing import NDArray

from co3_flower import kernels_side
from co3_flower import kernels_structure as kernels
from co3_flower.errors import PayloadError
from co3_flower.formats import FloatFormat
from co3_flower.layout import Layout, Plan

MIN_NUMEL = 4096  # an update without a matrix of so many entries is not tried


@dataclass(frozen=True)
class Structure:
    """The classes of all coded tensors.

    Attributes
    ----------
    plan : Plan
        Order of coding.
    modes : uint8 [tensors]
        How each tensor's classes are given.
    cols : int64 [tensors]
        Entries of a row.
    row_at, row_class, col_at, col_class : arrays
        Classes of rows and of columns, flat, and where each tensor's begin.
    class_map : uint8 [classes]
        Code table of each class.
    num_tables : int
        How many tables those are.
    of_tensor : sequence of int32 [classes, K + 1]
        Each tensor's symbols counted by class, and the classes; known to the encoder only.
    packed : bytes
        All of it, as sent.
    """

    plan: Plan
    modes: NDArray[np.uint8]
    cols: NDArray[np.int64]
    row_at: NDArray[np.int64]
    row_class: NDArray[np.uint16]
    col_at: NDArray[np.int64]
    col_class: NDArray[np.uint16]
    class_map: NDArray[np.uint8]
    num_tables: int
    packed: bytes
    of_tensor: Sequence[NDArray[np.int32]] = ()

    @property
    def kernel_layout(self) -> tuple[Any, ...]:
        """What the kernels want to know of the tensors."""
        return (
            self.plan.offsets,
            self.plan.num_coded,
            self.modes,
            self.cols,
            self.row_at,
            self.row_class,
            self.col_at,
            self.col_class,
        )

    def sum_map(self, dead: int) -> NDArray[np.uint8]:
        """Return the table of each sum of a row's and a column's class; `dead` of dead ones."""
        sums = np.full(kernels.NUM_SUMS, dead, np.uint8)
        sums[: kernels.DEAD] = self.class_map[-1]
        sums[: kernels.NUM_CLASSES] = self.class_map
        return sums


@lru_cache(maxsize=64)
def class_laws(fmt: FloatFormat) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the costs and gains of `kernels.class_laws` for a format."""
    positive = fmt.values[fmt.zero :]
    costs = np.zeros((kernels.NUM_CLASSES, positive.size), np.float32)
    gains = np.zeros(kernels.NUM_CLASSES, np.float64)
    kernels.class_laws(positive, costs, gains)
    return costs, gains


def is_worth_a_try(layout: Layout, plan: Plan) -> bool:
    """Tell whether the update has a matrix that is large enough for row and column factors."""
    return any(
        len(layout.shapes[i]) > 1 and layout.numels[i] >= MIN_NUMEL
        for i in plan.order[: plan.num_coded]
    )


def choose_structure(
    layout: Layout,
    plan: Plan,
    fmt: FloatFormat,
    symbols: Any,
    residual: Any,
    scales: NDArray[np.float32],
    mean_magnitudes: NDArray[np.float64],
    choose_modes: Callable[..., None] = kernels.choose_structure,
) -> tuple[Structure, NDArray[np.int64]]:
    """Choose the classes of every coded tensor.

    Parameters
    ----------
    layout, plan : Layout, Plan
        The update.
    fmt : FloatFormat
        Format of the coded tensors.
    symbols : uint8 [n]
        Flat symbols.
    residual : float32 [n]
        What is left of each entry after conversion.
    scales : float32 [tensors]
        Multipliers before conversion.
    mean_magnitudes : float64 [tensors]
        Mean of |v| over the entries that are not zero, the unit of fixed-point sums.
    choose_modes : callable
        ``kernels_structure.choose_structure``, or the like of it where symbols and residual live.

    Returns
    -------
    structure : Structure
        The classes.
    counts : int64 [tables, K]
        How often each symbol occurs in each table's classes.
    """
    rows, cols, taps = _matrix_shapes(layout.shapes, plan.order[: plan.num_coded])
    row_at, row_class, col_at, col_class = _class_arrays(rows, cols)
    modes = np.zeros(rows.size, np.uint8)
    units = np.exp2(np.floor(np.log2(np.where(mean_magnitudes > 0, mean_magnitudes, 1.0))))
    costs, gains = class_laws(fmt)
    counts = np.zeros((kernels.DEAD, fmt.num_values), np.int64)
    of_tensor = List.empty_list(int32[:, ::1])
    data = np.zeros(4096 + 8 * (row_class.size + col_class.size + rows.size), np.uint8)
    state, odds = kernels_side.start_coding(), kernels.new_odds()
    choose_modes(
        symbols, residual, plan.offsets, scales, units, rows, cols, taps, fmt.values, costs, gains,
        row_at, row_class, col_at, col_class, modes, counts, of_tensor, data, state, odds,
    )  # fmt: skip
    class_map = np.zeros(kernels.NUM_CLASSES, np.uint8)
    counts = counts[: kernels.NUM_CLASSES]
    kernels.merge_classes(counts, 8.0, class_map)
    kernels.code_class_map(class_map, odds, state, data)
    size = int(kernels_side.end_coding(state, data))
    num_tables = int(class_map[-1]) + 1
    table_counts = np.zeros((num_tables, fmt.num_values), np.int64)
    np.add.at(table_counts, class_map, counts)
    table_counts[~table_counts.any(axis=1), fmt.zero] = 1  # a table must hold a symbol
    structure = Structure(
        plan, modes, cols, row_at, row_class, col_at, col_class, class_map, num_tables,
        data[:size].tobytes(), of_tensor,
    )  # fmt: skip
    return structure, table_counts


def read_structure(data: bytes | memoryview, layout: Layout, plan: Plan) -> Structure:
    """Undo the packing.

    Raises
    ------
    PayloadError
        If a factor is out of range or there are too many tables.
    """
    rows, cols, taps = _matrix_shapes(layout.shapes, plan.order[: plan.num_coded])
    row_at, row_class, col_at, col_class = _class_arrays(rows, cols)
    modes = np.zeros(rows.size, np.uint8)
    class_map = np.zeros(kernels.NUM_CLASSES, np.int64)
    num_tables, bad = kernels.read_structure(
        plan.offsets, taps, row_at, row_class, col_at, col_class, modes, class_map,
        np.frombuffer(data, np.uint8),
    )  # fmt: skip
    if bad >= 0:
        name = layout.names[plan.order[bad]]
        raise PayloadError(f"row and column factors must be in [0, 255], got others in {name!r}")
    if num_tables > kernels.MAX_TABLES:
        raise PayloadError(
            f"tables of classes must be at most {kernels.MAX_TABLES}, got {num_tables}"
        )
    return Structure(
        plan, modes, cols, row_at, row_class, col_at, col_class, class_map.astype(np.uint8),
        int(num_tables), bytes(data),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _matrix_shapes(
    shapes: tuple[tuple[int, ...], ...], positions: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows, columns and taps of each coded tensor; vectors and scalars are one row."""
    found = []
    for i in positions:
        shape = shapes[i]
        numel = math.prod(shape)
        if len(shape) < 2 or numel == 0:
            found.append((1, numel, 1))
        else:
            found.append((shape[0], numel // shape[0], math.prod(shape[2:])))
    rows, cols, taps = np.array(found, np.int64).reshape(-1, 3).T.copy()
    return rows, cols, taps


def _class_arrays(
    rows: NDArray[np.int64], cols: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.int64], NDArray[np.uint16]]:
    """Flat classes of rows and columns; vectors have no columns' classes."""
    row_at, col_at = np.zeros(rows.size + 1, np.int64), np.zeros(rows.size + 1, np.int64)
    np.cumsum(rows, out=row_at[1:])
    np.cumsum(cols, out=col_at[1:])
    return (
        row_at,
        np.zeros(int(row_at[-1]), np.uint16),
        col_at,
        np.zeros(int(col_at[-1]), np.uint16),
    )
