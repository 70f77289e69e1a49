"""Huffman: optimal limited lengths against package-merge, Kraft, codewords as bit strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive
from co3_flower.huffman import canonical_codes, code_lengths, kraft_sum


def as_weights(weights: Sequence[int]) -> np.ndarray:
    return np.array(weights, np.int64)


def as_bit_strings(lengths: np.ndarray) -> list[str]:
    """Codewords of the library as text, '' where a symbol is unused."""
    codes = canonical_codes(lengths)
    return [
        format(int(code), f"0{int(length)}b") if length else ""
        for code, length in zip(codes, lengths, strict=True)
    ]


def random_weights(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """Draw int64 weights of very different shapes; every fifth symbol is unused."""
    if kind == "flat":
        weights = rng.integers(1_000, 1_100, size)
    elif kind == "steep":
        weights = (2.0 ** rng.uniform(0, 40, size)).astype(np.int64)
    elif kind == "geometric":
        weights = (1e9 * 0.7 ** np.arange(size)).astype(np.int64) + 1
    else:
        weights = rng.integers(1, 4, size)  # many equal weights
    weights[rng.random(size) < 0.2] = 0
    weights[: min(2, size)] += 1  # at least two are used
    return weights.astype(np.int64)


# Lengths


@pytest.mark.parametrize("kind", ["flat", "steep", "geometric", "equal"])
@pytest.mark.parametrize("size", [2, 3, 5, 11, 15, 63, 247])
@pytest.mark.parametrize("spare_bits", [0, 1, 3, 7])
def test_lengths_cost_as_little_as_those_of_package_merge(
    rng: np.random.Generator, kind: str, size: int, spare_bits: int
) -> None:
    weights = random_weights(rng, kind, size)
    limit = max(1, math.ceil(math.log2(np.count_nonzero(weights)))) + spare_bits
    lengths = code_lengths(weights, limit)
    best = naive.code_bits(weights, naive.package_merge(weights, limit))
    assert lengths.max() <= limit
    assert kraft_sum(lengths) == 1
    assert naive.code_bits(weights, lengths) == best


@given(
    weights=st.lists(st.integers(0, 2**40), min_size=2, max_size=40).filter(
        lambda weights: sum(w > 0 for w in weights) >= 2
    ),
    limit=st.integers(6, 15),
)
def test_lengths_cost_as_little_as_those_of_package_merge_for_any_weights(
    weights: list[int], limit: int
) -> None:
    lengths = code_lengths(as_weights(weights), limit)
    best = naive.code_bits(weights, naive.package_merge(weights, limit))
    assert naive.code_bits(weights, lengths) == best
    assert max(lengths) <= limit


@pytest.mark.parametrize("size", [2, 5, 11, 30])
def test_lengths_equal_huffman_when_the_limit_does_not_bind(
    rng: np.random.Generator, size: int
) -> None:
    weights = rng.integers(1, 100, size)
    lengths = code_lengths(weights, 15)
    assert naive.code_bits(weights, lengths) == naive.optimal_code_bits(weights)


def test_lengths_obey_the_limit_when_weights_are_fibonacci_numbers() -> None:
    # The worst case: without a limit the longest of 40 codes has 39 bits.
    weights = [1, 1]
    while len(weights) < 40:
        weights.append(weights[-1] + weights[-2])
    assert max(naive.huffman_lengths(weights)) == 39
    lengths = code_lengths(as_weights(weights))
    assert lengths.max() == 12
    assert kraft_sum(lengths) == 1
    assert naive.code_bits(weights, lengths) == naive.code_bits(
        weights, naive.package_merge(weights, 12)
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1], [1, 1]),
        ([1, 1_000_000], [1, 1]),
        ([1, 1, 2], [2, 2, 1]),
        ([1, 1, 1, 1], [2, 2, 2, 2]),
        ([8, 4, 2, 1, 1], [1, 2, 3, 4, 4]),
        ([5, 0, 5], [1, 0, 1]),
        ([0, 7, 0, 3, 2, 0], [0, 1, 0, 2, 2, 0]),
    ],
)
def test_lengths_of_small_alphabets(weights: list[int], expected: list[int]) -> None:
    lengths = code_lengths(as_weights(weights))
    assert lengths.dtype == np.uint8
    assert lengths.tolist() == expected


@pytest.mark.parametrize("weights", [[0, 0, 0], [0], []])
def test_lengths_are_all_zero_when_no_symbol_is_used(weights: list[int]) -> None:
    assert code_lengths(as_weights(weights)).tolist() == [0] * len(weights)


@pytest.mark.parametrize(("weights", "expected"), [([0, 0, 9, 0], [0, 0, 1, 0]), ([1], [1])])
def test_length_of_a_lone_symbol_is_one(weights: list[int], expected: list[int]) -> None:
    # It marks the symbol; in a payload such a table costs no code bits (test_codec.py).
    assert code_lengths(as_weights(weights)).tolist() == expected


@pytest.mark.parametrize("weights", [[1, -1], [[1, 2], [3, 4]]])
def test_lengths_of_what_are_no_counts_are_refused(weights: list[Any]) -> None:
    with pytest.raises(ValueError, match="weights must .*got"):
        code_lengths(as_weights(weights))


def test_lengths_are_refused_when_the_limit_leaves_too_few_codewords() -> None:
    with pytest.raises(ValueError, match="max_length must .*got 3"):
        code_lengths(np.ones(9, np.int64), max_length=3)


@pytest.mark.parametrize("size", [2, 11, 247, 255])
def test_lengths_leave_unused_symbols_without_a_code(rng: np.random.Generator, size: int) -> None:
    weights = random_weights(rng, "steep", size)
    assert np.array_equal(code_lengths(weights) == 0, weights == 0)


def test_lengths_never_grow_with_the_weight(rng: np.random.Generator) -> None:
    weights = rng.integers(0, 10_000, 100)
    lengths = code_lengths(weights)
    used = np.argsort(weights)[np.count_nonzero(weights == 0) :]
    heavier = weights[used[1:]] > weights[used[:-1]]
    assert np.all(np.diff(lengths[used].astype(int))[heavier] <= 0)


def test_lengths_hold_for_weights_near_the_end_of_int64() -> None:
    weights = as_weights([2**60, 2**60, 2**59, 1, 1])
    assert naive.code_bits(weights, code_lengths(weights)) == naive.optimal_code_bits(weights)


def test_lengths_leave_the_weights_alone() -> None:
    weights = as_weights([5, 3, 1, 0])
    weights.flags.writeable = False
    code_lengths(weights)
    assert weights.tolist() == [5, 3, 1, 0]


@pytest.mark.parametrize("kind", ["flat", "geometric", "equal"])
@pytest.mark.parametrize("size", [2, 3, 11, 63, 247])
def test_mean_length_is_within_one_bit_of_the_entropy(
    rng: np.random.Generator, kind: str, size: int
) -> None:
    weights = random_weights(rng, kind, size)
    mean_length = naive.code_bits(weights, code_lengths(weights, 15)) / weights.sum()
    entropy = naive.entropy_bits(weights) / weights.sum()
    # Shannon's bound; a limit of 15 bits adds less than a thousandth for these weights.
    assert entropy - 1e-9 <= mean_length < entropy + 1.001


# Kraft


def test_kraft_sum_counts_used_symbols_only() -> None:
    assert kraft_sum(np.array([1, 0, 2, 2, 0], np.uint8)) == 1
    assert kraft_sum(np.array([1, 0, 2], np.uint8)) == 0.75
    assert kraft_sum(np.array([1, 1, 1], np.uint8)) == 1.5
    assert kraft_sum(np.zeros(5, np.uint8)) == 0


@given(weights=st.lists(st.integers(1, 2**50), min_size=2, max_size=255))
def test_kraft_sum_of_optimal_lengths_is_exactly_one(weights: list[int]) -> None:
    lengths = code_lengths(as_weights(weights))
    assert naive.kraft_sum(lengths.tolist()) == 1
    assert kraft_sum(lengths) == 1


# Codewords


@pytest.mark.parametrize(
    ("lengths", "codes"),
    [
        ([1, 1], ["0", "1"]),
        ([2, 1, 2], ["10", "0", "11"]),
        ([2, 1, 3, 3], ["10", "0", "110", "111"]),  # RFC 1951, 3.2.2, its first example
        (
            [3, 3, 3, 3, 3, 2, 4, 4],
            ["010", "011", "100", "101", "110", "00", "1110", "1111"],
        ),  # second
        ([0, 2, 0, 1, 2], ["", "10", "", "0", "11"]),
        ([4, 3, 2, 1, 4], ["1110", "110", "10", "0", "1111"]),
        ([0, 0, 0], ["", "", ""]),
    ],
)
def test_codewords_of_small_alphabets(lengths: list[int], codes: list[str]) -> None:
    assert as_bit_strings(np.array(lengths, np.uint8)) == codes
    assert naive.canonical_codes(lengths) == codes


def test_codewords_of_e2m1_give_zero_the_shortest() -> None:
    # Counts of the 11 symbols of a Laplacian gradient at a coarse scale, roughly.
    counts = as_weights([1, 2, 4, 8, 16, 90, 17, 9, 5, 3, 1])
    lengths = code_lengths(counts)
    assert as_bit_strings(lengths)[5] == "0"
    assert naive.code_bits(counts, lengths) == naive.optimal_code_bits(counts)


@pytest.mark.parametrize("size", [2, 3, 11, 63, 247, 255])
def test_codewords_equal_the_naive_canonical_code(rng: np.random.Generator, size: int) -> None:
    lengths = code_lengths(random_weights(rng, "steep", size))
    assert as_bit_strings(lengths) == naive.canonical_codes(lengths.tolist())


@given(weights=st.lists(st.integers(0, 10**6), min_size=2, max_size=64))
def test_no_codeword_begins_another(weights: list[int]) -> None:
    words = sorted(word for word in as_bit_strings(code_lengths(as_weights(weights))) if word)
    assert not any(b.startswith(a) for a, b in zip(words, words[1:], strict=False))
