"""Length-limited Huffman codes: counts or a pmf in, code lengths and codewords out.

This is part of the *compress* stage. Codes are canonical: the lengths alone say them all. A table
in which a single symbol occurs has length 1 for that symbol (Kraft sum 1/2) and takes no bits in a
payload.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from co3_flower import kernels

MAX_LENGTH = kernels.WINDOW_BITS  # bits; the decoder looks up windows of so many


def code_lengths(weights: ArrayLike, max_length: int = MAX_LENGTH) -> NDArray[np.uint8]:
    """Return the code lengths of an optimal prefix code no longer than `max_length`.

    Parameters
    ----------
    weights : int64 [K]
        Counts of the symbols, or scaled probabilities; symbols of weight 0 get no code.
    max_length : int
        Longest codeword allowed, in bits; at most 12 can be sent.

    Returns
    -------
    uint8 [K]
        Lengths in bits, 0 for unused symbols.

    Raises
    ------
    ValueError
        If a weight is negative, or more symbols are used than codewords of `max_length` bits exist.

    Examples
    --------
    >>> code_lengths([5, 0, 2, 1]).tolist()
    [1, 0, 2, 2]
    >>> code_lengths([8, 4, 2, 1], max_length=2).tolist()
    [2, 2, 2, 2]
    """
    w = np.ascontiguousarray(weights, dtype=np.int64)
    if w.ndim != 1 or (w.size and w.min() < 0):
        raise ValueError(
            f"weights must be a vector of counts >= 0, "
            f"got shape {w.shape}, least {w.min(initial=0)}"
        )
    used = int(np.count_nonzero(w))
    if not 1 <= max_length <= 32 or used > 2**max_length:
        raise ValueError(
            f"max_length must be in [1, 32] and give {used} symbols a code, got {max_length}"
        )
    lengths = np.zeros(w.size, np.uint8)
    kernels.huffman_lengths(w, max_length, lengths)
    return lengths


def canonical_codes(lengths: ArrayLike) -> NDArray[np.uint32]:
    """Return the canonical codewords of the given lengths: shorter ones first, then by symbol.

    Parameters
    ----------
    lengths : uint8 [K]
        Code lengths in bits, 0 for unused symbols.

    Returns
    -------
    uint32 [K]
        Codewords whose most significant bit (of `length` bits) goes first.

    Examples
    --------
    >>> [f"{c:0{n}b}" for c, n in zip(canonical_codes([2, 1, 3, 3]), [2, 1, 3, 3])]
    ['10', '0', '110', '111']
    """
    array = np.ascontiguousarray(lengths, dtype=np.uint8)
    codes = np.zeros(array.size, np.uint32)
    kernels.canonical_codes(array, codes)
    return codes


def kraft_sum(lengths: ArrayLike) -> float:
    """Return the sum of 2**-length over the used symbols.

    It is 1 for a complete code, 1/2 for a single symbol.

    Examples
    --------
    >>> kraft_sum([2, 1, 3, 3])
    1.0
    """
    used = np.asarray(lengths, dtype=np.int64)
    return float((2.0 ** -used[used > 0]).sum())
