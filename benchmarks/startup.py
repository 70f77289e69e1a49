"""What starting costs: imports, and the first call with an empty and with a filled kernel cache.

Run with ``python -m benchmarks.startup``. Everything is measured in fresh interpreters. In a
deployment every message is handled by a new process, so a second process must compile nothing:
numba's own counters say how many kernels were loaded from disk and how many were compiled.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, parser, quartiles
from benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_REPEATS, QUICK_REPEATS = 7, 1
BASE = "import numpy, numba, flwr"
IMPORTS = {
    "co3_flower": "import co3_flower",
    "numpy, numba, flwr": BASE,
    "the same and flwr's two app packages": f"{BASE}, flwr.clientapp, flwr.serverapp",
    "CO3Strategy and co3_mod": "from co3_flower import CO3Strategy, co3_mod",
}
FORBIDDEN = ("torch", "ray", "scipy.stats")
MAX_RATIO = 1.2

TIMED_IMPORT = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, [m for m in {forbidden} if m in sys.modules]]))
"""

# Times each first and second call, and counts the kernels that were compiled for them.
FIRST_CALLS = """
import json, time
start = time.perf_counter()
import numpy as np
import co3_flower as co3
from co3_flower import kernels
seconds = {{"import": time.perf_counter() - start}}

def call(name, work):
    for which in ("first", "second"):
        start = time.perf_counter()
        result = work()
        seconds[which + " " + name] = time.perf_counter() - start
    return result

rng = np.random.default_rng(0)
update = {{name: rng.standard_normal(n).astype(np.float32) for name, n in (("w", 5000), ("b", 9))}}
{work}
known = [f.stats for f in vars(kernels).values() if hasattr(f, "py_func")]
compiled = sum(sum(s.cache_misses.values()) for s in known)
loaded = sum(sum(s.cache_hits.values()) for s in known)
print(json.dumps([seconds, compiled, loaded]))
"""
CODEC_WORK = """
config = co3.CodecConfig()
residual = {name: np.zeros_like(array) for name, array in update.items()}
encoded = call("encode", lambda: co3.encode_update(update, residual, config))
total = {name: np.zeros_like(array) for name, array in update.items()}
call("accumulate", lambda: co3.accumulate_update(encoded.payload, total, 1.0))
call("decode", lambda: co3.decode_update(encoded.payload, update))
"""
QUICK_WORK = """
from co3_flower.feedback import compensate
call("compensate", lambda: compensate(update["w"], update["w"], 0.9))
"""


def run_python(code: str, cache_dir: str = "") -> str:
    """Run code in a fresh interpreter and return its last line."""
    env = dict(os.environ)
    if cache_dir:
        env["NUMBA_CACHE_DIR"] = cache_dir
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if child.returncode != 0:
        raise RuntimeError(f"a measured process failed: {child.stderr[-2000:]}")
    return child.stdout.strip().splitlines()[-1]


def measure_imports(repeats: int, warm_up: int = 1) -> tuple[list[Row], float]:
    """Time the imports in turn; rows, and the product's time over that of its dependencies."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    loaded: dict[str, list[str]] = {}
    for repetition in range(warm_up + repeats):  # the first round fills the page cache
        for name, statement in IMPORTS.items():
            code = TIMED_IMPORT.format(statement=statement, forbidden=FORBIDDEN)
            value, loaded[name] = json.loads(run_python(code))
            if repetition >= warm_up:
                seconds[name].append(value)
    base = seconds["numpy, numba, flwr"]
    rows = []
    for name, values in seconds.items():
        q1, median, q3 = quartiles(values)
        ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
        rows.append(
            {
                "import": name,
                "median s": median,
                "quartiles": f"{q1:.3f}..{q3:.3f}",
                "x numpy, numba, flwr": ratio,
                "unwanted": ", ".join(loaded[name]) or "none",
            }
        )
    return rows, rows[0]["x numpy, numba, flwr"]


def measure_first_calls(work: str) -> list[Row]:
    """Run the same calls in two fresh processes that share a cache, empty for the first."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "second process"):
            seconds, compiled, loaded = json.loads(run_python(FIRST_CALLS.format(work=work), cache))
            files = sum(1 for path in Path(cache).rglob("*.nb?") if path.is_file())
            counts = {"compiled": compiled, "loaded": loaded, "cache files": files}
            rows.append({"process": name, **counts, **{f"{k} s": v for k, v in seconds.items()}})
    return rows


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("Import time, and first calls with an empty and with a filled cache.")
    arguments.add_argument(
        "--repeats", type=int, default=None, help=f"{DEFAULT_REPEATS}, with --quick {QUICK_REPEATS}"
    )
    options = arguments.parse_args(argv)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else DEFAULT_REPEATS)
    report = Report("startup", options)
    rows, ratio = measure_imports(repeats, warm_up=0 if options.quick else 1)
    report.add_table("Imports", rows)
    first, second = measure_first_calls(QUICK_WORK if options.quick else CODEC_WORK)
    report.add_table("First calls", [first, second])
    report.at_most("import co3_flower", ratio, MAX_RATIO, "x import numpy, numba, flwr")
    report.at_most("kernels compiled in a second process", second["compiled"], 0)
    return report.finish()


if __name__ == "__main__":
    main()
