"""Tiny float formats (the *convert* stage): names in, limits and value tables out.

A format ``e<E>m<M>`` has one sign bit, E exponent bits (bias 2**(E-1) - 1), M mantissa bits and
subnormals. Its top exponent is reserved, as IEEE 754 reserves it for infinities and NaNs, so the
papers' fp8 [1,5,2] is ``e5m2`` with 247 values and their fp4 is ``e2m1`` with 11. The suffix ``fn``
(finite) uses the top exponent for values. A *symbol* is a position in the ascending table of
values; zero stands there once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from co3_flower.errors import ConfigError

_FINITE_FORMATS = {"e2m1fn": (2, 1), "e3m2fn": (3, 2), "e2m3fn": (2, 3), "e4m3fn": (4, 3)}
_NAME = re.compile(r"e([0-9])m([0-9])(fn)?")
_TRIPLE = re.compile(r"sgn-(mant-exp|exp-mant): *1 *, *([0-9]) *, *([0-9])")
_CHOICES = (
    "format must be e<E>m<M> with E >= 1, M >= 0, E + M <= 7 and at least three values, one of "
    "'e2m1fn', 'e3m2fn', 'e2m3fn', 'e4m3fn', or a triple 'sgn-mant-exp:1,M,E' or "
    "'sgn-exp-mant:1,E,M'"
)


@dataclass(frozen=True)
class FloatFormat:
    """A small floating-point format: derived limits and the table of its values.

    Parameters
    ----------
    exponent_bits, mantissa_bits : int
        E >= 1 and M >= 0 with E + M <= 7; the sign bit comes on top.
    finite : bool
        True for the ``fn`` formats, whose top exponent holds finite values (``e4m3fn`` keeps one
        NaN code, which is not a value here).

    Raises
    ------
    ConfigError
        If the sizes are out of range or leave fewer than three values.

    Examples
    --------
    >>> FloatFormat.parse("e2m1").values.tolist()
    [-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
    >>> FloatFormat.parse("sgn-exp-mant:1,5,2").max_finite
    57344.0
    """

    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    def __post_init__(self) -> None:
        e, m = self.exponent_bits, self.mantissa_bits
        known = not self.finite or (e, m) in _FINITE_FORMATS.values()
        if e < 1 or m < 0 or e + m > 7 or not known or self._num_magnitudes < 2:
            raise ConfigError(f"{_CHOICES}, got {self.name!r}")

    @classmethod
    def parse(cls, text: str) -> FloatFormat:
        """Return the format that a name or a triple with its order spelled out stands for.

        Parameters
        ----------
        text : str
            ``e5m2``, ``e4m3fn``, ``sgn-mant-exp:1,2,1`` (= e1m2) or ``sgn-exp-mant:1,5,2`` (=
            e5m2).

        Raises
        ------
        ConfigError
            If the text is none of these.
        """
        if not isinstance(text, str):
            raise ConfigError(f"{_CHOICES}, got {text!r}")
        return _parse(text)

    @property
    def name(self) -> str:
        """Canonical name, such as ``e5m2`` or ``e4m3fn``."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}" + ("fn" if self.finite else "")

    @property
    def bias(self) -> int:
        """Exponent bias, 2**(E-1) - 1."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def _num_magnitudes(self) -> int:
        exponents = 2**self.exponent_bits - (0 if self.finite else 1)
        nan_codes = 1 if self.finite and (self.exponent_bits, self.mantissa_bits) == (4, 3) else 0
        return int(exponents * 2**self.mantissa_bits) - nan_codes

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Float32 [K], ascending, read-only: ``values[k]`` is what symbol k stands for."""
        code = np.arange(self._num_magnitudes)
        exponent, fraction = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
        significand = np.where(exponent == 0, fraction, fraction + 2**self.mantissa_bits)
        magnitude = np.ldexp(significand, np.maximum(exponent, 1) - self.bias - self.mantissa_bits)
        values = np.concatenate([-magnitude[:0:-1], magnitude]).astype(np.float32)
        values.setflags(write=False)
        return values

    @property
    def num_values(self) -> int:
        """K, the size of the alphabet (odd: zero and pairs of opposite values)."""
        return 2 * self._num_magnitudes - 1

    @property
    def zero(self) -> int:
        """The symbol of 0.0."""
        return self._num_magnitudes - 1

    @property
    def max_finite(self) -> float:
        """Largest value; conversion saturates to it."""
        return float(self.values[-1])

    @property
    def min_normal(self) -> float:
        """Smallest normal value, 2**(1 - bias); for E = 1 all values lie below it."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value (for M = 0 it is normal)."""
        return float(self.values[self.zero + 1])


@lru_cache(maxsize=256)
def _parse(text: str) -> FloatFormat:
    if (match := _NAME.fullmatch(text)) is not None:
        return FloatFormat(int(match[1]), int(match[2]), finite=match[3] is not None)
    if (match := _TRIPLE.fullmatch(text)) is not None:
        first, second = int(match[2]), int(match[3])
        return FloatFormat(first, second) if match[1] == "exp-mant" else FloatFormat(second, first)
    hint = {"fp4": "e2m1", "fp8": "e5m2"}.get(text.lower())
    note = f"; for the papers' {text.lower()} use {hint!r}" if hint else ""
    raise ConfigError(f"{_CHOICES}, got {text!r}{note}")
