"""What a benchmark found: tables on the screen, numbers to reach, one JSON line in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness import Row, Timing
from benchmarks.machine import environment


class Report:
    """Prints what a benchmark found while it runs, and appends it to a file as one JSON line.

    Parameters
    ----------
    benchmark : str
        Name of the benchmark.
    options : argparse.Namespace
        From `parser`.
    """

    def __init__(self, benchmark: str, options: argparse.Namespace) -> None:
        self.benchmark = benchmark
        self.options = options
        self.environment = environment()
        self.rows: list[Row] = []
        self.targets: list[Row] = []
        print(f"== {benchmark} ==")
        for name, value in self.environment.items():
            print(f"{name:<14}{value}")

    def add_timings(
        self, section: str, timings: Sequence[Timing], unit: str = "parameters"
    ) -> None:
        """Print a table of timings, the product first, and keep the rows."""
        rows = [timing.as_row(section, timings[0]) for timing in timings]
        self.rows += rows
        header = ["", f"M {unit}/s", "best", "ms", "quartiles", "bits/item", "x product's time"]
        print(f"\n{section}")
        print(format_table(header, [_cells(row) for row in rows]))

    def add_table(self, section: str, rows: Sequence[Row], header: Sequence[str] = ()) -> None:
        """Print rows of anything else (numbers rounded) and keep them."""
        self.rows += [{"section": section, **row} for row in rows]
        header = list(header or (rows[0] if rows else ()))
        print(f"\n{section}")
        print(format_table(header, [[_text(value) for value in row.values()] for row in rows]))

    def at_least(self, what: str, got: float | None, reach: float, unit: str = "") -> None:
        """Note a number to reach, and whether it was reached."""
        self._target(what, got, ">=", reach, unit)

    def at_most(self, what: str, got: float | None, reach: float, unit: str = "") -> None:
        """Note a limit to keep, and whether it was kept."""
        self._target(what, got, "<=", reach, unit)

    def finish(self) -> Row:
        """Print the numbers to reach, append the JSON line, and return what it holds."""
        if self.targets:
            print("\n" + format_targets(self.targets))
        print()
        options = {k: v for k, v in vars(self.options).items() if not isinstance(v, Path)}
        result = {
            "benchmark": self.benchmark,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": self.environment,
            "options": options,
            "rows": self.rows,
            "targets": self.targets,
        }
        output: Path = self.options.output
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        return result

    def _target(self, what: str, got: float | None, sign: str, reach: float, unit: str) -> None:
        reached = None
        if got is not None and not self.options.quick:  # tiny data prove nothing
            reached = bool(got >= reach if sign == ">=" else got <= reach)
        self.targets.append(
            {
                "what": what,
                "sign": sign,
                "reach": reach,
                "unit": unit,
                "got": None if got is None else float(got),
                "reached": reached,
            }
        )


def format_targets(targets: Sequence[Row]) -> str:
    """Return the table of the numbers to reach."""
    verdicts = {True: "yes", False: "NO", None: "not judged"}
    rows = [
        [
            target["what"],
            f"{target['sign']} {target['reach']:g} {target['unit']}".rstrip(),
            _text(target["got"]),
            verdicts[target["reached"]],
        ]
        for target in targets
    ]
    return format_table(["number to reach", "reach", "got", "reached"], rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as a table, the first column to the left.

    Examples
    --------
    >>> print(format_table(["", "ms"], [["memcpy", "1.5"], ["zlib", "210.0"]]))
                 ms
    memcpy      1.5
    zlib      210.0
    """
    table = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "   ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def _cells(row: Row) -> list[str]:
    bits = row["bits_per_parameter"]
    return [
        row["name"],
        f"{row['million_per_second']:.1f}",
        f"{row['best_million_per_second']:.1f}",
        f"{1e3 * row['median_seconds']:.2f}",
        f"{1e3 * row['q1_seconds']:.2f}..{1e3 * row['q3_seconds']:.2f}",
        "" if bits is None else f"{bits:.4f}",
        f"{row['times_product']:.3f}",
    ]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "-" if value is None else str(value)
