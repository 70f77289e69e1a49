"""The run-config of the app: parsed, checked and typed before anything trains.

In comes Flower's ``context.run_config`` (or what the command line merged), out goes one frozen
`Settings`. Every mistake is one `ConfigError` of one line that lists the choices.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from co3_flower import CodecConfig, ConfigError
from co3_flower.compressors import COMPRESSORS, Compressor, is_rival, make_compressor

Value = str | int | float | bool

DATASETS = ("digits", "cifar10")
MODELS = ("cnn", "resnet20", "densenet121", "resnet50v2", "nasnetmobile")

# Aggregating strategies; "" is FedAvg without a dense copy of each client's weights.
STRATEGIES = (
    "",
    "fedavg",
    "fedavgm",
    "fedadam",
    "fedadagrad",
    "fedyogi",
    "qfedavg",
    "fedmedian",
    "fedtrimmedavg",
    "krum",
    "multikrum",
    "bulyan",
)

MIN_BULYAN_CLIENTS = 3  # 4 f + 3 with f = 0 malicious ones

# Keys with a fixed list of values; the codec's own keys are checked by CodecConfig.
CHOICES: dict[str, tuple[str, ...]] = {
    "partition": ("iid", "dirichlet"),
    "model": MODELS,
    "payload": ("gradient", "update"),
    "weighting": ("examples", "uniform"),
    "compressor": tuple(COMPRESSORS),
    "buffers": ("coded", "raw", "local"),
    "strategy": STRATEGIES,
    "device": ("auto", "cpu", "cuda"),
}

PATH_KEYS = ("run-dir", "memory-dir", "data-dir")  # of a machine, not of an experiment

# Key -> (rule in words, test).
RANGES = {
    "num-server-rounds": ("at least 1", lambda x: x >= 1),
    "num-clients": ("at least 0", lambda x: x >= 0),
    "dirichlet-alpha": ("above 0", lambda x: x > 0),
    "batch-size": ("at least 2", lambda x: x >= 2),  # BatchNorm needs two values a channel
    "local-steps": ("at least 1", lambda x: x >= 1),
    "local-epochs": ("at least 0", lambda x: x >= 0),
    "lr": ("above 0", lambda x: x > 0),
    "server-lr": ("at least 0", lambda x: x >= 0),
    "fraction-train": ("in (0, 1]", lambda x: 0 < x <= 1),
    "min-replies": ("at least 1", lambda x: x >= 1),
    "node-timeout": ("above 0", lambda x: x > 0),
    "reply-timeout": ("above 0", lambda x: x > 0),
    "max-update-norm": ("at least 0", lambda x: x >= 0),
    "max-examples": ("at least 1", lambda x: x >= 1),
    "seed": ("in [0, 2**32)", lambda x: 0 <= x < 2**32),
    "num-threads": ("at least 1", lambda x: x >= 1),
    "target-bits-per-parameter": ("at least 0", lambda x: x >= 0),
    "uplink-budget-mb": ("at least 0", lambda x: x >= 0),
    "eval-every": ("at least 1", lambda x: x >= 1),
    "save-gradients-every": ("at least 0", lambda x: x >= 0),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of the app, key by key as in ``[tool.flwr.app.config]`` (``-`` becomes ``_``).

    Build it with `Settings.from_run_config`, which checks every value.
    """

    num_server_rounds: int = 60
    num_clients: int = 0
    dataset: str = "digits"
    data_dir: str = ""
    partition: str = "iid"
    dirichlet_alpha: float = 0.5
    model: str = "cnn"
    augment: bool = False
    batch_size: int = 32
    local_steps: int = 2
    local_epochs: int = 0
    lr: float = 0.1
    server_lr: float = 0.0
    payload: str = "gradient"
    weighting: str = "examples"
    compressor: str = "co3"
    compressor_settings: str = ""
    format: str = "e2m1"
    gamma: float = 0.9
    scale: str = "mse"
    scale_multiplier: float = 1.0
    scale_refit_every: int = 1
    prior: str = "gennorm"
    coder: str = "huffman"
    min_numel: int = 1024
    target_bits_per_parameter: float = 0.0
    uplink_budget_mb: float = 0.0
    buffers: str = "coded"
    strategy: str = ""
    fraction_train: float = 1.0
    min_replies: int = 1
    node_timeout: float = 600.0
    reply_timeout: float = 3600.0
    max_update_norm: float = 0.0
    max_examples: int = 1_000_000
    reclip: bool = False
    seed: int = 0
    device: str = "auto"
    structure: str = "auto"
    num_threads: int = 1
    eval_every: int = 5
    save_gradients_every: int = 0
    run_dir: str = ""
    resume: bool = False
    memory_dir: str = ""

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Value]) -> "Settings":
        """Check a run-config and return it typed; keys it lacks keep their defaults.

        Parameters
        ----------
        run_config : Mapping[str, str | int | float | bool]
            Keys as in ``[tool.flwr.app.config]``.

        Returns
        -------
        Settings

        Raises
        ------
        ConfigError
            An unknown key, a wrong type, or a value out of range or not on the list.

        Examples
        --------
        >>> Settings.from_run_config({"gamma": 1}).gamma
        1.0
        """
        check_keys(run_config)
        values = {key: _typed(key, value) for key, value in run_config.items()}
        settings = cls(**{key.replace("-", "_"): value for key, value in values.items()})
        for key, value in settings.as_run_config().items():
            _check_value(key, value)
        check_together(settings)
        try:
            settings.codec_config()
        except ConfigError as error:  # it names its fields, not the keys
            setting, _, rest = str(error).partition(" ")
            raise ConfigError(f"{setting.replace('_', '-')} {rest}") from None
        settings.update_compressor()
        return settings

    def as_run_config(self) -> dict[str, Value]:
        """Return the settings under their run-config keys."""
        return {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}

    def codec_config(self) -> CodecConfig:
        """Return the codec's part of the settings."""
        return CodecConfig(
            format=self.format,
            gamma=self.gamma,
            scale=self.scale,
            scale_multiplier=self.scale_multiplier,
            scale_refit_every=self.scale_refit_every,
            prior=self.prior,
            coder=self.coder,
            structure=self.structure,
            min_numel=self.min_numel,
            target_bits_per_parameter=self.target_bits_per_parameter or None,
            num_threads=self.num_threads,
        )

    def update_compressor(self) -> CodecConfig | Compressor:
        """Return what updates are compressed by: the codec's settings, or a rival of it.

        Raises
        ------
        ConfigError
            When compressor-settings are not those of the compressor.
        """
        if self.compressor == "co3":
            if self.compressor_settings:
                raise ConfigError(
                    "compressor-settings must be '' with compressor 'co3', which has keys of its "
                    f"own (format, gamma, ...), got {self.compressor_settings!r}"
                )
            return self.codec_config()
        values = parse_overrides([self.compressor_settings], "compressor-settings:")
        try:
            return make_compressor(self.compressor, values)
        except ConfigError as error:
            raise ConfigError(f"compressor-settings: {error}") from None

    @property
    def uplink_budget_bytes(self) -> int | None:
        """Bytes that all payloads of the run may take, None for no limit."""
        return max(1, int(self.uplink_budget_mb * 10**6)) if self.uplink_budget_mb > 0 else None

    @property
    def ps_step(self) -> float:
        """Step size of the PS: server-lr, or for 0 what the payload kind implies."""
        if self.server_lr > 0:
            return self.server_lr
        return self.lr if self.payload == "gradient" else 1.0


DEFAULTS = Settings().as_run_config()


def check_keys(run_config: Mapping[str, object]) -> None:
    """Raise ConfigError for a key the app does not know, naming the closest one it does."""
    for key in run_config:
        if key not in DEFAULTS:
            close = difflib.get_close_matches(key, DEFAULTS, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(DEFAULTS)}"
            raise ConfigError(f"run-config key must be a known one, got {key!r}; {advice}")


def read_config_file(path: Path) -> dict[str, Value]:
    """Read a TOML file of run-config keys, one flat table.

    Raises
    ------
    ConfigError
        No such file, not TOML, or a value that is a table or a list.
    """
    table = read_toml(path)
    if "grid" in table:
        raise ConfigError(f"grid must be in a sweep only, got it in {path}; use `co3 sweep {path}`")
    for key, value in table.items():
        check_scalar(key, value, path)
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; ConfigError where there is none, or it is not TOML."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"CONFIG.toml must be a readable file, got {str(path)!r} ({error.strerror})"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"CONFIG.toml must be UTF-8 text, got other bytes in {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"CONFIG.toml must be TOML, got an error in {path}: {error}") from None


def check_scalar(key: str, value: object, path: Path) -> None:
    """Raise ConfigError for a value of a file that is no setting: a table, a list, a date."""
    if not isinstance(value, (str, int, float, bool)):
        raise ConfigError(
            f"{key} must be a string, number or boolean, got a {type(value).__name__} in {path}"
        )


def parse_overrides(texts: list[str], source: str = "-c") -> dict[str, Value]:
    """Parse ``-c "key=value key=value"`` texts as Flower does: values in TOML, strings quoted.

    Errors begin with the name of the source.

    Raises
    ------
    ConfigError
        A text that is not such a list.

    Examples
    --------
    >>> parse_overrides(["lr=0.1 format='e5m2'", "seed=3"])
    {'lr': 0.1, 'format': 'e5m2', 'seed': 3}
    """
    values: dict[str, Value] = {}
    for text in texts:
        for item in _split_items(text):
            key, equals, value = item.partition("=")
            if not (key and equals and value):
                raise ConfigError(f"{source} must hold key=value pairs, got {item!r} in {text!r}")
            try:
                values[key] = tomllib.loads(f"x = {value}")["x"]
            except tomllib.TOMLDecodeError:
                raise ConfigError(
                    f"{source} values must be numbers, true, false or quoted strings, got {item!r};"
                    f""" a string is written {key}="'{value}'" in the shell"""
                ) from None
    return values


def expand_path(text: str, key: str) -> str:
    """Expand ``~`` and environment variables of a path.

    Raises
    ------
    ConfigError
        The path names an environment variable that is not set.
    """
    expanded = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111
    if "$" in expanded:
        name = expanded[expanded.index("$") + 1 :].split("/")[0].strip("{}")
        raise ConfigError(
            f"{key} must name environment variables that are set, got {text!r};"
            f" set {name} to the folder it stands for"
        )
    return expanded


def _split_items(text: str) -> list[str]:
    """Split at blanks outside quotes, the quotes kept."""
    items, current, quote = [], "", ""
    for character in text:
        if character in "'\"" and quote in ("", character):
            quote = "" if quote else character
        if character.isspace() and not quote:
            items.append(current)
            current = ""
        else:
            current += character
    return [item for item in [*items, current] if item]


def _typed(key: str, value: object) -> Value:
    kind = type(DEFAULTS[key])
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
        raise ConfigError(f"{key} must be {names[kind]}, got {value!r}")
    return value


def _check_value(key: str, value: Value) -> None:
    if key in CHOICES and value not in CHOICES[key]:
        listed = ", ".join(repr(choice) for choice in CHOICES[key])
        raise ConfigError(f"{key} must be one of {listed}, got {value!r}")
    if value in (math.inf, -math.inf):
        raise ConfigError(f"{key} must be finite, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # what Flower's records hold
        raise ConfigError(f"{key} must be in [-2**63, 2**63), got {value!r}")
    if key in RANGES:
        rule, holds = RANGES[key]
        if not holds(value):  # NaN holds nothing
            raise ConfigError(f"{key} must be {rule}, got {value!r}")


def check_together(settings: Settings) -> None:
    """Raise ConfigError where settings that are fine alone do not fit each other."""
    if 0 < settings.num_clients < settings.min_replies:
        raise ConfigError(
            f"min-replies must be at most num-clients, got {settings.min_replies}"
            f" with {settings.num_clients} clients"
        )
    for key in ("target-bits-per-parameter", "uplink-budget-mb"):
        value = settings.as_run_config()[key]
        if value and settings.compressor != "co3":
            raise ConfigError(
                f"{key} must be 0 with compressor {settings.compressor!r}, whose payloads have a"
                f" size of their own, got {value}"
            )
    for key in ("strategy", "max-update-norm"):
        value = settings.as_run_config()[key]
        if value and COMPRESSORS[settings.compressor].is_sketch:
            raise ConfigError(
                f"{key} must be {DEFAULTS[key]!r} with compressor {settings.compressor!r}, which"
                f" gives no client's own update, got {value!r}"
            )
    if settings.save_gradients_every and is_rival(settings.compressor):
        raise ConfigError(
            f"save-gradients-every must be 0 with compressor {settings.compressor!r}, whose"
            f" payloads `co3 analyze` cannot take apart, got {settings.save_gradients_every}"
        )
    if settings.strategy == "bulyan" and 0 < settings.num_clients < MIN_BULYAN_CLIENTS:
        raise ConfigError(
            f"num-clients must be at least {MIN_BULYAN_CLIENTS} with strategy 'bulyan', got"
            f" {settings.num_clients}"
        )
    if settings.resume and not settings.run_dir:
        raise ConfigError("run-dir must name the run to go on with where resume is true, got ''")
    if settings.reclip and not settings.max_update_norm:
        raise ConfigError("max-update-norm must be above 0 with reclip, got 0.0")
    if settings.data_dir and settings.dataset != "cifar10":
        raise ConfigError(
            f"data-dir must be '' unless dataset is 'cifar10', got {settings.data_dir!r}"
        )
    if settings.strategy and settings.payload == "update" and settings.server_lr not in (0.0, 1.0):
        raise ConfigError(
            f"server-lr must be 0 or 1 with strategy {settings.strategy!r} and payload 'update',"
            f" got {settings.server_lr}; the strategy has a step size of its own"
        )


def check_dataset(name: str) -> None:
    """Raise ConfigError for a data set that is not on this machine; clients need not have it."""
    if name not in DATASETS and not (name and Path(expand_path(name, "dataset")).is_dir()):
        raise ConfigError(
            "dataset must be 'digits', 'cifar10' or a directory of parquet files or image folders,"
            f" got {name!r}"
        )
