"""Runs with their progress shown: one experiment, one on a federation, many points of a sweep."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from co3_flower import Co3Error
from sim.engine import Engine
from sim.federation import Federation
from sim.outputs import Row, check_writable, read_rows, read_summary
from sim.resolve import check_machine, check_packages, gpu_share
from sim.settings import Settings

POLL_SECONDS = 0.2
LINGER_SECONDS = 10.0  # for a run that is done to end by itself
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b: ")
SAYS_NOTHING = ("RuntimeError: An error was encountered.", "RuntimeError: Simulation Runtime crash")


class RunFailed(Co3Error, RuntimeError):
    """A run ended without a result; the message is the reason."""


class Interrupted(Co3Error):
    """Ctrl-C, SIGTERM or SIGHUP ended the run; everything it started is ended too."""

    exit_code = 130  # 128 + SIGINT, as a shell reports it


def run_experiment(
    root: Path, settings: Settings, console: Console, gpus_per_client: float | None = None
) -> Row:
    """Run one experiment on an engine of its own and return its summary.

    Parameters
    ----------
    root : Path
        The checkout.
    settings : Settings
        With absolute paths and a number of clients, as `resolve_settings` gives them.
    console : rich.console.Console
        Where the progress bar goes.
    gpus_per_client : float, optional
        Share of a GPU for each client that trains; see `gpu_share`.

    Raises
    ------
    ConfigError
        The packages of the extra ``sim`` are not installed, the images cannot be read or are too
        few, or a folder cannot be written.
    RunFailed
        The run ended without a result.
    Interrupted
        It was asked to end.
    """
    check_packages()
    check_machine(settings)
    folder = Path(settings.run_dir)
    check_writable(folder, "run-dir")
    if settings.memory_dir:
        check_writable(Path(settings.memory_dir), "memory-dir")
    log = folder / "flower.log"
    num_cpus = os.cpu_count() or 1
    num_processes = min(num_cpus, settings.num_clients)
    try:
        with signals_as_interrupt(), Engine(root, log) as engine:
            engine.submit(
                settings.as_run_config(),
                num_clients=settings.num_clients,
                num_cpus=num_processes,
                gpu_share=gpu_share(settings.device, num_processes, gpus_per_client),
            )
            _follow(
                engine,
                settings.num_server_rounds,
                console,
                rows=lambda: read_rows(folder),
                summary=lambda: read_summary(folder),
            )
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; `co3 run --resume {folder}` goes on") from None
    summary = read_summary(folder)
    if summary is None:
        summary = {"status": "failed", "error": last_error(log.read_text(errors="replace"))}
    if summary["status"] != "completed":
        raise RunFailed(f"the run failed: {summary['error']} (all of Flower's log: {log})")
    return summary


def run_on_federation(root: Path, settings: Settings, name: str, console: Console) -> Row:
    """Run one experiment on a SuperLink that is there already, and return its summary.

    Parameters
    ----------
    root : Path
        The checkout.
    settings : Settings
        As `resolve_remote_settings` gives them.
    name : str
        Connection in Flower's config.toml.
    console : rich.console.Console
        Where the progress bar goes.

    Raises
    ------
    EngineError
        The SuperLink is not there, does not take the run, or is gone for a minute.
    RunFailed
        The run ended without a result.
    Interrupted
        It was asked to end; the run is stopped.
    """
    with signals_as_interrupt(), Federation(root, name) as run:
        try:
            run.submit(settings.as_run_config())
            _follow(run, settings.num_server_rounds, console, rows=run.rows, summary=run.summary)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; run {run.run_id or 'none'} is stopped") from None
        summary = run.summary()
        if summary is None:
            reason = last_error(run.log) if ERROR_LINE.search(run.log) else run.failure()
            summary = {"status": "failed", "error": reason}
        if summary["status"] != "completed":
            raise RunFailed(
                f"the run failed: {summary['error']} (all of Flower's log:"
                f" flwr log {run.run_id} {name})"
            )
        return summary


def _follow(
    engine: Engine | Federation,
    num_server_rounds: int,
    console: Console,
    *,
    rows: Callable[[], list[Row]],
    summary: Callable[[], Row | None],
) -> None:
    """Show the rounds as they come, until the run has ended."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=5) as progress:
        task = progress.add_task("rounds", total=num_server_rounds, state="starting Flower")
        accuracy, shown = None, 0
        while True:
            is_running = engine.is_running()  # before the look, so that nothing is missed
            done = rows()
            evaluated = [row["accuracy"] for row in done if row["accuracy"] is not None]
            accuracy = evaluated[-1] if evaluated else None
            if done:
                last = done[-1]
                state = _state(accuracy, last)
                progress.update(task, completed=last["server_round"], state=state)
                if not console.is_terminal and len(evaluated) > shown:  # a log gets lines
                    shown = len(evaluated)
                    print(f"round {last['server_round']}/{num_server_rounds}  {state}", flush=True)
            if summary() is not None:
                engine.wait(LINGER_SECONDS)
                return
            if not is_running:
                return
            time.sleep(POLL_SECONDS)


def _state(accuracy: float | None, row: Row) -> str:
    parts = ["accuracy  -   " if accuracy is None else f"accuracy {accuracy:6.2%}"]
    parts.append(f"R {row['R'] / 8e6:.3f} MB")
    if row["bits_per_parameter"] is not None:
        parts.append(f"{row['bits_per_parameter']:.3f} bits/parameter")
    return "  ".join(parts)


def last_error(log: str) -> str:
    r"""Return the last line of a log that reads like a Python error, else its last line.

    What Flower says of any error behind the error itself does not count.

    Examples
    --------
    >>> last_error("Traceback ...\nValueError: boom\n\nExit Code: 700")
    'ValueError: boom'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    found = [line for line in lines if ERROR_LINE.match(line)]
    errors = [line for line in found if not line.startswith(SAYS_NOTHING)] or found
    return (errors or lines or ["no output"])[-1]


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as Ctrl-C does, so that nothing is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    caught = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
