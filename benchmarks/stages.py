"""Where the time of encode_update and accumulate_update goes.

Run with ``python -m benchmarks.stages``. Two views: the profile of whole calls by Python's
profiler (compiled kernels count for the function that calls them), and the kernels of the convert
stage one by one, each over the whole update. The latter cost more in sum than the fused loop, which
keeps its blocks in the first-level cache; they show the proportions.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.data import Update, load_updates
from benchmarks.harness import (
    Case,
    Row,
    add_timing_options,
    first_if_quick,
    measure,
    num_repeats,
    parser,
)
from benchmarks.report import Report
from co3_flower import CodecConfig, accumulate_update, encode_update, kernels
from co3_flower.quantize import kernel_format

CONFIGS = {
    "e2m1": CodecConfig(format="e2m1", structure="none"),
    "e2m1, structure auto": CodecConfig(format="e2m1"),
    "e5m2, scale 1": CodecConfig(format="e5m2", scale="unit", structure="none"),
}
NUM_SHOWN = 14


def profile_calls(work: Callable[[], object], calls: int, num_items: int) -> list[Row]:
    """Return the functions that a call spends its time in, the costliest first."""
    work()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        work()
    profiler.disable()
    stats = pstats.Stats(profiler).stats
    total = sum(values[2] for values in stats.values())
    costly = sorted(stats.items(), key=lambda item: -item[1][2])[:NUM_SHOWN]
    return [
        {
            "function": _function_name(*place),
            "calls": values[1] / calls,
            "own ms": 1e3 * values[2] / calls,
            "share": values[2] / total,
            "ns/parameter": 1e9 * values[2] / calls / num_items,
        }
        for place, values in costly
    ]


def _function_name(file: str, line: int, name: str) -> str:
    return f"{Path(file).stem}.{name}" if line > 0 else name


class ConvertKernels:
    """The kernels of the convert stage, each run over all tensors of an update."""

    def __init__(self, update: Update, config: CodecConfig) -> None:
        encoded = encode_update(update.arrays, None, config)
        self.tensors = [array.reshape(-1).copy() for array in update.arrays.values()]
        self.converted = [array.copy() for array in self.tensors]
        self.residuals = [array.reshape(-1) for array in encoded.residual.values()]
        self.scales = [np.float32(tensor.scale) for tensor in encoded.stats.tensors]
        self.symbols = [np.zeros(array.size, np.uint8) for array in self.tensors]
        self.format = kernel_format(config.float_format)
        self.lanes = np.zeros((2, kernels.LANES), np.float64)
        self.counts = np.zeros(config.float_format.num_values, np.int64)
        bins = 256 << kernels.COARSE_BITS
        self.histogram = np.zeros((4, bins), np.uint32)
        self.fit_arrays = np.zeros(bins, np.float64), np.zeros(2 << kernels.COARSE_BITS, np.float64)

    def compensate(self) -> None:
        """Add the decayed residual, with the sums that the statistics need (gamma 0: stays)."""
        for x, m in zip(self.tensors, self.residuals, strict=True):
            kernels.compensate_block(x, m, np.float32(0.0), self.lanes[0], self.lanes[1])

    def count_bits(self) -> None:
        """Count the top bits of |v|."""
        for x in self.tensors:
            kernels.add_to_histogram(x.view(np.uint32), self.histogram)

    def fit(self) -> None:
        """Count the top bits of |v|, and fit the law to them."""
        for x in self.tensors:
            self.histogram[:] = 0
            kernels.fit_histogram(x.view(np.uint32), self.histogram, *self.fit_arrays)

    def quantize(self) -> None:
        """Convert; the residual takes the place of v, as in the codec."""
        for x, symbols, scale in zip(self.converted, self.symbols, self.scales, strict=True):
            kernels.quantize_block(x, symbols, scale, self.format)

    def measure_residual(self) -> None:
        """Sum |m'| and m'**2, for the statistics."""
        for x in self.converted:
            kernels.measure_block(x, self.lanes[0], self.lanes[1])

    def count_symbols(self) -> None:
        """Count the symbols."""
        for symbols in self.symbols:
            kernels.count_symbols(symbols, self.counts.size, self.counts)

    def cases(self, num_items: int) -> list[Case]:
        """Return all of them, a memcpy first."""
        flat = np.zeros(num_items, np.float32)
        out = np.empty_like(flat)
        works = {
            "memcpy": lambda: np.copyto(out, flat),
            "compensate and sum |g|, v**2": self.compensate,
            "histogram of |v|": self.count_bits,
            "histogram and fit of the law": self.fit,
            "quantize, residual, events": self.quantize,
            "sum |m'|, m'**2": self.measure_residual,
            "count symbols": self.count_symbols,
        }
        return [Case(name, work, num_items) for name, work in works.items()]


def measure_update(
    report: Report, update: Update, label: str, config: CodecConfig, repeats: int
) -> None:
    """Profile both directions, and time the kernels of the convert stage."""
    n = update.num_parameters
    residual = encode_update(update.arrays, None, config).residual
    payload = encode_update(update.arrays, residual, config).payload
    total = {name: np.zeros_like(array) for name, array in update.arrays.items()}
    for verb, work in (
        ("encode_update", lambda: encode_update(update.arrays, residual, config)),
        ("accumulate_update", lambda: accumulate_update(payload, total, 1.0)),
    ):
        rows = profile_calls(work, repeats, n)
        report.add_table(f"{update.name}, {label}: profile of {verb}", rows)
    timings = measure(ConvertKernels(update, config).cases(n), repeats)
    report.add_timings(f"{update.name}, {label}: kernels of the convert stage", timings)


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("Profile of encoding and decoding, stage by stage.")
    add_timing_options(arguments)
    options = arguments.parse_args(argv)
    report = Report("stages", options)
    for update in load_updates(options):
        for label, config in first_if_quick(CONFIGS, options).items():
            measure_update(report, update, label, config, num_repeats(options))
    return report.finish()


if __name__ == "__main__":
    main()
