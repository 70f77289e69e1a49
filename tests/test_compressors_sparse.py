"""Top-k, SIDCo and sparse ternary: what they send, how positions are coded, what they keep."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from co3_flower.compressors import Compressor, make_compressor
from co3_flower.compressors.sparse import (
    Sidco,
    Sparse,
    Stc,
    TopK,
    decode_positions,
    encode_positions,
    largest_positions,
    num_kept,
)
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.layout import Layout

SPARSE = (TopK(ratio=0.05), Sidco(ratio=0.05), Stc(ratio=0.05))
LAYOUT = Layout.of({"w": np.zeros(40, np.float32)})


def naive_code(positions: list[int], parameter: int) -> str:
    """The bits of the gaps: quotient in zeros, a one, then the remainder."""
    bits = ""
    for previous, position in zip([-1, *positions], positions, strict=False):
        gap = position - previous - 1
        bits += "0" * (gap // 2**parameter) + "1"
        bits += f"{gap % 2**parameter:0{parameter}b}" if parameter else ""
    return bits


def packed(bits: str) -> bytes:
    """A string of bits as bytes, filled up with zeros."""
    padded = bits + "0" * (-len(bits) % 8)
    return bytes(int(padded[i : i + 8], 2) for i in range(0, len(padded), 8))


def naive_largest(vector: np.ndarray, count: int) -> list[int]:
    """Sorted by magnitude, then position."""
    order = sorted(range(vector.size), key=lambda i: (-abs(float(vector[i])), i))
    return sorted(order[:count])


def naive_threshold(vector: np.ndarray, ratio: float, first: float, stages: int) -> float:
    """Peaks over the threshold before, fitted stage by stage, in plain Python."""
    peaks = [abs(float(x)) for x in vector]
    ratios = [ratio]
    if stages > 1 and ratio < first:
        ratios = [first, *[(ratio / first) ** (1 / (stages - 1))] * (stages - 1)]
    threshold = 0.0
    for share in ratios:
        scale = sum(x - threshold for x in peaks) / len(peaks)
        threshold -= scale * np.log(share)
        peaks = [x for x in peaks if x > threshold]
    return threshold


def send(compressor: Compressor, update: dict, state: dict | None) -> tuple[dict, dict]:
    payload, state = compressor.encode(update, state, 0)
    return compressor.decode(payload, update, 0), state


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "parameter", "code"),
    [
        ([], 0, ""),
        ([0], 0, "1"),  # gap 0
        ([3], 1, "0 1 1"),  # gap 3: 4 bits at parameter 0, 3 at parameters 1 and 2
        ([2, 3, 9], 1, "0 1 0  1 0  0 0 1 1"),  # gaps 2, 0, 5: 9 bits; 10 at 0, 10 at 2
        ([7, 15, 23], 2, "0 1 11  0 1 11  0 1 11"),  # gaps 7: 4 bits each; 5 at 1, 4 at 3
    ],
)
def test_code_of_positions_is_the_hand_computed_one(
    positions: list[int], parameter: int, code: str
) -> None:
    expected = bytes([parameter]) + packed(code.replace(" ", ""))
    assert encode_positions(np.array(positions, np.int64)) == expected


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_code_of_positions_is_the_shortest_of_the_naive_ones(
    rng: np.random.Generator, share: float
) -> None:
    positions = np.flatnonzero(rng.random(5_000) < share)
    codes = [naive_code(positions.tolist(), parameter) for parameter in range(20)]
    best = min(range(20), key=lambda parameter: len(codes[parameter]))
    assert encode_positions(positions) == bytes([best]) + packed(codes[best])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
def test_positions_come_back(rng: np.random.Generator, share: float) -> None:
    positions = np.flatnonzero(rng.random(5_000) < share)
    code = memoryview(encode_positions(positions))
    np.testing.assert_array_equal(decode_positions(code, positions.size, 5_000), positions)


def test_positions_of_uniform_draws_take_their_entropy_and_a_little(
    rng: np.random.Generator,
) -> None:
    """Within 4 % of n times the binary entropy: Golomb codes are near optimal for such gaps."""
    n, share = 200_000, 0.01
    positions = np.flatnonzero(rng.random(n) < share)
    entropy_bits = -n * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert 8 * len(encode_positions(positions)) < 1.04 * entropy_bits


@pytest.mark.parametrize(
    ("code", "count", "num_entries"),
    [
        (b"", 0, 10),  # no parameter
        (b"\x20\xff\xff\xff\xff\xff\xff", 1, 10),  # parameter 32
        (b"\x00\x80", 10**6, 10**7),  # fewer bits than positions
        (b"\x00\x00\x00", 1, 100),  # a quotient that does not end
        (b"\x01\x80", 5, 100),  # not bits enough for the parameter
        (b"\x00\x01", 1, 7),  # position 7 of 7
        (b"\x1f\xff\xff\xff\xff", 1, 100),  # gap 2**31 - 1
        (b"\x1f" + bytes(5) + b"\x1f" + bytes(5), 1, 100),  # quotient 43 of divisor 2**31
        (b"\x00\x81", 1, 100),  # a bit after the last position
        (b"\x00\x80\x00", 1, 100),  # a byte after the last position
    ],
)
def test_hostile_code_of_positions_is_refused(code: bytes, count: int, num_entries: int) -> None:
    with pytest.raises(PayloadError):
        decode_positions(memoryview(code), count, num_entries)


@pytest.mark.parametrize("compressor", SPARSE, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<I", 41),  # more than the layout has
        struct.pack("<I", 2**32 - 1) + bytes(100),
        struct.pack("<I", 40),  # no values
        struct.pack("<If", 1, np.nan) + b"\x00\x80",
        struct.pack("<If", 1, np.inf) + b"\x00\x00\x80",
    ],
)
def test_hostile_body_is_refused(compressor: Sparse, body: bytes) -> None:
    with pytest.raises(PayloadError):
        compressor.decompress(memoryview(body), LAYOUT, 0)


def test_bits_after_the_last_sign_are_refused() -> None:
    good = struct.pack("<IfB", 1, 2.0, 0x80) + b"\x00\x80"
    assert Stc().decompress(memoryview(good), LAYOUT, 0)["w"][0] == -2.0
    with pytest.raises(PayloadError, match="after the last sign"):
        Stc().decompress(memoryview(good.replace(b"\x80\x00\x80", b"\xc0\x00\x80")), LAYOUT, 0)


# --- which entries --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 100, 300])
def test_largest_positions_are_the_naive_ones_with_ties(
    rng: np.random.Generator, count: int
) -> None:
    vector = rng.integers(-9, 10, 300).astype(np.float32)
    assert largest_positions(vector, count).tolist() == naive_largest(vector, count)


@pytest.mark.parametrize(
    ("ratio", "num_entries", "kept"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 1000, 10), (0.29, 100, 29), (1.0, 7, 7), (1e-9, 7, 1)],
)
def test_ratio_is_of_all_entries_and_at_least_one(
    ratio: float, num_entries: int, kept: int
) -> None:
    assert num_kept(ratio, num_entries) == kept


def test_topk_sends_the_largest_entries_of_all_tensors_together(small_update: dict) -> None:
    decoded, state = send(TopK(ratio=0.02), small_update, None)
    vector = np.concatenate([value.ravel() for value in small_update.values()])
    expected = np.zeros_like(vector)
    chosen = naive_largest(vector, round(0.02 * vector.size))
    expected[chosen] = vector[chosen]
    sent = np.concatenate([value.ravel() for value in decoded.values()])
    np.testing.assert_array_equal(sent, expected)
    left = np.concatenate([state[f"residual/{name}"].ravel() for name in small_update])
    np.testing.assert_array_equal(left, vector - expected)


def test_topk_payload_is_the_frame_the_values_and_the_positions(heavy_tail: np.ndarray) -> None:
    payload, _ = TopK(ratio=0.01).encode({"w": heavy_tail}, None, 0)
    code = encode_positions(largest_positions(heavy_tail, 50))
    assert len(payload) == 36 + 4 + 4 * 50 + len(code)
    assert len(code) * 8 / 50 < 9  # bits a position; 32 as an integer


def test_topk_of_everything_is_the_update(heavy_tail: np.ndarray) -> None:
    decoded, state = send(TopK(ratio=1.0), {"w": heavy_tail}, None)
    np.testing.assert_array_equal(decoded["w"], heavy_tail)
    assert not state["residual/w"].any()


def test_stc_sends_signs_and_the_mean_magnitude(heavy_tail: np.ndarray) -> None:
    decoded, state = send(Stc(ratio=0.02), {"w": heavy_tail}, None)
    chosen = naive_largest(heavy_tail, 100)
    mean = np.float32(sum(abs(float(heavy_tail[i])) for i in chosen) / 100)
    expected = np.zeros_like(heavy_tail)
    expected[chosen] = np.sign(heavy_tail[chosen]) * mean
    np.testing.assert_allclose(decoded["w"], expected, rtol=1e-7)
    np.testing.assert_array_equal(state["residual/w"], heavy_tail - decoded["w"])


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_sidco_threshold_is_the_naive_one(
    heavy_tail: np.ndarray, stages: int, ratio: float
) -> None:
    threshold = Sidco(ratio=ratio).threshold(np.abs(heavy_tail), stages)
    expected = naive_threshold(heavy_tail, ratio, 0.25, stages)
    assert threshold == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_sidco_meets_its_target_on_the_law_it_fits(rng: np.random.Generator, stages: int) -> None:
    """Five standard deviations of the count, and as much again for the fitted scale."""
    vector = rng.laplace(size=50_000).astype(np.float32)
    threshold = Sidco(ratio=0.02).threshold(np.abs(vector), stages)
    count = np.count_nonzero(np.abs(vector) > threshold)
    assert abs(count - 1_000) < 10 * np.sqrt(1_000)


def test_sidco_sends_what_lies_above_the_threshold(heavy_tail: np.ndarray) -> None:
    decoded, _ = send(Sidco(ratio=0.02), {"w": heavy_tail}, None)
    threshold = naive_threshold(heavy_tail, 0.02, 0.25, 1)
    np.testing.assert_array_equal(
        decoded["w"], np.where(np.abs(heavy_tail) > threshold, heavy_tail, 0)
    )


def test_sidco_adapts_its_stages_as_the_naive_rule_says(rng: np.random.Generator) -> None:
    """Uniform magnitudes: a single exponential law sets the threshold far too high."""
    sidco = Sidco(ratio=0.02, adaptation_rounds=3)
    update = {"w": rng.uniform(-1, 1, 2_000).astype(np.float32)}
    state: dict | None = None
    stages, sent, seen = 1, [], set()
    for _ in range(30):
        decoded, state = send(sidco, update, state)
        sent.append(np.count_nonzero(decoded["w"]))
        if len(sent) == 3:
            if sum(sent) / 3 > 1.2 * 0.02 * 2_000:
                stages -= 1
            elif sum(sent) / 3 < 0.8 * 0.02 * 2_000:
                stages += 1
            stages, sent = max(1, min(6, stages)), []
        assert state["adaptation"][0] == stages
        seen.add(stages)
    assert len(seen) > 1


def test_sidco_comes_near_its_target_with_error_feedback(rng: np.random.Generator) -> None:
    update_of = lambda: {"w": rng.standard_t(4, 20_000).astype(np.float32)}  # noqa: E731
    sidco, state, sent = Sidco(ratio=0.01), None, []
    for _ in range(60):
        decoded, state = send(sidco, update_of(), state)
        sent.append(np.count_nonzero(decoded["w"]))
    assert 0.5 < np.mean(sent[20:]) / 200 < 2.0


def test_sidco_sends_a_single_entry() -> None:
    update = {"w": np.float32([-3.0])}
    assert send(Sidco(), update, None)[0]["w"].tolist() == [-3.0]


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", SPARSE, ids=lambda c: c.name)
def test_all_that_was_sent_and_the_residual_are_all_that_came(
    compressor: Sparse, rng: np.random.Generator
) -> None:
    """Within float32's rounding of twelve sums."""
    total, sent, state = np.zeros(3_000), np.zeros(3_000), None
    for _ in range(12):
        update = {"w": rng.standard_t(3, 3_000).astype(np.float32)}
        decoded, state = send(compressor, update, state)
        total += update["w"]
        sent += decoded["w"]
    np.testing.assert_allclose(sent + state["residual/w"], total, atol=1e-4)
    assert np.abs(state["residual/w"]).max() > 0


@pytest.mark.parametrize("compressor", SPARSE, ids=lambda c: c.name)
def test_huge_entries_travel_without_a_warning(compressor: Sparse) -> None:
    update = {"w": np.full(10, np.finfo(np.float32).max)}
    decoded, _ = send(compressor, update, None)
    assert np.isfinite(decoded["w"]).all()
    assert decoded["w"].any()


@pytest.mark.parametrize("name", ["topk", "sidco", "stc"])
@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, np.nan, "0.1", True])
def test_impossible_ratio_is_named(name: str, ratio: object) -> None:
    with pytest.raises(ConfigError, match=r"ratio must be in \(0, 1\]"):
        make_compressor(name, {"ratio": ratio})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("first_ratio", 0), ("first_ratio", 1), ("adaptation_rounds", 0), ("tolerance", -1)],
)
def test_impossible_setting_of_sidco_is_named(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be"):
        Sidco(**{setting: value})
