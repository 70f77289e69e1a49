"""The run-config: defaults in one voice, every mistake one line that says what to do."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from co3_flower import CodecConfig, ConfigError
from sim.settings import (
    DEFAULTS,
    RANGES,
    Settings,
    check_dataset,
    expand_path,
    parse_overrides,
    read_config_file,
)

REPOSITORY = Path(__file__).resolve().parents[1]
SINGLE = (
    "cifar10-*",
    "digits-*",
    "paper-*",
)  # what `co3 run` takes; others are sweeps and comparisons
CONFIGS = [
    path
    for path in sorted((REPOSITORY / "configs").iterdir())
    if any(path.match(pattern) for pattern in SINGLE)
]


def test_defaults_are_those_of_pyproject() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
    assert listed == DEFAULTS
    assert {key: type(value) for key, value in listed.items()} == {
        key: type(value) for key, value in DEFAULTS.items()
    }


def test_settings_round_trip_through_the_run_config() -> None:
    settings = Settings.from_run_config({"lr": 0.5, "format": "e5m2", "num-clients": 3})
    assert Settings.from_run_config(settings.as_run_config()) == settings
    assert (settings.lr, settings.format, settings.num_clients) == (0.5, "e5m2", 3)


def test_codec_config_takes_over_every_codec_key() -> None:
    settings = Settings.from_run_config(
        {"format": "e5m2", "gamma": 0.5, "scale": "unit", "prior": "auto", "min-numel": 7}
    )
    assert settings.codec_config() == CodecConfig(
        format="e5m2", gamma=0.5, scale="unit", prior="auto", min_numel=7
    )


@pytest.mark.parametrize(
    ("run_config", "step"),
    [
        ({"payload": "gradient", "lr": 0.3}, 0.3),  # the PS takes the SGD step
        ({"payload": "update", "lr": 0.3}, 1.0),  # the clients took it
        ({"payload": "gradient", "lr": 0.3, "server-lr": 0.7}, 0.7),
        ({"payload": "update", "server-lr": 0.7}, 0.7),
    ],
)
def test_ps_step_follows_the_payload_kind(run_config: dict[str, Any], step: float) -> None:
    assert Settings.from_run_config(run_config).ps_step == step


@pytest.mark.parametrize(
    ("run_config", "message"),
    [
        ({"gama": 0.9}, "run-config key must be a known one, got 'gama'; did you mean 'gamma'?"),
        ({"xyzzy": 1}, "run-config key must be a known one, got 'xyzzy'; known are num-server-rou"),
        ({"lr": "big"}, "lr must be a number, got 'big'"),
        ({"lr": True}, "lr must be a number, got True"),
        ({"batch-size": 8.5}, "batch-size must be an integer, got 8.5"),
        ({"format": 3}, "format must be a string, got 3"),
        ({"reclip": 0}, "reclip must be true or false, got 0"),
        ({"lr": 0}, "lr must be above 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be above 0, got nan"),
        ({"fraction-train": 1.5}, "fraction-train must be in (0, 1], got 1.5"),
        ({"batch-size": 1}, "batch-size must be at least 2, got 1"),
        ({"payload": "both"}, "payload must be one of 'gradient', 'update', got 'both'"),
        ({"compressor": "zip"}, "compressor must be one of 'co3', 'none', "),
        ({"data-dir": "x"}, "data-dir must be '' unless dataset is 'cifar10', got 'x'"),
        ({"min-replies": 5, "num-clients": 4}, "min-replies must be at most num-clients, got 5"),
        ({"strategy": "fedprox"}, "strategy must be one of '', 'fedavg', 'fedavgm', 'fedadam', "),
        ({"strategy": "bulyan", "num-clients": 2}, "num-clients must be at least 3 with strategy"),
        ({"coder": "ans"}, "coder must be one of 'huffman', 'rans', got 'ans'"),
        ({"model": "vgg"}, "model must be one of 'cnn', 'resnet20', "),
        ({"reclip": True}, "max-update-norm must be above 0 with reclip, got 0.0"),
        (
            {"compressor": "countsketch", "max-update-norm": 1.0},
            "max-update-norm must be 0.0 with compressor 'countsketch', which gives no client's",
        ),
        (
            {"compressor": "countsketch", "strategy": "fedadam"},
            "strategy must be '' with compressor 'countsketch', which gives no client's own upd",
        ),
        ({"max-update-norm": -1}, "max-update-norm must be at least 0, got -1.0"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_must_hold(
    run_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_run_config(run_config)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("run_config", [{"format": "fp4"}, {"gamma": 1.5}, {"scale": "max"}])
def test_the_codec_judges_its_own_keys(run_config: dict[str, Any]) -> None:
    (key,) = run_config
    with pytest.raises(ConfigError, match=f"{key} must be"):
        Settings.from_run_config(run_config)


def test_target_and_budget_are_taken_over() -> None:
    settings = Settings.from_run_config(
        {"coder": "rans", "target-bits-per-parameter": 0.3, "uplink-budget-mb": 2.5}
    )
    assert settings.codec_config().target_bits_per_parameter == 0.3
    assert settings.uplink_budget_bytes == 2_500_000
    assert Settings().codec_config().target_bits_per_parameter is None
    assert Settings().uplink_budget_bytes is None


@pytest.mark.parametrize("key", ["target-bits-per-parameter", "uplink-budget-mb"])
def test_target_and_budget_need_the_compressor(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be 0 with compressor 'none'"):
        Settings.from_run_config({key: 1.5, "compressor": "none"})


@pytest.mark.parametrize("key", RANGES)
def test_every_default_is_in_its_range(key: str) -> None:
    assert RANGES[key][1](DEFAULTS[key])


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["lr=0.1 seed=3"], {"lr": 0.1, "seed": 3}),
        (["format='e5m2'"], {"format": "e5m2"}),
        (['format="e5m2"', "reclip=false"], {"format": "e5m2", "reclip": False}),
        (["data-dir='/a b/c' lr=1"], {"data-dir": "/a b/c", "lr": 1}),  # a blank inside quotes
        (["lr=0.1", "lr=0.2"], {"lr": 0.2}),  # the last one wins
        ([], {}),
    ],
)
def test_overrides_are_read_as_flower_reads_them(texts: list[str], values: dict[str, Any]) -> None:
    assert parse_overrides(texts) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format=e5m2", "-c values must be numbers, true, false or quoted strings, got 'format=e5"),
        ("lr", "-c must hold key=value pairs, got 'lr'"),
        ("lr = 1", "-c must hold key=value pairs, got 'lr'"),
        ("=1", "-c must hold key=value pairs, got '=1'"),
    ],
)
def test_a_wrong_override_is_shown(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([text])
    assert str(caught.value).startswith(message)


def test_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("# comment\nlr = 0.5\nformat = 'e5m2'\n")
    assert read_config_file(path) == {"lr": 0.5, "format": "e5m2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "CONFIG.toml must be TOML"),
        ("[a]\nlr = 1", "a must be a string, number or boolean, got a dict"),
        ("lr = [1, 2]", "lr must be a string, number or boolean, got a list"),
    ],
)
def test_a_wrong_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a readable file, got .*nowhere.toml"):
        read_config_file(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("name", ["mnist", "", "/no/such/folder"])
def test_a_data_set_must_be_known_where_it_is_used_only(name: str) -> None:
    settings = Settings.from_run_config({"dataset": name})  # a client with its own need not have it
    with pytest.raises(ConfigError, match="dataset must be 'digits', 'cifar10' or a directory"):
        check_dataset(settings.dataset)


def test_expand_path_fills_in_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CO3_DATA", "/data")
    assert expand_path("$CO3_DATA/cifar10", "data-dir") == "/data/cifar10"


def test_expand_path_names_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CO3_DATA", raising=False)
    with pytest.raises(ConfigError, match="data-dir must name .* that are set, .*; set CO3_DATA"):
        expand_path("$CO3_DATA/cifar10", "data-dir")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_of_the_repository_is_valid(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CO3_DATA", "/data")
    Settings.from_run_config(read_config_file(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_opens_with_its_launch_line(path: Path) -> None:
    assert path.read_text().startswith(f"# co3 run configs/{path.name}\n")
