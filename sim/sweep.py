"""A grid of experiments: which points there are, running those that are not done, and the table.

A sweep file is a config of the settings that all points share, with one or more tables ``[[grid]]``
of lists. Each grid stands for every combination of its values, the last key fastest::

    model = "cnn"

    [[grid]]
    seed = [0, 1, 2]
    gamma = [0.0, 0.9]
    format = ["e2m1", "e5m2"]

    [[grid]]
    seed = [0, 1, 2]
    compressor = "none"

Every point has a run-dir in the sweep's folder, named by its values. A point whose summary says
"completed" is done: the same command goes on where a sweep was ended or killed.
"""

import contextlib
import fcntl
import itertools
import json
import math
import queue
import shutil
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from co3_flower import ConfigError
from sim.outputs import Row, read_rows, read_summary
from sim.settings import DEFAULTS, Settings, Value, check_keys, check_scalar, read_toml
from sim.worker import Worker

GRID = "grid"
SEED = "seed"
PATHS = ("run-dir", "memory-dir", "data-dir")  # of a machine, not of an experiment
TABLE_NAME = "table.md"
LOCK_NAME = "lock"
POLL_SECONDS = 0.5
SPEED_SECONDS = 3600.0  # the time left follows the speed of this last hour

Values = dict[str, Value]


@dataclass(frozen=True)
class Point:
    """One experiment of a sweep.

    Attributes
    ----------
    values : dict
        What its grid sets, typed as the settings are.
    settings : Settings
        All of it, with absolute paths, a run-dir and a number of clients.
    """

    values: Values
    settings: Settings

    @property
    def folder(self) -> Path:
        """Its run-dir."""
        return Path(self.settings.run_dir)

    @property
    def name(self) -> str:
        """Its values in one word, which is its folder's name."""
        return self.folder.name


def read_sweep_file(path: Path) -> tuple[Values, list[Values]]:
    """Read a sweep file: the settings that all points share, and each point's own.

    Parameters
    ----------
    path : Path
        A TOML file as in configs/sweep-*.toml.

    Returns
    -------
    shared : dict
    points : list of dict
        In the order of the file, the last key of a grid fastest; each combination once.

    Raises
    ------
    ConfigError
        No such file, not TOML, no grid, an empty list, an unknown key, or run-dir in a grid.
    """
    shared = read_toml(path)
    grids = shared.pop(GRID, None)
    for key, value in shared.items():
        check_scalar(key, value, path)
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ConfigError(
            f"a sweep must have tables [[{GRID}]] of lists of values, got none in {path}"
        )
    points: list[Values] = []
    for grid in grids:
        check_keys(grid)
        if "run-dir" in grid:
            raise ConfigError(f"run-dir must stand above [[{GRID}]], got it in one in {path}")
        lists = {key: _as_list(key, values, path) for key, values in grid.items()}
        for combination in itertools.product(*lists.values()):
            point = dict(zip(lists, combination, strict=True))
            if point not in points:
                points.append(point)
    return shared, points


def point_name(values: Mapping[str, Value]) -> str:
    """Return the name of a point's folder.

    Examples
    --------
    >>> point_name({"format": "e2m1", "gamma": 1.0, "reclip": True})
    'format=e2m1,gamma=1,reclip=true'
    """
    return ",".join(f"{key}={quote(_text(value), safe='')}" for key, value in values.items())


def pending_points(points: Sequence[Point]) -> list[Point]:
    """Return the points that are not done, in order.

    Raises
    ------
    ConfigError
        A point's folder holds a run with other settings.
    """
    pending = []
    for point in points:
        _check_same_settings(point)
        summary = read_summary(point.folder)
        if summary is None or summary["status"] != "completed":
            pending.append(point)
    return pending


def run_points(
    points: Sequence[Point],
    *,
    root: Path,
    jobs: int,
    console: Console,
    on_done: Callable[[Point], None] | None = None,
) -> dict[str, str]:
    """Run experiments in worker processes, show how far they are, and go on where one fails.

    Parameters
    ----------
    points : sequence of Point
        What an earlier try has left in their folders is removed first.
    root : Path
        The checkout.
    jobs : int
        Worker processes; each runs one point after another.
    console : rich.console.Console
        Where the progress bar goes.
    on_done : callable, optional
        Called with each point that is done, at once.

    Returns
    -------
    dict
        The points that failed, by name, each with the reason in one line.
    """
    waiting = deque(points)
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    lanes = [_Lane(root, waiting, events) for _ in range(min(jobs, len(points)))]
    try:
        for lane in lanes:
            lane.thread.start()
        return _follow(points, events, console, on_done)
    finally:
        waiting.clear()
        for lane in lanes:
            lane.stop()


def format_sweep_table(points: Sequence[Point]) -> str:
    """Return a Markdown table of the points that are done, those that differ in the seed as one.

    Accuracy and R are means over the seeds; the spread of the accuracy is the sample standard
    deviation, given where there are two seeds or more.
    """
    keys = list(dict.fromkeys(key for point in points for key in point.values if key != SEED))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for point in points:
        label = tuple(_text(point.values[key]) if key in point.values else "" for key in keys)
        summary = read_summary(point.folder)
        rows = groups.setdefault(label, [])
        if summary is not None and summary["status"] == "completed":
            rows.append(summary)
    header = [*keys, "seeds", "accuracy", "loss", "R, MB", "bits per parameter"]
    lines = [header, ["---"] * len(header)]
    lines += [[*label, str(len(rows)), *_means(rows)] for label, rows in groups.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


@contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder, which is made, against a second `co3 sweep` on it.

    Raises
    ------
    ConfigError
        It cannot be made, or is held already.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_NAME).open("w")
    except OSError as error:
        raise ConfigError(
            f"run-dir must be a folder that can be made, got {str(folder)!r} ({error.strerror})"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"run-dir must have one sweep at a time, got a second one on {str(folder)!r}"
            ) from None
        yield


@dataclass(frozen=True)
class _Event:
    """A point was started (no summary) or has ended."""

    point: Point
    summary: Row | None = None


class _Lane:
    """A thread that keeps one worker process busy, and replaces it when it dies."""

    def __init__(
        self, root: Path, waiting: deque[Point], events: queue.SimpleQueue[_Event]
    ) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True)
        self._root = root
        self._waiting = waiting
        self._events = events
        self._worker: Worker | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End the worker in the middle of its point; the thread ends by that."""
        self._is_stopped = True
        if self._worker is not None:
            self._worker.stop()
        if self.thread.is_alive():
            self.thread.join()

    def _work(self) -> None:
        while self._waiting and not self._is_stopped:
            try:
                point = self._waiting.popleft()
            except IndexError:  # another lane was faster
                return
            self._events.put(_Event(point))
            self._events.put(_Event(point, self._run(point)))

    def _run(self, point: Point) -> Row:
        try:
            shutil.rmtree(point.folder, ignore_errors=True)
            point.folder.mkdir(parents=True)
            if self._worker is None or not self._worker.is_alive():
                self._worker = Worker(self._root)
            return self._worker.run(point.settings.as_run_config())
        except OSError as error:
            return {"status": "failed", "error": f"{error.strerror} ({point.folder})"}


def _follow(
    points: Sequence[Point],
    events: queue.SimpleQueue[_Event],
    console: Console,
    on_done: Callable[[Point], None] | None,
) -> dict[str, str]:
    """Show the events until every point has ended; return the failed ones with their reasons."""
    failed: dict[str, str] = {}
    running: dict[str, Point] = {}
    num_ended = ended_rounds = 0
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:3.0f} %  {task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    total = sum(point.settings.num_server_rounds for point in points)
    with Progress(*columns, console=console, speed_estimate_period=SPEED_SECONDS) as progress:
        task = progress.add_task("sweep", total=total, state="starting")
        while num_ended < len(points):
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=POLL_SECONDS)
                if event.summary is None:
                    running[event.point.name] = event.point
                else:
                    del running[event.point.name]
                    num_ended += 1
                    ended_rounds += event.point.settings.num_server_rounds
                    if event.summary["status"] != "completed":
                        failed[event.point.name] = event.summary["error"]
                    elif on_done is not None:
                        on_done(event.point)
                    left = progress.tasks[task].time_remaining
                    _print_event(event, num_ended, len(points), left, console)
            rounds = ended_rounds + sum(_rounds_done(point) for point in running.values())
            state = f"{num_ended}/{len(points)} points"
            state += f", {len(failed)} failed" if failed else ""
            progress.update(task, completed=rounds, state=state)
    return failed


def _rounds_done(point: Point) -> int:
    return max(0, len(read_rows(point.folder)) - 1)  # the first row is round 0


def _print_event(
    event: _Event, num_ended: int, num_points: int, left: float | None, console: Console
) -> None:
    """Write a line for a point that has ended."""
    assert event.summary is not None
    if event.summary["status"] == "completed":
        accuracy, megabytes = event.summary["accuracy"], event.summary["R_megabytes"]
        outcome = f"R {megabytes:.3f} MB"
        if accuracy is not None:
            outcome = f"accuracy {accuracy:.2%}  {outcome}"
    else:
        outcome = f"failed: {event.summary['error']}"
    line = f"{num_ended}/{num_points}  {unquote(event.point.name)}  {outcome}"
    if left is not None and not console.is_terminal:  # a log has no bar that shows it
        line += f"  ({timedelta(seconds=math.ceil(left))} left)"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _check_same_settings(point: Point) -> None:
    """Raise ConfigError where a point's folder has a run of other settings."""
    try:
        text = (point.folder / "config.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    stored = {**DEFAULTS, **json.loads(text)["run_config"]}
    for key, wanted in point.settings.as_run_config().items():
        if stored[key] != wanted and key not in PATHS:
            raise ConfigError(
                f"{key} must be {stored[key]!r} as in {str(point.folder)!r}, got {wanted!r};"
                " give a changed sweep another folder: -c \"run-dir='...'\""
            )


def _as_list(key: str, values: Any, path: Path) -> list[Value]:
    listed = values if isinstance(values, list) else [values]
    if not listed:
        raise ConfigError(f"{key} must have at least one value, got [] in {path}")
    for value in listed:
        check_scalar(key, value, path)
    return listed


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0")


def _means(rows: Sequence[Row]) -> list[str]:
    """Return the cells of one line of the table."""
    if not rows:
        return [""] * 4
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    rates = [row["bits_per_parameter"] for row in rows if row["bits_per_parameter"] is not None]
    accuracy = f"{100 * statistics.mean(accuracies):.2f}" if accuracies else ""
    if len(accuracies) > 1:
        accuracy += f" ± {100 * statistics.stdev(accuracies):.2f}"
    return [
        f"{accuracy} %" if accuracy else "",
        f"{statistics.mean(losses):.4f}" if losses else "",
        f"{statistics.mean(row['R_megabytes'] for row in rows):.3f}",
        f"{statistics.mean(rates):.3f}" if rates else "",
    ]
