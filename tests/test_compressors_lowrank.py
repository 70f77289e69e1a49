"""PowerSGD: the iteration, what travels, what is kept."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from co3_flower.compressors import make_compressor
from co3_flower.compressors.lowrank import PowerSgd, iterate, multiply, orthonormalize
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.layout import Layout

EXACT = 1e-5  # of the largest entry: float32's rounding of P and Q, a few of each in a sum


def matrix_of_rank(rng: np.random.Generator, rank: int, shape: tuple[int, int]) -> np.ndarray:
    left, right = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    return (left @ right).astype(np.float32)


def naive_step(matrix: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and Q by NumPy's products and its QR, signs made those of Gram-Schmidt."""
    product = matrix.astype(np.float64) @ q.T
    p, r = np.linalg.qr(product)
    p = p * np.sign(np.diag(r))
    return p.T, (matrix.T.astype(np.float64) @ p).T


def test_step_is_the_naive_one(rng: np.random.Generator) -> None:
    matrix = rng.standard_normal((30, 53)).astype(np.float32)  # 53: more than three times 16 lanes
    q = rng.standard_normal((3, 53))
    p, new_q = iterate(matrix, q)
    naive_p, naive_q = naive_step(matrix, q)
    np.testing.assert_allclose(p, naive_p, atol=1e-6)
    np.testing.assert_allclose(new_q, naive_q, atol=1e-5)
    np.testing.assert_allclose(multiply(p, new_q), naive_p.T @ naive_q, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_rank_at_least_that_of_the_matrix_gives_it_back(
    rng: np.random.Generator, rank: int
) -> None:
    matrix = matrix_of_rank(rng, 2, (40, 30))
    update = {"w": matrix.reshape(40, 5, 6)}
    powersgd = PowerSgd(rank=rank)
    payload, _ = powersgd.encode(update, None, 0)
    decoded = powersgd.decode(payload, update, 0)["w"]
    np.testing.assert_allclose(decoded, update["w"], atol=EXACT * np.abs(matrix).max())


def test_warm_start_goes_to_the_best_approximation(rng: np.random.Generator) -> None:
    """As the singular value decomposition gives it, within 1 %; one step alone is far off."""
    values = np.diag(0.8 ** np.arange(30))
    left, _ = np.linalg.qr(rng.standard_normal((40, 30)))
    right, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    matrix = (left @ values @ right).astype(np.float32)
    best = np.sqrt((np.diag(values)[4:] ** 2).sum())
    q = rng.standard_normal((4, 30))
    errors = []
    for _ in range(30):
        p, new_q = iterate(matrix, q)
        q = new_q.astype(np.float64)
        errors.append(np.linalg.norm(matrix - multiply(p, new_q)))
    assert best < errors[-1] < 1.01 * best < 1.05 * best < errors[0]


def test_state_starts_the_next_round(rng: np.random.Generator) -> None:
    update = {"w": rng.standard_normal((20, 30)).astype(np.float32)}
    powersgd = PowerSgd(rank=2)
    _, state = powersgd.encode(update, None, 0)
    payload, after = powersgd.encode(update, state, 1)
    p, q = iterate(update["w"] + state["residual/w"], state["q/w"].astype(np.float64))
    np.testing.assert_array_equal(after["q/w"], q)
    assert payload[-4 - 4 * (p.size + q.size) : -4] == p.tobytes() + q.tobytes()


def test_vectors_and_small_matrices_travel_as_they_are(rng: np.random.Generator) -> None:
    shapes = {"bias": (500,), "gain": (), "thin": (2, 500), "empty": (0, 5), "wide": (20, 500)}
    update = {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    powersgd = PowerSgd(rank=2)
    payload, state = powersgd.encode(update, None, 0)
    decoded = powersgd.decode(payload, update, 0)
    for name in ("bias", "gain", "thin", "empty"):
        np.testing.assert_array_equal(decoded[name], update[name])
        assert not state[f"residual/{name}"].any()
    assert len(payload) == 36 + 4 * (500 + 1 + 1000 + 0 + 2 * (20 + 500))
    assert {key for key in state if key.startswith("q/")} == {"q/wide"}


def test_all_that_was_sent_and_the_residual_are_all_that_came(rng: np.random.Generator) -> None:
    """Within float32's rounding of ten sums."""
    total, sent, state = np.zeros((20, 30)), np.zeros((20, 30)), None
    for _ in range(10):
        update = {"w": rng.standard_normal((20, 30)).astype(np.float32)}
        payload, state = PowerSgd().encode(update, state, 0)
        total += update["w"]
        sent += PowerSgd().decode(payload, update, 0)["w"]
    np.testing.assert_allclose(sent + state["residual/w"], total, atol=1e-4)


def test_column_that_depends_on_others_is_zero_and_starts_anew(rng: np.random.Generator) -> None:
    flat, full = matrix_of_rank(rng, 1, (20, 30)), matrix_of_rank(rng, 2, (20, 30))
    powersgd = PowerSgd(rank=2)
    _, state = powersgd.encode({"w": flat}, None, 0)
    assert state["q/w"].any(axis=1).tolist() == [True, False]
    payload, _ = powersgd.encode({"w": full}, state, 0)
    decoded = powersgd.decode(payload, {"w": full}, 0)["w"]
    np.testing.assert_allclose(decoded, full, atol=EXACT * np.abs(full).max())


def test_zero_update_does_not_stop_later_ones(rng: np.random.Generator) -> None:
    powersgd, update = PowerSgd(), {"w": matrix_of_rank(rng, 2, (20, 30))}
    _, state = powersgd.encode({"w": np.zeros((20, 30), np.float32)}, None, 0)
    payload, _ = powersgd.encode(update, state, 0)
    assert payload == powersgd.encode(update, None, 0)[0]


def test_orthonormal_vectors_are_so_when_they_were_nearly_dependent(
    rng: np.random.Generator,
) -> None:
    base = rng.standard_normal(50)
    vectors = base + 1e-5 * rng.standard_normal((4, 50))
    result = orthonormalize(vectors)
    np.testing.assert_allclose(result @ result.T, np.eye(4), atol=1e-12)


def test_huge_entries_travel_without_a_warning() -> None:
    update = {"w": np.full((20, 30), np.finfo(np.float32).max)}
    payload, state = PowerSgd().encode(update, None, 0)
    assert (PowerSgd().decode(payload, update, 0)["w"] > 0).all()
    assert np.isfinite(state["residual/w"]).all()


@pytest.mark.parametrize(
    "body",
    [b"", bytes(4 * 99), bytes(4 * 101), struct.pack("<100f", *[np.nan] * 100)],
)
def test_hostile_body_is_refused(body: bytes) -> None:
    layout = Layout.of({"w": np.zeros((20, 30), np.float32)})  # 2 * (20 + 30) numbers
    with pytest.raises(PayloadError):
        PowerSgd().decompress(memoryview(body), layout, 0)


@pytest.mark.parametrize("rank", [0, -1, 1.5, "2", True])
def test_impossible_rank_is_named(rank: object) -> None:
    with pytest.raises(ConfigError, match="rank must be an integer"):
        make_compressor("powersgd", {"rank": rank})


@pytest.mark.parametrize("q", [np.ones((2, 30)), np.ones((1, 3)), np.full((1, 30), np.nan)])
def test_state_of_another_rank_or_matrix_is_refused(q: np.ndarray) -> None:
    update = {"w": np.ones((20, 30), np.float32)}
    with pytest.raises(ValueError, match=r"Q of the last round must be finite, \(1, 30\), got"):
        PowerSgd(rank=1).encode(update, {"q/w": q.astype(np.float32)}, 0)
