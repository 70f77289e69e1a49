"""The work on whole tensors, where they live: NumPy arrays on the host, torch tensors on a device.

The stages (`codec`, `rate`, `tables`) know sizes, scales, counts and code tables; whatever has an
entry per parameter they leave to a `Dense`. `HostDense` does it with the numba loops; `dense_torch`
has the one for torch tensors, which gives the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from co3_flower import kernels, kernels_rate, kernels_structure
from co3_flower.bitstream import (
    decode_structured,
    decode_symbols,
    encode_structured,
    encode_symbols,
    run_parts,
    split_evenly,
)
from co3_flower.formats import FloatFormat
from co3_flower.layout import TENSOR_FLOAT32, Layout, Plan, as_arrays, cut_flat, is_tensor
from co3_flower.payload import Parts, scale_limits
from co3_flower.quantize import kernel_format, rule_table
from co3_flower.tables import CodeTables, Converted

if TYPE_CHECKING:
    from co3_flower.dense_torch import TorchDense

Array: TypeAlias = Any  # NumPy array, or torch tensor
Flat: TypeAlias = Any  # all entries of an update in coding order, one array
_FLOAT32 = np.dtype(np.float32)


class Dense(Protocol):
    """Where whole tensors live, and what is done with them there.

    Flat arrays are float32 [n] or, symbols, uint8 [n]; offsets int64 say where the tensors in
    question begin among the entries, and where the last one ends.
    """

    @property
    def device(self) -> Any:
        """The device, for torch; None on the host."""

    @property
    def choose_modes(self) -> Callable[..., None]:
        """``kernels_structure.choose_structure``, or the like of it."""

    def arrays(self, update: Mapping[str, Any]) -> dict[str, Array]:
        """Return an update's tensors, checked as by `layout.as_arrays`."""

    def difference(self, after: Array, before: Array) -> Array:
        """Return after minus before as float32, from the wider of float32 and the dtype before."""

    def as_float32(self, array: Array) -> Array:
        """Return a tensor as float32 in C order; no copy where none is needed."""

    def to_host(self, array: Array) -> NDArray[Any]:
        """Return a tensor as NumPy array."""

    def count_not_finite(self, array: Array) -> int:
        """Return how many entries of a tensor are NaN or infinite."""

    def flatten(self, arrays: Sequence[Array], num_entries: int) -> Flat:
        """Return all entries as float32 in a new flat array."""

    def as_flat(self, arrays: Sequence[Array], num_entries: int) -> Flat:
        """Return all entries of float32 arrays, not to be changed: no copy of `cut_flat`'s."""

    def decay(self, m: Flat, gammas: NDArray[np.float32], offsets: NDArray[np.int64]) -> Flat:
        """Return ``f32(gamma * m)``."""

    def zeros(self, num_entries: int) -> Flat:
        """Return float32 zeros."""

    def compensate(
        self, v: Flat, m: Flat, gammas: NDArray[np.float32], offsets: NDArray[np.int64]
    ) -> None:
        """Add ``f32(gamma * m)`` to v in place; nothing where m is empty."""

    def convert(
        self,
        v: Flat,
        m: Flat,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        multiplier: float,
        symbols: Flat,
    ) -> None:
        """Compensate, fit, scale and convert a group's tensors; v becomes their residual.

        See `kernels.convert_tensors`, which fills the group.
        """

    def measure(
        self,
        v: Flat,
        m: Flat,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        above: NDArray[np.uint32],
    ) -> None:
        """Compensate, fit and scale a group's tensors, and count magnitudes.

        See `kernels_rate.measure_tensors`. `above` [rows, bins + 1] has a row for each tensor with
        a table of its own, and one for all others.
        """

    def convert_scaled(
        self,
        v: Flat,
        symbols: Flat,
        offsets: NDArray[np.int64],
        factor: float,
        base: Converted,
        group: Converted,
    ) -> tuple[Flat, Flat]:
        """Convert a group's tensors at `factor` times the scales of `base`.

        Returns residual and symbols of all tensors: those behind the group stay as they are in v
        and symbols, which are not changed. See `kernels_rate.convert_scaled`.
        """

    def measure_zeros(
        self, v: Flat, offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return each tensor's sum of magnitudes, and how many entries are not zero."""

    def symbol_array(self, num_entries: int) -> Flat:
        """Return symbols that are not set."""

    def take(self, v: Flat, parts: Sequence[tuple[int, int]]) -> Flat:
        """Return a new flat array of parts of one."""

    def encode(
        self,
        choice: CodeTables,
        symbols: Flat,
        plan: Plan,
        chunk_symbols: int,
        num_streams: int,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the code of all symbols and each stream's words; see `encode_symbols`."""

    def decode(self, parts: Parts, plan: Plan) -> Flat:
        """Return the symbols of a payload; see `decode_symbols`."""

    def count_symbols(self, symbols: Flat, begin: int, end: int, num: int) -> NDArray[np.int64]:
        """Return how often each of `num` symbols occurs in symbols[begin:end]."""

    def look_up(
        self,
        symbols: Flat,
        offsets: NDArray[np.int64],
        values: NDArray[np.float32],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Array]:
        """Return tensors of values[tensor, symbol]."""

    def accumulator(self, array: Any, shape: tuple[int, ...], name: str) -> Array:
        """Return a sum that is to be added to, flat; raises ValueError where it cannot be."""

    def accumulate(
        self,
        sums: Sequence[Array],
        symbols: Flat,
        offsets: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> None:
        """Add values[tensor, symbol] to each tensor's sum in place."""

    def add_weighted(self, total: Array, update: Array, weight: int) -> None:
        """Add in place, ``total = f32(total + f32(f32(weight) * f32(update)))``."""


def dense_for(tensors: Mapping[str, Any] | Layout, device: Any, num_threads: int) -> Dense:
    """Return what works on tensors where they live.

    Parameters
    ----------
    tensors : mapping of str to array, or Layout
        NumPy arrays, or torch tensors: one that is not on the CPU decides.
    device : torch.device, str or None
        Where to work in any case, with torch.
    num_threads : int
        Threads on the host.
    """
    if device is None and isinstance(tensors, Mapping):
        device = next((x.device for x in tensors.values() if is_on_device(x)), None)
    return HostDense(num_threads) if device is None else _torch_dense(device)


def bring_to_host(arrays: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Return float32 arrays as NumPy arrays; those of a device come in one go.

    Parameters
    ----------
    arrays : mapping of str to float32 array
        NumPy arrays, or torch tensors on one device, such as a residual.
    """
    dense = dense_for(arrays, None, 1)
    if isinstance(dense, HostDense):
        return as_arrays(arrays)
    tensors = list(arrays.values())
    offsets = np.cumsum([0, *(tensor.numel() for tensor in tensors)])
    flat = dense.to_host(dense.as_flat(tensors, int(offsets[-1])))
    parts = cut_flat(flat, offsets, [tuple(tensor.shape) for tensor in tensors])
    return dict(zip(arrays, parts, strict=True))


def is_on_device(array: Any) -> bool:
    """Tell whether an array is a torch tensor with data on another device than the CPU."""
    return is_tensor(array) and array.device.type not in ("cpu", "meta")


def _torch_dense(device: Any) -> TorchDense:
    from co3_flower.dense_torch import TorchDense  # torch is imported where it is used, only

    return TorchDense.on(device)


@dataclass(frozen=True)
class HostDense:
    """Work on NumPy arrays, in numba loops; what they give does not depend on the threads."""

    num_threads: int

    @property
    def device(self) -> None:
        """See `Dense`."""
        return None

    @property
    def choose_modes(self) -> Callable[..., None]:
        """See `Dense`."""
        modes: Callable[..., None] = kernels_structure.choose_structure
        return modes

    def arrays(self, update: Mapping[str, Any]) -> dict[str, Array]:
        """See `Dense`."""
        return as_arrays(update)

    def difference(self, after: Array, before: Array) -> Array:
        """See `Dense`."""
        wide = np.result_type(np.float32, before.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is named later
            return self.as_float32(np.subtract(after, before, dtype=wide))

    def as_float32(self, array: Array) -> Array:
        """See `Dense`."""
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, np.float32).reshape(array.shape)

    def to_host(self, array: Array) -> NDArray[Any]:
        """See `Dense`."""
        host: NDArray[Any] = array
        return host

    def count_not_finite(self, array: Array) -> int:
        """See `Dense`."""
        return int((~np.isfinite(array)).sum())

    def flatten(self, arrays: Sequence[Array], num_entries: int) -> Flat:
        """See `Dense`."""
        flat = np.empty(num_entries, np.float32)
        if arrays:
            with np.errstate(over="ignore", invalid="ignore"):  # reported as infinite
                np.concatenate([a.reshape(-1) for a in arrays], out=flat, casting="unsafe")
        return flat

    def as_flat(self, arrays: Sequence[Array], num_entries: int) -> Flat:
        """See `Dense`."""
        arrays = [a if isinstance(a, np.ndarray) else as_arrays({"": a})[""] for a in arrays]
        whole = _common_base(arrays, num_entries)
        return self.flatten(arrays, num_entries) if whole is None else whole

    def decay(self, m: Flat, gammas: NDArray[np.float32], offsets: NDArray[np.int64]) -> Flat:
        """See `Dense`."""
        decayed = np.empty_like(m)
        for gamma, begin, end in zip(gammas, offsets[:-1], offsets[1:], strict=True):
            np.multiply(m[begin:end], gamma, out=decayed[begin:end])
        return decayed

    def zeros(self, num_entries: int) -> Flat:
        """See `Dense`."""
        return np.zeros(num_entries, np.float32)

    def compensate(
        self, v: Flat, m: Flat, gammas: NDArray[np.float32], offsets: NDArray[np.int64]
    ) -> None:
        """See `Dense`."""
        if m.size:
            for gamma, begin, end in zip(gammas, offsets[:-1], offsets[1:], strict=True):
                kernels.add_scaled(v[begin:end], m[begin:end], gamma)

    def convert(
        self,
        v: Flat,
        m: Flat,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        multiplier: float,
        symbols: Flat,
    ) -> None:
        """See `Dense`."""
        fmt, table = kernel_format(group.fmt), rule_table(rule, group.fmt)

        def convert_part(first: int, last: int) -> None:
            kernels.convert_tensors(
                first, last, v, m, gammas, offsets, fmt, kernels.RULES.index(rule), multiplier,
                table, symbols, group.scales, group.fits, group.counts, group.sums, group.events,
            )  # fmt: skip

        self._run(convert_part, group.sizes)

    def measure(
        self,
        v: Flat,
        m: Flat,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        above: NDArray[np.uint32],
    ) -> None:
        """See `Dense`."""
        fmt, table, num_own = kernel_format(group.fmt), rule_table(rule, group.fmt), len(above) - 1

        def measure_part(first: int, last: int) -> None:
            kernels_rate.measure_tensors(
                first, last, v, m, gammas, offsets, fmt, kernels.RULES.index(rule), table, num_own,
                group.scales, group.fits, group.sums, group.events, above,
            )  # fmt: skip

        self._run(measure_part, group.sizes)
        kernels_rate.measure_pool(v, offsets, num_own, group.scales, above[-1])

    def convert_scaled(
        self,
        v: Flat,
        symbols: Flat,
        offsets: NDArray[np.int64],
        factor: float,
        base: Converted,
        group: Converted,
    ) -> tuple[Flat, Flat]:
        """See `Dense`."""
        fmt = kernel_format(group.fmt)
        rest, converted = np.empty_like(v), np.empty_like(symbols)
        behind = slice(int(offsets[-1]), None)
        rest[behind], converted[behind] = v[behind], symbols[behind]

        def convert_part(first: int, last: int) -> None:
            kernels_rate.convert_scaled(
                first, last, v, rest, offsets, fmt, factor, scale_limits(group.fmt)[0],
                base.scales, converted, group.scales, group.fits, group.counts, group.sums,
                group.events,
            )  # fmt: skip

        self._run(convert_part, group.sizes)
        return rest, converted

    def measure_zeros(
        self, v: Flat, offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """See `Dense`."""
        parts = [v[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]
        sums = [np.abs(part, dtype=np.float64).sum() for part in parts]
        live = [np.count_nonzero(part) for part in parts]
        return np.array(sums, np.float64), np.array(live, np.int64)

    def symbol_array(self, num_entries: int) -> Flat:
        """See `Dense`."""
        return np.empty(num_entries, np.uint8)

    def take(self, v: Flat, parts: Sequence[tuple[int, int]]) -> Flat:
        """See `Dense`."""
        return np.concatenate([v[begin:end] for begin, end in parts])

    def encode(
        self,
        choice: CodeTables,
        symbols: Flat,
        plan: Plan,
        chunk_symbols: int,
        num_streams: int,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `Dense`."""
        if choice.structure is None:
            return encode_symbols(
                choice.tables, symbols, plan.offsets, choice.table_of, chunk_symbols,
                self.num_threads, num_streams,
            )  # fmt: skip
        return encode_structured(
            choice.tables, choice.structure, symbols, chunk_symbols, self.num_threads, num_streams
        )

    def decode(self, parts: Parts, plan: Plan) -> Flat:
        """See `Dense`."""
        coded = parts.words, parts.sizes, parts.num_streams
        if parts.structure is not None:
            return decode_structured(
                parts.tables, parts.structure, *coded, parts.chunk_symbols, self.num_threads
            )
        return decode_symbols(
            parts.tables, *coded, plan.offsets, parts.table_of, parts.chunk_symbols,
            self.num_threads,
        )  # fmt: skip

    def count_symbols(self, symbols: Flat, begin: int, end: int, num: int) -> NDArray[np.int64]:
        """See `Dense`."""
        counts = np.empty(num, np.int64)
        kernels.count_symbols(symbols[begin:end], num, counts)
        return counts

    def look_up(
        self,
        symbols: Flat,
        offsets: NDArray[np.int64],
        values: NDArray[np.float32],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Array]:
        """See `Dense`."""
        decoded = [np.empty(shape, np.float32) for shape in shapes]

        def look_up(first: int, last: int) -> None:
            for j in range(first, last):
                part = symbols[offsets[j] : offsets[j + 1]]
                kernels.look_up(decoded[j].reshape(-1), part, values[j])

        self._run(look_up, np.diff(offsets))
        return decoded

    def accumulator(self, array: Any, shape: tuple[int, ...], name: str) -> Array:
        """See `Dense`."""
        if is_tensor(array) and array.device.type == "cpu" and str(array.dtype) == TENSOR_FLOAT32:
            array = array.detach().numpy()
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != _FLOAT32:
            got = (
                f"{array.dtype} {array.shape}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise ValueError(
                f"accumulator must hold a float32 array of shape {shape}, got {got} in {name!r}"
            )
        if not array.flags.carray:
            raise ValueError(
                "accumulator must be C-contiguous, aligned and writeable, got an array that is not "
                f"in {name!r}"
            )
        return array.reshape(-1)

    def accumulate(
        self,
        sums: Sequence[Array],
        symbols: Flat,
        offsets: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> None:
        """See `Dense`."""
        bounds = offsets.tolist()

        def add(first: int, last: int) -> None:
            ends = itertools.pairwise(bounds[first : last + 1])
            for total, (begin, end), table in zip(
                sums[first:last], ends, values[first:last], strict=True
            ):
                kernels.accumulate(total, symbols[begin:end], table)

        self._run(add, np.diff(offsets))

    def add_weighted(self, total: Array, update: Array, weight: int) -> None:
        """See `Dense`."""
        with np.errstate(over="ignore", invalid="ignore"):
            total += np.float32(weight) * np.asarray(update, np.float32)

    def _run(self, work: Callable[[int, int], None], sizes: NDArray[np.int64]) -> None:
        run_parts(work, split_evenly(sizes, self.num_threads), self.num_threads)


def _common_base(arrays: Sequence[NDArray[np.float32]], num_entries: int) -> Flat | None:
    """Return the flat array whose consecutive parts these are (see `cut_flat`), or None."""
    base = arrays[0].base if arrays else None
    if (
        not isinstance(base, np.ndarray)
        or base.shape != (num_entries,)
        or not base.flags.c_contiguous
    ):
        return None
    if base.dtype != np.float32:
        return None
    at = base.__array_interface__["data"][0]
    for array in arrays:
        if array.base is not base or not array.flags.c_contiguous:
            return None
        if array.size and array.__array_interface__["data"][0] != at:
            return None
        at += 4 * array.size
    return base


def symbols_of_zero(dense: Dense, plan: Plan, fmt: FloatFormat, buffer_fmt: FloatFormat) -> Flat:
    """Return the symbols of an update of zeros."""
    symbols = dense.symbol_array(plan.num_symbols)
    symbols[: plan.offsets[plan.num_coded]] = fmt.zero
    symbols[plan.offsets[plan.num_coded] :] = buffer_fmt.zero
    return symbols
