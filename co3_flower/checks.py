"""Checks of settings, CO3Strategy's and compressors'; each error says what must hold."""

from __future__ import annotations

from collections.abc import Sequence

from co3_flower.errors import ConfigError


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}")


def check_number(
    name: str, value: object, low: float, high: float, *, open_below: bool = False
) -> None:
    """Raise ConfigError unless ``low <= value <= high``, or ``low < value`` if open below."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_below and value == low):  # type: ignore[operator]
        bracket = "(" if open_below else "["
        raise ConfigError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless the value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_integer_within(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless the value is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise ConfigError unless the value is a number above 0 and finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number above 0 and finite, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless the value is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def resolve_server_lr(server_lr: float | None, payload: str, *, has_inner: bool) -> float:
    """Return the server's step size; an inner strategy in update mode steps by itself."""
    if server_lr is None:
        if payload == "gradient":
            raise ConfigError("server_lr must be set in gradient mode, got None; for example 0.01")
        return 1.0
    check_number("server_lr", server_lr, 0, float("inf"), open_below=True)
    if payload == "update" and has_inner and server_lr != 1:
        raise ConfigError(
            f"server_lr must be 1 with an inner strategy in update mode, got {server_lr!r}; set "
            "the inner strategy's own step size instead"
        )
    return float(server_lr)
