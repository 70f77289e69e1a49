"""Formats: value tables from the meaning of the bits, against ml_dtypes, limits, names, errors."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import naive
from co3_flower.errors import Co3Error, ConfigError
from co3_flower.formats import FloatFormat

# Formats that ml_dtypes knows too: (ours, theirs, bits of a code).
ML_DTYPES = [
    ("e5m2", ml_dtypes.float8_e5m2, 8),
    ("e4m3", ml_dtypes.float8_e4m3, 8),
    ("e3m4", ml_dtypes.float8_e3m4, 8),
    ("e4m3fn", ml_dtypes.float8_e4m3fn, 8),
    ("e3m2fn", ml_dtypes.float6_e3m2fn, 6),
    ("e2m3fn", ml_dtypes.float6_e2m3fn, 6),
    ("e2m1fn", ml_dtypes.float4_e2m1fn, 4),
]

BAD_FORMATS = [
    "",
    "fp4",
    "fp8",
    "e2",
    "m1",
    "e0m3",  # no exponent
    "e1m0",  # zero is its only value
    "e8m0",  # more than 7 bits
    "e5m3",
    "e1m7",
    "e-1m2",
    "e2m-1",
    "e2.0m1",
    "e2m1f",
    "e2m1fnuz",
    "e5m2fn",  # ml_dtypes has no such type
    "e3m4fn",
    "e2m1 e5m2",
    "E2M1",
    "e02m1",
    "e2m1\n",
    "e²m1",
    "e２m1",  # a digit, but not an ASCII one
    "float8_e5m2",
    "1,5,2",  # in which order?
    "[1,5,2]",
    "sgn-exp-mant:1,5",
    "sgn-exp-mant:1,5,2,0",
    "sgn-exp-mant:0,5,2",
    "sgn-exp-mant:2,5,2",
    "sgn-exp-mant:1,x,2",
    "sgn-exp-mant:1,5,3",
    "sgn-mant-exp:1,0,1",
    "exp-sgn-mant:5,1,2",
    "sgn-exp-mant:",
    "sgn-exp-mant",
]


@pytest.mark.parametrize("name", naive.ALL_FORMATS)
def test_values_equal_those_spelled_out_by_the_bit_fields(name: str) -> None:
    expected = np.array([float(value) for value in naive.values(name)], np.float32)
    values = FloatFormat.parse(name).values
    assert values.dtype == np.float32
    assert values.tobytes() == expected.tobytes()  # bytes: the zero is +0.0


@pytest.mark.parametrize(("name", "dtype", "bits"), ML_DTYPES)
def test_values_equal_all_finite_codes_of_ml_dtypes(name: str, dtype: type, bits: int) -> None:
    codes = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    assert np.array_equal(FloatFormat.parse(name).values, np.unique(codes[np.isfinite(codes)]))


@pytest.mark.parametrize(("name", "dtype", "bits"), ML_DTYPES)
def test_limits_equal_those_of_ml_dtypes(name: str, dtype: type, bits: int) -> None:
    fmt, theirs = FloatFormat.parse(name), ml_dtypes.finfo(dtype)
    assert fmt.max_finite == float(theirs.max)
    assert fmt.min_normal == float(theirs.smallest_normal)
    assert fmt.min_subnormal == float(theirs.smallest_subnormal)


def test_e2m1_has_the_eleven_values_of_the_paper() -> None:
    values = [-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3]
    assert FloatFormat.parse("e2m1").values.tolist() == values


def test_e2m1fn_has_the_fifteen_values_of_ocp() -> None:
    positive = [0.5, 1, 1.5, 2, 3, 4, 6]
    values = [-value for value in reversed(positive)] + [0.0] + positive
    assert FloatFormat.parse("e2m1fn").values.tolist() == values


@pytest.mark.parametrize(
    ("name", "num_values", "bias", "max_finite", "min_normal", "min_subnormal"),
    [
        ("e5m2", 247, 15, 57344.0, 2.0**-14, 2.0**-16),  # 1.75 * 2**15; the fp8 paper's
        ("e4m3", 239, 7, 240.0, 2.0**-6, 2.0**-9),  # 1.875 * 2**7
        ("e4m3fn", 253, 7, 448.0, 2.0**-6, 2.0**-9),  # 1.75 * 2**8: mantissa 7 is NaN
        ("e2m1", 11, 1, 3.0, 1.0, 0.5),
        ("e2m1fn", 15, 1, 6.0, 1.0, 0.5),
        ("e2m0", 5, 1, 2.0, 1.0, 1.0),  # no subnormals: the least positive value is normal
        ("e7m0", 253, 63, 2.0**63, 2.0**-62, 2.0**-62),
        ("e3m4", 223, 3, 15.5, 0.25, 2.0**-6),
    ],
)
def test_limits_follow_from_the_bits(
    name: str,
    num_values: int,
    bias: int,
    max_finite: float,
    min_normal: float,
    min_subnormal: float,
) -> None:
    fmt = FloatFormat.parse(name)
    assert (fmt.num_values, fmt.bias) == (num_values, bias)
    assert (fmt.max_finite, fmt.min_normal) == (max_finite, min_normal)
    assert fmt.min_subnormal == min_subnormal


@pytest.mark.parametrize("name", naive.ALL_FORMATS)
def test_limits_are_python_floats_taken_from_the_values(name: str) -> None:
    fmt = FloatFormat.parse(name)
    assert type(fmt.max_finite) is type(fmt.min_normal) is type(fmt.min_subnormal) is float
    assert fmt.max_finite == fmt.values[-1] == -fmt.values[0]
    assert fmt.min_subnormal == fmt.values[fmt.zero + 1]
    assert fmt.num_values == len(fmt.values) <= 256  # symbols are uint8


@pytest.mark.parametrize("name", naive.ALL_FORMATS)
def test_values_are_symmetric_around_the_symbol_zero(name: str) -> None:
    fmt = FloatFormat.parse(name)
    assert fmt.zero == (fmt.num_values - 1) // 2
    assert fmt.values[fmt.zero] == 0.0
    assert np.array_equal(fmt.values, -fmt.values[::-1])


def test_values_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        FloatFormat.parse("e2m1").values[0] = 1.0


def test_format_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FloatFormat.parse("e2m1").exponent_bits = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", naive.ALL_FORMATS)
def test_name_parses_back_to_the_same_format(name: str) -> None:
    fmt = FloatFormat.parse(name)
    assert fmt.name == name
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.finite) == naive.split_name(name)
    assert FloatFormat.parse(fmt.name) == fmt
    assert hash(FloatFormat.parse(fmt.name)) == hash(fmt)


@pytest.mark.parametrize(
    ("triple", "name"),
    [
        ("sgn-mant-exp:1,2,1", "e1m2"),
        ("sgn-exp-mant:1,5,2", "e5m2"),
        ("sgn-exp-mant:1,2,1", "e2m1"),
        ("sgn-mant-exp:1,1,2", "e2m1"),
        ("sgn-exp-mant:1,7,0", "e7m0"),
    ],
)
def test_triple_is_read_in_the_order_it_spells_out(triple: str, name: str) -> None:
    assert FloatFormat.parse(triple) == FloatFormat.parse(name)


@pytest.mark.parametrize("text", BAD_FORMATS)
def test_parse_refuses_an_impossible_format_and_says_what_is_possible(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FloatFormat.parse(text)
    message = str(caught.value)
    assert message.startswith("format must be ")
    assert "e<E>m<M>" in message
    assert "'e2m1fn'" in message
    assert ", got '" in message


@pytest.mark.parametrize("text", ["fp16", "e5m3", "e2m1fnuz", "sgn-exp-mant:2,5,2"])
def test_parse_says_what_it_got(text: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{text}'"):
        FloatFormat.parse(text)


@pytest.mark.parametrize("thing", [None, 8, 2.1, ("e2m1",), ["e2m1"], b"e2m1"])
def test_parse_refuses_what_is_no_text(thing: object) -> None:
    with pytest.raises(ConfigError, match="format must"):
        FloatFormat.parse(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "advice"), [("fp4", "'e2m1'"), ("fp8", "'e5m2'")])
def test_parse_names_the_format_meant_by_the_papers(text: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FloatFormat.parse(text)
    assert f"for the papers' {text} use {advice}" in str(caught.value)


def test_config_error_is_both_ours_and_a_value_error() -> None:
    assert issubclass(ConfigError, Co3Error)
    assert issubclass(ConfigError, ValueError)
