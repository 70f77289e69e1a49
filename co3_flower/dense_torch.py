"""The work on whole tensors with torch, on any device; see `dense.Dense`.

What comes to the host is what has no entry per parameter: histograms, sums of rows and columns,
counts, and the code itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from co3_flower import kernels, kernels_counts, kernels_rate, kernels_structure
from co3_flower import kernels_torch as ops
from co3_flower.bitstream import raise_unsound, stream_bounds, with_dead_table
from co3_flower.errors import ConfigError
from co3_flower.huffman import HuffmanTables
from co3_flower.layout import (
    Plan,
    as_arrays,
    check_mapping,
    check_tensor,
    cut_flat,
    dense_tensor,
    is_tensor,
)
from co3_flower.payload import Parts, scale_limits
from co3_flower.quantize import kernel_format, rule_table
from co3_flower.structure import Structure
from co3_flower.tables import CodeTables, Converted


@dataclass(frozen=True)
class TorchDense:
    """Work on torch tensors on one device."""

    device: torch.device

    @classmethod
    def on(cls, device: Any) -> TorchDense:
        """Return what works on a device, as torch names it; ConfigError where it has none."""
        try:
            torch.empty(0, device=device)  # a device may have a name and not be here
            return cls(torch.device(device))
        except (RuntimeError, TypeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"device must be one that torch has here, got {device!r} ({reason})"
            ) from None

    def arrays(self, update: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `Dense`."""
        check_mapping(update)
        tensors = {}
        for name, value in update.items():
            if is_tensor(value):
                check_tensor(name, value)
                tensors[name] = dense_tensor(value)
            else:
                tensors[name] = torch.tensor(as_arrays({name: value})[name])
        return tensors

    def difference(self, after: Any, before: Any) -> Tensor:
        """See `Dense`."""
        start = self._here(before)
        wide = torch.promote_types(torch.float32, start.dtype)
        return self.as_float32(self._here(after).to(wide) - start.to(wide))

    def as_float32(self, array: Any) -> Tensor:
        """See `Dense`."""
        return self._here(array).to(torch.float32).contiguous()

    def to_host(self, array: Tensor) -> NDArray[Any]:
        """See `Dense`."""
        host: NDArray[Any] = array.cpu().numpy()
        return host

    def count_not_finite(self, array: Tensor) -> int:
        """See `Dense`."""
        return int((~torch.isfinite(array)).sum())

    def flatten(self, arrays: Sequence[Tensor], num_entries: int) -> Tensor:
        """See `Dense`."""
        if not any(map(is_tensor, arrays)):
            parts = [np.asarray(array, np.float32).reshape(-1) for array in arrays]
            host = np.concatenate([np.empty(0, np.float32), *parts])  # goes up in one piece
            return torch.from_numpy(host).to(self.device)
        flat = torch.empty(num_entries, dtype=torch.float32, device=self.device)
        if arrays:
            parts = [self._here(array).reshape(-1).to(torch.float32) for array in arrays]
            torch.cat(parts, out=flat)
        return flat

    def as_flat(self, arrays: Sequence[Any], num_entries: int) -> Tensor:
        """See `Dense`."""
        whole = self._common_storage(arrays, num_entries)
        return self.flatten(arrays, num_entries) if whole is None else whole

    def decay(self, m: Tensor, gammas: NDArray[np.float32], offsets: NDArray[np.int64]) -> Tensor:
        """See `Dense`."""
        return m * torch.repeat_interleave(self._up(gammas), self._up(np.diff(offsets)))

    def zeros(self, num_entries: int) -> Tensor:
        """See `Dense`."""
        return torch.zeros(num_entries, dtype=torch.float32, device=self.device)

    def compensate(
        self, v: Tensor, m: Tensor, gammas: NDArray[np.float32], offsets: NDArray[np.int64]
    ) -> None:
        """See `Dense`."""
        if m.numel():
            part = slice(int(offsets[0]), int(offsets[-1]))
            v[part] += self.decay(m[part], gammas, offsets)  # the product rounds before the sum

    def convert(
        self,
        v: Tensor,
        m: Tensor,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        multiplier: float,
        symbols: Tensor,
    ) -> None:
        """See `Dense`."""
        if self._fit(v, m, gammas, offsets, group, rule, multiplier) is not None:
            self._quantize(v, v, symbols, offsets, group)

    def measure(
        self,
        v: Tensor,
        m: Tensor,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        above: NDArray[np.uint32],
    ) -> None:
        """See `Dense`."""
        folded = self._fit(v, m, gammas, offsets, group, rule, 1.0)
        if folded is None:
            return
        num_own = len(above) - 1
        bins = folded.shape[1]
        above[:-1, :bins] = folded[:num_own, ::-1].cumsum(axis=1)[:, ::-1]
        scaled = v[offsets[num_own] : offsets[-1]] * torch.repeat_interleave(
            self._up(group.scales[num_own:]), self._up(group.sizes[num_own:])
        )
        of_pool = ops.count_bins(
            scaled, torch.zeros_like(scaled, dtype=torch.int64), 1, kernels.COARSE_BITS
        )[0]
        of_pool[: kernels_rate.FIRST_BIN] = 0
        above[-1, :bins] = self.to_host(of_pool)[::-1].cumsum()[::-1]

    def convert_scaled(
        self,
        v: Tensor,
        symbols: Tensor,
        offsets: NDArray[np.int64],
        factor: float,
        base: Converted,
        group: Converted,
    ) -> tuple[Tensor, Tensor]:
        """See `Dense`."""
        scaled = np.clip(
            base.scales.astype(np.float64) * factor, scale_limits(group.fmt)[0], 2**120
        )
        group.scales[:] = np.where(group.fits[:, 0] > 0, scaled.astype(np.float32), base.scales)
        rest, converted = v.clone(), symbols.clone()
        self._quantize(v, rest, converted, offsets, group)
        return rest, converted

    def measure_zeros(
        self, v: Tensor, offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """See `Dense`."""
        sizes = self._up(np.diff(offsets))
        part = v[offsets[0] : offsets[-1]]
        sums = ops.reduce_parts(part.double().abs(), sizes, "sum")
        return self.to_host(sums), self.to_host(ops.sum_parts((part != 0).long(), sizes))

    def symbol_array(self, num_entries: int) -> Tensor:
        """See `Dense`."""
        return torch.empty(num_entries, dtype=torch.uint8, device=self.device)

    def take(self, v: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
        """See `Dense`."""
        return torch.cat([v[begin:end] for begin, end in parts])

    def encode(
        self,
        choice: CodeTables,
        symbols: Tensor,
        plan: Plan,
        chunk_symbols: int,
        num_streams: int,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `Dense`."""
        if plan.num_symbols == 0:
            is_huffman = isinstance(choice.tables, HuffmanTables)
            return np.empty(0, np.uint32 if is_huffman else np.uint16), np.zeros(0, np.int64)
        tables = with_dead_table(choice.tables)
        keys = self._keys(choice.structure, choice.table_of, plan, tables.alphabets.size - 1)
        at = keys * int(tables.alphabets.max()) + symbols
        if isinstance(tables, HuffmanTables):
            entries = self._up(self._entries(tables)).reshape(-1)
            bounds = self._up(stream_bounds(plan.num_symbols, chunk_symbols, num_streams))
            words, sizes = ops.pack_codes(at, entries & ops.WORD, entries >> 32, bounds)
            wrapped = ((words ^ 0x80000000) - 0x80000000).to(torch.int32)
            return self.to_host(wrapped).view(np.uint32), self.to_host(sizes)
        frequencies = self._up(tables.frequencies.astype(np.int64))
        words, sizes = ops.encode_rans(at, frequencies, chunk_symbols)
        wrapped = ((words ^ 0x8000) - 0x8000).to(torch.int16)
        return self.to_host(wrapped).view(np.uint16), self.to_host(sizes)

    def decode(self, parts: Parts, plan: Plan) -> Tensor:
        """See `Dense`."""
        if plan.num_symbols == 0:
            return self.symbol_array(0)
        tables = with_dead_table(parts.tables)
        dead = tables.alphabets.size - 1
        keys = self._keys(parts.structure, parts.table_of, plan, dead)
        starts = self._up(np.concatenate([[0], np.cumsum(parts.sizes)]))
        num_words = int(parts.sizes.sum())
        if isinstance(tables, HuffmanTables):
            words = self._up(parts.words[:num_words].view(np.int32)).long() & ops.WORD
            entries, used = self._up(self._entries(tables)), self._up(tables.lengths > 0)
            windows = ops.window_table(entries & ops.WORD, entries >> 32, used)
            bounds = stream_bounds(plan.num_symbols, parts.chunk_symbols, parts.num_streams)
            symbols, sound = ops.unpack_codes(words, starts, self._up(bounds), keys, dead, windows)
        else:
            words = self._up(parts.words[:num_words].view(np.int16)).long() & 0xFFFF
            frequencies = self._up(tables.frequencies.astype(np.int64))
            symbols, sound = ops.decode_rans(
                words, starts, keys, dead, frequencies, parts.chunk_symbols
            )
        good = self.to_host(sound)
        if not good.all():
            raise_unsound(int(np.argmin(good)), parts.sizes)
        return symbols

    def count_symbols(self, symbols: Tensor, begin: int, end: int, num: int) -> NDArray[np.int64]:
        """See `Dense`."""
        return self.to_host(torch.bincount(symbols[begin:end], minlength=num))

    def look_up(
        self,
        symbols: Tensor,
        offsets: NDArray[np.int64],
        values: NDArray[np.float32],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """See `Dense`."""
        return cut_flat(self._values(symbols, offsets, values), offsets, shapes)

    def accumulator(self, array: Any, shape: tuple[int, ...], name: str) -> Tensor:
        """See `Dense`."""
        good = is_tensor(array) and array.dtype == torch.float32 and tuple(array.shape) == shape
        if not good or array.device.type != self.device.type:
            got = (
                f"{array.dtype} {tuple(array.shape)} on {array.device}"
                if is_tensor(array)
                else type(array).__name__
            )
            raise ValueError(
                f"accumulator must hold a torch.float32 tensor of shape {shape} on {self.device}, "
                f"got {got} in {name!r}"
            )
        if not array.is_contiguous():
            raise ValueError(
                f"accumulator must be contiguous, got a tensor that is not in {name!r}"
            )
        flat: Tensor = array.detach().view(-1)
        return flat

    def accumulate(
        self,
        sums: Sequence[Tensor],
        symbols: Tensor,
        offsets: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> None:
        """See `Dense`."""
        decoded = self._values(symbols, offsets, values)
        for total, (begin, end) in zip(sums, itertools.pairwise(offsets.tolist()), strict=True):
            total += decoded[begin:end]

    def add_weighted(self, total: Tensor, update: Any, weight: int) -> None:
        """See `Dense`."""
        total += self.as_float32(update) * float(np.float32(weight))

    def choose_modes(
        self,
        symbols: Tensor,
        residual: Tensor,
        offsets: NDArray[np.int64],
        scales: NDArray[np.float32],
        units: NDArray[np.float64],
        rows: NDArray[np.int64],
        cols: NDArray[np.int64],
        taps: NDArray[np.int64],
        values: NDArray[np.float32],
        costs: NDArray[np.float32],
        gains: NDArray[np.float64],
        row_at: NDArray[np.int64],
        row_class: NDArray[np.uint16],
        col_at: NDArray[np.int64],
        col_class: NDArray[np.uint16],
        modes: NDArray[np.uint8],
        counts: NDArray[np.int64],
        of_tensor: Any,
        data: NDArray[np.uint8],
        state: NDArray[np.int64],
        odds: NDArray[np.int64],
    ) -> None:
        """`kernels_structure.choose_structure`, whose arguments these are."""
        num_tensors, num_values, zero = rows.size, values.size, values.size // 2
        sizes = np.diff(offsets)[:num_tensors]
        part = slice(0, int(sizes.sum()))
        symbols, residual = symbols[part], residual[part]
        of = ops.tensor_of(self._up(sizes), symbols.numel())
        of_row, of_col, row_sizes = self._places(sizes, rows, cols, row_at, col_at)
        row_live, col_live = ops.live_flags(symbols != zero, of_col, int(col_at[-1]), row_sizes)
        row_sums, col_sums = ops.magnitude_sums(
            symbols, residual, of * num_values, self._up(values / scales[:, None]).reshape(-1),
            self._up((4096.0 / units).astype(np.float32))[of], of_row, of_col, int(col_at[-1]),
            row_sizes,
        )  # fmt: skip
        factors = (
            np.zeros_like(row_class), np.zeros_like(col_class), np.zeros_like(col_class),
            np.zeros_like(col_class),
        )  # fmt: skip
        bits = np.zeros((num_tensors, 5), np.float64)
        sent = np.zeros((num_tensors, 5), np.int64)
        kernels_counts.propose_all(
            sizes, scales, units, rows, cols, taps, gains, row_at, self.to_host(row_sums),
            self.to_host(row_live), col_at, self.to_host(col_sums), self.to_host(col_live),
            *factors, bits, sent,
        )  # fmt: skip

        magnitudes = (symbols.int() - zero).abs().long()
        sampled = self._rows_sampled(rows, sent[:, 4])
        mode_costs = np.zeros((num_tensors, 5), np.int64)
        device_costs, device_sizes = self._up(costs), self._up(sizes)
        for mode in range(5):
            kernels_counts.all_mode_classes(
                mode, sizes, cols, taps, row_at, col_at, *factors, bits, sent, row_class, col_class
            )
            looked_at = np.where(sampled, row_class, kernels_structure.DEAD)
            classes = ops.class_sums(self._up(looked_at), self._up(col_class), of_row, of_col)
            mode_costs[:, mode] = self.to_host(
                ops.class_costs(classes, magnitudes, device_costs, device_sizes)
            )

        ranges = np.zeros((num_tensors, 2), np.int64)
        kernels_counts.settle_modes(
            mode_costs, sizes, rows, cols, taps, row_at, col_at, *factors, bits, sent, modes,
            row_class, col_class, ranges, odds, state, data,
        )  # fmt: skip
        at = np.zeros(num_tensors + 1, np.int64)
        np.cumsum(ranges[:, 1] - ranges[:, 0], out=at[1:])
        classes = ops.class_sums(self._up(row_class), self._up(col_class), of_row, of_col)
        counted = ops.count_classes(
            symbols, classes, self._up(at[:-1] - ranges[:, 0])[of], int(at[-1]), num_values
        )
        kernels_counts.list_classes(self.to_host(counted), at, ranges, counts, of_tensor)

    def _fit(
        self,
        v: Tensor,
        m: Tensor,
        gammas: NDArray[np.float32],
        offsets: NDArray[np.int64],
        group: Converted,
        rule: str,
        multiplier: float,
    ) -> NDArray[np.float64] | None:
        """Compensate v in place, fit each tensor and choose its scale.

        Returns the histograms, float64 [tensors, bins], or None where an entry is not finite.
        """
        num = group.sizes.size
        sizes = self._up(group.sizes)
        part = v[int(offsets[0]) : int(offsets[-1])]
        group.sums[:, 0] = self.to_host(ops.reduce_parts(part.double().abs(), sizes, "sum"))
        self.compensate(v, m, gammas, offsets)
        group.sums[:, 1] = self.to_host(ops.reduce_parts(part.double().square(), sizes, "sum"))
        of = ops.tensor_of(sizes, part.numel())
        coarse = self.to_host(ops.count_bins(part, of, num, kernels.COARSE_BITS))
        folded, bins = np.zeros(coarse.shape, np.float64), np.zeros((num, 3), np.int64)
        kernels_counts.fit_tensors(
            coarse, group.sizes, group.fits, group.events[:, 2], folded, bins
        )
        if group.events[:, 2].any():
            return None
        for t in np.flatnonzero(bins[:, 2]).tolist():
            one = part[offsets[t] - offsets[0] : offsets[t + 1] - offsets[0]]
            fine = ops.count_bins(one, torch.zeros_like(one).long(), 1, kernels.FINE_BITS)
            kernels_counts.refine_fits(np.array([t]), self.to_host(fine), group.fits, bins)
        powers, peaks = np.zeros(num, np.float64), np.zeros(num, np.float32)
        if rule == "std":
            powers = self._mean_powers(part, sizes, group.sizes, bins[:, 1])
        elif rule == "absmax":
            peaks = self.to_host(ops.reduce_parts(part.abs(), sizes, "max"))
        kernels_counts.pick_scales(
            kernels.RULES.index(rule), multiplier, group.fits, folded, bins, powers, peaks,
            kernel_format(group.fmt), rule_table(rule, group.fmt), group.scales,
        )  # fmt: skip
        return folded

    def _mean_powers(
        self, v: Tensor, sizes: Tensor, host_sizes: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the mean of v**2 of each tensor whose histogram is not empty, from integers."""
        tops = ((np.maximum(ends, 1) - 1) >> kernels.COARSE_BITS) - 127
        units = self._up(np.ldexp(1.0, 23 - tops))
        highs, lows = (self.to_host(x).tolist() for x in ops.fixed_point_squares(v, sizes, units))
        powers = np.zeros(ends.size, np.float64)
        for t in np.flatnonzero(ends).tolist():
            total = (highs[t] << 32) + lows[t]
            powers[t] = kernels.mean_power(
                total >> 32, total & ops.WORD, int(tops[t]), int(host_sizes[t])
            )
        return powers

    def _quantize(
        self,
        v: Tensor,
        rest: Tensor,
        symbols: Tensor,
        offsets: NDArray[np.int64],
        group: Converted,
    ) -> None:
        """Write symbols and residual of a group's tensors, and count what came of them."""
        part = slice(int(offsets[0]), int(offsets[-1]))
        sizes = self._up(group.sizes)
        of = ops.tensor_of(sizes, part.stop - part.start)
        symbols[part], rest[part], saturated, underflowed = ops.quantize(
            v[part], self._up(group.scales)[of], kernel_format(group.fmt)
        )
        num, num_values = group.counts.shape
        group.counts[:] = self.to_host(ops.count_symbols(symbols[part], of, num, num_values))
        wide = rest[part].double()
        group.sums[:, 2] = self.to_host(ops.reduce_parts(wide.square(), sizes, "sum"))
        group.sums[:, 3] = self.to_host(ops.reduce_parts(wide.abs(), sizes, "sum"))
        for i, flags in enumerate((saturated, underflowed)):
            group.events[:, i] = self.to_host(ops.sum_parts(flags.long(), sizes))

    def _places(
        self,
        sizes: NDArray[np.int64],
        rows: NDArray[np.int64],
        cols: NDArray[np.int64],
        row_at: NDArray[np.int64],
        col_at: NDArray[np.int64],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return row and column of each entry among all tensors' rows and columns.

        The third is how many entries each row has.
        """
        row_sizes = np.repeat(cols, rows)
        behind = np.cumsum(row_sizes) - row_sizes
        of_row = ops.tensor_of(self._up(row_sizes), int(sizes.sum()))
        shift = self._up(np.repeat(col_at[:-1], rows) - behind)
        of_col = torch.arange(of_row.numel(), device=self.device) + shift[of_row]
        return of_row, of_col, self._up(row_sizes)

    def _rows_sampled(self, rows: NDArray[np.int64], every: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell of each row of all tensors whether modes are compared by it."""
        number = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
        sampled: NDArray[np.bool_] = number % np.repeat(np.maximum(every, 1), rows) == 0
        return sampled

    def _keys(
        self,
        structure: Structure | None,
        table_of: NDArray[np.int64],
        plan: Plan,
        dead: int,
    ) -> Tensor:
        """Return the code table of each entry, int64 [n]."""
        sizes = np.diff(plan.offsets)
        if structure is None:
            return torch.repeat_interleave(self._up(table_of), self._up(sizes))
        of_coded = sizes[: plan.num_coded]
        rows, cols = np.diff(structure.row_at), structure.cols
        row_class, col_class = structure.row_class.copy(), structure.col_class.copy()
        for t in np.flatnonzero(structure.modes == kernels_structure.NONE).tolist():
            if of_coded[t]:  # one class for all of it, said by the first row
                row_class[structure.row_at[t] : structure.row_at[t + 1]] = row_class[
                    structure.row_at[t]
                ]
                col_class[structure.col_at[t] : structure.col_at[t + 1]] = kernels_structure.CENTRE
        of_row, of_col, _ = self._places(of_coded, rows, cols, structure.row_at, structure.col_at)
        classes = ops.class_sums(self._up(row_class), self._up(col_class), of_row, of_col)
        of_classes = self._up(structure.sum_map(dead))[classes].long()
        of_buffers = torch.full(
            (int(sizes[plan.num_coded :].sum()),), structure.num_tables, device=self.device
        )
        return torch.cat([of_classes, of_buffers])

    def _values(
        self, symbols: Tensor, offsets: NDArray[np.int64], values: NDArray[np.float32]
    ) -> Tensor:
        """Return values[tensor, symbol] of all entries, float32 [n]."""
        of = ops.tensor_of(self._up(np.diff(offsets)), symbols.numel())
        return self._up(values).reshape(-1)[of * values.shape[1] + symbols]

    @staticmethod
    def _entries(tables: HuffmanTables) -> NDArray[np.int64]:
        """Return codeword and, from bit 32 on, length of each table's symbols."""
        entries = np.zeros(tables.lengths.shape, np.uint64)
        kernels.encoder_entries(tables.lengths, entries)
        return entries.astype(np.int64)

    def _up(self, array: NDArray[Any]) -> Tensor:
        """Return a small host array as a tensor on the device, unsigned 16-bit numbers as int64."""
        if array.dtype == np.uint16:
            array = array.astype(np.int64)
        return torch.tensor(array, device=self.device)

    def _here(self, array: Any) -> Tensor:
        tensor: Tensor = array if is_tensor(array) else self._up(array)
        return tensor.detach().to(self.device)

    def _common_storage(self, arrays: Sequence[Any], num_entries: int) -> Tensor | None:
        """Return the flat tensor whose consecutive parts these are, or None."""
        at = 0
        first = None
        for array in arrays:
            if not is_tensor(array) or array.dtype != torch.float32:
                return None
            if array.device.type != self.device.type or not array.is_contiguous():
                return None
            if array.numel() == 0:
                continue
            storage = array.untyped_storage()
            if first is None:
                first = array
                if storage.nbytes() != 4 * num_entries:
                    return None
            if storage.data_ptr() != first.untyped_storage().data_ptr():
                return None
            if array.storage_offset() != at:
                return None
            at += array.numel()
        if first is None or at != num_entries:
            return None
        return first.detach().as_strided((num_entries,), (1,), 0)
