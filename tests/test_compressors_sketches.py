"""FetchSGD's count sketch: linear, recovered by the server, stable."""

from __future__ import annotations

import numpy as np
import pytest

from co3_flower.compressors import make_compressor
from co3_flower.compressors.sketches import CountSketch
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.layout import Layout

MASK = 2**64 - 1


def naive_cell(key: int, position: int, columns: int) -> tuple[int, int]:
    """Column and sign of an entry, in Python's integers."""
    x = (key + position * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return (x >> 32) * columns >> 32, -1 if x & 1 else 1


def naive_cells(compressor: CountSketch, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns and signs, int [rows, n]."""
    columns = compressor.table_shape(n)[1]
    cells = [[naive_cell(int(key), j, columns) for j in range(n)] for key in compressor.row_keys()]
    return np.array(cells)[..., 0], np.array(cells)[..., 1]


def naive_sketch(compressor: CountSketch, vector: np.ndarray) -> np.ndarray:
    columns, signs = naive_cells(compressor, vector.size)
    table = np.zeros(compressor.table_shape(vector.size))
    for row in range(len(table)):
        np.add.at(table[row], columns[row], signs[row] * vector.astype(np.float64))
    return table.astype(np.float32)


def naive_estimate(compressor: CountSketch, table: np.ndarray, n: int) -> np.ndarray:
    columns, signs = naive_cells(compressor, n)
    votes = signs * np.take_along_axis(table.astype(np.float64), columns, axis=1)
    return np.median(votes, axis=0).astype(np.float32)


def whole_numbers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Entries whose sums are exact in float32."""
    return rng.integers(-1000, 1001, n).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_table_and_estimates_are_the_naive_ones(rng: np.random.Generator, rows: int) -> None:
    compressor = CountSketch(rows=rows, columns=0.1, hash_seed=7)
    vector = rng.standard_t(3, 1_000).astype(np.float32)
    table = compressor.sketch(vector)
    assert table.shape == (rows, 100)
    np.testing.assert_array_equal(table, naive_sketch(compressor, vector))
    np.testing.assert_array_equal(
        compressor.estimate(table, 1_000), naive_estimate(compressor, table, 1_000)
    )


def test_sketch_of_a_sum_is_the_sum_of_sketches(rng: np.random.Generator) -> None:
    compressor = CountSketch()
    a, b = whole_numbers(rng, 2_000), whole_numbers(rng, 2_000)
    np.testing.assert_array_equal(
        compressor.sketch(a + b), compressor.sketch(a) + compressor.sketch(b)
    )


def test_body_is_the_table_and_decodes_to_it(rng: np.random.Generator) -> None:
    update = {"w": whole_numbers(rng, 900).reshape(30, 30), "b": whole_numbers(rng, 100)}
    payload, state = CountSketch(columns=0.05).encode(update, None, 5)
    decoded = CountSketch(columns=0.05).decode(payload, update, 6)  # the same hashes in all rounds
    table = naive_sketch(
        CountSketch(columns=0.05), np.concatenate([update["w"].ravel(), update["b"]])
    )
    assert state == {}
    assert list(decoded) == ["sketch/"]
    np.testing.assert_array_equal(decoded["sketch/"], table)
    assert len(payload) == 36 + 4 * 5 * 50


def test_rows_and_columns_are_hit_evenly() -> None:
    """Chi-square of 100 columns over 20,000 entries: less than five deviations above its mean."""
    columns, signs = naive_cells(CountSketch(columns=0.005), 20_000)
    for row, sign in zip(columns, signs, strict=True):
        counts = np.bincount(row, minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(2 * 99)
        assert abs(sign.sum()) < 5 * np.sqrt(20_000)
    together = np.bincount(columns[0] * 100 + columns[1], minlength=10_000)
    assert ((together - 2) ** 2 / 2).sum() < 9_999 + 5 * np.sqrt(2 * 9_999)


def test_other_hash_seed_gives_another_table(rng: np.random.Generator) -> None:
    vector = whole_numbers(rng, 1_000)
    assert (CountSketch().sketch(vector) != CountSketch(hash_seed=1).sketch(vector)).any()


def test_heavy_hitters_are_recovered(rng: np.random.Generator) -> None:
    """Twenty entries far above the noise and a hundred columns for each: all and only these."""
    vector = rng.standard_normal(10_000).astype(np.float32)
    heavy = rng.choice(10_000, 20, replace=False)
    vector[heavy] += 1_000
    compressor = CountSketch(columns=0.2, k=0.002)
    layout = Layout.of({"w": vector})
    update, _ = compressor.finish({"sketch/": compressor.sketch(vector)}, {}, layout)
    assert sorted(np.flatnonzero(update["w"])) == sorted(heavy)
    np.testing.assert_allclose(update["w"][heavy], 1_000, atol=20)  # five others in a cell


@pytest.mark.parametrize("masking", [False, True])
def test_finish_is_the_naive_server(rng: np.random.Generator, masking: bool) -> None:
    compressor = CountSketch(columns=0.1, k=0.02, momentum=0.5, masking=masking)
    momentum, error, state = np.zeros((5, 50)), np.zeros((5, 50)), {}
    layout = Layout.of({"a": np.zeros((10, 30), np.float32), "b": np.zeros(200, np.float32)})
    for _ in range(3):
        table = compressor.sketch(64 * whole_numbers(rng, 500))  # halves stay exact
        kept = {key: value.copy() for key, value in state.items()}
        update, new_state = compressor.finish({"sketch/": table}, state, layout)
        for key, value in kept.items():
            np.testing.assert_array_equal(state[key], value)
        state = new_state
        momentum = 0.5 * momentum + table
        error = error + momentum
        estimates = naive_estimate(compressor, error, 500)
        order = sorted(range(500), key=lambda j: (-abs(estimates[j]), j))[:10]
        expected = np.zeros(500, np.float32)
        expected[order] = estimates[order]
        taken = naive_sketch(compressor, expected)
        if masking:
            momentum[taken != 0], error[taken != 0] = 0, 0
        else:
            error = error - taken
        assert update["a"].shape == (10, 30)
        flat = np.concatenate([update["a"].ravel(), update["b"]])
        np.testing.assert_array_equal(flat, expected)
        np.testing.assert_array_equal(state["momentum"], momentum)
        np.testing.assert_array_equal(state["error"], error)


def test_all_that_was_recovered_and_the_error_are_all_that_came(rng: np.random.Generator) -> None:
    """Without momentum and masking, in sketch space: an identity, rounding apart."""
    compressor = CountSketch(columns=0.2, k=0.002, momentum=0.0, masking=False)
    layout, state = Layout.of({"w": np.zeros(1_000, np.float32)}), {}
    total, recovered = np.zeros(1_000, np.float32), np.zeros(1_000, np.float32)
    for _ in range(8):
        vector = whole_numbers(rng, 1_000)
        update, state = compressor.finish({"sketch/": compressor.sketch(vector)}, state, layout)
        total += vector
        recovered += update["w"]
    np.testing.assert_allclose(
        compressor.sketch(recovered) + state["error"], compressor.sketch(total), atol=0.1
    )


def test_masked_error_stays_bounded_where_the_subtracted_one_grows(
    rng: np.random.Generator,
) -> None:
    """Noise of 30 rounds, recovering half as many entries as there are columns."""
    layout = Layout.of({"w": np.zeros(4_000, np.float32)})
    sizes = {}
    for masking in (False, True):
        compressor, state = CountSketch(columns=0.04, k=0.02, momentum=0, masking=masking), {}
        for _ in range(30):
            table = compressor.sketch(rng.standard_normal(4_000).astype(np.float32))
            _, state = compressor.finish({"sketch/": table}, state, layout)
        sizes[masking] = np.linalg.norm(state["error"]) / np.linalg.norm(table)
    assert sizes[True] < 10
    assert sizes[False] > 1_000


def test_finish_of_clients_goes_the_way_of_their_mean(rng: np.random.Generator) -> None:
    """Over rounds, what a fixed mean update leaves at the server points along it."""
    base = rng.standard_t(3, 4_000)
    compressor, state, sent = CountSketch(columns=0.2, k=0.01), {}, np.zeros(4_000)
    layout = Layout.of({"w": np.zeros(4_000, np.float32)})
    for _ in range(40):
        clients = [(base + rng.standard_normal(4_000)).astype(np.float32) for _ in range(4)]
        mean = sum(compressor.sketch(client) for client in clients) / np.float32(4)
        update, state = compressor.finish({"sketch/": mean}, state, layout)
        sent += update["w"]
    assert sent @ base / np.linalg.norm(sent) / np.linalg.norm(base) > 0.6


@pytest.mark.parametrize("size", [0, 4 * 9, 4 * 11])
def test_body_of_another_size_is_refused(size: int) -> None:
    layout = Layout.of({"w": np.zeros(100, np.float32)})  # a table of 5 * 2
    with pytest.raises(PayloadError):
        CountSketch().decompress(memoryview(bytes(size)), layout, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_table_that_is_not_finite_is_refused(bad: float) -> None:
    layout = Layout.of({"w": np.zeros(100, np.float32)})
    body = np.full(10, bad, np.float32).tobytes()
    with pytest.raises(PayloadError, match="sketch must be finite"):
        CountSketch().decompress(memoryview(body), layout, 0)


def test_huge_entries_travel_without_a_warning() -> None:
    update = {"w": np.full(200, np.finfo(np.float32).max)}
    payload, _ = CountSketch().encode(update, None, 0)
    assert np.isfinite(CountSketch().decode(payload, update, 0)["sketch/"]).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rows", 0),
        ("rows", 2.5),
        ("columns", 0),
        ("columns", 1.5),
        ("k", 0),
        ("k", np.nan),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("masking", 1),
        ("hash_seed", -1),
    ],
)
def test_impossible_setting_is_named(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be"):
        make_compressor("countsketch", {setting: value})
