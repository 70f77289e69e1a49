"""rANS: frequencies, the coder against a slow twin, and whole payloads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive
from co3_flower import CodecConfig, PayloadError, decode_update, encode_update
from co3_flower.bitstream import (
    decode_symbols,
    encode_symbols,
    pack_tables,
    unpack_rans_tables,
)
from co3_flower.kernels_rans import FREQUENCY_BITS, TOTAL
from co3_flower.rans import RansTables

counts_of_symbols = st.lists(st.integers(0, 10**9), min_size=1, max_size=125).map(
    lambda half: half + half[:-1]  # an odd alphabet, as every format has
)


def tables_of(*counts: list[int]) -> RansTables:
    return RansTables.from_weights(np.array(counts, np.int64))


def draw(rng: np.random.Generator, counts: list[int], size: int) -> np.ndarray:
    weights = np.array(counts, np.float64)
    return rng.choice(len(counts), size, p=weights / weights.sum()).astype(np.uint8)


def coded(tables: RansTables, symbols: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array([0, symbols.size], np.int64)
    return encode_symbols(tables, symbols, offsets, np.zeros(1, np.int64), chunk)


@given(counts_of_symbols.filter(any))
def test_frequencies_sum_to_the_total_and_spare_no_symbol_that_occurs(counts: list[int]) -> None:
    frequencies = tables_of(counts).frequencies[0]
    assert int(frequencies.sum()) == TOTAL
    assert np.array_equal(frequencies > 0, np.array(counts) > 0)


@given(counts_of_symbols.filter(any))
def test_frequencies_are_those_of_the_slow_twin(counts: list[int]) -> None:
    tables = tables_of(counts)
    weights = naive.rans_weights(tables.exponents[0].tolist(), tables.mantissas[0].tolist())
    assert tables.frequencies[0].tolist() == naive.rans_frequencies(weights, FREQUENCY_BITS)


@given(st.lists(counts_of_symbols.filter(any), min_size=1, max_size=4))
def test_tables_survive_packing(counts: list[list[int]]) -> None:
    tables = RansTables.joined([tables_of(each) for each in counts])
    data = np.frombuffer(pack_tables(tables, np.zeros(0, np.int64), len(counts)), np.uint8)
    first = np.zeros(len(counts), np.int64)
    read = unpack_rans_tables(data, tables.alphabets, np.zeros((1, 124), np.int64), first)
    assert np.array_equal(read.frequencies, tables.frequencies)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64, 1001])
@pytest.mark.parametrize("chunk", [1, 3, 8, 50, 2000])
def test_stream_is_that_of_the_slow_twin(rng: np.random.Generator, size: int, chunk: int) -> None:
    counts = [1, 5, 90, 30, 2]
    tables, symbols = tables_of(counts), draw(rng, counts, size)
    words, sizes = coded(tables, symbols, chunk)
    frequencies = tables.frequencies[0].tolist()
    expected = [
        naive.rans_encode(symbols[i : i + chunk].tolist(), frequencies, FREQUENCY_BITS)
        for i in range(0, size, chunk)
    ]
    assert words.tolist() == [word for stream in expected for word in stream]
    assert sizes.tolist() == [len(stream) for stream in expected]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_symbols_come_back_across_tensors_and_chunks(
    rng: np.random.Generator, num_threads: int
) -> None:
    counts = [[1, 10, 60, 10, 1], [0, 0, 1, 0, 0], [300, 1, 5, 1, 2], [0, 5, 0, 0, 0]]
    sizes = [1000, 257, 3, 0]
    symbols = np.concatenate([draw(rng, c, n) for c, n in zip(counts, sizes, strict=True)])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tables, numbers = tables_of(*counts), np.arange(4)
    words, streams = encode_symbols(tables, symbols, offsets, numbers, 100, num_threads)
    padded = np.append(words, np.uint16(0))
    read = decode_symbols(tables, padded, streams, 4, offsets, numbers, 100, num_threads)
    assert np.array_equal(read, symbols)


@pytest.mark.parametrize("counts", [[3, 30, 9940, 29, 4], [1, 2, 9960, 30, 7]])
def test_code_takes_the_entropy_and_the_states(rng: np.random.Generator, counts: list[int]) -> None:
    symbols = draw(rng, counts, 400_000)
    drawn = np.bincount(symbols, minlength=5)
    words, _ = coded(tables_of(drawn.tolist()), symbols, 400_000)
    entropy = naive.entropy_bits(drawn)
    states = 4 * 32
    assert entropy < 16 * words.size <= 1.01 * entropy + states  # weights have 5 bits


def test_table_with_one_symbol_takes_no_bits_but_the_states() -> None:
    words, _ = coded(tables_of([0, 7, 0]), np.ones(10_000, np.uint8), 10_000)
    assert words.size == 8


@pytest.mark.parametrize("position", [0, 3, 9, -1])
def test_damaged_stream_is_refused(rng: np.random.Generator, position: int) -> None:
    counts = [3, 40, 3]
    symbols = draw(rng, counts, 500)
    tables, offsets = tables_of(counts), np.array([0, 500], np.int64)
    words, sizes = coded(tables, symbols, 500)
    damaged = np.append(words, np.uint16(0))
    damaged[position if position >= 0 else words.size - 1] ^= 0x0101
    with pytest.raises(PayloadError, match="code must fill"):
        decode_symbols(tables, damaged, sizes, 4, offsets, np.zeros(1, np.int64), 500)


@pytest.mark.parametrize("format", ["e2m1", "e5m2", "e1m1", "e3m0", "e4m3fn"])
@pytest.mark.parametrize("prior", ["gennorm", "norm", "laplace", "empirical", "auto"])
def test_payload_decodes_to_what_huffman_coding_gives(
    rng: np.random.Generator, format: str, prior: str
) -> None:
    update = {
        "w": rng.laplace(size=(70, 40)).astype(np.float32),
        "b": rng.normal(size=40).astype(np.float32),
        "mean": rng.normal(size=40).astype(np.float32),
        "dead": np.zeros(1500, np.float32),
        "steps": np.array(3),
    }
    settings = {"format": format, "prior": prior, "buffers": ("mean",)}
    by_coder = [
        decode_update(encode_update(update, None, CodecConfig(coder=c, **settings)).payload, update)
        for c in ("huffman", "rans")
    ]
    assert all(np.array_equal(by_coder[0][name], by_coder[1][name]) for name in update)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_payload_does_not_depend_on_threads(rng: np.random.Generator, num_threads: int) -> None:
    update = {f"w{i}": rng.normal(size=70_000).astype(np.float32) for i in range(3)}
    payloads = {
        encode_update(update, None, CodecConfig(coder="rans", num_threads=n)).payload
        for n in (1, num_threads)
    }
    assert len(payloads) == 1


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"format": "e2m1"}, 1.003),
        ({"format": "e2m1", "scale_multiplier": 0.3}, 1.003),
        ({"format": "e2m1", "scale_multiplier": 0.1}, 1.003),
        ({"format": "e2m1", "scale_multiplier": 0.05}, 1.03),
        ({"format": "e5m2", "scale": "unit"}, 1.004),
    ],
)
def test_code_of_a_real_gradient_is_near_its_tensors_entropies(
    real_gradient: dict[str, np.ndarray], settings: dict[str, object], limit: float
) -> None:
    large = {name: g for name, g in real_gradient.items() if g.size >= 4096}
    config = CodecConfig(coder="rans", prior="empirical", structure="none", **settings)  # type: ignore[arg-type]
    stats = encode_update(large, None, config).stats
    assert stats.entropy_bits < stats.code_bits <= limit * stats.entropy_bits + 512
