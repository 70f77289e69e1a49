"""The convert stage: nearest symbols of a tiny format, against NumPy's and ml_dtypes' casts.

Run with ``python -m benchmarks.quantize``. ml_dtypes has no E2M1 without its top exponent, so
there its 15-value float4_e2m1fn stands beside e2m1.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
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
from benchmarks.rivals import midpoints
from co3_flower import FloatFormat
from co3_flower.quantize import choose_scale, dequantize, quantize

CASTS = {"e2m1": ml_dtypes.float4_e2m1fn, "e5m2": ml_dtypes.float8_e5m2}


def quantize_cases(x: np.ndarray, scale: np.float32, fmt: FloatFormat) -> list[Case]:
    """Return the ways from float32 [n] to symbols."""
    edges, out, cast = midpoints(fmt), np.empty_like(x), CASTS[fmt.name]
    searched = "NumPy searchsorted, uint8"
    return [
        Case("co3 quantize", lambda: quantize(x, scale, fmt), x.size),
        Case("memcpy", lambda: np.copyto(out, x), x.size),
        Case(searched, lambda: np.searchsorted(edges, x * scale).astype(np.uint8), x.size),
        Case(f"ml_dtypes {np.dtype(cast).name}", lambda: (x * scale).astype(cast), x.size),
    ]


def dequantize_cases(x: np.ndarray, scale: np.float32, fmt: FloatFormat) -> list[Case]:
    """Return the ways from symbols back to float32 [n]."""
    symbols, out = quantize(x, scale, fmt), np.empty_like(x)
    table, cast = fmt.values / scale, CASTS[fmt.name]
    small = (x * scale).astype(cast)
    name = f"ml_dtypes {np.dtype(cast).name}"
    return [
        Case("co3 dequantize", lambda: dequantize(symbols, scale, fmt), x.size),
        Case("memcpy", lambda: np.copyto(out, x), x.size),
        Case("NumPy take", lambda: np.take(table, symbols, out=out, mode="clip"), x.size),
        Case(name, lambda: small.astype(np.float32) / scale, x.size),
    ]


def measure_update(report: Report, update: Update, name: str, repeats: int) -> None:
    """Measure one format on all entries of an update, as one tensor."""
    fmt, x = FloatFormat.parse(name), update.flat()
    scale = choose_scale(x, fmt)
    for verb, cases in (
        ("float32 -> symbols", quantize_cases(x, scale, fmt)),
        ("symbols -> float32", dequantize_cases(x, scale, fmt)),
    ):
        report.add_timings(f"{update.name}, {name}: {verb}", measure(cases, repeats), "entries")


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("Conversion to symbols and back, against NumPy and ml_dtypes.")
    add_timing_options(arguments)
    options = arguments.parse_args(argv)
    report = Report("quantize", options)
    for update in load_updates(options):
        for name in first_if_quick(CASTS, options):
            measure_update(report, update, name, num_repeats(options))
    return report.finish()


if __name__ == "__main__":
    main()
