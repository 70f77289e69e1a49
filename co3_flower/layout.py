"""What an update looks like: names, shapes, dtypes and kinds of its tensors, in order.

A tensor's kind is coded, buffer or raw. Coded tensors and buffers are converted to a tiny float
format; raw tensors (integers, booleans and those that the user names) travel as they are. Both ends
derive the same `Plan` from a layout and a payload's header.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT_DTYPES = frozenset(map(np.dtype, ("float16", "float32", "float64")))
_STRIDED = "torch.strided"  # how torch calls a dense tensor
TENSOR_FLOAT32 = "torch.float32"  # and one of floats
RAW_DTYPES = FLOAT_DTYPES | frozenset(
    map(
        np.dtype, ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    )
)


class Kind(IntEnum):
    """How a tensor travels."""

    CODED = 0
    BUFFER = 1
    RAW = 2


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of the tensors of an update, in order.

    Examples
    --------
    >>> Layout.of({"w": np.zeros((2, 3), np.float32), "steps": np.int64(7)})
    Layout(names=('w', 'steps'), shapes=((2, 3), ()), dtypes=(dtype('float32'), dtype('int64')))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, like: Layout | Mapping[str, Any]) -> Layout:
        """Return the layout of a mapping of arrays (or torch tensors), or the layout itself.

        Raises
        ------
        TypeError
            If it is neither, or an entry's dtype is not a float, integer or bool type that NumPy
            knows.
        """
        if isinstance(like, Layout):
            return like
        if not isinstance(like, Mapping):
            raise TypeError(
                "layout must be a Layout or a mapping of names to arrays, "
                f"got {type(like).__name__}"
            )
        shapes, dtypes = [], []
        for name, value in like.items():
            if is_tensor(value):
                check_tensor(name, value)
                dtypes.append(tensor_dtype(name, value))
            else:
                value = value if isinstance(value, np.ndarray | np.generic) else np.asarray(value)
                dtypes.append(value.dtype)
            shapes.append(tuple(value.shape))
        if not RAW_DTYPES.issuperset(dtypes):
            dtypes = [_travelling(name, dtype) for name, dtype in zip(like, dtypes, strict=True)]
        return cls(tuple(like), tuple(shapes), tuple(dtypes))

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Entries of each tensor."""
        sizes = []
        for shape in self.shapes:
            size = 1
            for axis in shape:
                size *= axis
            sizes.append(size)
        return tuple(sizes)

    def digest(self, raw: Collection[int]) -> bytes:
        """Return 8 bytes for the shapes in order, which tensors are raw, and the dtypes of those.

        Parameters
        ----------
        raw : collection of int
            Positions of the raw tensors.
        """
        return _digest(self.shapes, tuple((i, self.dtypes[i].str) for i in sorted(raw)))

    def select(self, chosen: Collection[str | int], setting: str) -> frozenset[int]:
        """Return the positions that names or positions stand for.

        Raises
        ------
        ValueError
            If a name or position is not in the layout; the message names the setting.
        """
        index = {name: i for i, name in enumerate(self.names)}
        positions = set()
        for item in chosen:
            if isinstance(item, str) and item in index:
                positions.add(index[item])
            elif isinstance(item, int) and 0 <= item < len(self):
                positions.add(item)
            else:
                raise ValueError(
                    f"{setting} must name tensors of the update, got {item!r}; "
                    f"it has {_some(self.names)}"
                )
        return frozenset(positions)

    def table_threshold(self, kinds: tuple[Kind, ...], min_numel: int) -> int:
        """Return the size from which tensors have a code table of their own.

        It is `min_numel`, or more where that would give more tables than `max_tables` allows.
        """
        return _table_threshold(self, kinds, min_numel)

    def plan(self, kinds: tuple[Kind, ...], min_numel: int) -> Plan:
        """Return the order of coding for the given kinds (see `Plan`)."""
        return _plan(self, kinds, min_numel)


@dataclass(frozen=True)
class Plan:
    """The order in which the tensors of a payload are coded.

    Coded tensors with a code table of their own come first, then the small ones that share a table,
    then the buffers, which share another; each group in layout order.

    Attributes
    ----------
    kinds : tuple of Kind
        One per tensor of the layout.
    min_numel : int
        Coded tensors below this size share a table.
    order : tuple of int
        Layout positions of all coded tensors and buffers, in coding order.
    num_own, num_pooled, num_buffers : int
        Sizes of the three groups.
    offsets : int64 [len(order) + 1]
        Where each tensor begins among the flat symbols.
    raw : tuple of int
        Layout positions of the raw tensors.
    """

    kinds: tuple[Kind, ...]
    min_numel: int
    order: tuple[int, ...]
    num_own: int
    num_pooled: int
    num_buffers: int
    offsets: NDArray[np.int64]
    raw: tuple[int, ...]

    @property
    def num_coded(self) -> int:
        """Tensors in the update's own format, with a table of their own or not."""
        return self.num_own + self.num_pooled

    @property
    def num_symbols(self) -> int:
        """Symbols of all coded tensors and buffers."""
        return int(self.offsets[-1])

    @property
    def pool(self) -> slice:
        """Coding positions of the small coded tensors."""
        return slice(self.num_own, self.num_coded)

    @property
    def has_pool(self) -> bool:
        """Whether the small coded tensors hold any entry."""
        return bool(self.offsets[self.num_coded] > self.offsets[self.num_own])

    @property
    def has_buffers(self) -> bool:
        """Whether the buffers hold any entry."""
        return bool(self.offsets[-1] > self.offsets[self.num_coded])


def sub_layout(
    layout: Layout, positions: Sequence[int], dtype: np.dtype[Any] | None = None
) -> Layout:
    """Return the layout of some of the tensors."""
    return Layout(
        tuple(layout.names[i] for i in positions),
        tuple(layout.shapes[i] for i in positions),
        tuple(dtype or layout.dtypes[i] for i in positions),
    )


def cut_flat(flat: Any, offsets: NDArray[np.int64], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return views of the tensors that lie one after the other in a flat array or torch tensor.

    Examples
    --------
    >>> [part.tolist() for part in cut_flat(np.arange(5), np.array([0, 4, 5]), [(2, 2), ()])]
    [[[0, 1], [2, 3]], 4]
    """
    bounds = itertools.pairwise(offsets.tolist())
    return [
        flat[begin:end].reshape(shape) for (begin, end), shape in zip(bounds, shapes, strict=True)
    ]


def max_tables(num_symbols: int) -> int:
    """Return how many code tables large tensors may have.

    A decoder's look-up tables take 40 KiB each: this keeps them within about two and a half times
    the update, and all that it holds within four, whatever a payload says.
    """
    return 64 + num_symbols // 4096


def as_arrays(update: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the update as NumPy arrays.

    Torch tensors are brought to the host and made dense; bfloat16, torch's or ml_dtypes', becomes
    float32.

    Parameters
    ----------
    update : mapping of str to array
        NumPy arrays, torch tensors or array-likes, in order.

    Returns
    -------
    dict of str to array
        Float, integer or bool arrays; no copy where none is needed.

    Raises
    ------
    TypeError
        If the update is no mapping, or an entry's dtype is none of those.
    """
    check_mapping(update)
    arrays = {
        name: value if isinstance(value, np.ndarray) else _as_array(name, value)
        for name, value in update.items()
    }
    if RAW_DTYPES.issuperset([array.dtype for array in arrays.values()]):
        return arrays
    return {
        name: array.astype(_travelling(name, array.dtype), copy=False)
        for name, array in arrays.items()
    }


def check_mapping(update: object) -> None:
    """Raise TypeError where an update is no mapping."""
    if not isinstance(update, Mapping):
        raise TypeError(f"update must be a mapping of names to arrays, got {type(update).__name__}")


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor, by its manners: torch is not imported here."""
    return hasattr(value, "detach")


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError where a torch tensor has no data."""
    if getattr(value, "is_meta", False):
        raise TypeError(
            f"tensor must hold data, got one on the meta device in {name!r}; load the weights"
        )


def dense_tensor(value: Any) -> Any:
    """Return a torch tensor where it lies: detached, dense, float32 for bfloat16."""
    value = value.detach()
    if str(getattr(value, "layout", _STRIDED)) != _STRIDED:  # an embedding's sparse gradient
        value = value.to_dense()
    return value.float() if str(value.dtype) == "torch.bfloat16" else value


def tensor_dtype(name: str, value: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a torch tensor, float32 for bfloat16."""
    name_of_dtype = str(value.dtype).removeprefix("torch.")
    try:
        dtype = np.dtype("float32" if name_of_dtype == "bfloat16" else name_of_dtype)
    except TypeError:  # float8 and the like, which NumPy lacks
        raise _dtype_error(name, value.dtype) from None
    if dtype not in RAW_DTYPES:
        raise _dtype_error(name, value.dtype)
    return dtype


def _as_array(name: str, value: Any) -> NDArray[Any]:
    if is_tensor(value):
        check_tensor(name, value)
        tensor_dtype(name, value)
        return np.asarray(dense_tensor(value).cpu().numpy())
    return np.asarray(value)


def _travelling(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a tensor goes on: native byte order, float32 for bfloat16."""
    if dtype.name == "bfloat16":  # ml_dtypes', which JAX uses
        return np.dtype(np.float32)
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native not in RAW_DTYPES:
        raise _dtype_error(name, dtype)
    return native


def _dtype_error(name: str, dtype: object) -> TypeError:
    choices = ", ".join(sorted(d.name for d in RAW_DTYPES))
    return TypeError(f"dtype must be one of {choices} or bfloat16, got {dtype} in {name!r}")


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return shown + (f", ... ({len(names)} tensors)" if len(names) > 8 else "")


@lru_cache(maxsize=64)
def _digest(shapes: tuple[tuple[int, ...], ...], raw: tuple[tuple[int, str], ...]) -> bytes:
    content = bytearray()
    for shape in shapes:
        content += struct.pack(f"<B{len(shape)}Q", len(shape), *shape)
    for position, dtype in raw:
        content += struct.pack("<Q", position) + dtype.lstrip("<>=|").encode() + b"\0"
    return hashlib.blake2b(content, digest_size=8).digest()


@lru_cache(maxsize=64)
def _table_threshold(layout: Layout, kinds: tuple[Kind, ...], min_numel: int) -> int:
    pairs = zip(layout.numels, kinds, strict=True)
    sizes = sorted((n for n, kind in pairs if kind == Kind.CODED), reverse=True)
    limit = max_tables(sum(sizes))
    return min_numel if len(sizes) <= limit else max(min_numel, sizes[limit] + 1)


@lru_cache(maxsize=64)
def _plan(layout: Layout, kinds: tuple[Kind, ...], min_numel: int) -> Plan:
    numels = layout.numels
    coded = [i for i, kind in enumerate(kinds) if kind == Kind.CODED]
    own = [i for i in coded if numels[i] >= min_numel]
    pooled = [i for i in coded if numels[i] < min_numel]
    buffers = [i for i, kind in enumerate(kinds) if kind == Kind.BUFFER]
    order = tuple(own + pooled + buffers)
    offsets = np.zeros(len(order) + 1, np.int64)
    np.cumsum([numels[i] for i in order], out=offsets[1:])
    offsets.setflags(write=False)
    raw = tuple(i for i, kind in enumerate(kinds) if kind == Kind.RAW)
    return Plan(kinds, min_numel, order, len(own), len(pooled), len(buffers), offsets, raw)
