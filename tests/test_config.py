"""Settings: defaults, every impossible value, the wording of the errors."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest

import naive
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError
from co3_flower.formats import FloatFormat

DEFAULTS: dict[str, Any] = {
    "format": "e2m1",
    "gamma": 0.9,
    "scale": "mse",
    "scale_multiplier": 1.0,
    "prior": "gennorm",
    "coder": "huffman",
    "structure": "auto",
    "min_numel": 1024,
    "raw": (),
    "buffers": (),
    "target_bits_per_parameter": None,
    "num_threads": 1,
}

BAD_SETTINGS = [
    ("format", "fp4"),
    ("format", "e5m3"),
    ("format", None),
    ("format", 8),
    ("gamma", -0.1),
    ("gamma", 1.5),
    ("gamma", math.nan),
    ("gamma", math.inf),
    ("gamma", "0.9"),
    ("gamma", None),
    ("scale", "max"),
    ("scale", ""),
    ("scale", None),
    ("scale", 1.0),
    ("scale_multiplier", 0.0),
    ("scale_multiplier", -1.0),
    ("scale_multiplier", math.nan),
    ("scale_multiplier", math.inf),
    ("scale_multiplier", "1"),
    ("prior", "normal"),
    ("prior", None),
    ("coder", "lz78"),
    ("coder", None),
    ("structure", "rows"),
    ("structure", None),
    ("min_numel", -1),
    ("min_numel", 1.5),
    ("min_numel", "1024"),
    ("min_numel", None),
    ("raw", "fc.bias"),  # a text is a collection of letters
    ("raw", (1.5,)),
    ("raw", (None,)),
    ("raw", (-1,)),
    ("raw", None),
    ("raw", 3),
    ("buffers", "running_mean"),
    ("buffers", (1.5,)),
    ("buffers", (-1,)),
    ("buffers", None),
    ("target_bits_per_parameter", 0.0),
    ("target_bits_per_parameter", -1.0),
    ("target_bits_per_parameter", math.nan),
    ("target_bits_per_parameter", "2"),
    ("num_threads", 0),
    ("num_threads", -1),
    ("num_threads", 1.5),
    ("num_threads", "2"),
    ("num_threads", None),
]

CHOICES = {
    "scale": ("mse", "std", "absmax", "unit", "paper"),
    "prior": ("gennorm", "norm", "laplace", "empirical", "auto"),
    "coder": ("huffman",),
    "structure": ("auto", "none"),
}


def test_defaults_are_those_of_the_design() -> None:
    config = CodecConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_fields_are_those_of_the_design_in_its_order() -> None:
    assert [field.name for field in dataclasses.fields(CodecConfig)][: len(DEFAULTS)] == list(
        DEFAULTS
    )


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        CodecConfig("e2m1")  # type: ignore[misc]


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError):
        CodecConfig(fmt="e2m1")  # type: ignore[call-arg]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CodecConfig().gamma = 0.5  # type: ignore[misc]


def test_equal_settings_make_equal_configs() -> None:
    assert CodecConfig(raw=("a",)) == CodecConfig(raw=("a",))
    assert hash(CodecConfig(raw=("a",))) == hash(CodecConfig(raw=("a",)))
    assert CodecConfig(gamma=0.5) != CodecConfig(gamma=0.6)


def test_config_survives_pickle_copy_and_replace() -> None:
    config = CodecConfig(format="e5m2", raw=(1, "b"))
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert dataclasses.replace(config, gamma=0.5).format == "e5m2"


@pytest.mark.parametrize(("setting", "value"), BAD_SETTINGS)
def test_bad_setting_is_refused_by_name_with_rule_and_value(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        CodecConfig(**{setting: value})
    # `<thing> must <rule>, got <value>`, in one line; of a collection the bad item may be the value
    got = {repr(value)} | ({repr(value[0])} if isinstance(value, tuple) else set())
    values = "|".join(re.escape(text) for text in got)
    assert re.fullmatch(rf"{setting} must .+, got ({values})(; .+)?", str(caught.value))


@pytest.mark.parametrize("setting", CHOICES)
def test_bad_choice_lists_the_valid_ones(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CodecConfig(**{setting: "nonsense"})  # type: ignore[arg-type]
    for choice in CHOICES[setting]:
        assert repr(choice) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "choice"), [(name, choice) for name in CHOICES for choice in CHOICES[name]]
)
def test_every_choice_is_accepted(setting: str, choice: str) -> None:
    assert getattr(CodecConfig(**{setting: choice}), setting) == choice  # type: ignore[arg-type]


@pytest.mark.parametrize("name", naive.ALL_FORMATS)
def test_every_format_is_accepted(name: str) -> None:
    assert FloatFormat.parse(CodecConfig(format=name).format).name == name


@pytest.mark.parametrize("gamma", [0, 0.0, 0.5, 1, 1.0, np.float32(0.5), np.float64(0.9)])
def test_gamma_may_be_any_real_number_in_zero_to_one(gamma: float) -> None:
    assert CodecConfig(gamma=gamma).gamma == gamma


@pytest.mark.parametrize("value", [1, 64, 10**9])
def test_min_numel_may_be_any_size(value: int) -> None:
    assert CodecConfig(min_numel=value).min_numel == value


def test_raw_and_buffers_may_be_lists_of_names_and_positions() -> None:
    config = CodecConfig(raw=["a", 3], buffers=[1])  # type: ignore[arg-type]
    assert (tuple(config.raw), tuple(config.buffers)) == (("a", 3), (1,))


def test_raw_may_hold_positions_that_numpy_found() -> None:
    positions = np.flatnonzero([0, 1, 0, 1])
    assert CodecConfig(raw=tuple(positions)).raw == (1, 3)
