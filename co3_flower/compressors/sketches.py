"""Sketches that the server sums and recovers an update from afterwards: FetchSGD's count sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.checks import check_integer_within, check_number
from co3_flower.compressors import kernels_sketch
from co3_flower.compressors.interface import (
    BodyReader,
    Compressor,
    State,
    Tensors,
    flatten,
    generator,
    unflatten,
)
from co3_flower.compressors.sparse import largest_positions, num_kept
from co3_flower.errors import ConfigError
from co3_flower.layout import Layout

SKETCH = "sketch/"  # no tensor of torch or Keras is called that
_MOMENTUM, _ERROR = "momentum", "error"


@dataclass(frozen=True, kw_only=True)
class CountSketch(Compressor):
    """A count sketch of the update; momentum, error feedback and top-k recovery at the server.

    In each of ``rows`` rows a hash sends each entry of the flattened update to one of the columns,
    with a sign. The body is the table in float32. Hash functions are the same for all clients and
    rounds, so a weighted mean of tables is the table of the mean. With it, S, the server does

    - momentum = ``momentum`` * momentum + S and error = error + momentum,
    - takes for each entry the median over rows of what the error table says, and of these the share
      ``k`` of largest magnitude as the update,
    - removes the update from the error: with ``masking`` all cells that its table reaches become
      zero, in the error and in the momentum; without, its table is subtracted from the error.

    Subtracting is the paper's algorithm, masking what its experiments do: noise in the estimates
    makes the subtracted error grow without bound unless ``k`` is far below ``columns``.

    The paper scales the momentum by the step size before it enters the error; here the update is
    scaled after recovery, which is the same while the step size is constant. Clients keep nothing.
    Hashes are those of a 64-bit mixer in place of random polynomials.

    Parameters
    ----------
    rows : int
        Rows of the table.
    columns : float
        Columns of the table, as a share of the number of parameters, in (0, 1]. The payload has
        rows * columns float32 numbers a parameter.
    k : float
        Share of the parameters recovered in a round, in (0, 1]. Recovery needs k well below
        ``columns``.
    momentum : float
        In [0, 1).
    masking : bool
        How the recovered update leaves the error.
    hash_seed : int
        Of the hash functions.

    References
    ----------
    arXiv 2007.07682 (FetchSGD), algorithm 1.

    Examples
    --------
    >>> update = {"w": np.float32([0, 0, 8, 0, 0, 0, 0, -2])}
    >>> compressor = CountSketch(columns=1.0, k=0.125)
    >>> payload, _ = compressor.encode(update, None, 0)
    >>> mean = compressor.decode(payload, update, 0)
    >>> update, server_state = compressor.finish(mean, {}, Layout.of(update))
    >>> update["w"].tolist()
    [0.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "countsketch"
    scheme: ClassVar[int] = 14
    is_sketch: ClassVar[bool] = True
    rows: int = 5
    columns: float = 0.02
    k: float = 0.005
    momentum: float = 0.9
    masking: bool = True
    hash_seed: int = 0

    def __post_init__(self) -> None:
        check_integer_within("rows", self.rows, 1, 255)
        check_number("columns", self.columns, 0, 1, open_below=True)
        check_number("k", self.k, 0, 1, open_below=True)
        check_number("momentum", self.momentum, 0, 0.9999)
        if not isinstance(self.masking, bool):
            raise ConfigError(f"masking must be True or False, got {self.masking!r}")
        check_integer_within("hash_seed", self.hash_seed, 0, 2**63 - 1)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return the table; there is no state."""
        return self.sketch(flatten(tensors)).astype("<f4", copy=False).tobytes(), {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the table as the one tensor "sketch/", float32 [rows, columns]."""
        reader = BodyReader(body)
        shape = self.table_shape(sum(layout.numels))
        table = reader.floats(shape[0] * shape[1], "sketch").reshape(shape)
        reader.end()
        return {SKETCH: table}

    def finish(
        self, total: Tensors, server_state: State, layout: Layout
    ) -> tuple[Tensors, Tensors]:
        """Return the recovered update, and the tables of momentum and error."""
        num_entries = sum(layout.numels)
        if num_entries == 0:
            return unflatten(np.zeros(0, np.float32), layout), dict(server_state)
        table = total[SKETCH]
        zeros = np.zeros_like(table)
        momentum = np.float32(self.momentum) * server_state.get(_MOMENTUM, zeros) + table
        error = server_state.get(_ERROR, zeros) + momentum
        estimates = self.estimate(error, num_entries)
        chosen = largest_positions(estimates, num_kept(self.k, num_entries))
        update = np.zeros(num_entries, np.float32)
        update[chosen] = estimates[chosen]
        taken = self.sketch(update)
        if self.masking:
            momentum = np.where(taken == 0, momentum, np.float32(0))
            error = np.where(taken == 0, error, np.float32(0))
        else:
            error = error - taken
        return unflatten(update, layout), {_MOMENTUM: momentum, _ERROR: error}

    def sketch(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the table, float32 [rows, columns], of float32 entries [n]; summed in float64."""
        table = np.zeros(self.table_shape(vector.size))
        kernels_sketch.add_to_table(vector, self.row_keys(), table)
        largest = np.finfo(np.float32).max
        return np.clip(table, -largest, largest).astype(np.float32)

    def estimate(self, table: NDArray[np.float32], num_entries: int) -> NDArray[np.float32]:
        """Return what a table says of each entry, float32 [num_entries]: medians over its rows."""
        estimates = np.empty(num_entries, np.float32)
        kernels_sketch.estimate_entries(table, self.row_keys(), estimates)
        return estimates

    def table_shape(self, num_entries: int) -> tuple[int, int]:
        """Return rows and columns of the table for a number of entries."""
        return self.rows, math.ceil(self.columns * num_entries)

    def row_keys(self) -> NDArray[np.uint64]:
        """Return uint64 [rows] that tell the rows' hash functions apart."""
        return generator(self.hash_seed).integers(0, 2**64, self.rows, np.uint64)
