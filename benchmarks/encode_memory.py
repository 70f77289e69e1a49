"""Peak memory of encode_update beyond its inputs and outputs.

Run with ``python -m benchmarks.encode_memory``. Each case has a process of its own, which encodes
once to warm up, drops the result, and encodes again while the system counts the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.data import Update, load_gradient, synthetic_update
from benchmarks.harness import Row, parser
from benchmarks.peak import MIB, Peak, is_available, run_child
from benchmarks.report import Report
from co3_flower import CodecConfig, encode_update

MODULE = "benchmarks.encode_memory"
LIMIT = 2.0  # dense float32 copies
QUICK_PARAMETERS = 1_000_000
SIZES = {"DenseNet121": 0, "25 M synthetic": 25_000_000}  # 0: the real gradient

# Name -> settings; "separate" residuals are arrays of their own, as read from a file.
CASES: dict[str, dict[str, object]] = {
    "e2m1": {"format": "e2m1"},
    "e2m1, separate residual": {"format": "e2m1", "separate": True},
    "e2m1, prior auto": {"format": "e2m1", "prior": "auto"},
    "e2m1, 2 threads": {"format": "e2m1", "num_threads": 2},
    "e5m2": {"format": "e5m2", "scale": "unit"},
}


def measure_case(name: str, update: Update) -> Row:
    """Encode with a residual, in this process, and return what the peak was made of."""
    settings = dict(CASES[name])
    separate = bool(settings.pop("separate", False))
    config = CodecConfig(**settings)
    residual = encode_update(update.arrays, None, config).residual
    if separate:
        residual = {key: array.copy() for key, array in residual.items()}
    encode_update(update.arrays, residual, config)
    with Peak() as peak:
        encoded = encode_update(update.arrays, residual, config)
    dense = 4 * update.num_parameters
    outputs = sum(array.nbytes for array in encoded.residual.values()) + len(encoded.payload)
    beyond = peak.above_entry - outputs
    return {
        "case": name,
        "update": update.name,
        "dense MiB": dense / MIB,
        "above entry MiB": peak.above_entry / MIB,
        "outputs MiB": outputs / MIB,
        "beyond outputs MiB": beyond / MIB,
        "dense copies": beyond / dense,
    }


def child(options: argparse.Namespace) -> None:
    """Measure one case and print it as JSON."""
    update = load_gradient() if options.num_parameters == 0 else None
    if update is None:
        update = synthetic_update(options.num_parameters, options.seed)
        name = f"{options.num_parameters / 1e6:g} M synthetic"
        update = Update(name, {k: np.asarray(v) for k, v in update.arrays.items()})
    print(json.dumps(measure_case(options.case, update)))


def main(argv: Sequence[str] | None = None) -> Row | None:
    """Run the benchmark."""
    arguments = parser("Peak memory of encode_update beyond inputs and outputs.")
    arguments.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments.add_argument("--num-parameters", type=int, default=0, help=argparse.SUPPRESS)
    options = arguments.parse_args(argv)
    if options.case:
        child(options)
        return None
    report = Report("encode_memory", options)
    if not is_available():
        sys.exit("the peak of a process can be set back on Linux only")
    sizes = {"1 M synthetic": QUICK_PARAMETERS} if options.quick else dict(SIZES)
    if load_gradient() is None:
        sizes.pop("DenseNet121", None)
    rows = []
    for size in sizes.values():
        for case in list(CASES)[: 1 if options.quick else None]:
            wanted = ["--case", case, "--num-parameters", str(size), "--seed", str(options.seed)]
            rows.append(run_child(MODULE, wanted))
    report.add_table("Peak of encode_update", rows)
    for row in rows:
        what = f"encode memory beyond inputs and outputs, {row['update']}, {row['case']}"
        report.at_most(what, row["dense copies"], LIMIT, "dense copies")
    return report.finish()


if __name__ == "__main__":
    main()
