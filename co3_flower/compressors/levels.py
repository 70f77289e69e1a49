"""Compressors that round every entry to one of a few levels: QSGD, TernGrad, signs, TinyScript."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from co3_flower.checks import check_integer_within, check_number
from co3_flower.compressors import kernels_levels as kernels
from co3_flower.compressors.interface import (
    BodyReader,
    Compressor,
    State,
    Tensors,
    compensate,
    flatten,
    generator,
    residual_state,
    unflatten,
)
from co3_flower.compressors.packing import LARGEST, as_float32, pack_codes, scaled, unpack_codes
from co3_flower.errors import PayloadError
from co3_flower.layout import Layout

_DENSE, _SPARSE = 0, 1  # QSGD's two ways to write levels


@dataclass(frozen=True, kw_only=True)
class Qsgd(Compressor):
    """QSGD: levels at random beside ``|x| / norm * levels``, in Elias' recursive code; unbiased.

    The norm is the L2 norm of a bucket of consecutive entries of all tensors in a row. The body has
    one flag for the paper's two ways to write levels, of which the shorter is taken: distances,
    signs and levels of what is not zero; or level + 1 of every entry. Two choices save the paper's
    code some bits: buckets share one stream, and a level of zero has no sign in either way.

    Parameters
    ----------
    levels : int
        Levels above zero, s in the paper, 1 to 65535; the server decodes with the same number.
    bucket : int
        Entries that share a norm.

    References
    ----------
    arXiv 1610.02132, section 3 and appendix A (Code_s and Code'_s).

    Examples
    --------
    >>> update = {"w": np.float32([0.0, -4.0, 0.0])}
    >>> payload, state = Qsgd(levels=1).encode(update, None, 0)
    >>> Qsgd(levels=1).decode(payload, update, 0)["w"].tolist()
    [0.0, -4.0, 0.0]
    """

    name: ClassVar[str] = "qsgd"
    scheme: ClassVar[int] = 5
    levels: int = 16
    bucket: int = 512

    def __post_init__(self) -> None:
        check_integer_within("levels", self.levels, 1, 2**16 - 1)
        check_integer_within("bucket", self.bucket, 1, 2**31 - 1)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return the flag, the norms as float32 and the stream; there is no state."""
        vector = flatten(tensors)
        starts = np.arange(0, vector.size, self.bucket)
        squares = np.square(vector, dtype=np.float64)
        norms = np.minimum(np.sqrt(np.add.reduceat(squares, starts)), LARGEST).astype(np.float32)
        shares = np.abs(vector)
        shares /= self._spread(np.where(norms > 0, norms, np.float32(1)), vector.size)
        shares *= np.float32(self.levels)
        below = np.floor(shares)
        below += generator(round_seed).random(vector.size, np.float32) < shares - below
        levels = np.copysign(below, vector).astype(np.int32)
        dense, sparse, num_nonzero = kernels.count_bits(levels)
        data = np.zeros(-(-min(dense, sparse) // 8), np.uint8)
        if sparse < dense:
            head = struct.pack("<BQ", _SPARSE, num_nonzero)
            kernels.write_sparse(levels, data)
        else:
            head = struct.pack("<B", _DENSE)
            kernels.write_dense(levels, data)
        return head + norms.astype("<f4").tobytes() + data.tobytes(), {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return norm * level / levels; PayloadError unless the stream fills the tensors."""
        size = sum(layout.numels)
        reader = BodyReader(body)
        (way,) = reader.unpack("<B")
        if way not in (_DENSE, _SPARSE):
            raise PayloadError(f"way of coding must be {_DENSE} or {_SPARSE}, got {way}")
        num_nonzero = reader.unpack("<Q")[0] if way == _SPARSE else 0
        if num_nonzero > size:
            raise PayloadError(f"nonzero entries must be at most {size}, got {num_nonzero}")
        norms = reader.floats(-(-size // self.bucket), "norms")
        data = np.frombuffer(reader.rest(), np.uint8)
        levels = np.zeros(size, np.int32)
        if way == _SPARSE:
            num_bytes = kernels.read_sparse(data, self.levels, num_nonzero, levels)
        else:
            num_bytes = kernels.read_dense(data, self.levels, levels)
        if num_bytes != data.size:
            raise PayloadError(f"levels must fill {data.size} bytes, got other codes")
        steps = norms / np.float32(self.levels)
        return unflatten(scaled(levels, self._spread(steps, size)), layout)

    def _spread(self, values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Return one value an entry from one a bucket."""
        bounds = np.minimum(np.arange(values.size + 1) * self.bucket, size)
        return np.repeat(values, np.diff(bounds))


@dataclass(frozen=True, kw_only=True)
class TernGrad(Compressor):
    """TernGrad: each entry becomes 0 or the largest magnitude of its tensor, at random.

    A tensor is first clipped at ``clip`` standard deviations; of what that leaves the code is
    unbiased. Five ternary digits make a byte, not the paper's two bits a digit. The standard
    deviation is taken about zero, the mean that the paper's law of gradients has; so a tensor of
    one entry keeps it.

    Parameters
    ----------
    clip : float
        In standard deviations, c in the paper; 0 = no clipping.

    References
    ----------
    arXiv 1705.07878, equations 3 to 5 (ternarizing) and section 4 (layer-wise scalers, clipping).
    """

    name: ClassVar[str] = "terngrad"
    scheme: ClassVar[int] = 6
    clip: float = 2.5

    def __post_init__(self) -> None:
        check_number("clip", self.clip, 0.0, sys.float_info.max)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return a float32 scaler a tensor and five digits a byte; there is no state."""
        magnitudes = np.abs(flatten(tensors))
        scalers = np.zeros(len(tensors), np.float32)
        begin = 0
        for i, array in enumerate(tensors.values()):
            part = magnitudes[begin : begin + array.size]
            begin += array.size
            if self.clip and part.size:
                sigma = float(np.sqrt(np.square(part, dtype=np.float64).mean()))
                np.minimum(part, as_float32(self.clip * sigma), out=part)
            scalers[i] = part.max(initial=0)
        random = generator(round_seed).random(magnitudes.size, np.float32)
        random *= np.repeat(scalers, [array.size for array in tensors.values()])
        kept = (random < magnitudes).astype(np.int8)
        digits = np.zeros(-(-kept.size // 5) * 5, np.uint8)
        digits[: kept.size] = 1 + np.where(np.signbit(flatten(tensors)), -kept, kept)
        return scalers.astype("<f4").tobytes() + (digits.reshape(-1, 5) @ _POWERS).tobytes(), {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the tensors; PayloadError unless all bytes are five ternary digits."""
        size = sum(layout.numels)
        reader = BodyReader(body)
        scalers = reader.floats(len(layout), "scalers")
        words = np.frombuffer(reader.take(-(-size // 5), "digits"), np.uint8)
        reader.end()
        if words.max(initial=0) >= len(_TRITS):
            raise PayloadError(f"bytes must be below {len(_TRITS)}, got {words.max()}")
        signs = _TRITS[words].reshape(-1)[:size]
        return unflatten(scaled(signs, np.repeat(scalers, layout.numels)), layout)


@dataclass(frozen=True, kw_only=True)
class SignSgd(Compressor):
    """EF-signSGD: the signs of each tensor, times the mean of its magnitudes; error feedback.

    One bit an entry, packed; a zero counts as positive. What the paper multiplies by the step size
    before compressing comes here as it is: a step size that stays the same changes nothing.

    References
    ----------
    arXiv 1901.09847, algorithm 1 (with the scaled sign of its section 4, layer by layer).

    Examples
    --------
    >>> update = {"w": np.float32([3.0, -1.0])}
    >>> payload, state = SignSgd().encode(update, None, 0)
    >>> SignSgd().decode(payload, update, 0)["w"].tolist(), state["residual/w"].tolist()
    ([2.0, -2.0], [1.0, 1.0])
    """

    name: ClassVar[str] = "signsgd"
    scheme: ClassVar[int] = 7

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return a float32 scale a tensor and the signs; the state is the residual."""
        whole = compensate(tensors, state)
        scales = np.zeros(len(whole), np.float32)
        for i, array in enumerate(whole.values()):
            if array.size:
                scales[i] = as_float32(float(np.abs(array).mean(dtype=np.float64)))
        negative = flatten(whole) < 0
        body = scales.astype("<f4").tobytes() + np.packbits(negative).tobytes()
        decoded = _signed(negative, scales, Layout.of(tensors))
        return body, residual_state(whole, decoded)

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return plus or minus the scale of each tensor."""
        reader = BodyReader(body)
        scales = reader.floats(len(layout), "scales")
        negative = unpack_codes(reader, sum(layout.numels), 1)
        reader.end()
        return _signed(negative, scales, layout)


@dataclass(frozen=True, kw_only=True)
class TinyScript(Compressor):
    """TinyScript: the nearest of the levels that suit a tensor's magnitudes, if Weibull, best.

    A tensor is taken for double-Weibull about zero, with the shape and scale that its mean
    magnitude and mean square ask for. Half of the levels lie above zero, where they meet Lloyd's
    conditions under that law, the others mirror them. The paper sends the two parameters; here the
    positive levels travel as float32, so that no number need come out alike on two machines, and
    an entry goes to its nearest level, for which Lloyd's conditions are those of least variance.

    Parameters
    ----------
    bits : int
        Of an entry, 1 to 8.

    References
    ----------
    Fu et al., Don't Waste Your Bits! Squeeze Activations and Gradients for Deep Neural Networks via
    TinyScript, ICML 2020; Lloyd, Least squares quantization in PCM, IEEE Trans. Inf. Theory 1982.
    """

    name: ClassVar[str] = "tinyscript"
    scheme: ClassVar[int] = 15
    bits: int = 4

    def __post_init__(self) -> None:
        check_integer_within("bits", self.bits, 1, 8)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return the positive levels of each tensor and the codes; there is no state."""
        half = 1 << self.bits - 1
        levels = np.zeros((len(tensors), half), np.float32)
        codes = []
        for i, array in enumerate(tensors.values()):
            magnitudes = np.abs(array).reshape(-1)
            shape, scale = fit_weibull(magnitudes)
            levels[i] = scaled(lloyd_levels(shape, half), np.full(half, scale, np.float32))
            middles = (levels[i, 1:] + levels[i, :-1].astype(np.float64)) / 2
            code = np.zeros(magnitudes.size, np.uint8)
            for middle in middles.astype(np.float32):
                code += magnitudes > middle
            codes.append(code + np.uint8(half) * (array < 0).reshape(-1))
        packed = pack_codes(np.concatenate([np.empty(0, np.uint8), *codes]), self.bits)
        return levels.astype("<f4").tobytes() + packed, {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the tensors of levels."""
        half = 1 << self.bits - 1
        reader = BodyReader(body)
        levels = reader.floats(len(layout) * half, "levels").reshape(-1, half)
        codes = unpack_codes(reader, sum(layout.numels), self.bits)
        reader.end()
        bounds = np.cumsum([0, *layout.numels]).tolist()
        return {
            name: np.concatenate([levels[i], -levels[i]])[codes[bounds[i] : bounds[i + 1]]].reshape(
                layout.shapes[i]
            )
            for i, name in enumerate(layout.names)
        }


def fit_weibull(magnitudes: NDArray[np.float32]) -> tuple[float, np.float32]:
    """Return shape and scale of the Weibull law with the mean and mean square of magnitudes.

    The shape is the nearest of 1/32, 2/32, ... that lies in [1/4, 8]; the scale of zeros is 0.
    """
    mean = float(magnitudes.mean(dtype=np.float64)) if magnitudes.size else 0.0
    if mean == 0:
        return 1.0, np.float32(0)
    ratio = float(np.square(magnitudes, dtype=np.float64).mean()) / mean**2
    shape = float(_SHAPES[np.abs(_RATIOS - ratio).argmin()])
    return shape, as_float32(mean / float(special.gamma(1 + 1 / shape)))


@lru_cache(maxsize=1024)
def lloyd_levels(shape: float, count: int) -> NDArray[np.float64]:
    """Return levels for the Weibull law of scale 1 that meet Lloyd's conditions, float64 [count].

    Every level is the mean of the law between the middles towards its neighbours; the iteration
    begins at the density's third root (Panter and Dite's rule for many levels) and ends where no
    level moves by more than 1e-5 of itself, or after 400 steps.
    """
    mass = (np.arange(count) + 0.5) / count
    start = 3 * special.gammaincinv((shape + 2) / (3 * shape), mass)
    levels: NDArray[np.float64] = start ** (1 / shape)
    for _ in range(400):
        powers = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]]) ** shape
        moments = special.gamma(1 + 1 / shape) * special.gammainc(1 + 1 / shape, powers)
        weights = -np.diff(np.exp(-powers))
        before, levels = levels, np.diff(moments) / np.maximum(weights, np.finfo(float).tiny)
        if np.abs(levels - before).max() <= 1e-5 * levels.min():
            break
    return levels


def _signed(negative: NDArray[Any], scales: NDArray[np.float32], layout: Layout) -> Tensors:
    values = np.repeat(scales, layout.numels)
    return unflatten(np.where(negative, -values, values), layout)


_POWERS = np.array([81, 27, 9, 3, 1], np.uint8)  # of the first of five ternary digits, and so on
_TRITS = (np.arange(243)[:, np.newaxis] // _POWERS % 3 - 1).astype(np.int8)
_SHAPES = np.arange(8, 257) / 32
_RATIOS = special.gamma(1 + 2 / _SHAPES) / special.gamma(1 + 1 / _SHAPES) ** 2  # mean square by
