"""Error feedback with a decaying memory: update and residual in, compensated update out.

This is the *correct* stage. The residual of a round is what its conversion lost,
``m' = f32(v - y)``; a share gamma of it joins the next update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels
from co3_flower.layout import TENSOR_FLOAT32, is_tensor

_FLOAT32 = np.dtype(np.float32)


def compensate(
    update: NDArray[np.float32], residual: NDArray[np.float32] | None, gamma: float
) -> NDArray[np.float32]:
    """Return the update plus the decayed residual, ``v = f32(g + f32(f32(gamma) * m))``.

    Parameters
    ----------
    update : float32 [...]
        Local gradient or weight difference g; not changed.
    residual : float32 [...] or None
        Residual m of the last round, or None in the first.
    gamma : float
        Memory decay in [0, 1].

    Returns
    -------
    float32 [...]
        A new array v of the update's shape.

    Examples
    --------
    >>> compensate(np.float32([1.0, 2.0]), np.float32([0.5, -0.5]), 0.5)
    array([1.25, 1.75], dtype=float32)

    References
    ----------
    arXiv 2203.09044, the update with error feedback and memory decay.
    """
    compensated = np.array(update, dtype=np.float32, order="C")
    if residual is not None:
        flat = np.ascontiguousarray(residual, dtype=np.float32).reshape(-1)
        kernels.add_scaled(compensated.reshape(-1), flat, np.float32(gamma))
    return compensated


def check_residual(
    residual: Mapping[str, Any],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Raise ValueError unless the residual has exactly the given names and shapes, in any order.

    Parameters
    ----------
    residual : mapping of str to float32 array
        What an earlier ``encode_update`` returned.
    names, shapes : sequences
        The error-fed tensors of the present update.
    """
    if residual.keys() != set(names):
        missing = [name for name in names if name not in residual]
        extra = sorted(set(residual) - set(names))
        raise ValueError(
            f"residual must hold exactly the coded tensors of the update, "
            f"got missing {missing} and extra {extra}"
        )
    for name, shape in zip(names, shapes, strict=True):
        array = residual[name]
        is_float32 = (isinstance(array, np.ndarray) and array.dtype == _FLOAT32) or (
            is_tensor(array) and str(array.dtype) == TENSOR_FLOAT32
        )
        if not is_float32 or tuple(array.shape) != shape:
            got = f"{getattr(array, 'dtype', type(array).__name__)} {np.shape(array)}"
            raise ValueError(f"residual must be float32 {shape}, got {got} in {name!r}")
