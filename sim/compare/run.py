"""A comparison, stage by stage: what is not done of it is run, then tables and figure are made."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from co3_flower import ConfigError
from sim.compare.figure import save_figure
from sim.compare.plan import Comparison
from sim.compare.results import Result, add_result, read_results, result_of, scores
from sim.compare.table import format_comparison
from sim.outputs import check_writable
from sim.points import TABLE_NAME, Point, points_failed, run_pending, sole_owner
from sim.resolve import check_machine, check_packages, settle


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
            settings = settle(values, folder)
        for lr in stage.lrs:
            settle({**values, "lr": lr}, folder)
        for seed in stage.seeds:
            settle({**values, "seed": seed}, folder)
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
    check_packages()
    names = [stage.name for stage in comparison.stages]
    if last_stage and last_stage not in names:
        raise ConfigError(f"--until must be one of {', '.join(names)}, got {last_stage!r}")
    check_writable(folder, "run-dir")
    tables = ""
    with sole_owner(folder):
        for stage in comparison.stages[: names.index(last_stage or names[-1]) + 1]:
            results = read_results(folder)
            points = comparison.points(stage, results, folder, lambda v: settle(v, Path.cwd()))
            check_machine(points[0].settings)
            failed = _run_stage(root, folder, points, results, jobs, console)
            if failed:
                raise points_failed(failed, f"{len(points)} points of stage {stage.name!r}")
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
    return run_pending(
        pending,
        root,
        jobs,
        console,
        f"results in {folder}",
        on_done=lambda point: add_result(folder, result_of(point)),
    )
