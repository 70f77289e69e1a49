"""The commands that a checkout adds to `co3`: run, sweep, compare and report."""

import importlib.util
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from co3_flower import Co3Error, ConfigError
from sim.compare.figure import save_figure
from sim.compare.plan import Comparison, read_comparison
from sim.compare.results import Result, add_result, read_results, result_of, scores
from sim.compare.table import format_comparison
from sim.data import check_shares, shared_images
from sim.engine import Engine
from sim.federation import Federation
from sim.outputs import (
    Row,
    check_is_unused,
    check_writable,
    default_run_dir,
    format_table,
    read_config,
    read_rows,
    read_summary,
)
from sim.settings import (
    DATASETS,
    Settings,
    Value,
    check_dataset,
    check_together,
    expand_path,
    parse_overrides,
    read_config_file,
)
from sim.sweep import (
    TABLE_NAME,
    Point,
    format_sweep_table,
    pending_points,
    point_name,
    read_sweep_file,
    run_points,
    sole_owner,
)

DEFAULT_NUM_CLIENTS = 4
POLL_SECONDS = 0.2
LINGER_SECONDS = 10.0  # for a run that is done to end by itself
NEEDED = ("torch", "torchvision", "ray", "flwr_datasets", "sklearn", "tensorboard")
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b: ")
SAYS_NOTHING = ("RuntimeError: An error was encountered.", "RuntimeError: Simulation Runtime crash")
PATH_KEYS = ("run_dir", "memory_dir", "data_dir")


SharedOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--run-config",
        metavar='"KEY=VALUE ..."',
        help="Settings that override those all points share; see `co3 run --help`.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Points at a time, each on one CPU core.")]


class RunFailed(Co3Error, RuntimeError):
    """A run ended without a result; the message is the reason."""


class Interrupted(Co3Error):
    """Ctrl-C, SIGTERM or SIGHUP ended the run; everything it started is ended too."""

    exit_code = 130  # 128 + SIGINT, as a shell reports it


def register(app: typer.Typer, root: Path) -> None:
    """Add the commands of a checkout.

    Parameters
    ----------
    app : typer.Typer
        The command line they are added to.
    root : Path
        The checkout.
    """

    @app.command("run")
    def run(
        config: Annotated[
            Path | None,
            typer.Argument(
                metavar="[CONFIG.toml]", help="Run-config of an experiment, as in configs/."
            ),
        ] = None,
        override: Annotated[
            list[str] | None,
            typer.Option(
                "-c",
                "--run-config",
                metavar='"KEY=VALUE ..."',
                help="Settings that override CONFIG.toml; strings are quoted: -c \"format='e5m2'\"."
                " May be repeated.",
            ),
        ] = None,
        num_clients: Annotated[
            int | None,
            typer.Option(
                "--num-clients",
                min=1,
                help=f"Clients to simulate (default: num-clients, else {DEFAULT_NUM_CLIENTS});"
                " with --federation, to wait for (else those that are there).",
            ),
        ] = None,
        federation: Annotated[
            str | None,
            typer.Option(
                "--federation",
                metavar="NAME",
                help="Run on the SuperLink of this name in Flower's config.toml, with the"
                " SuperNodes connected to it, and start none; see docs/deploy.md.",
            ),
        ] = None,
        resume: Annotated[
            Path | None,
            typer.Option(
                "--resume",
                metavar="RUN_DIR",
                help="Go on with a run that was ended, killed or failed, with its own settings.",
            ),
        ] = None,
        gpus_per_client: Annotated[
            float | None,
            typer.Option(
                "--gpus-per-client",
                metavar="SHARE",
                help="Share of a GPU for each client that trains, 0.1 for ten at a time on one"
                " (default: one GPU shared by as many as there are CPU cores). None is used where"
                " there is none, or with device='cpu'.",
            ),
        ] = None,
    ) -> None:
        r"""Train a network federatedly, and count the bits.

        Runs on Flower's simulation engine, or with --federation on a deployment: paths are then
        those of the SuperLink's machine (memory-dir: of the clients'), and so is run-dir.

        Every key of \[tool.flwr.app.config] in pyproject.toml is a setting; they are listed and
        explained there. Shows accuracy, R and bits per parameter while it runs, ends with a table,
        and leaves config.json, rounds.jsonl, summary.json, model.npz, TensorBoard events and
        flower.log in run-dir (default: runs/<time>-<id>).

        The exit code is 0 for a completed run, 1 for one that failed, 2 for a wrong setting, 130
        after Ctrl-C.
        """
        if gpus_per_client is not None:
            check_gpu_share(gpus_per_client, federation)
        if resume is not None:
            if config or override or num_clients or federation:
                raise ConfigError(
                    "--resume must stand alone, got other options; a run goes on with its own"
                    " settings (on a federation: the same ones, and -c 'resume=true')"
                )
            summary = run_experiment(root, resumed_settings(resume), Console(), gpus_per_client)
        elif federation is None:
            settings = resolve_settings(config, override or [], num_clients, Path.cwd())
            summary = run_experiment(root, settings, Console(), gpus_per_client)
        else:
            settings = resolve_remote_settings(config, override or [], num_clients)
            summary = run_on_federation(root, settings, federation, Console())
        typer.echo(f"run-dir  {summary['run_dir']}\n{format_table(summary)}")

    @app.command("sweep")
    def sweep(
        config: Annotated[
            Path,
            typer.Argument(
                metavar="FILE.toml",
                help="Settings and grids of values, as in configs/sweep-*.toml.",
            ),
        ],
        override: SharedOverrides = None,
        jobs: Jobs = 1,
    ) -> None:
        r"""Run a grid of experiments, and go on where an earlier call was ended.

        FILE.toml holds the settings that all points share, and tables \[\[grid]] of lists: a grid
        stands for every combination of its values. Points run in worker processes that load
        everything once, without Flower's engine: R and the model are the same as with `co3 run`.

        Each point leaves what `co3 run` leaves in a folder of its own under run-dir (default:
        runs/<name of FILE>); points that are done are not repeated, failed ones are tried again.
        Ends with a table (means over seeds) that is also written to run-dir/table.md.

        The exit code is 0 when every point is done, 1 when some failed, 2 for a wrong setting, 130
        after Ctrl-C.
        """
        sweep_dir, points = resolve_points(config, override or [], Path.cwd())
        table = run_sweep(root, sweep_dir, points, jobs, Console())
        typer.echo(f"run-dir  {sweep_dir}\n\n{table}")

    @app.command("compare")
    def compare(
        config: Annotated[
            Path,
            typer.Argument(
                metavar="FILE.toml",
                help="Settings, compressors and stages, as in configs/compare-*.toml.",
            ),
        ],
        override: SharedOverrides = None,
        jobs: Jobs = 1,
        last_stage: Annotated[
            str, typer.Option("--until", metavar="STAGE", help="Stop behind this stage.")
        ] = "",
    ) -> None:
        r"""Train with every compressor of a file, and go on where an earlier call was ended.

        FILE.toml holds the settings that all points share, a table \[\[entry]] for each compressor
        at each strength, and tables \[\[stage]]: the first one finds each entry's best step size,
        later ones train the best of them longer, on more seeds or in another setting.

        Each finished point is a line of run-dir/results.jsonl (default run-dir: runs/<name of
        FILE>) and not repeated. Ends with a table for each stage, also in run-dir/table.md, and the
        figure accuracy against R as PNG and SVG.

        The exit code is 0 when every point is done, 1 when some failed, 2 for a wrong setting, 130
        after Ctrl-C.
        """
        comparison = read_comparison(config)
        comparison.shared.update(parse_overrides(override or []))
        folder = compare_dir(comparison, config, Path.cwd())
        table = run_comparison(root, folder, comparison, last_stage, jobs, Console())
        typer.echo(f"run-dir  {folder}\n\n{table}")

    @app.command("report")
    def report(
        run_dirs: Annotated[
            list[Path],
            typer.Argument(metavar="RUN_DIR...", help="Folders of runs or of sweeps."),
        ],
        output: Annotated[
            Path | None,
            typer.Option(
                "--output",
                metavar="DIR",
                help="Folder of the report (default: RUN_DIR/report, for several ./report).",
            ),
        ] = None,
    ) -> None:
        """Draw what runs have left: one page that needs no network, and its figures.

        Accuracy and loss against R with their lower envelope, accuracy over rounds, tables of
        networks and runs; where gradients were saved (save-gradients-every), their histograms,
        laws, distances, kurtosis, coded sizes and residuals. Writes DIR/report.html and
        DIR/figures/*.png and *.svg.
        """
        from sim.report.page import write_report  # torch and matplotlib: seconds

        folder = output or (run_dirs[0] if len(run_dirs) == 1 else Path.cwd()) / "report"
        typer.echo(write_report(run_dirs, folder))


def resolve_settings(
    config: Path | None, overrides: list[str], num_clients: int | None, folder: Path
) -> Settings:
    """Merge CONFIG.toml, the overrides and the options, check them, and make paths absolute.

    Parameters
    ----------
    config : Path or None
        TOML file of run-config keys.
    overrides : list of str
        ``key=value`` texts; they win over the file.
    num_clients : int or None
        Wins over both.
    folder : Path
        What relative paths refer to.

    Raises
    ------
    ConfigError
        A wrong key or value, or a run-dir that holds a run already.
    """
    settings = _settle(_merge(config, overrides, num_clients), folder)
    run_dir = settings.run_dir or str(default_run_dir(folder))
    check_is_unused(Path(run_dir))
    memory_dir = settings.memory_dir
    if settings.compressor != "none" and not memory_dir:
        # U residuals need not sit in the driver's memory.
        memory_dir = str(Path(run_dir) / "memory")
    return replace(settings, run_dir=run_dir, memory_dir=memory_dir)


def resumed_settings(run_dir: Path) -> Settings:
    """Return the settings with which a run goes on; its folder may have been moved.

    Parameters
    ----------
    run_dir : Path
        Folder of the run.

    Raises
    ------
    ConfigError
        It holds no run, or a completed one.
    """
    run_dir = run_dir.absolute()
    settings = Settings.from_run_config(read_config(run_dir)["run_config"])
    memory_dir = settings.memory_dir
    if memory_dir and Path(memory_dir).is_relative_to(settings.run_dir):
        memory_dir = str(run_dir / Path(memory_dir).relative_to(settings.run_dir))
    (run_dir / "summary.json").unlink(missing_ok=True)  # of a run that failed; there is a new end
    return replace(settings, run_dir=str(run_dir), memory_dir=memory_dir, resume=True)


def resolve_remote_settings(
    config: Path | None, overrides: list[str], num_clients: int | None
) -> Settings:
    """Merge and check as `resolve_settings`; paths are those of other machines.

    Raises
    ------
    ConfigError
        A wrong key or value, or a relative path.
    """
    settings = Settings.from_run_config(_merge(config, overrides, num_clients))
    paths = {name.replace("_", "-"): getattr(settings, name) for name in PATH_KEYS}
    if settings.dataset not in DATASETS:
        paths["dataset"] = settings.dataset
    for key, path in paths.items():
        # A client takes memory-dir as it is; the SuperLink's machine expands ~ and variables.
        if path and not path.startswith(("/",) if key == "memory-dir" else ("/", "~", "$")):
            raise ConfigError(
                f"{key} must be an absolute path with --federation, where it names a folder of"
                f" another machine, got {path!r}"
            )
    if settings.save_gradients_every:
        raise ConfigError(
            "save-gradients-every must be 0 with --federation, where the run-dir is on another"
            f" machine than the clients, got {settings.save_gradients_every}"
        )
    _check_buffers(settings)
    return settings


def _merge(config: Path | None, overrides: list[str], num_clients: int | None) -> dict[str, Value]:
    values = read_config_file(config) if config else {}
    values.update(parse_overrides(overrides))
    if num_clients is not None:
        values["num-clients"] = num_clients
    return values


def resolve_points(config: Path, overrides: list[str], folder: Path) -> tuple[Path, list[Point]]:
    """Return a sweep's folder and its points, whose settings are checked.

    Parameters
    ----------
    config : Path
        Sweep file; see `sim.sweep`.
    overrides : list of str
        ``key=value`` texts; they win over what the points share, not over the grids.
    folder : Path
        What relative paths refer to.

    Raises
    ------
    ConfigError
        A wrong file, key or value.
    """
    shared, grid = read_sweep_file(config)
    shared.update(parse_overrides(overrides))
    sweep_dir = Path(_settle(shared, folder).run_dir or folder / "runs" / config.stem)
    points = []
    for values in grid:
        settings = _settle({**shared, **values}, folder)
        typed = {key: settings.as_run_config()[key] for key in values}
        settings = replace(settings, run_dir=str(sweep_dir / point_name(typed)))
        points.append(Point(typed, settings))
    return sweep_dir, points


def run_sweep(
    root: Path, sweep_dir: Path, points: Sequence[Point], jobs: int, console: Console
) -> str:
    """Run the points of a sweep that are not done and return the table of all.

    Raises
    ------
    ConfigError
        A point that cannot run on this machine, or a folder that another sweep holds or has used.
    RunFailed
        Some points failed; the others are done, and the table is written.
    Interrupted
        It was asked to end.
    """
    _check_packages()
    for point in points:
        _check_machine(point.settings)
    check_writable(sweep_dir, "run-dir")
    for memory_dir in {point.settings.memory_dir for point in points} - {""}:
        check_writable(Path(memory_dir), "memory-dir")
    with sole_owner(sweep_dir):
        pending = pending_points(points)
        if len(pending) < len(points):
            console.print(f"{len(points) - len(pending)} of {len(points)} points are done already")
        failed = _run_pending(pending, root, jobs, console, f"points in {sweep_dir}")
        table = format_sweep_table(points)
        (sweep_dir / TABLE_NAME).write_text(table, encoding="utf-8")
    if failed:
        typer.echo(table)
        raise _points_failed(failed, f"{len(points)} points")
    return table


def compare_dir(comparison: Comparison, config: Path, folder: Path) -> Path:
    """Return a comparison's folder, once all its settings are checked, those of later stages too.

    Raises
    ------
    ConfigError
        A setting that cannot be, or a seed or step size outside of the stages, which have their
        own.
    """
    for values in (comparison.shared, *comparison.entries.values()):
        for key in ("lr", "seed"):
            if key in values:
                raise ConfigError(f"{key} must be given in [[stage]] alone, got {values[key]!r}")
    for stage in comparison.stages:
        for entry in comparison.entries.values():
            values = {**comparison.shared, **stage.values, **entry}
            settings = _settle(values, folder)
        for lr in stage.lrs:
            _settle({**values, "lr": lr}, folder)
        for seed in stage.seeds:
            _settle({**values, "seed": seed}, folder)
    return Path(settings.run_dir or folder / "runs" / config.stem)


def run_comparison(
    root: Path, folder: Path, comparison: Comparison, last_stage: str, jobs: int, console: Console
) -> str:
    """Run what is not done of a comparison, stage by stage, and return the tables.

    Raises
    ------
    ConfigError
        A point that cannot run on this machine, a stage that is not there, or a folder that another
        comparison holds or has used.
    RunFailed
        Some points failed; the stages behind are not begun.
    Interrupted
        It was asked to end.
    """
    _check_packages()
    names = [stage.name for stage in comparison.stages]
    if last_stage and last_stage not in names:
        raise ConfigError(f"--until must be one of {', '.join(names)}, got {last_stage!r}")
    check_writable(folder, "run-dir")
    tables = ""
    with sole_owner(folder):
        for stage in comparison.stages[: names.index(last_stage or names[-1]) + 1]:
            results = read_results(folder)
            points = comparison.points(stage, results, folder, lambda v: _settle(v, Path.cwd()))
            _check_machine(points[0].settings)
            failed = _run_stage(root, folder, points, results, jobs, console)
            if failed:
                raise _points_failed(failed, f"{len(points)} points of stage {stage.name!r}")
            by_stage = {
                name: scores(r for r in read_results(folder) if r.stage == name)
                for name in names[: names.index(stage.name) + 1]
            }
            tables = "\n".join(
                f"{name}\n\n{format_comparison(found, comparison.target_share)}"
                for name, found in by_stage.items()
            )
            (folder / TABLE_NAME).write_text(tables, encoding="utf-8")
            save_figure(by_stage, folder)
    return tables


def _run_stage(
    root: Path,
    folder: Path,
    points: Sequence[Point],
    results: Sequence[Result],
    jobs: int,
    console: Console,
) -> dict[str, str]:
    """Run the points that have no result yet; return the failed ones with their reasons."""
    stage = points[0].values["stage"]
    done = {(r.label, r.config["lr"], r.config["seed"]): r for r in results if r.stage == stage}
    pending = []
    for point in points:
        config = point.settings.as_run_config()
        result = done.get((str(point.values["label"]), config["lr"], config["seed"]))
        if result is None:
            pending.append(point)
        elif wrong := [key for key, value in result.config.items() if config[key] != value]:
            raise ConfigError(
                f"{wrong[0]} must be {result.config[wrong[0]]!r} as in {str(folder)!r}, got "
                f"{config[wrong[0]]!r}; give a changed comparison another folder: "
                "-c \"run-dir='...'\""
            )
    console.print(f"stage {stage}: {len(points) - len(pending)} of {len(points)} points are done")
    if not pending:
        return {}
    return _run_pending(
        pending,
        root,
        jobs,
        console,
        f"results in {folder}",
        on_done=lambda point: add_result(folder, result_of(point)),
    )


def _run_pending(
    pending: Sequence[Point],
    root: Path,
    jobs: int,
    console: Console,
    kept: str,
    on_done: Callable[[Point], None] | None = None,
) -> dict[str, str]:
    """Run points; return the failed ones with their reasons."""
    try:
        with _signals_as_interrupt():
            return run_points(pending, root=root, jobs=jobs, console=console, on_done=on_done)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the same command goes on where it was ({kept})") from None


def _points_failed(failed: Mapping[str, str], of_what: str) -> RunFailed:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    return RunFailed(f"{len(failed)} of {of_what} failed, the others are done: {reasons}")


def _settle(values: Mapping[str, Value], folder: Path) -> Settings:
    """Check settings, make their paths absolute and the number of clients known."""
    settings = Settings.from_run_config(values)
    if settings.resume:
        raise ConfigError("resume must be false here, got true; use `co3 run --resume RUN_DIR`")
    paths = {name: _absolute(getattr(settings, name), name, folder) for name in PATH_KEYS}
    if settings.dataset not in DATASETS:
        paths["dataset"] = _absolute(settings.dataset, "dataset", folder)
    clients = settings.num_clients or DEFAULT_NUM_CLIENTS
    settings = replace(settings, **paths, num_clients=clients)
    check_together(settings)
    check_dataset(settings.dataset)
    return settings


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
    _check_packages()
    _check_machine(settings)
    folder = Path(settings.run_dir)
    check_writable(folder, "run-dir")
    if settings.memory_dir:
        check_writable(Path(settings.memory_dir), "memory-dir")
    log = folder / "flower.log"
    num_cpus = os.cpu_count() or 1
    num_processes = min(num_cpus, settings.num_clients)
    try:
        with _signals_as_interrupt(), Engine(root, log) as engine:
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
    with _signals_as_interrupt(), Federation(root, name) as run:
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


def _absolute(path: str, name: str, folder: Path) -> str:
    if not path:
        return ""
    return str((folder / expand_path(path, name.replace("_", "-"))).resolve())


def _check_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"co3 run must find the packages of the extra 'sim', got none of {', '.join(missing)};"
            " run `make setup`, or pip install -e '.[sim]'"
        )


def _check_machine(settings: Settings) -> None:
    """Find before anything starts what would only fail once Flower runs."""
    if settings.data_dir and not Path(settings.data_dir).is_dir():
        raise ConfigError(f"data-dir must be a folder with CIFAR-10, got {settings.data_dir!r}")
    if settings.device == "cuda" and shutil.which("nvidia-smi") is None:
        raise ConfigError("device must be 'cpu' or 'auto' where there is no GPU, got 'cuda'")
    _check_buffers(settings)
    labels = shared_images(settings.dataset, settings.data_dir).labels
    check_shares(
        labels,
        settings.num_clients,
        settings.partition,
        alpha=settings.dirichlet_alpha,
        seed=settings.seed,
    )


def _check_buffers(settings: Settings) -> None:
    if settings.buffers == "local":
        raise ConfigError(
            "buffers must be 'coded' or 'raw' here, got 'local': the PS evaluates models with"
            " BatchNorm, and would lack their statistics"
        )


def check_gpu_share(gpus_per_client: float, federation: str | None) -> None:
    """Raise ConfigError for a share of a GPU that cannot be, or that nothing here hands out."""
    if not 0.0 < gpus_per_client <= 1.0:
        raise ConfigError(f"--gpus-per-client must be above 0 and at most 1, got {gpus_per_client}")
    if federation is not None:
        raise ConfigError(
            "--gpus-per-client must be left out with --federation, whose SuperNodes have their own"
            f" machines, got {gpus_per_client}"
        )


def gpu_share(device: str, num_processes: int, gpus_per_client: float | None) -> float:
    """Return the share of the GPU for each training process; Ray hides it from those with none."""
    if device == "cpu" or (device == "auto" and shutil.which("nvidia-smi") is None):
        return 0.0
    return gpus_per_client or round(1 / num_processes, 4)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
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
