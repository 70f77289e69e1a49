"""What every benchmark shares: options and interleaved timing.

The product and its rivals are timed in one process and in turn, repetition by repetition, so that
whatever else the machine does hits all of them alike. Ratios are taken within a repetition; their
median is reported.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

DEFAULT_OUTPUT = Path(__file__).with_name("results.jsonl")
DEFAULT_REPEATS, QUICK_REPEATS = 9, 2

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One way to do the work: the product (the first case of a list) or a rival.

    Attributes
    ----------
    name : str
        What the table calls it.
    run : callable
        Does the work once.
    num_items : int
        Entries that it handles; a slow rival may be given a part of the data.
    num_bytes : callable, optional
        Bytes that the result of `run` takes, where its size is of interest.
    max_repeats : int
        A slow case is repeated no more often.
    """

    name: str
    run: Callable[[], Any]
    num_items: int
    num_bytes: Callable[[Any], int] | None = None
    max_repeats: int = 1_000_000


@dataclass
class Timing:
    """What was measured of a case: seconds of wall clock and of CPU time per repetition."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    num_bytes: int | None = None

    @property
    def best_speed(self) -> float:
        """Items per second of the fastest repetition."""
        return self.case.num_items / min(self.seconds)

    @property
    def bits_per_item(self) -> float | None:
        """Bits of the result per item, None where its size is of no interest."""
        return None if self.num_bytes is None else 8 * self.num_bytes / self.case.num_items

    def times(self, product: Timing) -> float:
        """How many times as long as the product it takes per item: median over repetitions."""
        share = product.case.num_items / self.case.num_items
        pairs = zip(self.seconds, product.seconds, strict=False)
        return statistics.median(mine / other for mine, other in pairs) * share

    def as_row(self, section: str, product: Timing) -> Row:
        """Return the numbers as they go into the JSON line."""
        q1, median, q3 = quartiles(self.seconds)
        return {
            "section": section,
            "name": self.case.name,
            "num_items": self.case.num_items,
            "repeats": len(self.seconds),
            "median_seconds": median,
            "q1_seconds": q1,
            "q3_seconds": q3,
            "best_seconds": min(self.seconds),
            "best_cpu_seconds": min(self.cpu_seconds),
            "million_per_second": self.case.num_items / median / 1e6,
            "best_million_per_second": self.best_speed / 1e6,
            "bits_per_parameter": self.bits_per_item,
            "times_product": self.times(product),
        }


def measure(cases: Sequence[Case], repeats: int) -> list[Timing]:
    """Time all cases in turn, `repeats` times over, after one round that does not count.

    Parameters
    ----------
    cases : sequence of Case
        The product first. Each repetition starts one case further on.
    repeats : int
        Repetitions; a case with a smaller `max_repeats` sits out the later ones, and skips the
        first round where that is 1.
    """
    timings = [Timing(case) for case in cases]
    for case in cases:
        if case.max_repeats > 1:
            case.run()
    for repetition in range(repeats):
        first = repetition % len(timings)
        for timing in timings[first:] + timings[:first]:
            if repetition < timing.case.max_repeats:
                _time_once(timing)
    return timings


def _time_once(timing: Timing) -> None:
    gc.collect()
    gc.disable()
    try:
        cpu, start = time.process_time(), time.perf_counter()
        result = timing.case.run()
        timing.seconds.append(time.perf_counter() - start)
        timing.cpu_seconds.append(time.process_time() - cpu)
    finally:
        gc.enable()
    if timing.case.num_bytes is not None:
        timing.num_bytes = timing.case.num_bytes(result)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile.

    Examples
    --------
    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) < 2:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument("--quick", action="store_true", help="tiny data, few repetitions: a check")
    result.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="file the JSON line is appended to"
    )
    result.add_argument("--seed", type=int, default=0, help="of everything random")
    return result


def add_timing_options(arguments: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that time an update: repetitions and data."""
    arguments.add_argument(
        "--repeats", type=int, default=None, help=f"{DEFAULT_REPEATS}, with --quick {QUICK_REPEATS}"
    )
    arguments.add_argument(
        "--data", choices=("all", "densenet121", "synthetic"), default="all", help="updates"
    )
    arguments.add_argument(
        "--num-parameters", type=int, default=4_000_000, help="of the synthetic update, at least"
    )


def num_repeats(options: argparse.Namespace) -> int:
    """Return the number of repetitions that the options ask for."""
    return options.repeats or (QUICK_REPEATS if options.quick else DEFAULT_REPEATS)


def first_if_quick(choices: Mapping[str, T], options: argparse.Namespace) -> dict[str, T]:
    """Return all choices, with --quick the first one only."""
    return dict(list(choices.items())[: 1 if options.quick else None])
