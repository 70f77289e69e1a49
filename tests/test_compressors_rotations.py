"""EDEN and FO-SGD's one bit against slow twins and their papers' laws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg, stats

from co3_flower.compressors import kernels_levels as kernels
from co3_flower.compressors.interface import Compressor, generator
from co3_flower.compressors.rotations import Eden, OneBit, Rotation, normal_levels
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.layout import Layout
from conftest import draw_gennorm

# Mean squared error of Max's quantizers of a standard normal entry (Max, 1960, table 1).
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def body_of(compressor: Compressor, x: np.ndarray, seed: int = 0) -> bytes:
    return compressor.compress({"w": x}, {}, seed)[0]


def decode_body(compressor: Compressor, body: bytes, x: np.ndarray, seed: int = 0) -> np.ndarray:
    return compressor.decompress(memoryview(body), Layout.of({"w": x}), seed)["w"]


def roundtrip(compressor: Compressor, x: np.ndarray, seed: int = 0) -> np.ndarray:
    return decode_body(compressor, body_of(compressor, x, seed), x, seed)


def turning_matrix(size: int, seed: int) -> np.ndarray:
    """The orthogonal matrix of one block: Hadamard's after signs on the diagonal."""
    bits = np.unpackbits(np.frombuffer(generator(seed).bytes(-(-size // 8)), np.uint8), count=size)
    return linalg.hadamard(size) @ np.diag(1.0 - 2.0 * bits) / np.sqrt(size)


def test_hadamard_is_sylvesters_matrix_block_by_block(rng: np.random.Generator) -> None:
    sizes = np.array([8, 32, 1, 2], np.int64)
    vector = rng.integers(-9, 9, 43).astype(np.float32)
    expected = linalg.block_diag(*(linalg.hadamard(size) for size in sizes)) @ vector
    kernels.hadamard(vector, sizes)
    np.testing.assert_array_equal(vector, expected)  # small integers: exact


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, []),
        (1, [1]),
        (3, [4]),
        (1023, [1024]),
        (1024, [1024]),
        (1025, [1024, 1]),
        (10_000, [4096, 4096, 1024, 1024]),  # 784 fill up the last
        (7_000, [4096, 2048, 1024]),  # 856 fill up the last
        (8192 + 3, [4096, 4096, 4]),
    ],
)
def test_blocks_are_powers_of_two_and_only_the_last_is_filled_up(
    size: int, expected: list[int]
) -> None:
    assert Eden(block=4096).blocks(size).tolist() == expected


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_normal_levels_meet_lloyds_conditions(bits: int) -> None:
    levels = normal_levels(bits).astype(np.float64)
    assert levels.size == 2**bits
    ends = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    centres = -np.diff(stats.norm.pdf(ends)) / np.diff(stats.norm.cdf(ends))
    np.testing.assert_allclose(levels, centres, rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [256, 200])
def test_eden_decodes_to_what_its_twin_makes(
    rng: np.random.Generator, bits: int, size: int
) -> None:
    """R^-1(S Q), S = |x|^2 / <R(x), Q>, by the matrix; R(x) sqrt(d) / |x| goes to its nearest."""
    x = draw_gennorm(rng, size, beta=0.7)
    padded = np.zeros(256)
    padded[:size] = x
    matrix = turning_matrix(256, 9)
    turned = matrix @ padded
    shares = turned * np.sqrt(256) / np.linalg.norm(padded)
    levels = normal_levels(bits).astype(np.float64)
    nearest = levels[np.abs(shares[:, np.newaxis] - levels).argmin(axis=1)]
    scale = (padded @ padded) / (turned @ nearest)
    expected = (matrix.T @ (scale * nearest))[:size]
    np.testing.assert_allclose(
        roundtrip(Eden(bits=bits), x, 9), expected, atol=2e-6 * np.abs(expected).max()
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_keeps_the_inner_product_with_the_update(rng: np.random.Generator, bits: int) -> None:
    """What the scale is for: <x, decoded> = |x|^2 in every round, on blocks that are not padded."""
    x = draw_gennorm(rng, 1024 + 2048, beta=0.7)
    decoded = roundtrip(Eden(bits=bits), x, 4)
    for block in (slice(0, 2048), slice(2048, None)):
        product = decoded[block].astype(np.float64) @ x[block]
        assert product == pytest.approx(x[block].astype(np.float64) @ x[block], rel=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_errs_as_a_normal_law_has_it(rng: np.random.Generator, bits: int) -> None:
    """|x - decoded|^2 / |x|^2 = 1 / (1 - D) - 1, of any long vector."""
    x = draw_gennorm(rng, 2**15, beta=0.5)
    error = ((roundtrip(Eden(bits=bits), x) - x) ** 2).sum() / (x**2).sum()
    assert error == pytest.approx(1 / (1 - DISTORTION[bits]) - 1, rel=0.05)


def naive_onebit(x: np.ndarray, seed: int, dither: float) -> np.ndarray:
    rng = generator(seed)
    matrix = turning_matrix(x.size, seed)
    rng.bytes(-(-x.size // 8))
    turned = matrix @ x.astype(np.float64)
    limit = dither * np.sqrt((turned**2).mean()) if dither else np.abs(turned).max()
    noise = (2 * rng.random(x.size, np.float32) - 1) * limit
    return matrix.T @ np.where(turned > noise, limit, -limit)


@pytest.mark.parametrize("dither", [0.0, 1.5])
def test_onebit_decodes_to_what_its_twin_makes(rng: np.random.Generator, dither: float) -> None:
    x = draw_gennorm(rng, 512, beta=0.7)
    expected = naive_onebit(x, 11, dither)
    np.testing.assert_allclose(
        roundtrip(OneBit(dither=dither), x, 11), expected, atol=2e-6 * np.abs(expected).max()
    )


def mean_and_variance(compressor: Compressor, x: np.ndarray, trials: int) -> tuple[float, float]:
    """Squared distance of the mean over seeds from x, and the variance of that mean."""
    decoded = np.stack([roundtrip(compressor, x, seed) for seed in range(trials)])
    distance = ((decoded.mean(axis=0) - x) ** 2).sum()
    return float(distance), float(decoded.var(axis=0, ddof=1).sum() / trials)


def test_onebit_gives_back_a_single_large_entry() -> None:
    """Sparse updates are what flattening is for: turned, this one is plus or minus its norm."""
    x = np.zeros(256, np.float32)
    x[17] = 3.0
    np.testing.assert_allclose(roundtrip(OneBit(), x), x, atol=1e-6)


def test_onebit_with_less_noise_varies_less_and_is_biased(rng: np.random.Generator) -> None:
    x = rng.standard_normal(256).astype(np.float32)
    _, whole = mean_and_variance(OneBit(), x, 300)
    distance, less = mean_and_variance(OneBit(dither=1.0), x, 300)
    assert less < whole / 4
    assert distance > 2 * less


def test_seed_of_another_round_decodes_to_something_else(rng: np.random.Generator) -> None:
    x = rng.standard_normal(1024).astype(np.float32)
    decoded = decode_body(Eden(bits=4), body_of(Eden(bits=4), x, 1), x, 2)
    assert abs(decoded @ x) < 0.2 * (x @ x)


@pytest.mark.parametrize("compressor", [Eden(bits=3), OneBit()], ids=lambda c: c.name)
def test_body_has_a_scale_a_block_and_codes_of_fixed_width(compressor: Rotation) -> None:
    body = body_of(compressor, np.ones(5000, np.float32))  # blocks 4096 and 904 in 1024
    assert len(body) == 2 * 4 + 5120 // 8 * getattr(compressor, "bits", 1)


@pytest.mark.parametrize("compressor", [Eden(), OneBit()], ids=lambda c: c.name)
def test_bodies_of_another_size_or_scale_are_refused(compressor: Rotation) -> None:
    x = np.ones(3000, np.float32)
    body = body_of(compressor, x)
    infinite = np.float32(np.inf).tobytes() + body[4:]
    for wrong in (b"", body[:3], body[:-1], body + b"\0", infinite):
        with pytest.raises(PayloadError):
            decode_body(compressor, wrong, x)


@pytest.mark.parametrize("compressor", [Eden(), OneBit()], ids=lambda c: c.name)
@pytest.mark.parametrize("value", [np.finfo(np.float32).max, 1e-45])
def test_extreme_entries_are_coded_to_finite_ones(compressor: Rotation, value: float) -> None:
    x = np.full(2048 + 1, value, np.float32)
    decoded = roundtrip(compressor, x)
    assert np.isfinite(decoded).all()
    assert decoded.any()


@pytest.mark.parametrize("compressor", [Eden(), OneBit()], ids=lambda c: c.name)
def test_largest_scales_decode_to_finite_entries(compressor: Rotation) -> None:
    x = np.ones(1024, np.float32)
    scale = np.float32(np.finfo(np.float32).max).tobytes()
    assert np.isfinite(decode_body(compressor, scale + body_of(compressor, x)[4:], x)).all()


@pytest.mark.parametrize(
    ("make", "setting", "value"),
    [
        (Eden, "bits", 0),
        (Eden, "bits", 5),
        (Eden, "block", 512),
        (Eden, "block", 3000),
        (OneBit, "block", 2**25),
        (OneBit, "dither", -0.5),
        (OneBit, "dither", 1000001),
    ],
)
def test_impossible_setting_is_named(make: type[Rotation], setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} must be .*, got {value}"):
        make(**{setting: value})
