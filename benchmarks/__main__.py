"""Run all benchmarks, each in a process of its own: ``python -m benchmarks``.

What they print goes to the screen as it comes; at the end stands one table of the numbers to reach.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, parser
from benchmarks.report import format_table, format_targets

# In this order; the arguments keep the whole near five minutes on two idle cores.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "roundtrip": ("--num-parameters", "1000000"),
    "coder": ("--repeats", "3", "--num-parameters", "300000"),
    "fit": (),
    "quantize": ("--repeats", "5", "--num-parameters", "1000000"),
    "stages": ("--data", "densenet121"),
    "encode_memory": (),
    "server_memory": (),
    "startup": ("--repeats", "4"),
    "simulation": ("--model", "densenet121", "--num-rounds", "5"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run them and return the exit code: 1 if one could not be run."""
    arguments = parser("Run all benchmarks and list the numbers to reach.")
    arguments.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="some of them"
    )
    options = arguments.parse_args(argv)
    seen = _lines(options.output)
    seconds: dict[str, float] = {}
    failed = []
    for name in options.only:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(options.output)]
        command += ["--seed", str(options.seed), *BENCHMARKS[name]]
        command += ["--quick"] if options.quick else []
        start = time.perf_counter()
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
        seconds[name] = time.perf_counter() - start
    targets = [target for line in _lines(options.output)[len(seen) :] for target in line["targets"]]
    print(f"== all ==\n\n{format_targets(targets)}\n")
    seconds["all"] = sum(seconds.values())
    print(format_table(["benchmark", "seconds"], [[k, f"{v:.0f}"] for k, v in seconds.items()]))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _lines(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
