"""Symbols and code tables in, packed bytes out, and back.

Checks arguments and spreads the kernels over threads.

The flat symbols of an update are cut in chunks of equal size that run across tensors, each chunk in
`NUM_STREAMS` equal parts; a part is a bit stream on 32-bit words of its own, so that threads and
one core's pipelines can decode several at once. The bytes depend on the symbols and tables alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels
from co3_flower.errors import PayloadError

NUM_STREAMS = 2
CHUNK_BITS = 8 * 16384  # code bits of a chunk, on average

T = TypeVar("T")


def run_parts(function: Callable[[int, int], T], bounds: list[int], num_threads: int) -> list[T]:
    """Call function(first, last) for each pair of neighbouring bounds; several run in threads."""
    parts = list(zip(bounds[:-1], bounds[1:], strict=True))
    if num_threads <= 1 or len(parts) <= 1:
        return [function(first, last) for first, last in parts]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda part: function(*part), parts))


def split_evenly(weights: NDArray[np.int64], num_parts: int) -> list[int]:
    """Return bounds that cut a sequence in at most `num_parts` runs of about equal weight."""
    if num_parts <= 1 or weights.size == 0:
        return [0, weights.size]
    ends = np.cumsum(weights)
    targets = ends[-1] * np.arange(1, num_parts) / num_parts
    return sorted({0, weights.size, *np.searchsorted(ends, targets).tolist()})


def chunk_size(num_symbols: int, num_bits: int) -> int:
    """Return the symbols per chunk for which a chunk has about 16 KiB of code."""
    if num_bits == 0:
        return max(1, num_symbols)
    size = num_symbols * CHUNK_BITS // num_bits
    return max(1, min(num_symbols, max(1024, size)))


def encode_symbols(
    symbols: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    lengths: NDArray[np.uint8],
    num_values: int,
    num_paired: int,
    chunk_symbols: int,
    num_threads: int = 1,
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Pack symbols with each tensor's code table.

    Parameters
    ----------
    symbols : uint8 [n]
        Flat symbols of all tensors.
    offsets : int64 [tensors + 1]
        Where each tensor begins.
    table_of : int64 [tensors]
        Code table of each tensor.
    lengths : uint8 [tables, K]
        Code lengths in bits; every symbol that occurs has one.
    num_values, num_paired : int
        The first `num_paired` tables are for alphabets of `num_values` symbols; where these are
        few, the symbols are coded in pairs.
    chunk_symbols : int
        Symbols per chunk.

    Returns
    -------
    words : uint32 [w]
        The code.
    sizes : int64 [chunks * NUM_STREAMS]
        Words of each stream.
    """
    num_chunks = -(-symbols.size // chunk_symbols)
    sizes = np.zeros(num_chunks * NUM_STREAMS, np.int64)
    entries = np.zeros(lengths.shape, np.uint64)
    kernels.encoder_entries(lengths, entries)
    width = num_values if num_values <= kernels.PAIR_ALPHABET else 0
    num_paired = num_paired if width else 0
    pairs = np.zeros((num_paired, width * width), np.uint64)
    kernels.pair_entries(entries[:num_paired], width, pairs)

    def encode_part(first: int, last: int) -> NDArray[np.uint32]:
        part = (last - first) * chunk_symbols
        words = np.empty(
            part * kernels.WINDOW_BITS // 32 + 2 + 2 * NUM_STREAMS * (last - first), np.uint32
        )
        used = kernels.encode_streams(
            first, last, chunk_symbols, NUM_STREAMS, symbols, offsets, table_of, entries,
            num_paired, width, pairs, words, sizes,
        )  # fmt: skip
        return words[:used]

    bounds = split_evenly(np.ones(num_chunks, np.int64), num_threads)
    parts = run_parts(encode_part, bounds, num_threads)
    return (
        parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint32)])
    ), sizes


def decode_symbols(
    words: NDArray[np.uint32],
    sizes: NDArray[np.int64],
    num_streams: int,
    chunk_symbols: int,
    offsets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    lengths: NDArray[np.uint8],
    num_threads: int = 1,
) -> NDArray[np.uint8]:
    """Unpack what `encode_symbols` packed; the tables must be complete.

    Parameters
    ----------
    words : uint32 [w + 1]
        The code and at least one word behind it, which is never used.
    sizes : int64 [chunks * num_streams]
        Words of each stream; they sum to w.

    Returns
    -------
    uint8 [n]
        The symbols; each is in use in its tensor's table.

    Raises
    ------
    PayloadError
        If a stream's code does not end in its last word.
    """
    symbols = np.empty(int(offsets[-1]), np.uint8)
    single = np.zeros((lengths.shape[0], 1 << kernels.WINDOW_BITS), np.uint16)
    several = np.zeros(single.shape, np.uint64)
    kernels.decoder_tables(lengths, single, several)
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])

    def decode_part(first: int, last: int) -> int:
        return int(
            kernels.decode_streams(
                first,
                last,
                chunk_symbols,
                num_streams,
                words,
                starts,
                offsets,
                table_of,
                single,
                several,
                symbols,
            )
        )

    bounds = split_evenly(np.ones(sizes.size // num_streams, np.int64), num_threads)
    for stream in run_parts(decode_part, bounds, num_threads):
        if stream >= 0:
            raise PayloadError(
                f"code must fill the {sizes[stream]} words of its stream, "
                f"got another length in stream {stream}"
            )
    return symbols


def pack_tables(
    lengths: NDArray[np.uint8],
    alphabets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    num_tables: int,
) -> bytes:
    """Pack code lengths [tables, K] and table numbers below `num_tables`.

    Each table's lengths are those of its alphabet, whose size `alphabets` holds.
    """
    data = np.zeros(lengths.size * 40 + table_of.size * 32 + 64, np.uint8)
    used = kernels.encode_tables(lengths, alphabets, table_of, num_tables, data)
    return data[:used].tobytes()


def unpack_tables(
    data: NDArray[np.uint8], alphabets: NDArray[np.int64], num_tensors: int, num_tables: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Undo `pack_tables`: code lengths [tables, largest alphabet], table numbers [num_tensors].

    Raises
    ------
    PayloadError
        If a table is no complete code, or a table number is too large.
    """
    lengths = np.zeros((alphabets.size, int(alphabets.max(initial=1))), np.uint8)
    table_of = np.zeros(num_tensors, np.int64)
    bad = kernels.decode_tables(data, alphabets, num_tables, lengths, table_of)
    if bad >= 0:
        raise PayloadError(
            f"code lengths must make a complete prefix code, got others in table {bad}"
        )
    if table_of.size and table_of.max() >= num_tables:
        raise PayloadError(f"table number must be below {num_tables}, got {table_of.max()}")
    return lengths, table_of
