"""Compressors that spread an update over all its entries first: EDEN and FO-SGD's one bit.

Both turn all tensors in a row, as one vector, by signs drawn from the round's seed and a
Walsh-Hadamard transform. After that, entries are about as large as each other and nearly normal,
whatever they were before. Where the papers transform the whole vector, here it is cut into blocks,
each with a norm of its own, so that its length need not be a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.checks import check_integer_within, check_number
from co3_flower.compressors import kernels_levels as kernels
from co3_flower.compressors.interface import (
    BodyReader,
    Compressor,
    State,
    Tensors,
    flatten,
    generator,
    unflatten,
)
from co3_flower.compressors.packing import LARGEST, pack_codes, scaled, unpack_codes
from co3_flower.errors import ConfigError
from co3_flower.layout import Layout

_SMALLEST = 1024  # entries of a block, unless the last: only that one is filled up with zeros

# Means of the standard normal law between the middles of neighbours (Lloyd's and Max's conditions),
# by bits; the others are their mirror images.
POSITIVE_LEVELS = {
    1: (0.797884561,),  # sqrt(2 / pi)
    2: (0.452780035, 1.51041761),
    3: (0.245094179, 0.756005281, 1.34390928, 2.1519457),
    4: (
        *(0.12839503, 0.388048299, 0.656759119, 0.942340456),
        *(1.2562312, 1.61804639, 2.06901723, 2.73258957),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rotation(Compressor):
    """A code of the turned vector.

    Parameters
    ----------
    block : int
        Entries that are turned together, a power of two from 1024 to 2**24.
    """

    block: int = 2**16

    def __post_init__(self) -> None:
        check_integer_within("block", self.block, _SMALLEST, 2**24)
        if self.block & (self.block - 1):
            raise ConfigError(f"block must be a power of two, got {self.block}")

    def blocks(self, size: int) -> NDArray[np.int64]:
        """Return the sizes of the blocks of a vector: powers of two, only the last filled up."""
        sizes = [self.block] * (size // self.block)
        rest = size % self.block
        while rest >= _SMALLEST:
            sizes.append(1 << rest.bit_length() - 1)
            rest -= sizes[-1]
        if rest:
            sizes.append(1 << (rest - 1).bit_length())
        return np.array(sizes, np.int64)

    def rotate(
        self, vector: NDArray[np.float32], rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.int64]]:
        """Return turned blocks with a mean square of 1, the norms they had, and their sizes.

        The transform is not divided by the root of the block's size, so an entry is about standard
        normal. Of a block of zeros all entries are 0.
        """
        sizes = self.blocks(vector.size)
        padded = np.zeros(int(sizes.sum()), np.float64)
        padded[: vector.size] = vector
        norms = np.sqrt(block_sums(np.square(padded), sizes))
        padded /= np.repeat(np.where(norms > 0, norms, 1.0), sizes)
        turned = padded.astype(np.float32)
        turned *= _signs(rng, turned.size)
        kernels.hadamard(turned, sizes)
        return turned, norms, sizes

    def rotate_back(
        self,
        turned: NDArray[np.float32],
        scales: NDArray[np.float32],
        rng: np.random.Generator,
        layout: Layout,
    ) -> Tensors:
        """Return the tensors whose turned blocks are these times their scales; changes turned."""
        size = sum(layout.numels)
        sizes = self.blocks(size)
        kernels.hadamard(turned, sizes)
        turned *= _signs(rng, turned.size)
        return unflatten(scaled(turned, np.repeat(scales, sizes))[:size], layout)


@dataclass(frozen=True, kw_only=True)
class Eden(Rotation):
    """EDEN: turned entries at the levels that suit a normal law best, scaled to be unbiased.

    Over uniformly drawn rotations the scale |x|^2 / <R(x), Q> makes the code unbiased. Over signs
    and a Hadamard transform, which stand in for them here as in the paper, it nearly is for blocks
    that are long or not sparse. Codes have a fixed width.

    Parameters
    ----------
    bits : int
        Of an entry, 1 to 4.

    References
    ----------
    Vargaftik et al., EDEN: Communication-Efficient and Robust Distributed Mean Estimation for
    Federated Learning, ICML 2022, arXiv 2108.08842, algorithm 1 (deterministic levels); with one
    bit it is DRIVE, arXiv 2105.08339.
    """

    name: ClassVar[str] = "eden"
    scheme: ClassVar[int] = 13
    bits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer_within("bits", self.bits, 1, 4)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return a float32 scale a block and the codes; there is no state."""
        turned, norms, sizes = self.rotate(flatten(tensors), generator(round_seed))
        levels = normal_levels(self.bits)
        codes = np.zeros(turned.size, np.uint8)
        for middle in (levels[1:] + levels[:-1]) / 2:
            codes += turned > middle
        products = block_sums(turned.astype(np.float64) * levels[codes], sizes)
        scales = np.minimum(norms / np.where(products > 0, products, np.inf), LARGEST)
        return scales.astype("<f4").tobytes() + pack_codes(codes, self.bits), {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the levels, turned back and scaled."""
        sizes = self.blocks(sum(layout.numels))
        reader = BodyReader(body)
        scales = reader.floats(sizes.size, "scales")
        codes = unpack_codes(reader, int(sizes.sum()), self.bits)
        reader.end()
        turned = normal_levels(self.bits)[codes]
        return self.rotate_back(turned, scales, generator(round_seed), layout)


@dataclass(frozen=True, kw_only=True)
class OneBit(Rotation):
    """FO-SGD's gradient code: flatten by a random turn, add noise, send signs.

    A sign of ``turned + noise``, with noise uniform between plus and minus the largest magnitude of
    the turned block, times that magnitude, has the turned entry as its mean: unbiased. Less noise,
    as ``dither`` sets it, clips the entries that stick out: a bias, for less variance. The paper's
    abstract speaks of such a bias, so its own noise must be of that kind.

    Parameters
    ----------
    dither : float
        Largest noise, in root mean squares of a turned block, at most 1e6; 0 = the block's infinity
        norm, unbiased.

    References
    ----------
    Stollenwerk and Jacques, Flattened one-bit stochastic gradient descent, 2024, arXiv 2405.11095.
    The two steps are those of its abstract; how much noise it takes is a setting here.
    """

    name: ClassVar[str] = "onebit"
    scheme: ClassVar[int] = 8
    dither: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("dither", self.dither, 0.0, 1e6)

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return a float32 scale a block and the signs; there is no state."""
        rng = generator(round_seed)
        turned, norms, sizes = self.rotate(flatten(tensors), rng)
        if self.dither:
            limits = np.full(sizes.size, self.dither, np.float32)
        else:
            limits = np.maximum.reduceat(np.abs(turned), np.cumsum(sizes) - sizes)
        noise = rng.random(turned.size, np.float32)
        noise -= np.float32(0.5)
        noise *= np.repeat(2 * limits, sizes)
        negative = turned <= noise
        scales = np.minimum(norms * limits / sizes, LARGEST)
        return scales.astype("<f4").tobytes() + np.packbits(negative).tobytes(), {}

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the signs, turned back and scaled."""
        sizes = self.blocks(sum(layout.numels))
        reader = BodyReader(body)
        scales = reader.floats(sizes.size, "scales")
        negative = unpack_codes(reader, int(sizes.sum()), 1)
        reader.end()
        turned = 1 - 2 * negative.astype(np.float32)
        return self.rotate_back(turned, scales, generator(round_seed), layout)


def normal_levels(bits: int) -> NDArray[np.float32]:
    """Return the levels for a standard normal entry, ascending.

    Examples
    --------
    >>> normal_levels(2).round(2).tolist() == np.float32([-1.51, -0.45, 0.45, 1.51]).tolist()
    True
    """
    positive = np.array(POSITIVE_LEVELS[bits], np.float32)
    return np.concatenate([-positive[::-1], positive])


def block_sums(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum over each of consecutive blocks."""
    sums: NDArray[np.float64] = np.add.reduceat(values, np.cumsum(sizes) - sizes)
    return sums


def _signs(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    bits = np.unpackbits(np.frombuffer(rng.bytes(-(-count // 8)), np.uint8), count=count)
    return 1 - 2 * bits.astype(np.float32)
