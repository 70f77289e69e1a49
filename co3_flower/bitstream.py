"""Symbols and code tables in, packed bytes out, and back.

Checks arguments and spreads the kernels over threads.

The flat symbols of an update are cut in chunks of equal size that run across tensors, each chunk in
equal parts (`CodecConfig.num_streams`); a part is a bit stream on 32-bit words of its own, so that
threads and one core's pipelines can decode several at once. The bytes depend on the symbols, tables
and number of streams alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels, kernels_rans, kernels_side, kernels_structure
from co3_flower.errors import PayloadError
from co3_flower.huffman import HuffmanTables
from co3_flower.laws import no_laws
from co3_flower.rans import RansTables
from co3_flower.structure import Structure

NUM_STREAMS = 2  # of a chunk, where settings do not say otherwise
MAX_STREAMS = 255  # what the header's field holds
CHUNK_BITS = 8 * 16384  # code bits of a chunk, on average
MIN_CHUNK_SYMBOLS = 1024  # of a chunk, unless the update is smaller: lengths must not outgrow it
MAX_CHUNK_SYMBOLS = 2**32 - 1  # what the header's field holds

T = TypeVar("T")
Tables: TypeAlias = HuffmanTables | RansTables


def run_parts(function: Callable[[int, int], T], bounds: list[int], num_threads: int) -> list[T]:
    """Call function(first, last) for each pair of neighbouring bounds; several run in threads."""
    parts = list(zip(bounds[:-1], bounds[1:], strict=True))
    if num_threads <= 1 or len(parts) <= 1:
        return [function(first, last) for first, last in parts]
    return list(_pool(num_threads, os.getpid()).map(lambda part: function(*part), parts))


@lru_cache(maxsize=4)
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """Keep the threads of a process; a forked one has none of its parent's."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="co3")


def split_evenly(weights: NDArray[np.int64], num_parts: int) -> list[int]:
    """Return bounds that cut a sequence in at most `num_parts` runs of about equal weight."""
    if num_parts <= 1 or weights.size == 0:
        return [0, weights.size]
    ends = np.cumsum(weights)
    targets = ends[-1] * np.arange(1, num_parts) / num_parts
    return sorted({0, weights.size, *np.searchsorted(ends, targets).tolist()})


def chunk_size(num_symbols: int, num_bits: int) -> int:
    """Return the symbols per chunk for which a chunk has about 16 KiB of code."""
    most = min(num_symbols, MAX_CHUNK_SYMBOLS)
    if num_bits == 0:
        return max(1, most)
    size = num_symbols * CHUNK_BITS // num_bits
    return max(1, min(most, max(MIN_CHUNK_SYMBOLS, size)))


def _encode_chunks(
    encode: Callable[[int, int], NDArray[Any]], num_chunks: int, num_threads: int
) -> NDArray[Any]:
    """Join the words that encode(first, last) makes of runs of chunks."""
    bounds = split_evenly(np.ones(num_chunks, np.int64), num_threads)
    parts: list[NDArray[Any]] = run_parts(encode, bounds, num_threads)
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint16)])


def _decode_chunks(
    decode: Callable[[int, int], int], num_chunks: int, sizes: NDArray[np.int64], num_threads: int
) -> None:
    """Call decode(first, last) on runs of chunks; raise for the first stream that it names."""
    bounds = split_evenly(np.ones(num_chunks, np.int64), num_threads)
    for stream in run_parts(decode, bounds, num_threads):
        if stream >= 0:
            raise_unsound(stream, sizes)


def raise_unsound(stream: int, sizes: NDArray[np.int64]) -> NoReturn:
    """Raise PayloadError for a stream whose code does not end in its last word."""
    raise PayloadError(
        f"code must fill the {sizes[stream]} words of its stream, "
        f"got another length in stream {stream}"
    )


def stream_bounds(num_symbols: int, chunk_symbols: int, num_streams: int) -> NDArray[np.int64]:
    """Return where each stream's symbols begin, and where the last one's end.

    Examples
    --------
    >>> stream_bounds(12, 5, 2).tolist()
    [0, 2, 5, 7, 10, 11, 12]
    """
    begins = np.arange(0, num_symbols, chunk_symbols)[:, None]
    sizes = np.minimum(num_symbols - begins, chunk_symbols)
    return np.append(begins + sizes * np.arange(num_streams) // num_streams, num_symbols)


def encode_symbols(
    tables: Tables,
    symbols: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    chunk_symbols: int,
    num_threads: int = 1,
    num_streams: int = NUM_STREAMS,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Pack symbols with each tensor's code table.

    Parameters
    ----------
    tables : HuffmanTables or RansTables
        Code tables; every symbol that occurs has a code.
    symbols : uint8 [n]
        Flat symbols of all tensors.
    offsets : int64 [tensors + 1]
        Where each tensor begins.
    table_of : int64 [tensors]
        Code table of each tensor.
    chunk_symbols : int
        Symbols per chunk.
    num_streams : int
        Streams of a chunk, for Huffman codes.

    Returns
    -------
    words : uint32 or uint16 [w]
        The code.
    sizes : int64 [chunks * streams of a chunk]
        Words of each stream.
    """
    num_chunks = -(-symbols.size // chunk_symbols)
    sizes = np.zeros(num_chunks * stored_streams(tables, num_streams), np.int64)
    arguments = symbols, offsets, table_of, chunk_symbols, sizes
    encode: Callable[[int, int], NDArray[Any]]
    if isinstance(tables, HuffmanTables):
        encode = _huffman_encoder(tables, *arguments, num_streams)
    else:
        encode = _rans_encoder(tables, *arguments)
    return _encode_chunks(encode, num_chunks, num_threads), sizes


def decode_symbols(
    tables: Tables,
    words: NDArray[Any],
    sizes: NDArray[np.int64],
    num_streams: int,
    offsets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    chunk_symbols: int,
    num_threads: int = 1,
) -> NDArray[np.uint8]:
    """Unpack what `encode_symbols` packed; the tables must be complete.

    Parameters
    ----------
    words : uint32 or uint16 [w + 1]
        The code and at least one word behind it, which is never used.
    sizes : int64 [chunks * streams of a chunk]
        Words of each stream; they sum to w.
    num_streams : int
        Streams of a chunk, for Huffman codes.

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
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    if isinstance(tables, HuffmanTables):
        single = np.zeros((tables.alphabets.size, 1 << kernels.WINDOW_BITS), np.uint16)
        several = np.zeros(single.shape, np.uint64)
        kernels.decoder_tables(tables.lengths, single, several)
        num_chunks = sizes.size // num_streams

        def decode(first: int, last: int) -> int:
            bad: int = kernels.decode_streams(
                first, last, chunk_symbols, num_streams, words, starts, offsets, table_of,
                single, several, symbols,
            )  # fmt: skip
            return bad
    else:
        symbol_of = np.zeros((tables.alphabets.size, kernels_rans.TOTAL), np.uint8)
        steps = np.zeros(tables.frequencies.shape, np.uint32)
        kernels_rans.decoder_slots(tables.frequencies, symbol_of, steps)
        num_chunks = sizes.size

        def decode(first: int, last: int) -> int:
            bad: int = kernels_rans.decode_chunks(
                first, last, chunk_symbols, words, starts, offsets, table_of,
                symbol_of, steps, symbols,
            )  # fmt: skip
            return bad

    _decode_chunks(decode, num_chunks, sizes, num_threads)
    return symbols


def encode_structured(
    tables: Tables,
    structure: Structure,
    symbols: NDArray[np.uint8],
    chunk_symbols: int,
    num_threads: int = 1,
    num_streams: int = NUM_STREAMS,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Pack symbols, each with the code table of its class.

    Parameters
    ----------
    tables : HuffmanTables or RansTables
        Those of the classes, then the buffers', if there are any.
    structure : Structure
        Which entry is of which class.
    symbols, chunk_symbols, num_threads, num_streams
        As for `encode_symbols`, whose results these are.
    """
    tables = with_dead_table(tables)
    dead, width = tables.alphabets.size - 1, int(tables.alphabets.max())
    num_chunks = -(-symbols.size // chunk_symbols)
    sizes = np.zeros(num_chunks * stored_streams(tables, num_streams), np.int64)
    entries, steps = np.zeros((0, 0), np.uint64), np.zeros((0, 0, 5), np.uint64)
    if isinstance(tables, HuffmanTables):
        entries = np.zeros(tables.lengths.shape, np.uint64)
        kernels.encoder_entries(tables.lengths, entries)
        word: np.dtype[Any] = np.dtype(np.uint32)
    else:
        steps = _rans_steps(tables)
        word = np.dtype(np.uint16)

    def encode(first: int, last: int) -> NDArray[Any]:
        room = (last - first) * (chunk_symbols + kernels_rans.STATE_WORDS + num_streams)
        words = np.empty(room, word)
        none16, none32 = np.empty(0, np.uint16), np.empty(0, np.uint32)
        is_huffman = word == np.uint32
        used = kernels_structure.encode_chunks(
            first, last, chunk_symbols, num_streams if is_huffman else 0, symbols,
            structure.kernel_layout, structure.sum_map(dead), structure.num_tables, width,
            steps.reshape(-1, 5), entries.reshape(-1),
            np.empty(chunk_symbols + kernels_rans.STATE_WORDS + 1, np.uint16),
            none16 if is_huffman else words, words if is_huffman else none32, sizes,
        )  # fmt: skip
        return words[:used]

    return _encode_chunks(encode, num_chunks, num_threads), sizes


def decode_structured(
    tables: Tables,
    structure: Structure,
    words: NDArray[Any],
    sizes: NDArray[np.int64],
    num_streams: int,
    chunk_symbols: int,
    num_threads: int = 1,
) -> NDArray[np.uint8]:
    """Unpack what `encode_structured` packed; parameters and errors are as for `decode_symbols`."""
    tables = with_dead_table(tables)
    dead, width = tables.alphabets.size - 1, int(tables.alphabets.max())
    out = np.empty(int(structure.plan.offsets[-1]), np.uint8)
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    is_huffman = isinstance(tables, HuffmanTables)
    single = np.zeros((1, 1), np.uint16)
    symbol_of, steps = np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.uint32)
    if isinstance(tables, HuffmanTables):
        single = np.zeros((dead + 1, 1 << kernels.WINDOW_BITS), np.uint16)
        kernels.decoder_windows(tables.lengths, single)
    else:
        symbol_of = np.zeros((dead + 1, kernels_rans.TOTAL), np.uint8)
        steps = np.zeros(tables.frequencies.shape, np.uint32)
        kernels_rans.decoder_slots(tables.frequencies, symbol_of, steps)

    def decode(first: int, last: int) -> int:
        bad: int = kernels_structure.decode_chunks(
            first, last, chunk_symbols, num_streams if is_huffman else 0, words, starts,
            structure.kernel_layout, structure.sum_map(dead), structure.num_tables, width,
            symbol_of.reshape(-1), steps.reshape(-1), single, out,
        )  # fmt: skip
        return bad

    num_chunks = sizes.size // (num_streams if is_huffman else 1)
    _decode_chunks(decode, num_chunks, sizes, num_threads)
    return out


def structured_bits(tables: Tables, structure: Structure) -> NDArray[np.float64]:
    """Return the bits [tensors] that the coded tensors' symbols take (for rANS, their ideal)."""
    bits = np.zeros(structure.plan.num_coded, np.float64)
    kernels_structure.tensor_bits(
        structure.of_tensor, structure.class_map, tables.symbol_bits(), bits
    )
    return bits


def with_dead_table(tables: Tables) -> Tables:
    """Add a table in which zero alone occurs, for what is dead; it is never sent."""
    num_values = int(tables.alphabets[0])
    counts = np.zeros((1, num_values), np.int64)
    counts[0, num_values // 2] = 1
    if isinstance(tables, HuffmanTables):
        return HuffmanTables.joined([tables, HuffmanTables.from_weights(counts)])
    return RansTables.joined([tables, RansTables.from_weights(counts)])


def stored_streams(tables: Tables, num_streams: int) -> int:
    """Return how many stream lengths a chunk has: all states of rANS share one stream."""
    return num_streams if isinstance(tables, HuffmanTables) else 1


def lanes(tables: Tables, num_streams: int = NUM_STREAMS) -> int:
    """Return how many symbols of a chunk are coded side by side: streams, or states of rANS."""
    return num_streams if isinstance(tables, HuffmanTables) else kernels_rans.NUM_STATES


def _huffman_encoder(
    tables: HuffmanTables,
    symbols: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    chunk_symbols: int,
    sizes: NDArray[np.int64],
    num_streams: int,
) -> Callable[[int, int], NDArray[np.uint32]]:
    entries = np.zeros(tables.lengths.shape, np.uint64)
    kernels.encoder_entries(tables.lengths, entries)
    width = int(tables.alphabets.min(initial=kernels.PAIR_ALPHABET + 1))
    is_small = tables.alphabets == width  # the update's own format comes first
    num_paired = int(is_small.sum()) if width <= kernels.PAIR_ALPHABET else 0
    pairs = np.zeros((num_paired, width * width), np.uint64)
    kernels.pair_entries(entries[:num_paired], width, pairs)

    def encode(first: int, last: int) -> NDArray[np.uint32]:
        num_symbols = (last - first) * chunk_symbols
        room = num_symbols * kernels.WINDOW_BITS // 32 + 2 + 2 * num_streams * (last - first)
        words = np.empty(room, np.uint32)
        used = kernels.encode_streams(
            first, last, chunk_symbols, num_streams, symbols, offsets, table_of, entries,
            num_paired, width, pairs, words, sizes,
        )  # fmt: skip
        return words[:used]

    return encode


def _rans_encoder(
    tables: RansTables,
    symbols: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    table_of: NDArray[np.int64],
    chunk_symbols: int,
    sizes: NDArray[np.int64],
) -> Callable[[int, int], NDArray[np.uint16]]:
    steps = _rans_steps(tables)

    def encode(first: int, last: int) -> NDArray[np.uint16]:
        room = chunk_symbols + kernels_rans.STATE_WORDS + 1  # at most a word a symbol
        scratch = np.empty(room, np.uint16)
        words = np.empty((last - first) * room, np.uint16)
        used = kernels_rans.encode_chunks(
            first, last, chunk_symbols, symbols, offsets, table_of, steps, scratch, words, sizes,
        )  # fmt: skip
        return words[:used]

    return encode


def _rans_steps(tables: RansTables) -> NDArray[np.uint64]:
    """Return what encoding needs of each symbol, uint64 [tables, K, 5]."""
    steps = np.zeros((*tables.frequencies.shape, 5), np.uint64)
    kernels_rans.encoder_steps(tables.frequencies, steps)
    return steps


def pack_tables(tables: Tables, table_of: NDArray[np.int64], num_tables: int) -> bytes:
    """Pack code tables, and for Huffman codes the table numbers below `num_tables`."""
    if isinstance(tables, HuffmanTables):
        data = np.zeros(tables.lengths.size * 40 + table_of.size * 32 + 64, np.uint8)
        used = kernels_side.encode_tables(
            tables.lengths, tables.laws, tables.alphabets, table_of, num_tables, data
        )
    else:
        data = np.zeros(tables.exponents.size * 80 + 64, np.uint8)
        used = kernels_rans.encode_weights(
            tables.exponents, tables.mantissas, tables.laws, tables.alphabets, data
        )
    return data[:used].tobytes()


def unpack_huffman_tables(
    data: NDArray[np.uint8],
    alphabets: NDArray[np.int64],
    edges: NDArray[np.int64],
    edges_of: NDArray[np.int64],
    num_tensors: int,
    num_tables: int,
) -> tuple[HuffmanTables, NDArray[np.int64]]:
    """Undo `pack_tables`: the tables, and the table number of each of `num_tensors` tensors.

    Table t is of the format whose borders (see `laws.log2_edges`) are edges[edges_of[t]].

    Raises
    ------
    PayloadError
        If a table is no complete code, its law is out of range, or a table number is too large.
    """
    lengths = np.zeros((alphabets.size, int(alphabets.max(initial=1))), np.uint8)
    laws, table_of = no_laws(alphabets.size), np.zeros(num_tensors, np.int64)
    bad = kernels_side.decode_tables(
        data, alphabets, edges, edges_of, num_tables, lengths, laws, table_of
    )
    if bad >= 0:
        raise PayloadError(
            "code lengths must make a complete prefix code and laws be in range, got others in "
            f"table {bad}"
        )
    if table_of.size and table_of.max() >= num_tables:
        raise PayloadError(f"table number must be below {num_tables}, got {table_of.max()}")
    return HuffmanTables(lengths, alphabets, laws), table_of


def unpack_rans_tables(
    data: NDArray[np.uint8],
    alphabets: NDArray[np.int64],
    edges: NDArray[np.int64],
    edges_of: NDArray[np.int64],
) -> RansTables:
    """Undo `pack_tables`; see `unpack_huffman_tables`.

    Raises
    ------
    PayloadError
        If a table uses no symbol, or a weight or law is out of range.
    """
    shape = (alphabets.size, int(alphabets.max(initial=1)))
    exponents, mantissas = np.full(shape, -1, np.int8), np.zeros(shape, np.int8)
    frequencies, laws = np.zeros(shape, np.uint32), no_laws(alphabets.size)
    bad = kernels_rans.decode_weights(
        data, alphabets, edges, edges_of, exponents, mantissas, laws, frequencies
    )
    if bad >= 0:
        raise PayloadError(
            f"weights must use a symbol and be in range, as laws must, got others in table {bad}"
        )
    kernels_rans.explicit_frequencies(exponents, mantissas, frequencies)
    return RansTables(exponents, mantissas, frequencies, alphabets, laws)
