"""Points of a sweep or a comparison: experiments that worker processes run one after the other."""

import contextlib
import fcntl
import math
import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
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
from sim.outputs import Row, read_rows
from sim.runs import Interrupted, RunFailed, signals_as_interrupt
from sim.settings import Settings, Value
from sim.worker import Worker

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


def point_name(values: Mapping[str, Value]) -> str:
    """Return the name of a point's folder.

    Examples
    --------
    >>> point_name({"format": "e2m1", "gamma": 1.0, "reclip": True})
    'format=e2m1,gamma=1,reclip=true'
    """
    return ",".join(f"{key}={quote(as_text(value), safe='')}" for key, value in values.items())


def as_text(value: Value) -> str:
    """Return a value as names and tables show it.

    Examples
    --------
    >>> as_text(1.0), as_text(True), as_text("e2m1")
    ('1', 'true', 'e2m1')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0")


def run_pending(
    pending: Sequence[Point],
    root: Path,
    jobs: int,
    console: Console,
    kept: str,
    on_done: Callable[[Point], None] | None = None,
) -> dict[str, str]:
    """Run points; return the failed ones with their reasons."""
    try:
        with signals_as_interrupt():
            return run_points(pending, root=root, jobs=jobs, console=console, on_done=on_done)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the same command goes on where it was ({kept})") from None


def points_failed(failed: Mapping[str, str], of_what: str) -> RunFailed:
    """Return the error for points that failed, with their reasons by name."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    return RunFailed(f"{len(failed)} of {of_what} failed, the others are done: {reasons}")


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
