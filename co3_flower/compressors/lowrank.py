"""Matrices of low rank in place of the update's: PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.checks import check_integer_within
from co3_flower.compressors import kernels_lowrank
from co3_flower.compressors.interface import (
    BodyReader,
    Compressor,
    State,
    Tensors,
    compensate,
    generator,
    residual_state,
)
from co3_flower.layout import Layout

_Q = "q/"  # of the state: the right factor of each matrix, for the next round
_DEPENDENT = 1e-6  # a column is none where projection leaves less than this share of it


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """One step of power iteration a round for the best approximation of low rank.

    A tensor of two or more axes is a matrix M of (rows, all other axes). With Q of the last round
    (at first standard normal, the same for all clients), P = orthonormalized M Q, then
    Q = M.T P; P and Q travel in float32 and stand for P Q.T. What this leaves out of M is added to
    the next update. Vectors and scalars travel as they are, and so do matrices that P and Q would
    not make smaller.

    The paper's workers average P over all before it is orthonormalized, and then Q, by an
    all-reduce. Here each client iterates on its own matrix, P and Q both go up, and the server
    averages the products, which are of higher rank together.

    Columns are orthonormalized by Gram-Schmidt, twice, so signs are fixed. A column that depends on
    those before it becomes zero, and its Q starts anew in the next round. Sums run in float64
    and in a fixed order, not in BLAS, so that the bytes are the same for any number of threads.

    Parameters
    ----------
    rank : int
        Columns of P and Q.

    References
    ----------
    arXiv 1905.13727 (PowerSGD), algorithms 1 and 2.
    """

    name: ClassVar[str] = "powersgd"
    scheme: ClassVar[int] = 12
    rank: int = 2

    def __post_init__(self) -> None:
        check_integer_within("rank", self.rank, 1, 1024)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return P and Q of each matrix, and the other tensors; residual and Q are the state."""
        compensated = compensate(tensors, state)
        layout = Layout.of(compensated)
        parts, factors = [], {}
        for i, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
            array = compensated[name]
            if not self.factorizes(shape):
                parts.append(array)
                continue
            matrix = array.reshape(shape[0], -1)
            p, q = iterate(matrix, self.starting_q(state.get(_Q + name), i, matrix.shape[1]))
            parts += [p, q]
            factors[_Q + name] = q
        body = b"".join(part.astype("<f4", copy=False).tobytes() for part in parts)
        decoded = self.decompress(memoryview(body), layout, round_seed)
        return body, residual_state(compensated, decoded) | factors

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the products of P and Q, and the other tensors."""
        reader = BodyReader(body)
        tensors = {}
        for name, shape, numel in zip(layout.names, layout.shapes, layout.numels, strict=True):
            if self.factorizes(shape):
                rows, columns = shape[0], numel // shape[0]
                p = reader.floats(rows * self.rank, "P").reshape(self.rank, rows)
                q = reader.floats(columns * self.rank, "Q").reshape(self.rank, columns)
                tensors[name] = multiply(p, q).reshape(shape)
            else:
                tensors[name] = reader.floats(numel, "entries").reshape(shape)
        reader.end()
        return tensors

    def factorizes(self, shape: tuple[int, ...]) -> bool:
        """Return whether P and Q have fewer entries than a tensor of this shape."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], int(np.prod(shape[1:], dtype=object))
        return self.rank * (rows + columns) < rows * columns

    def starting_q(
        self, last: NDArray[np.float32] | None, position: int, columns: int
    ) -> NDArray[np.float64]:
        """Return float64 [rank, columns]: the last Q, fresh draws where it is none or zero."""
        fresh = generator(position).standard_normal((self.rank, columns))
        if last is not None and (last.shape != fresh.shape or not np.isfinite(last).all()):
            raise ValueError(
                f"Q of the last round must be finite, {fresh.shape}, got {last.shape} in tensor "
                f"{position}; it is of another rank or update"
            )
        return fresh if last is None else np.where(last.any(axis=1, keepdims=True), last, fresh)


def iterate(
    matrix: NDArray[np.float32], q: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return P float32 [r, n] and Q float32 [r, m] after one step from float64 Q [r, m].

    The matrix is float32 [n, m]. Columns of the paper's P and Q lie in rows. Q is made with P as it
    travels.
    """
    rank, rows, columns = len(q), *matrix.shape
    products = np.empty((rank, rows))
    kernels_lowrank.times_vectors(matrix, q, products)
    p = orthonormalize(products).astype(np.float32)
    new_q = np.zeros((rank, columns))
    kernels_lowrank.transposed_times_vectors(matrix, p, new_q)
    return p, np.clip(new_q, -kernels_lowrank.LARGEST, kernels_lowrank.LARGEST).astype(np.float32)


def orthonormalize(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rows of float64 [r, n] made orthonormal in order, dependent ones zero.

    Examples
    --------
    >>> orthonormalize(np.array([[2.0, 0.0], [1.0, 3.0], [5.0, 5.0]])).tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    result = np.zeros_like(vectors)
    for j, vector in enumerate(vectors):
        length = np.sqrt((vector * vector).sum())
        if length == 0:
            continue
        vector = vector / length
        for _ in range(2):
            for other in result[:j]:
                vector = vector - (vector * other).sum() * other
        left = np.sqrt((vector * vector).sum())
        if left > _DEPENDENT:
            result[j] = vector / left
    return result


def multiply(p: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return P Q.T, float32 [n, m], of P [r, n] and Q [r, m]; sums in float64."""
    matrix = np.empty((p.shape[1], q.shape[1]), np.float32)
    kernels_lowrank.outer_products(p, q, matrix)
    return matrix
