"""A few entries of the whole update, the others later: top-k, SIDCo and sparse ternary.

All three take entries of the flattened, compensated update, send them with their positions, and
keep the rest as the residual. They differ in how they choose the entries and in what they send of
them. A body is the number of entries (uint32), their values, and their positions as the gaps
between them in Rice codes: the parameter in one byte, then the code, filled up with zero bits.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.checks import check_integer_within, check_number
from co3_flower.compressors import kernels_sparse
from co3_flower.compressors.interface import (
    BodyReader,
    Compressor,
    State,
    Tensors,
    compensate,
    flatten,
    residual_state,
    unflatten,
)
from co3_flower.errors import PayloadError
from co3_flower.layout import Layout

_ADAPTATION = "adaptation"


@dataclass(frozen=True, kw_only=True)
class Sparse(Compressor):
    """Sends chosen entries of the flattened update as they are, with error feedback.

    Parameters
    ----------
    ratio : float
        Share of all entries to send, in (0, 1]; at least one is. Zeros are not sent.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1, open_below=True)

    def select(
        self, vector: NDArray[np.float32], state: State
    ) -> tuple[NDArray[np.int64], Tensors]:
        """Return the positions to send, ascending, and what the next round's choice needs."""
        return largest_positions(vector, num_kept(self.ratio, vector.size)), {}

    def pack_values(self, values: NDArray[np.float32]) -> bytes:
        """Return what is sent of float32 values [k] that are not zero."""
        return values.astype("<f4", copy=False).tobytes()

    def unpack_values(self, reader: BodyReader, count: int) -> NDArray[np.float32]:
        """Return the values of `count` entries."""
        return reader.floats(count, "values")

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return the chosen entries; the state holds all that they leave out."""
        compensated = compensate(tensors, state)
        vector = flatten(compensated)
        positions, kept = self.select(vector, state)
        positions = positions[vector[positions] != 0]
        values = self.pack_values(vector[positions])
        body = struct.pack("<I", positions.size) + values + encode_positions(positions)
        decoded = self.decompress(memoryview(body), Layout.of(compensated), round_seed)
        return body, residual_state(compensated, decoded) | kept

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the tensors, zero where nothing was sent."""
        reader = BodyReader(body)
        (count,) = reader.unpack("<I")
        num_entries = sum(layout.numels)
        if count > num_entries:
            raise PayloadError(f"entries must be at most {num_entries}, got {count}")
        values = self.unpack_values(reader, count)
        positions = decode_positions(reader.rest(), count, num_entries)
        vector = np.zeros(num_entries, np.float32)
        vector[positions] = values
        return unflatten(vector, layout)


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """The entries of largest magnitude in float32; what is left out is sent later.

    Of equal magnitudes the first count as larger. Of deep gradient compression this is the
    sparsification with local accumulation, without momentum correction, clipping and warm-up.

    References
    ----------
    arXiv 1809.07599 (Sparsified SGD with memory), algorithm 1; arXiv 1712.01887 (deep gradient
    compression).

    Examples
    --------
    >>> update = {"w": np.float32([1.0, -4.0, 2.0, 0.0])}
    >>> payload, state = TopK(ratio=0.5).encode(update, None, 0)
    >>> TopK().decode(payload, update, 0)["w"].tolist(), state["residual/w"].tolist()
    ([0.0, -4.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    """

    name: ClassVar[str] = "topk"
    scheme: ClassVar[int] = 9


@dataclass(frozen=True, kw_only=True)
class Sidco(Sparse):
    """The entries above a threshold that a double exponential law gives for the target ratio.

    In one stage the threshold is mean(|v|) * log(1 / ratio). With M stages the first aims at
    ``first_ratio``, and each further one fits the exponential law anew to what exceeded the
    threshold before it, all of them with equal shares of what is left of the ratio. Every
    ``adaptation_rounds`` rounds M goes down by one where more entries than the target were sent on
    average, by more than ``tolerance``, and up by one where fewer were.

    The paper leaves open, and this class has: M starts at 1 and is at most
    ceil(log2(1 / ratio)); a ratio of ``first_ratio`` or above is aimed at in one stage; the largest
    entry is sent where nothing exceeds the threshold (an update of a single entry never would).

    Parameters
    ----------
    ratio : float
        Target share of the entries (the paper's delta), in (0, 1].
    first_ratio : float
        That of the first of several stages (delta_1), in (0, 1).
    adaptation_rounds : int
        Rounds between changes of the number of stages (Q).
    tolerance : float
        Relative distance to the target that changes nothing (epsilon), upwards and downwards.

    References
    ----------
    arXiv 2101.10761 (SIDCo), algorithm 1 with exponential laws (SIDCo-E).
    """

    name: ClassVar[str] = "sidco"
    scheme: ClassVar[int] = 10
    first_ratio: float = 0.25
    adaptation_rounds: int = 5
    tolerance: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("first_ratio", self.first_ratio, 0.001, 0.999)
        check_integer_within("adaptation_rounds", self.adaptation_rounds, 1, 10_000)
        check_number("tolerance", self.tolerance, 0, 1)

    def select(
        self, vector: NDArray[np.float32], state: State
    ) -> tuple[NDArray[np.int64], Tensors]:
        """Return the positions above the threshold.

        The state's "adaptation" float32 [3] holds the number of stages, the sum of sent / target
        since it last changed, and the number of rounds in this sum.
        """
        stages, excess, rounds = (float(x) for x in state.get(_ADAPTATION, (1, 0, 0)))
        magnitudes = np.abs(vector)
        threshold = self.threshold(magnitudes, int(stages))
        positions = np.flatnonzero(magnitudes > threshold)
        if positions.size == 0:
            positions = largest_positions(vector, min(1, vector.size))
        excess += positions.size / max(1.0, self.ratio * vector.size)
        rounds += 1
        if rounds >= self.adaptation_rounds:
            stages = self.adapted(int(stages), excess / rounds)
            excess = rounds = 0.0
        return positions, {_ADAPTATION: np.array([stages, excess, rounds], np.float32)}

    def threshold(self, magnitudes: NDArray[np.float32], stages: int) -> np.float64:
        """Return the threshold for non-negative float32 magnitudes [n] by a number of stages."""
        ratios = [self.ratio]
        if stages > 1 and self.ratio < self.first_ratio:
            further = (self.ratio / self.first_ratio) ** (1 / (stages - 1))
            ratios = [self.first_ratio] + [further] * (stages - 1)
        threshold = np.float64(0)
        for ratio in ratios:
            if magnitudes.size == 0:
                break
            scale = magnitudes.mean(dtype=np.float64) - threshold
            threshold += scale * np.log(1 / ratio)
            magnitudes = magnitudes[magnitudes > threshold]
        return threshold

    def adapted(self, stages: int, excess: float) -> int:
        """Return the number of stages after rounds that sent `excess` times the target."""
        if excess > 1 + self.tolerance:
            stages -= 1
        elif excess < 1 - self.tolerance:
            stages += 1
        return max(1, min(stages, math.ceil(math.log2(1 / self.ratio))))


@dataclass(frozen=True, kw_only=True)
class Stc(Sparse):
    """Sparse ternary: the signs of the largest entries and their mean magnitude.

    Of equal magnitudes the first count as larger, and the mean is that of the entries sent. Only
    the way up is compressed; the paper's server compresses its answer by the same rule.

    References
    ----------
    arXiv 1903.02891 (sparse ternary compression), algorithm 1. Its Golomb codes too have powers of
    two as divisors, with the exponent that suits the ratio; here it is the best for the positions.

    Examples
    --------
    >>> update = {"w": np.float32([1.0, -4.0, 2.0, 0.0])}
    >>> payload, state = Stc(ratio=0.5).encode(update, None, 0)
    >>> Stc().decode(payload, update, 0)["w"].tolist(), state["residual/w"].tolist()
    ([0.0, -3.0, 3.0, 0.0], [1.0, -1.0, -1.0, 0.0])
    """

    name: ClassVar[str] = "stc"
    scheme: ClassVar[int] = 11

    def pack_values(self, values: NDArray[np.float32]) -> bytes:
        """Return the mean magnitude (float32) and one bit an entry, 1 for negative."""
        mean = float(np.abs(values).mean(dtype=np.float64)) if values.size else 0.0
        return struct.pack("<f", mean) + np.packbits(values < 0).tobytes()

    def unpack_values(self, reader: BodyReader, count: int) -> NDArray[np.float32]:
        """Return plus or minus the mean magnitude."""
        (mean,) = reader.floats(1, "mean magnitude")
        signs = np.frombuffer(reader.take(-(-count // 8), "signs"), np.uint8)
        negative = np.unpackbits(signs)
        if negative[count:].any():
            raise PayloadError("bits after the last sign must be 0, got others")
        values = np.full(count, mean, np.float32)
        values[negative[:count] == 1] *= -1
        return values


def num_kept(ratio: float, num_entries: int) -> int:
    """Return the entries that a ratio of all comes to, at least one if there is one."""
    return min(num_entries, max(1, round(ratio * num_entries)))


def largest_positions(vector: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the positions of the `count` largest magnitudes, ascending; of equal ones the first.

    Examples
    --------
    >>> largest_positions(np.float32([1.0, -3.0, 2.0, 2.0]), 2).tolist()
    [1, 2]
    """
    if count == 0:
        return np.empty(0, np.int64)
    magnitudes = np.abs(vector)
    smallest = np.partition(magnitudes, vector.size - count)[vector.size - count]
    above = np.flatnonzero(magnitudes > smallest)
    ties = np.flatnonzero(magnitudes == smallest)[: count - above.size]
    return np.sort(np.concatenate([above, ties]))


def encode_positions(positions: NDArray[np.int64]) -> bytes:
    """Return ascending positions as Rice codes of their gaps, the parameter in the first byte.

    Examples
    --------
    Gaps 2, 0, 5 at parameter 1 are 0 1 0, 1 0, 0 0 1 1:

    >>> encode_positions(np.array([2, 3, 9])).hex(" ")
    '01 51 80'
    """
    gaps = np.diff(positions, prepend=-1) - 1
    parameter, bits = kernels_sparse.best_parameter(gaps)
    data = np.zeros(-(-bits // 8), np.uint8)
    kernels_sparse.pack_gaps(gaps, parameter, data)
    return bytes([parameter]) + data.tobytes()


def decode_positions(code: memoryview, count: int, num_entries: int) -> NDArray[np.int64]:
    """Return the positions that `encode_positions` coded, int64 [count].

    Raises
    ------
    PayloadError
        If the code is not that of `count` positions below `num_entries`, to its last bit.
    """
    reader = BodyReader(code)
    (parameter,) = reader.unpack("<B")
    if parameter > kernels_sparse.MAX_PARAMETER:
        raise PayloadError(
            f"parameter of positions must be at most {kernels_sparse.MAX_PARAMETER}, "
            f"got {parameter}"
        )
    data = np.frombuffer(reader.rest(), np.uint8)
    if count * (1 + parameter) > 8 * data.size:
        raise PayloadError(f"code must hold {count} positions, got {data.size} bytes")
    positions = np.empty(count, np.int64)
    bits = kernels_sparse.unpack_positions(data, parameter, num_entries, positions)
    if bits < 0:
        raise PayloadError(f"code must hold {count} positions below {num_entries}, got others")
    padding = np.unpackbits(data[bits // 8 :])[bits % 8 :]
    if padding.size > 7 or padding.any():
        raise PayloadError(f"code must end after {bits} bits, got {data.size} bytes with others")
    return positions
