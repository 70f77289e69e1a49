"""The papers' measures: fast against naive, the definitions, and the identities between sizes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import naive_analysis as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from co3_flower import CodecConfig, ConfigError, FloatFormat, GenNorm, encode_update, fit_gennorm
from co3_flower import analysis as sizes_module
from co3_flower.analysis import (
    CODERS,
    available_coders,
    fit_tensor,
    measure_group,
    measure_tensor,
)
from co3_flower.analysis_report import analyze, choose_groups, to_json
from co3_flower.analysis_tables import make_tables
from co3_flower.goodness import divergence_bits, law_kurtosis, sample_kurtosis, w2_distance
from co3_flower.lz78 import (
    Phrases,
    bit_codes,
    expand_lz78,
    lz78_bit_string_bits,
    lz78_bits,
    parse_lz78,
)
from conftest import REPOSITORY, draw_gennorm

PAPERS_FORMATS = ("e2m1", "e5m2", "e1m2", "e3m2")
sequences = st.integers(1, 255).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k - 1), max_size=400))
)


# --- LZ78 -----------------------------------------------------------------------------------------


@given(sequences)
def test_lz78_phrases_are_those_of_the_naive_parser(case: tuple[int, list[int]]) -> None:
    phrases = parse_lz78(np.array(case[1], np.uint8))
    pairs = list(zip(phrases.parents.tolist(), phrases.symbols.tolist(), strict=True))
    assert pairs == naive.lz78_phrases(case[1])


@given(sequences)
def test_lz78_round_trip_gives_the_sequence_back(case: tuple[int, list[int]]) -> None:
    assert expand_lz78(parse_lz78(np.array(case[1], np.uint8))).tolist() == case[1]


@given(sequences)
def test_lz78_code_length_is_that_of_bits_that_can_be_read_back(
    case: tuple[int, list[int]],
) -> None:
    num_values = max(2, case[0])
    phrases = naive.lz78_phrases(case[1])
    text = naive.lz78_write(phrases, num_values)
    assert lz78_bits(len(phrases), num_values) == len(text)
    assert naive.lz78_expand(naive.lz78_read(text, num_values)) == case[1]


@pytest.mark.parametrize("num_phrases", [0, 1, 2, 3, 4, 5, 8, 9, 1000])
@pytest.mark.parametrize("num_values", [1, 2, 3, 11, 16, 247])
def test_lz78_bits_are_the_sum_of_the_formula(num_phrases: int, num_values: int) -> None:
    widths = [math.ceil(math.log2(j)) for j in range(1, num_phrases + 1)]
    assert lz78_bits(num_phrases, num_values) == sum(widths) + num_phrases * math.ceil(
        math.log2(num_values)
    )


def test_lz78_round_trip_survives_growth_of_the_dictionary(rng: np.random.Generator) -> None:
    sequence = rng.choice(247, 300_000).astype(np.uint8)
    phrases = parse_lz78(sequence)
    assert len(phrases) > 2**16
    np.testing.assert_array_equal(expand_lz78(phrases), sequence)


def test_lz78_of_one_symbol_repeated_has_phrases_of_growing_length() -> None:
    assert len(parse_lz78(np.zeros(5_050, np.uint8))) == 100  # 1 + 2 + ... + 100


def test_lz78_approaches_the_entropy_from_above(rng: np.random.Generator) -> None:
    p = np.array([0.7, 0.1, 0.1, 0.1])
    entropy = float(-(p * np.log2(p)).sum())
    costs = [
        lz78_bits(len(parse_lz78(rng.choice(4, n, p=p).astype(np.uint8))), 4) / n
        for n in (10_000, 1_000_000)
    ]
    assert costs[0] > costs[1] > entropy


def test_lz78_refuses_phrases_that_extend_later_ones() -> None:
    with pytest.raises(ValueError, match="phrases must extend earlier ones, got 2 in phrase 2"):
        expand_lz78(Phrases(np.array([0, 2], np.uint32), np.array([1, 1], np.uint8)))


@given(st.lists(st.integers(0, 10), max_size=200))
def test_bit_string_variant_counts_the_phrases_of_8_bit_codes(symbols: list[int]) -> None:
    fmt = FloatFormat.parse("e2m1")
    bits = [int(bit) for s in symbols for bit in f"{bit_codes(fmt)[s]:08b}"]
    count = len(naive.lz78_phrases(bits))
    expected = count * (math.floor(math.log2(count)) + 2) if count else 0
    assert lz78_bit_string_bits(np.array(symbols, np.uint8), fmt) == expected


@pytest.mark.parametrize("name", ["e5m2", "e4m3"])
def test_bit_codes_are_the_formats_own_bit_patterns(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fmt = FloatFormat.parse(name)
    dtype = {"e5m2": ml_dtypes.float8_e5m2, "e4m3": ml_dtypes.float8_e4m3}[name]
    np.testing.assert_array_equal(fmt.values.astype(dtype).view(np.uint8), bit_codes(fmt))


def test_analysis_without_the_jit_gives_the_same() -> None:
    program = (
        "import numpy as np\n"
        "from co3_flower.lz78 import *\n"
        "from co3_flower.goodness import *\n"
        "x = np.random.default_rng(0).laplace(size=600).astype(np.float32)\n"
        "s = (np.arange(2500) ** 2 % 9).astype(np.uint8)\n"
        "fmt = FloatFormat.parse('e2m1')\n"
        "print(len(parse_lz78(s)), (expand_lz78(parse_lz78(s)) == s).all(),"
        " lz78_bit_string_bits(s, fmt), w2_distance(x, GenNorm(1.0, 1.0)), sample_kurtosis(x))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            cwd=REPOSITORY,
            env={**os.environ, "NUMBA_DISABLE_JIT": flag},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for flag in ("0", "1")
    ]
    assert outputs[0][:3] == outputs[1][:3]
    assert outputs[0][1] == "True"
    # sums in another order: compiled loops may use vector registers
    assert np.allclose(*[[float(v) for v in out[3:]] for out in outputs], rtol=1e-12)


# --- W2, divergence, kurtosis ---------------------------------------------------------------------

LAWS = [
    GenNorm(1.0, 2.0),
    GenNorm(0.8, 1.0),
    GenNorm(0.02, 0.4, 0.3),
    GenNorm(1.3, 1.4, 0.9),
    GenNorm(1.7, 8.0, 0.05),
    GenNorm(1e-4, 0.2, 0.1),
    GenNorm(1e-12, 0.1),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 40])
def test_w2_is_the_integral_over_scipys_quantiles(
    law: GenNorm, size: int, rng: np.random.Generator
) -> None:
    x = draw_gennorm(rng, size, beta=1.2, zero_fraction=0.2 if size > 2 else 0.0)
    expected = naive.w2_distance(x, law.alpha, law.beta, law.zero_fraction)
    assert w2_distance(x, law) == pytest.approx(expected, rel=1e-6)  # the twin's quadrature


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, 16.0])
@pytest.mark.parametrize("zero_fraction", [0.0, 0.4])
def test_w2_vanishes_for_a_sample_of_the_laws_own_quantiles(
    beta: float, zero_fraction: float
) -> None:
    n = 200_000
    u = (np.arange(n) + 0.5) / n
    x = naive.law_quantile(u, 2.0, beta, zero_fraction)
    # What is left is the spread within the steps, nearly all in the outermost two.
    assert w2_distance(x, GenNorm(2.0, beta, zero_fraction)) < 0.02


def test_w2_does_not_depend_on_units_or_order(rng: np.random.Generator) -> None:
    x = draw_gennorm(rng, 2_000, beta=0.8, zero_fraction=0.1)
    law = fit_gennorm(x)
    moved = w2_distance(rng.permutation(x) * 1024, replace(law, alpha=law.alpha * 1024))
    assert moved == pytest.approx(w2_distance(x, law), rel=1e-9)  # sums of 2,000 float64


def test_w2_against_a_point_mass_is_the_standardised_norm(rng: np.random.Generator) -> None:
    x = rng.standard_normal(500)
    assert w2_distance(x, GenNorm(0.0, 1.0, 1.0)) == pytest.approx(1.0)
    assert w2_distance(x, GenNorm(1.0, 1.0, 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("x", [np.zeros(0, np.float32), np.zeros(7, np.float32)])
def test_w2_of_nothing_but_zeros_is_zero(x: np.ndarray) -> None:
    assert w2_distance(x, fit_gennorm(x)) == 0.0


@settings(max_examples=30)
@given(st.floats(0.15, 10.0), st.floats(0.0, 0.95), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_w2_is_finite_and_at_least_the_difference_of_standard_deviations(
    beta: float, zero_fraction: float, size: int, seed: int
) -> None:
    x = draw_gennorm(np.random.default_rng(seed), size, beta=beta, zero_fraction=zero_fraction)
    sigma = math.sqrt(float(np.mean(x.astype(np.float64) ** 2)))
    law = GenNorm(1.0, beta, zero_fraction)
    distance = w2_distance(x, law)
    assert math.isfinite(distance)
    if sigma > 0:
        assert distance >= abs(1.0 - law.std / sigma) * (1.0 - 1e-6) - 1e-6  # by Cauchy-Schwarz


def test_the_true_law_is_nearest(rng: np.random.Generator) -> None:
    x = draw_gennorm(rng, 50_000, beta=0.6, zero_fraction=0.25)
    fit = fit_tensor("x", x)
    assert fit.w2["gennorm"] < fit.w2["laplace"] < fit.w2["norm"]
    assert fit.w2["gennorm"] < 0.05


def test_divergence_is_scipys_relative_entropy(rng: np.random.Generator) -> None:
    fmt, law = FloatFormat.parse("e2m1"), GenNorm(1.0, 1.3, 0.1)
    counts = rng.integers(1, 1000, fmt.num_values)
    expected = stats.entropy(counts, law.pmf(fmt, 1.5), base=2)
    assert divergence_bits(counts, law, fmt, 1.5) == pytest.approx(expected, rel=1e-9)


def test_divergence_of_the_laws_own_counts_is_zero() -> None:
    fmt, law = FloatFormat.parse("e3m2"), GenNorm(1.0, 0.7, 0.2)
    counts = np.rint(law.pmf(fmt, 2.0) * 2**40).astype(np.int64)
    assert divergence_bits(counts, law, fmt, 2.0) == pytest.approx(0.0, abs=1e-9)


def test_divergence_of_what_the_law_excludes_costs_40_bits() -> None:
    fmt = FloatFormat.parse("e2m1")
    counts = np.zeros(fmt.num_values, np.int64)
    assert divergence_bits(counts, GenNorm(1.0, 2.0), fmt, 1.0) == 0.0
    counts[-1] = 3
    assert divergence_bits(counts, GenNorm(0.0, 1.0, 1.0), fmt, 1.0) == 40.0


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_sample_kurtosis_is_scipys(scale: float, heavy_tail: np.ndarray) -> None:
    x = (heavy_tail / np.abs(heavy_tail).max() * np.float32(scale)).astype(np.float32)
    expected = stats.kurtosis(x.astype(np.float64), fisher=False)
    assert sample_kurtosis(x) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("x", [[], [0.0], [2.5, 2.5, 2.5]])
def test_sample_kurtosis_of_equal_entries_is_nan(x: list[float]) -> None:
    assert math.isnan(sample_kurtosis(x))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_law_kurtosis_is_the_ratio_of_scipys_moments(law: GenNorm) -> None:
    fourth, second = (naive.law_moment(k, law.alpha, law.beta, law.zero_fraction) for k in (4, 2))
    assert law_kurtosis(law) == pytest.approx(fourth / second**2, rel=1e-9)


def test_law_kurtosis_of_an_atom_is_nan() -> None:
    assert math.isnan(law_kurtosis(GenNorm(0.0, 1.0, 1.0)))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPERS_FORMATS)
def test_sizes_of_a_tensor_are_the_codecs(name: str, heavy_tail: np.ndarray) -> None:
    config = CodecConfig(format=name)
    sizes = measure_tensor("w", heavy_tail, config).sizes
    for coder in available_coders():
        encoded = encode_update(
            {"w": heavy_tail}, None, replace(config, **CODERS[coder], min_numel=1)
        )
        assert sizes.payload_bits[coder] == 8 * len(encoded.payload)
        if coder in sizes.code_bits:
            assert sizes.code_bits[coder] == encoded.stats.tensors[0].code_bits
    assert sizes.entropy_bits == pytest.approx(encoded.stats.entropy_bits)


def test_symbols_are_those_that_the_payload_holds(heavy_tail: np.ndarray) -> None:
    config = CodecConfig(format="e3m2", scale_multiplier=0.5)
    converted = measure_tensor("w", heavy_tail, config)
    counts = np.bincount(converted.symbols, minlength=config.float_format.num_values)
    stats_row = encode_update({"w": heavy_tail}, None, config).stats.tensors[0]
    assert converted.scale == stats_row.scale
    p = counts[counts > 0] / counts.sum()
    assert stats_row.entropy_bits == pytest.approx(-heavy_tail.size * np.sum(p * np.log2(p)))


def test_divergence_is_what_an_ideal_code_for_the_law_pays_above_entropy(
    heavy_tail: np.ndarray,
) -> None:
    fit = fit_tensor("w", heavy_tail)
    config = CodecConfig(format="e5m2")
    converted = measure_tensor("w", heavy_tail, config, fit)
    pmf = fit.laws["norm"].pmf(config.float_format, float(converted.scale))
    ideal = -np.log2(np.maximum(pmf, 2.0**-40))[converted.symbols].sum()
    excess = ideal - converted.sizes.entropy_bits
    assert converted.sizes.divergence_bits["norm"] == pytest.approx(excess, rel=1e-9)


def test_sizes_of_a_group_are_sums_and_one_payload(small_update: dict[str, np.ndarray]) -> None:
    config = CodecConfig(format="e2m1")
    parts = {name: measure_tensor(name, x, config) for name, x in small_update.items()}
    group = measure_group("g", parts, config)
    rows = [part.sizes for part in parts.values()]
    assert group.code_bits["huffman_norm"] == sum(r.code_bits["huffman_norm"] for r in rows)
    whole = encode_update(small_update, None, replace(config, **CODERS["huffman_laplace"]))
    assert group.payload_bits["huffman_laplace"] == 8 * len(whole.payload)
    symbols = np.concatenate([part.symbols for part in parts.values()])
    assert group.code_bits["lz78"] == lz78_bits(len(parse_lz78(symbols)), 11)


def test_the_huffman_code_of_the_true_law_is_the_shorter_one(rng: np.random.Generator) -> None:
    config = CodecConfig(format="e5m2")
    for beta, better, worse in ((1.0, "laplace", "norm"), (2.0, "norm", "laplace")):
        bits = measure_tensor("w", draw_gennorm(rng, 50_000, beta=beta), config).sizes.code_bits
        assert bits[f"huffman_{better}"] < bits[f"huffman_{worse}"]
        assert bits[f"huffman_{better}"] < 1.01 * bits["huffman_empirical"]
        assert bits["huffman_gennorm"] < 1.001 * bits[f"huffman_{better}"]


def test_zstd_column_is_a_frame_that_gives_the_symbols_back(heavy_tail: np.ndarray) -> None:
    zstandard = pytest.importorskip("zstandard")
    converted = measure_tensor("w", heavy_tail, CodecConfig())
    frame = zstandard.ZstdCompressor(level=19).compress(converted.symbols.tobytes())
    assert zstandard.ZstdDecompressor().decompress(frame) == converted.symbols.tobytes()
    assert converted.sizes.code_bits["zstd"] == 8 * len(frame)
    assert converted.sizes.payload_bits["zstd"] == 8 * len(frame) + 32


def test_zstd_column_is_absent_with_a_note_without_the_package(
    monkeypatch: pytest.MonkeyPatch, small_update: dict[str, np.ndarray]
) -> None:
    monkeypatch.setattr(sizes_module, "zstd", lambda: None)
    result = analyze(small_update, [CodecConfig()])
    assert "zstd" not in result.formats[0].whole.code_bits
    codes = make_tables(result)[1]
    assert not any("zstd" in header for header in codes.headers)
    assert any("zstandard is not installed" in note for note in codes.notes)


def test_coders_that_the_config_refuses_have_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes_module, "_is_available", lambda coder: coder == "huffman")
    row = measure_tensor("w", np.ones(100, np.float32), CodecConfig()).sizes
    assert not any(key.startswith("rans") for key in row.payload_bits)


def test_awkward_tensors_are_measured_or_skipped(edge_update: dict[str, np.ndarray]) -> None:
    result = analyze(edge_update, [CodecConfig(format="e5m2")])
    assert set(result.skipped) == {"empty", "counter", "indices", "mask"}
    assert result.formats[0].whole.num_tensors == len(edge_update) - 4
    plain = json.loads(json.dumps(to_json(result), allow_nan=False))
    zeros = next(fit for fit in plain["fits"] if fit["name"] == "zeros")
    assert zeros["kurtosis"] is None
    assert zeros["w2"] == {"gennorm": 0.0, "norm": 0.0, "laplace": 0.0}


def test_a_gradient_without_floats_is_refused() -> None:
    with pytest.raises(ValueError, match="must have float entries, got 1 tensors without"):
        analyze({"n": np.arange(3)}, [CodecConfig()])


def test_an_empty_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor must have entries"):
        measure_tensor("w", np.zeros((0, 3), np.float32), CodecConfig())


# --- groups ---------------------------------------------------------------------------------------


def test_default_groups_of_a_densenet_are_in_blocks_1_2_and_4() -> None:
    names = {
        f"features.denseblock{i}.denselayer{j}.conv1.weight": (8, 8, 1, 1)
        for i in (1, 2, 3, 4)
        for j in (1, 2)
    }
    groups = choose_groups({"features.conv0.weight": (8, 3, 7, 7), **names}, [])
    assert [members[0].split(".")[1] for members in groups.values()] == [
        "denseblock1",
        "denseblock2",
        "denseblock4",
    ]


def test_a_network_without_convolutions_has_no_groups() -> None:
    assert choose_groups({"fc.weight": (10, 10)}, []) == {}


def test_a_group_that_no_tensor_is_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be parts of tensors' names, got 'conv'"):
        choose_groups({"fc.weight": (10, 10)}, ["fc", "conv"])


# --- the real gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPERS_FORMATS)
def test_real_gradient_orders_the_codes_as_the_papers_do(
    name: str, small_real_gradient: dict[str, np.ndarray]
) -> None:
    result = analyze(small_real_gradient, [CodecConfig(format=name)])
    whole = result.formats[0].whole
    codes, payloads = whole.code_bits, whole.payload_bits
    assert whole.entropy_bits <= codes["huffman_empirical"] <= codes["huffman_gennorm"]
    assert codes["huffman_gennorm"] < codes["lz78"] < codes["lz78_bit_string"]
    assert payloads["huffman_gennorm"] < 1.01 * payloads["huffman_empirical"]
    for coder in codes.keys() & payloads.keys():
        assert payloads[coder] > codes[coder]


def test_real_gradient_is_nearer_to_gennorm_than_to_norm_and_laplace(
    small_real_gradient: dict[str, np.ndarray],
) -> None:
    fits = [fit_tensor(name, x) for name, x in small_real_gradient.items() if x.size > 4096]
    mean = {law: np.mean([fit.w2[law] for fit in fits]) for law in ("gennorm", "norm", "laplace")}
    assert mean["gennorm"] < 0.7 * min(mean["norm"], mean["laplace"])
