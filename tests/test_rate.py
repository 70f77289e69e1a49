"""The knob: payloads of a wanted size, foretold from histograms, stable under error feedback."""

from __future__ import annotations

import numpy as np
import pytest

import naive
from co3_flower import kernels_rate
from co3_flower.codec import decode_update, encode_update
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError
from co3_flower.formats import FloatFormat
from co3_flower.quantize import quantize
from conftest import draw_gennorm

Arrays = dict[str, np.ndarray]

# What a format, coder and 85 k entries can take: Huffman codes from 1 bit on, e1m2 up to 2.8.
TARGETS = [
    ("e2m1", "rans", 0.05),
    ("e2m1", "rans", 0.3),
    ("e2m1", "rans", 1.0),
    ("e2m1", "rans", 2.5),
    ("e1m2", "rans", 0.1),
    ("e1m2", "rans", 2.0),
    ("e3m2", "rans", 0.3),
    ("e3m2", "rans", 3.0),
    ("e5m2", "rans", 0.1),
    ("e5m2", "rans", 3.0),
    ("e2m1", "huffman", 1.15),
    ("e2m1", "huffman", 2.5),
    ("e1m2", "huffman", 1.5),
    ("e3m2", "huffman", 3.0),
    ("e5m2", "huffman", 1.5),
    ("e5m2", "huffman", 4.0),
]


def with_target(target: float, **settings: object) -> CodecConfig:
    return CodecConfig(target_bits_per_parameter=target, **settings)  # type: ignore[arg-type]


def rate_error(update: Arrays, residual: Arrays | None, config: CodecConfig) -> float:
    got = encode_update(update, residual, config).stats.bits_per_parameter
    target = config.target_bits_per_parameter
    assert target is not None
    return got / target - 1.0


@pytest.fixture(scope="module")
def network() -> Arrays:
    """Two layers of different shapes and spreads, their rows unlike, with small tensors."""
    rng = np.random.default_rng(4)
    rows = np.exp(0.5 * rng.standard_normal((256, 1))).astype(np.float32)
    return {
        "conv.weight": draw_gennorm(rng, 9_216, beta=0.6, alpha=1e-4).reshape(32, 32, 3, 3),
        "conv.bias": draw_gennorm(rng, 32, beta=1.0, alpha=1e-2),
        "fc.weight": rows
        * draw_gennorm(rng, 76_800, beta=1.2, zero_fraction=0.1).reshape(256, 300),
        "fc.bias": draw_gennorm(rng, 256, beta=2.0, alpha=1e-3),
    }


# Meeting the target


@pytest.mark.parametrize(("name", "coder", "target"), TARGETS)
@pytest.mark.parametrize("structure", ["auto", "none"])
def test_payload_has_the_wanted_size(
    network: Arrays, name: str, coder: str, target: float, structure: str
) -> None:
    config = with_target(target, format=name, coder=coder, structure=structure)
    assert abs(rate_error(network, None, config)) < 0.02


@pytest.mark.parametrize("beta", [0.3, 0.7, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("target", [0.3, 1.0, 2.0])
def test_payload_of_a_small_update_has_the_wanted_size(
    rng: np.random.Generator, beta: float, target: float
) -> None:
    update = {"w": draw_gennorm(rng, 9_900, beta=beta).reshape(99, 100), "b": np.ones(100)}
    config = with_target(target, format="e3m2", coder="rans")
    assert abs(rate_error(update, None, config)) < 0.02


@pytest.mark.parametrize("prior", ["gennorm", "empirical", "auto"])
@pytest.mark.parametrize("scale", ["mse", "std", "absmax", "unit"])
def test_target_is_met_under_every_prior_and_scale(network: Arrays, prior: str, scale: str) -> None:
    config = with_target(0.7, coder="rans", prior=prior, scale=scale)
    assert abs(rate_error(network, None, config)) < 0.02


@pytest.mark.parametrize(
    ("coder", "target"),
    [("rans", 0.05), ("rans", 0.3), ("rans", 2.5), ("huffman", 1.1), ("huffman", 2.5)],
)
def test_payload_of_a_real_gradient_has_the_wanted_size(
    real_gradient: Arrays, coder: str, target: float
) -> None:
    assert abs(rate_error(real_gradient, None, with_target(target, coder=coder))) < 0.02


def test_size_includes_raw_tensors_and_buffers(network: Arrays) -> None:
    config = with_target(1.5, coder="rans", raw=("conv.bias",), buffers=("fc.bias",))
    assert abs(rate_error(network, None, config)) < 0.02


def test_target_is_met_with_a_residual(network: Arrays) -> None:
    config = with_target(0.5, coder="rans", gamma=1.0)
    residual = None
    for _ in range(5):
        encoded = encode_update(network, residual, config)
        residual = encoded.residual
        assert abs(encoded.stats.bits_per_parameter / 0.5 - 1.0) < 0.02


def test_bytes_do_not_depend_on_the_number_of_threads(real_gradient: Arrays) -> None:
    one, three = (
        encode_update(real_gradient, None, with_target(0.5, coder="rans", num_threads=n))
        for n in (1, 3)
    )
    assert one.payload == three.payload


def test_conversion_with_a_target_equals_naive(network: Arrays) -> None:
    config = with_target(0.5, coder="rans", buffers=("fc.bias",))
    residual = {name: np.full_like(g, 1e-3) for name, g in network.items()}
    encoded = encode_update(network, residual, config)
    coded = [name for name in network if name != "fc.bias"]
    scales = {row.name: row.scale for row in encoded.stats.tensors}
    values, after = naive.naive_round(
        {name: network[name] for name in coded},
        {name: residual[name] for name in coded},
        scales,
        name="e2m1",
        gamma=config.gamma,
    )
    decoded = decode_update(encoded.payload, network)
    for name in coded:
        assert decoded[name].tobytes() == values[name].tobytes()
        assert encoded.residual[name].tobytes() == after[name].tobytes()


def test_one_factor_scales_all_tensors(network: Arrays) -> None:
    plain = encode_update(network, None, CodecConfig(coder="rans"))
    coarse = encode_update(network, None, with_target(0.5, coder="rans"))
    factors = [
        b.scale / a.scale for a, b in zip(plain.stats.tensors, coarse.stats.tensors, strict=True)
    ]
    np.testing.assert_allclose(factors, factors[0], rtol=1e-6)  # float32 scales
    assert factors[0] < 0.5


# What cannot be met


def test_target_below_the_floor_of_huffman_codes_names_rans() -> None:
    with pytest.raises(ConfigError, match="coder='rans'"):
        with_target(0.3)


@pytest.mark.parametrize(
    ("name", "target", "wider"),
    [
        ("e2m1", 3.46, "e2m1fn"),
        ("e1m2", 2.81, "e2m1"),
        ("e2m1", 5.0, "e3m2"),
        ("e5m2", 8.0, "none"),
    ],
)
def test_target_above_what_the_format_holds_names_a_wider_one(
    name: str, target: float, wider: str
) -> None:
    with pytest.raises(ConfigError, match=wider):
        with_target(target, format=name, coder="rans")


def test_target_and_multiplier_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="scale_multiplier must be 1"):
        with_target(2.0, scale_multiplier=0.5)


def test_target_without_room_for_raw_tensors_is_refused(network: Arrays) -> None:
    with pytest.raises(ConfigError, match="raw tensors"):
        encode_update(network, None, with_target(1.0, coder="rans", raw=("conv.weight",)))


def test_target_with_no_room_for_code_keeps_everything_in_the_residual(
    rng: np.random.Generator,
) -> None:
    update = {"w": draw_gennorm(rng, 10_000, beta=1.0)}
    encoded = encode_update(update, None, with_target(0.045, coder="rans"))
    assert not decode_update(encoded.payload, update)["w"].any()
    np.testing.assert_array_equal(encoded.residual["w"], update["w"])


def test_target_beyond_the_update_is_approached_from_below(rng: np.random.Generator) -> None:
    # half the entries are zero: the entropy of their signs and magnitudes ends far below 3.4 bits
    update = {"w": draw_gennorm(rng, 20_000, beta=1.0, zero_fraction=0.5)}
    encoded = encode_update(update, None, with_target(3.4, coder="rans"))
    assert 2.0 < encoded.stats.bits_per_parameter < 3.4


def test_target_that_needs_clamped_entries_stops_at_twice_the_scale(
    rng: np.random.Generator,
) -> None:
    # beta 0.3: finer cells would take more bits and lose more of the tail than of the cells
    update = {"w": draw_gennorm(rng, 20_000, beta=0.3)}
    plain = encode_update(update, None, CodecConfig(coder="rans"))
    fine = encode_update(update, None, with_target(3.0, coder="rans"))
    assert fine.stats.tensors[0].scale == pytest.approx(2 * plain.stats.tensors[0].scale)
    assert fine.stats.bits_per_parameter < 2.0


@pytest.mark.parametrize("coder", ["rans", "huffman"])
def test_update_of_zeros_is_as_small_as_without_a_target(coder: str) -> None:
    update = {"w": np.zeros((100, 100), np.float32)}
    plain = encode_update(update, None, CodecConfig(coder=coder))
    assert encode_update(update, None, with_target(1.5, coder=coder)).payload == plain.payload


def test_update_of_two_magnitudes_gets_the_nearest_size(rng: np.random.Generator) -> None:
    # signs alone take 1 bit: no factor gives a size between nearly 0 and 1
    update = {"w": np.sign(rng.standard_normal(20_000)).astype(np.float32)}
    encoded = encode_update(update, None, with_target(0.8, coder="rans"))
    assert encoded.stats.bits_per_parameter == pytest.approx(1.0, abs=0.03)


def test_update_that_is_not_finite_is_refused(network: Arrays) -> None:
    broken = network | {"fc.bias": np.full(256, np.nan, np.float32)}
    with pytest.raises(ValueError, match=r"256 NaN or infinite entries in 'fc\.bias'"):
        encode_update(broken, None, with_target(1.5))


@pytest.mark.parametrize(
    "update", [{}, {"empty": np.zeros((0, 3), np.float32)}, {"steps": np.arange(3)}]
)
def test_update_without_float_entries_has_no_rate_to_meet(update: Arrays) -> None:
    assert encode_update(update, None, with_target(1.5)).stats.num_parameters == 0


@pytest.mark.parametrize("name", ["e2m1", "e1m1", "e4m3fn", "e5m2", "e2m0"])
@pytest.mark.parametrize("scale", ["mse", "absmax", "unit"])
def test_awkward_tensors_lose_nothing_under_a_target(
    edge_update: Arrays, name: str, scale: str
) -> None:
    target = 1.2 if name == "e1m1" else 2.0
    config = with_target(target, format=name, scale=scale, coder="rans")
    encoded = encode_update(edge_update, None, config)
    decoded = decode_update(encoded.payload, edge_update)
    for key, residual in encoded.residual.items():
        v = edge_update[key].astype(np.float32)
        np.testing.assert_allclose(decoded[key] + residual, v, rtol=1e-6)


# Foretelling


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("scale", [0.08, 0.3, 1.0, 4.0])
def test_foretold_counts_are_near_those_of_the_conversion(
    rng: np.random.Generator, beta: float, scale: float
) -> None:
    fmt = FloatFormat.parse("e2m1")
    v = draw_gennorm(rng, 200_000, beta=beta)
    bins = np.bincount(v.view(np.uint32) >> 20 & 2047, minlength=2048)
    above = np.append(np.cumsum(bins[::-1])[::-1], 0).astype(np.uint32)
    counts = np.zeros(fmt.num_values, np.int64)
    kernels_rate.expected_counts(above, v.size, scale, fmt.values[fmt.zero :], counts)
    truth = np.bincount(quantize(v, scale, fmt), minlength=fmt.num_values)
    assert counts.sum() == pytest.approx(v.size, abs=fmt.num_values)
    # five deviations of a count, and 1 % for the shape within a bin
    assert (np.abs(counts - truth) <= 0.01 * truth + 5 * np.sqrt(truth) + 1).all()


def test_number_above_ends_at_the_histogram_ends() -> None:
    above = np.zeros(2049, np.uint32)
    above[: 8 * 127 + 1] = 10  # ten entries in [1, 1.125)
    assert kernels_rate.number_above(above, 0.0) == 10.0
    assert kernels_rate.number_above(above, 0.9) == 10.0
    assert kernels_rate.number_above(above, 1.0625) == pytest.approx(5.0)
    assert kernels_rate.number_above(above, 1.2) == 0.0
    assert kernels_rate.number_above(above, 1e300) == 0.0


# The limit


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_payload_above_the_limit_is_made_to_fit(network: Arrays, share: float) -> None:
    config = CodecConfig(coder="rans")
    limit = int(share * len(encode_update(network, None, config).payload))
    encoded = encode_update(network, None, config, max_payload_bytes=limit)
    assert 0.93 * limit < len(encoded.payload) <= limit
    assert any(y.any() for y in decode_update(encoded.payload, network).values())


# Stability


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize(
    ("target", "beta", "name", "size"),
    [
        (0.05, 1.0, "e2m1", 60_000),
        (0.1, 0.5, "e2m1", 30_000),
        (0.3, 2.0, "e2m1", 10_000),
        (1.0, 1.0, "e2m1", 5_000),
        (2.0, 1.0, "e2m1", 5_000),
        (3.0, 1.0, "e3m2", 5_000),
    ],
)
def test_rate_holds_and_residual_stays_bounded_over_a_thousand_rounds(
    rng: np.random.Generator, target: float, beta: float, name: str, size: int, gamma: float
) -> None:
    update = {"w": draw_gennorm(rng, size, beta=beta, alpha=1e-3)}
    config = with_target(target, format=name, coder="rans", gamma=gamma)
    power = np.linalg.norm(update["w"])
    rates, norms, residual = [], [], None
    total = np.zeros(size)
    for _ in range(1000):
        encoded = encode_update(update, residual, config)
        residual = encoded.residual
        rates.append(encoded.stats.bits_per_parameter)
        norms.append(np.linalg.norm(residual["w"]) / power)
        total += decode_update(encoded.payload, update)["w"]
    np.testing.assert_allclose(rates[20:], target, rtol=0.05)
    # entries wait until they reach the cells that this rate pays for: 3 to 100 rounds' worth
    assert max(norms) < 6.0 / target
    assert max(norms[500:]) < 1.2 * max(norms[:500])
    if gamma == 1.0:
        error = np.linalg.norm(total / 1000 - update["w"]) / power
        assert error < (0.1 if target == 0.05 else 0.05)


def test_residual_stays_bounded_where_the_format_saturates(rng: np.random.Generator) -> None:
    # 3 bits of e2m1 for a Laplace law clamp its tail in every round
    update = {"w": draw_gennorm(rng, 5_000, beta=1.0)}
    residual, norms = None, []
    for _ in range(1000):
        residual = encode_update(
            update, residual, with_target(3.0, coder="rans", gamma=1.0)
        ).residual
        norms.append(np.linalg.norm(residual["w"]) / np.linalg.norm(update["w"]))
    assert max(norms) < 4.0


@pytest.mark.parametrize("target", [0.05, 0.1])
def test_small_matrix_meets_a_low_target_in_rounds_of_feedback(
    rng: np.random.Generator, target: float
) -> None:
    """Row and column factors come and go there; each is a jump in size."""
    spread = 2.0 ** rng.normal(size=(200, 1))
    gradient = {"w": (rng.laplace(size=(200, 300)) * spread).astype(np.float32)}
    config, residual = with_target(target, coder="rans", gamma=0.9), None
    for server_round in range(40):
        encoded = encode_update(gradient, residual, config)
        residual = encoded.residual
        if server_round >= 20:
            assert abs(encoded.stats.bits_per_parameter / target - 1) < 0.05
