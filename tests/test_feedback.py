"""Feedback: the compensated update, one float32 rounding after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import naive
from co3_flower.feedback import compensate

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
PAIRS = hnp.array_shapes(max_dims=3).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float32, shape, elements=FLOATS),
        hnp.arrays(np.float32, shape, elements=FLOATS),
    )
)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_compensate_equals_the_naive_sum_bit_for_bit(
    rng: np.random.Generator, gamma: float
) -> None:
    update, residual = rng.standard_normal((2, 100_000)).astype(np.float32)
    compensated = compensate(update, residual, gamma)
    assert compensated.dtype == np.float32
    assert compensated.tobytes() == naive.compensate(update, residual, gamma).tobytes()


def test_compensate_rounds_the_product_before_it_adds(rng: np.random.Generator) -> None:
    # A fused multiply-add keeps the product's low bits; on these numbers that shows.
    update, residual = rng.standard_normal((2, 100_000)).astype(np.float32)
    exact = update.astype(np.float64) + np.float64(np.float32(0.9)) * residual.astype(np.float64)
    fused = exact.astype(np.float32)
    expected = naive.compensate(update, residual, 0.9)
    assert np.count_nonzero(fused != expected) > 1_000
    assert np.array_equal(compensate(update, residual, 0.9), expected)


def test_compensate_rounds_gamma_to_float32_first() -> None:
    # 0.1 is far from a float32; over many residuals the two products differ in places.
    residual = np.arange(1, 50_001, dtype=np.float32)
    zero = np.zeros_like(residual)
    in_double = (0.1 * residual.astype(np.float64)).astype(np.float32)
    expected = np.float32(0.1) * residual
    assert np.any(in_double != expected)
    assert np.array_equal(compensate(zero, residual, 0.1), expected)


def test_compensate_without_a_residual_gives_the_update() -> None:
    update = np.array([[1.5, -0.0], [3e38, 1e-45]], np.float32)
    assert compensate(update, None, 0.9).tobytes() == update.tobytes()


def test_compensate_with_gamma_zero_forgets_the_residual() -> None:
    update, residual = np.array([1.0, -2.0], np.float32), np.array([5.0, 7.0], np.float32)
    assert compensate(update, residual, 0.0).tolist() == [1.0, -2.0]


def test_compensate_with_gamma_one_adds_the_residual() -> None:
    update, residual = np.array([1.0, -2.0], np.float32), np.array([5.0, 7.0], np.float32)
    assert compensate(update, residual, 1.0).tolist() == [6.0, 5.0]


def test_compensate_leaves_its_inputs_alone(rng: np.random.Generator) -> None:
    update, residual = rng.standard_normal((2, 1_000)).astype(np.float32)
    before = update.copy(), residual.copy()
    update.flags.writeable = residual.flags.writeable = False
    compensate(update, residual, 0.9)
    assert np.array_equal(update, before[0])
    assert np.array_equal(residual, before[1])


def test_compensate_never_returns_memory_of_its_inputs() -> None:
    update, residual = np.ones(10, np.float32), np.ones(10, np.float32)
    compensated = compensate(update, residual, 0.9)
    assert not np.shares_memory(compensated, update)
    assert not np.shares_memory(compensated, residual)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (4, 3, 2)])
def test_compensate_keeps_the_shape(shape: tuple[int, ...]) -> None:
    ones = np.ones(shape, np.float32)
    assert compensate(ones, ones, 0.5).shape == shape
    assert compensate(ones, None, 0.5).shape == shape


@given(pair=PAIRS, gamma=st.floats(0, 1))
def test_compensate_equals_the_naive_sum_for_any_arrays(
    pair: tuple[np.ndarray, np.ndarray], gamma: float
) -> None:
    update, residual = pair
    expected = naive.compensate(update, residual, gamma)
    assert compensate(update, residual, gamma).tobytes() == expected.tobytes()
