"""The settings of the codec, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from co3_flower import kernels
from co3_flower.bitstream import MAX_STREAMS, NUM_STREAMS
from co3_flower.errors import ConfigError
from co3_flower.formats import FloatFormat

SCALES = kernels.RULES
PAPER_FORMAT = "e2m1"  # what the papers' scale rule is made for
PRIORS = ("gennorm", "norm", "laplace", "empirical", "auto")
CODERS = ("huffman", "rans")
STRUCTURES = ("auto", "none")
_WIDER = ("e2m1", "e2m1fn", "e3m2", "e4m3", "e5m2")  # named where a target needs more values


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How an update is converted, corrected and compressed.

    Parameters
    ----------
    format : str
        Tiny float format, ``e<E>m<M>`` or one of the ``fn`` formats.
    gamma : float
        Decay in [0, 1] of the residual that joins the next update.
    scale : str
        ``mse`` (least mean squared error under the fitted law), ``std``, ``absmax``, ``unit``, or
        ``paper`` (the CO3 authors' rule, for e2m1 only: a polynomial in beta over alpha, near the
        optimum for beta in 0.5 to 2 and far from it below 0.4).
    scale_multiplier : float
        Positive factor on the scale; below 1 cells are coarser and fewer bits go up. The scale
        follows the spread of the update plus its residual: far below 1 and with gamma near 1 the
        residual grows, the cells grow with it, and in the end nothing is sent. A target has no such
        end.
    prior : str
        Where a code table comes from: ``gennorm``, ``norm`` or ``laplace`` (the format's cells
        under the fitted law with its zero atom), ``empirical`` (the counts), or ``auto`` (the
        smallest).
    coder : str
        ``huffman`` (at least one bit a symbol) or ``rans``.
    structure : str
        ``none`` (one code table per tensor) or ``auto`` (one per class of entries whose rows and
        columns spread alike, for the whole update, where that makes the payload smaller).
    min_numel : int
        Tensors with fewer entries share one code table.
    raw : sequence of str or int
        Names or positions of tensors that travel as they are.
    buffers : sequence of str or int
        Names or positions of float tensors that are coded in e4m3 with gamma 1 and share one table.
    target_bits_per_parameter : float or None
        Size of every payload, all its bytes counted, in bits per parameter: each update gets the
        factor on all scales that meets it within 2 %, whatever the residual does. It must be below
        log2 of the format's values, with Huffman codes above 1, and scale_multiplier must be 1. An
        update that cannot meet it takes the nearest size that it can: zeros take less; where frame
        and buffers leave no room, all stays in the residual; and scales ``mse`` and ``std`` are
        made at most twice as fine, as beyond that more is clamped than gained.
    num_threads : int
        Threads that encode; the bytes do not depend on it.
    scale_refit_every : int
        Rounds for which a client of a CO3Strategy keeps the scales that the rule has chosen; 1
        chooses in every round. (`encode_update` alone takes them as ``scales``.)
    num_streams : int
        Streams of a chunk with Huffman codes, at most 255. A device decodes all streams of a
        payload at once, a core two: more of them take about 3 bytes each in every chunk of 16 KiB.
        rANS always has four states.

    Raises
    ------
    ConfigError
        If a value is impossible or not available.

    Examples
    --------
    >>> CodecConfig(format="e5m2", scale="unit").float_format.num_values
    247
    """

    format: str = "e2m1"
    gamma: float = 0.9
    scale: str = "mse"
    scale_multiplier: float = 1.0
    prior: str = "gennorm"
    coder: str = "huffman"
    structure: str = "auto"
    min_numel: int = 1024
    raw: Sequence[str | int] = ()
    buffers: Sequence[str | int] = ()
    target_bits_per_parameter: float | None = None
    num_threads: int = 1
    scale_refit_every: int = 1
    num_streams: int = NUM_STREAMS

    def __post_init__(self) -> None:
        FloatFormat.parse(self.format)
        _check_number("gamma", self.gamma, "in [0, 1]", lambda x: 0.0 <= x <= 1.0)
        _check_choice("scale", self.scale, SCALES)
        if self.scale == "paper" and self.float_format.name != PAPER_FORMAT:
            raise ConfigError(
                f"format must be {PAPER_FORMAT!r} with scale 'paper', got {self.format!r}; "
                "use scale='mse'"
            )
        _check_number(
            "scale_multiplier",
            self.scale_multiplier,
            "positive and finite",
            lambda x: 0.0 < x < math.inf,
        )
        _check_choice("prior", self.prior, PRIORS)
        _check_choice("coder", self.coder, CODERS)
        _check_choice("structure", self.structure, STRUCTURES)
        _check_integer("min_numel", self.min_numel, 1, 2**32 - 1)
        _check_integer("scale_refit_every", self.scale_refit_every, 1, 2**31 - 1)
        _check_integer("num_streams", self.num_streams, 1, MAX_STREAMS)
        _check_integer("num_threads", self.num_threads, 1, 1024)
        for setting in ("raw", "buffers"):
            object.__setattr__(self, setting, _as_selection(setting, getattr(self, setting)))
        for setting in ("gamma", "scale_multiplier"):
            object.__setattr__(self, setting, float(getattr(self, setting)))
        for setting in ("min_numel", "scale_refit_every", "num_streams", "num_threads"):
            object.__setattr__(self, setting, int(getattr(self, setting)))
        if self.target_bits_per_parameter is not None:
            self._check_target()

    def _check_target(self) -> None:
        name, target = "target_bits_per_parameter", self.target_bits_per_parameter
        _check_number(name, target, "above 0 and finite, or None", lambda x: 0.0 < x < math.inf)
        assert target is not None
        most = math.log2(self.float_format.num_values)
        if target >= most:
            wider = [f for f in _WIDER if math.log2(FloatFormat.parse(f).num_values) > target]
            raise ConfigError(
                f"{name} must be below the {most:.3g} bits that values of {self.format} can take, "
                f"got {target!r}; "
                + (f"use a wider format such as {wider[0]}" if wider else "use compressor 'none'")
            )
        if self.coder == "huffman" and target <= 1.0:
            raise ConfigError(
                f"{name} must be above 1 with coder 'huffman', which spends at least one bit a "
                f"symbol, got {target!r}; use coder='rans'"
            )
        if self.scale_refit_every != 1:
            raise ConfigError(
                "scale_refit_every must be 1 with a target, which finds the scales in every round, "
                f"got {self.scale_refit_every}"
            )
        if self.scale_multiplier != 1.0:
            raise ConfigError(
                f"scale_multiplier must be 1 with a {name}, which finds the factor itself, got "
                f"{self.scale_multiplier!r}; leave one of them out"
            )
        object.__setattr__(self, name, float(target))

    @property
    def float_format(self) -> FloatFormat:
        """The parsed format."""
        return FloatFormat.parse(self.format)


def _check_choice(setting: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{setting} must be one of {', '.join(map(repr, choices))}, got {value!r}"
        )


def _check_number(setting: str, value: Any, rule: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(float(value)):
        raise ConfigError(f"{setting} must be a number {rule}, got {value!r}")


def _check_integer(setting: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ConfigError(f"{setting} must be an integer in [{low}, {high}], got {value!r}")


def _as_selection(setting: str, value: Any) -> tuple[str | int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(
            f"{setting} must be a sequence of tensor names or positions, got {value!r}"
        )
    items: list[str | int] = []
    for item in value:
        if isinstance(item, Integral) and not isinstance(item, bool) and int(item) >= 0:
            items.append(int(item))
        elif isinstance(item, str):
            items.append(item)
        else:
            raise ConfigError(f"{setting} must hold tensor names or positions >= 0, got {item!r}")
    return tuple(items)
