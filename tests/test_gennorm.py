"""GenNorm: the fit against scipy's likelihood, degenerate tensors, the pmf against scipy's cdf."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import naive
from co3_flower.formats import FloatFormat
from co3_flower.gennorm import GenNorm, fit_gennorm, fit_laplace, fit_norm
from conftest import draw_gennorm

NATS = 1e-5  # DESIGN's limit: mean log-likelihood per non-zero entry, for 1,024 entries and more

DEGENERATE = [
    pytest.param(np.full(2_000, 0.37, np.float32), id="constant"),
    pytest.param(np.full(2_000, -1e-30, np.float32), id="constant-tiny"),
    pytest.param(np.zeros(2_000, np.float32), id="all-zero"),
    pytest.param(np.zeros(0, np.float32), id="empty"),
    pytest.param(np.array([1.5], np.float32), id="one-entry"),
    pytest.param(np.array(1.5, np.float32), id="0-d"),
    pytest.param(np.array([0.0, 0.0, 2.0], np.float32), id="one-entry-not-zero"),
    pytest.param(np.array([1, -1, 1, 1, -1] * 400, np.float32) / 3, id="two-valued"),
    pytest.param(np.array([1e-20, 1.0], np.float32), id="far-apart"),
    pytest.param(np.array([1e-38, 3.4e38] * 512, np.float32), id="all-of-float32"),
    pytest.param(np.full(2_000, 3.4e38, np.float32), id="largest"),
    pytest.param(np.full(2_000, 1e-45, np.float32), id="smallest-subnormal"),
    pytest.param(np.array([1e-40, -1e-41, 0] * 500, np.float32), id="subnormals"),
]


def log_likelihood_deficit(x: np.ndarray, fit: GenNorm) -> float:
    """Nats per non-zero entry that the fit lacks to the best fit with beta in its bounds."""
    best = naive.mean_log_likelihood(x, *naive.fit_gennorm(x))
    return best - naive.mean_log_likelihood(x, fit.alpha, fit.beta)


# Fit


@pytest.mark.parametrize("beta", [0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("size", [1_024, 20_000])
def test_fit_reaches_the_best_likelihood(rng: np.random.Generator, beta: float, size: int) -> None:
    x = draw_gennorm(rng, size, beta=beta, alpha=1e-4)
    assert log_likelihood_deficit(x, fit_gennorm(x)) <= NATS


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_fit_reaches_the_likelihood_of_scipy(rng: np.random.Generator, beta: float) -> None:
    x = draw_gennorm(rng, 2_048, beta=beta, alpha=3.0)
    theirs_beta, _, theirs_alpha = stats.gennorm.fit(x.astype(np.float64), floc=0)
    theirs = naive.mean_log_likelihood(x, theirs_alpha, theirs_beta)
    fit = fit_gennorm(x)
    assert naive.mean_log_likelihood(x, fit.alpha, fit.beta) >= theirs - NATS


@pytest.mark.parametrize("alpha", [1e-25, 1e-8, 0.37, 1.0, 1e4, 1e25])
def test_fit_reaches_the_best_likelihood_at_any_magnitude(
    rng: np.random.Generator, alpha: float
) -> None:
    x = draw_gennorm(rng, 5_000, beta=0.8, alpha=alpha)
    assert log_likelihood_deficit(x, fit_gennorm(x)) <= NATS


def test_fit_reaches_the_best_likelihood_on_a_real_gradient(
    small_real_gradient: dict[str, np.ndarray],
) -> None:
    large = {name: x.ravel() for name, x in small_real_gradient.items() if x.size >= 1_024}
    assert len(large) >= 5
    deficits = {name: log_likelihood_deficit(x, fit_gennorm(x)) for name, x in large.items()}
    assert max(deficits.values()) <= NATS, deficits


@pytest.mark.parametrize("beta", [0.2, 0.5, 1.0, 2.0])
def test_fit_finds_the_parameters_the_entries_were_drawn_with(
    rng: np.random.Generator, beta: float
) -> None:
    x = draw_gennorm(rng, 200_000, beta=beta, alpha=0.01)
    fit = fit_gennorm(x)
    # Four standard errors at 200,000 entries: below 0.6 % for beta, 2.5 % for alpha (at beta 0.2).
    assert fit.beta == pytest.approx(beta, rel=0.025)
    assert fit.alpha == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("beta", "bound"), [(0.05, naive.BETA_BOUNDS[0]), (200.0, naive.BETA_BOUNDS[1])]
)
def test_fit_stops_at_the_bounds_of_beta(
    rng: np.random.Generator, beta: float, bound: float
) -> None:
    # beta 0.05 spans more than float32 holds, so its draws are clipped; they stay far below 0.1.
    with np.errstate(over="ignore", under="ignore"):
        x = draw_gennorm(rng, 5_000, beta=beta, alpha=1e-20)
    x = np.clip(x, -1e30, 1e30)
    assert fit_gennorm(x).beta == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("zero_fraction", [0.0, 0.075, 0.23, 0.9])
def test_fit_counts_exact_zeros_apart(rng: np.random.Generator, zero_fraction: float) -> None:
    x = draw_gennorm(rng, 20_000, beta=1.2, zero_fraction=zero_fraction)
    fit = fit_gennorm(x)
    assert fit.zero_fraction == pytest.approx(np.mean(x == 0), abs=1e-12)
    assert log_likelihood_deficit(x, fit) <= NATS


def test_fit_is_the_same_with_and_without_zeros(rng: np.random.Generator) -> None:
    x = draw_gennorm(rng, 4_096, beta=0.6)
    with_zeros = np.concatenate([x, np.zeros(36_864, np.float32)])
    without, padded = fit_gennorm(x), fit_gennorm(with_zeros)
    assert (padded.alpha, padded.beta) == (without.alpha, without.beta)
    assert padded.zero_fraction == pytest.approx(0.9, abs=1e-12)


def test_fit_ignores_signs_order_and_shape(rng: np.random.Generator) -> None:
    x = draw_gennorm(rng, 6_000, beta=0.9, zero_fraction=0.1)
    shuffled = -np.abs(rng.permutation(x)).reshape(20, 300)
    assert fit_gennorm(shuffled) == fit_gennorm(x)


@pytest.mark.parametrize("x", DEGENERATE)
def test_fit_of_a_degenerate_tensor_is_finite_and_bounded(x: np.ndarray) -> None:
    fit = fit_gennorm(x)
    assert math.isfinite(fit.alpha)
    assert fit.alpha >= 0
    assert naive.BETA_BOUNDS[0] <= fit.beta <= naive.BETA_BOUNDS[1]
    assert 0 <= fit.zero_fraction <= 1


@pytest.mark.parametrize("x", DEGENERATE)
@pytest.mark.parametrize("fit", [fit_gennorm, fit_norm, fit_laplace])
def test_pmf_of_a_degenerate_tensor_is_a_distribution(x: np.ndarray, fit: object) -> None:
    fmt = FloatFormat.parse("e2m1")
    for scale in (1.0, 2.0**-120, 2.0**120):
        pmf = fit(x).pmf(fmt, np.float32(scale))  # type: ignore[operator]
        assert pmf.shape == (fmt.num_values,)
        assert np.all(pmf >= 0)
        assert pmf.sum() == pytest.approx(1, abs=1e-9)


def test_fit_of_zeros_is_the_atom_alone() -> None:
    assert fit_gennorm(np.zeros(100, np.float32)).zero_fraction == 1


def test_fit_of_a_constant_has_the_largest_beta() -> None:
    fit = fit_gennorm(np.full(2_000, 0.37, np.float32))
    assert fit.beta == pytest.approx(16)
    # The most likely alpha at beta 16 is (16 * 0.37**16) ** (1/16) = 0.37 * 2**(1/4); a cell of the
    # histogram may be off by half its width, 1/16.
    assert fit.alpha == pytest.approx(0.37 * 2**0.25, rel=1 / 16)


def test_fit_survives_one_outlier_of_1e8_sigma(rng: np.random.Generator) -> None:
    x = rng.standard_normal(4_096).astype(np.float32)
    x[17] = 1e8
    fit = fit_gennorm(x)
    assert naive.BETA_BOUNDS[0] <= fit.beta <= naive.BETA_BOUNDS[1]
    assert log_likelihood_deficit(x, fit) <= NATS


def test_fit_is_not_thrown_by_ninety_percent_zeros(rng: np.random.Generator) -> None:
    # A plain fit of such a tensor collapses: beta 0.07, alpha 1e-22.
    x = draw_gennorm(rng, 20_000, beta=2.0, alpha=1e-3, zero_fraction=0.9)
    fit = fit_gennorm(x)
    assert fit.beta == pytest.approx(2.0, rel=0.2)  # 2,000 entries: a standard error of 4 %
    assert fit.alpha == pytest.approx(1e-3, rel=0.2)


def test_fit_leaves_its_input_alone(heavy_tail: np.ndarray) -> None:
    before = heavy_tail.copy()
    heavy_tail.flags.writeable = False
    fit_gennorm(heavy_tail)
    assert np.array_equal(heavy_tail, before)


def test_fit_is_frozen(heavy_tail: np.ndarray) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit_gennorm(heavy_tail).beta = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("zero_fraction", [0.0, 0.3])
def test_norm_fit_has_beta_two_and_the_root_mean_square(
    rng: np.random.Generator, zero_fraction: float
) -> None:
    x = draw_gennorm(rng, 10_000, beta=0.8, alpha=1e-3, zero_fraction=zero_fraction)
    nonzero = x[x != 0].astype(np.float64)
    fit = fit_norm(x)
    assert fit.beta == 2
    assert fit.alpha == pytest.approx(math.sqrt(2 * np.mean(nonzero**2)), rel=0.002)
    assert fit.zero_fraction == pytest.approx(np.mean(x == 0), abs=1e-12)


@pytest.mark.parametrize("zero_fraction", [0.0, 0.3])
def test_laplace_fit_has_beta_one_and_the_mean_magnitude(
    rng: np.random.Generator, zero_fraction: float
) -> None:
    x = draw_gennorm(rng, 10_000, beta=0.8, alpha=1e-3, zero_fraction=zero_fraction)
    fit = fit_laplace(x)
    assert fit.beta == 1
    assert fit.alpha == pytest.approx(np.mean(np.abs(x[x != 0].astype(np.float64))), rel=0.002)
    assert fit.zero_fraction == pytest.approx(np.mean(x == 0), abs=1e-12)


# Law


@pytest.mark.parametrize("name", ["e2m1", "e2m1fn", "e1m2", "e2m0", "e4m3", "e5m2", "e7m0"])
@pytest.mark.parametrize("beta", [0.1, 0.4, 1.0, 2.0, 7.3, 16.0])
@pytest.mark.parametrize("zero_fraction", [0.0, 0.25])
def test_pmf_equals_the_differences_of_the_cdf_of_scipy(
    name: str, beta: float, zero_fraction: float
) -> None:
    alpha, scale = 0.02, np.float32(37.5)
    pmf = GenNorm(alpha, beta, zero_fraction).pmf(FloatFormat.parse(name), scale)
    assert pmf.dtype == np.float64
    expected = naive.gennorm_pmf(name, float(scale), alpha, beta, zero_fraction)
    # A probability off by 1e-9 changes a count of a billion entries by one.
    np.testing.assert_allclose(pmf, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0, 1e6])
def test_pmf_equals_the_differences_of_the_cdf_of_scipy_at_any_scale(scale: float) -> None:
    pmf = GenNorm(0.01, 0.7, 0.1).pmf(FloatFormat.parse("e2m1"), np.float32(scale))
    expected = naive.gennorm_pmf("e2m1", float(np.float32(scale)), 0.01, 0.7, 0.1)
    np.testing.assert_allclose(pmf, expected, rtol=1e-6, atol=1e-9)


@given(
    log_alpha=st.floats(-30, 30),
    beta=st.floats(*naive.BETA_BOUNDS),
    zero_fraction=st.floats(0, 1),
    log_scale=st.floats(-36, 36),
    name=st.sampled_from(naive.ALL_FORMATS),
)
def test_pmf_is_a_symmetric_distribution(
    log_alpha: float, beta: float, zero_fraction: float, log_scale: float, name: str
) -> None:
    fmt = FloatFormat.parse(name)
    pmf = GenNorm(10**log_alpha, beta, zero_fraction).pmf(fmt, np.float32(10**log_scale))
    assert np.all((pmf >= 0) & (pmf <= 1))
    assert pmf.sum() == pytest.approx(1, abs=1e-9)
    assert pmf[fmt.zero] >= zero_fraction - 1e-9
    np.testing.assert_allclose(pmf, pmf[::-1], rtol=1e-12)


def test_pmf_predicts_the_symbols_of_entries_drawn_from_the_law(rng: np.random.Generator) -> None:
    x = draw_gennorm(rng, 100_000, beta=0.8, alpha=0.1, zero_fraction=0.2)
    counts = np.bincount(naive.quantize(x, 5.0, "e2m1"), minlength=11)
    pmf = GenNorm(0.1, 0.8, 0.2).pmf(FloatFormat.parse("e2m1"), np.float32(5.0))
    # Five standard errors of a binomial of 100,000.
    np.testing.assert_allclose(counts / 1e5, pmf, atol=5 * math.sqrt(0.25 / 1e5))


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("zero_fraction", [0.0, 0.4])
def test_std_is_the_root_mean_square_of_the_law_with_its_atom(
    beta: float, zero_fraction: float
) -> None:
    expected = stats.gennorm.std(beta, scale=0.05) * math.sqrt(1 - zero_fraction)
    assert GenNorm(0.05, beta, zero_fraction).std == pytest.approx(expected, rel=1e-9)
