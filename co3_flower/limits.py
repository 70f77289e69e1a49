"""What a sound payload may still not do: entries that are too large, an update that is too long.

In come a payload's symbols and the values they stand for, before anything is added or handed out;
no dense copy is made of what is coded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co3_flower.errors import PayloadError
from co3_flower.layout import FLOAT_DTYPES, Kind, Layout, Plan

Count: TypeAlias = Callable[[int], NDArray[np.int64]]
_BLOCK = 2**16  # raw entries squared at a time


@dataclass(frozen=True)
class NormLimit:
    """Upper bound on the L2 norm of a decoded update, over some of its tensors as one vector.

    Parameters
    ----------
    max_norm : float
        Positive and finite.
    names : frozenset of str
        The float tensors that count, coded or raw.
    clip : bool
        Scale these tensors down to the bound; otherwise a longer update is refused.

    Examples
    --------
    >>> NormLimit(1.5, frozenset(["weight", "bias"]), clip=True).max_norm
    1.5
    """

    max_norm: float
    names: frozenset[str]
    clip: bool = False


def check_magnitudes(
    layout: Layout,
    plan: Plan,
    values: NDArray[np.float32],
    count: Count,
    raw: Mapping[int, NDArray[Any]],
    limit: float,
) -> None:
    """Refuse float entries beyond a limit.

    The scales tell nearly always that there are none; only then the symbols are looked at.

    Parameters
    ----------
    layout, plan : Layout, Plan
        Of the payload.
    values : float32 [tensor in coding order, symbol]
        What the symbols stand for.
    count : callable
        How often each symbol occurs in a coded tensor or buffer, by its number in coding order.
    raw : mapping of int to array
        Raw tensors by layout position.
    limit : float
        Largest magnitude.

    Raises
    ------
    PayloadError
        Naming the tensor.
    """
    largest = {
        i: float(np.abs(array).max(initial=0))
        for i, array in raw.items()
        if array.dtype in FLOAT_DTYPES
    }
    for j in np.flatnonzero(values.max(axis=1, initial=0) > limit).tolist():
        used = count(j) > 0
        largest[plan.order[j]] = float(np.abs(values[j, used]).max(initial=0))
    for i, magnitude in largest.items():
        if magnitude > limit:
            raise PayloadError(
                f"decoded entries must be at most {limit:g} in magnitude, "
                f"got {magnitude:g} in {layout.names[i]!r}"
            )


def update_norm(
    names: frozenset[str],
    layout: Layout,
    plan: Plan,
    values: NDArray[np.float32],
    count: Count,
    raw: Mapping[int, NDArray[Any]],
) -> float:
    """Return the L2 norm over the named tensors: of coded ones, from how often each symbol occurs.

    Parameters are those of `check_magnitudes`. The sum of squares is rounded once, so that neither
    the order of tensors nor the number of threads matters; squares are of entries over the largest
    value there is, so that none overflows, a raw float64's neither.
    """
    coded = [j for j, i in enumerate(plan.order) if layout.names[i] in names]
    others = [array.reshape(-1) for i, array in raw.items() if layout.names[i] in names]
    largest = max(
        [float(values[coded].max(initial=0)), *(float(np.abs(x).max(initial=0)) for x in others)]
    )
    if largest == 0:
        return 0.0
    squares: list[float] = []
    with np.errstate(under="ignore"):
        for j in coded:
            row = values[j] / np.float64(largest)
            squares += (count(j) * np.square(row)).tolist()
        for array in others:
            for k in range(0, array.size, _BLOCK):
                squares.append(float(np.square(array[k : k + _BLOCK] / np.float64(largest)).sum()))
    return largest * math.sqrt(math.fsum(squares))


def limit_norm(
    limit: NormLimit,
    layout: Layout,
    plan: Plan,
    values: NDArray[np.float32],
    count: Count,
    raw: Mapping[int, NDArray[Any]],
) -> None:
    """Refuse an update that is too long, or scale its values down in place: ``y = f32(c * y)``.

    Parameters are those of `check_magnitudes`; `values` and the arrays of `raw` are changed.
    The factor c = max_norm / norm and the product are float64: entries may be as large as float32
    goes, where a float32 factor would be subnormal.

    Raises
    ------
    PayloadError
        When the norm is above the limit and `clip` is false.
    """
    norm = update_norm(limit.names, layout, plan, values, count, raw)
    if norm <= limit.max_norm:
        return
    if not limit.clip:
        raise PayloadError(
            f"decoded update must have an L2 norm of at most {limit.max_norm:g}, got {norm:g}"
        )
    factor = np.float64(limit.max_norm / norm)
    chosen = [j for j, i in enumerate(plan.order) if layout.names[i] in limit.names]
    with np.errstate(under="ignore"):
        values[chosen] = values[chosen] * factor
        for i, array in raw.items():
            if layout.names[i] in limit.names:
                np.multiply(array, factor, out=array, dtype=np.float64, casting="same_kind")


def limit_arrays(
    arrays: dict[str, NDArray[Any]], max_magnitude: float, norm_limit: NormLimit | None
) -> None:
    """Hold decoded tensors to the limits: `check_magnitudes`, then `limit_norm`.

    Parameters
    ----------
    arrays : dict of str to array
        Float arrays may be scaled down, in new arrays.
    max_magnitude : float
        Largest magnitude of a float entry.
    norm_limit : NormLimit or None
        Bound on the norm.

    Raises
    ------
    PayloadError
        As those two do.
    """
    layout = Layout.of(arrays)
    plan = layout.plan((Kind.RAW,) * len(layout), 1)
    values, raw = np.empty((0, 1), np.float32), dict(enumerate(arrays.values()))
    check_magnitudes(layout, plan, values, _count_nothing, raw, max_magnitude)
    if norm_limit is not None:
        raw = {i: a.copy() if layout.names[i] in norm_limit.names else a for i, a in raw.items()}
        limit_norm(norm_limit, layout, plan, values, _count_nothing, raw)
        arrays.update(zip(layout.names, raw.values(), strict=True))


def _count_nothing(j: int) -> NDArray[np.int64]:
    raise AssertionError(f"no tensor is coded, got one at {j}")
