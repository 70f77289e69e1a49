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

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from co3_flower import ConfigError
from sim.outputs import Row, check_writable, read_summary
from sim.points import (
    TABLE_NAME,
    Point,
    Values,
    as_text,
    point_name,
    points_failed,
    run_pending,
    sole_owner,
)
from sim.resolve import check_machine, check_packages, settle
from sim.settings import (
    DEFAULTS,
    PATH_KEYS,
    Value,
    check_keys,
    check_scalar,
    parse_overrides,
    read_toml,
)

GRID = "grid"
SEED = "seed"


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
    sweep_dir = Path(settle(shared, folder).run_dir or folder / "runs" / config.stem)
    points = []
    for values in grid:
        settings = settle({**shared, **values}, folder)
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
    check_packages()
    for point in points:
        check_machine(point.settings)
    check_writable(sweep_dir, "run-dir")
    for memory_dir in {point.settings.memory_dir for point in points} - {""}:
        check_writable(Path(memory_dir), "memory-dir")
    with sole_owner(sweep_dir):
        pending = pending_points(points)
        if len(pending) < len(points):
            console.print(f"{len(points) - len(pending)} of {len(points)} points are done already")
        failed = run_pending(pending, root, jobs, console, f"points in {sweep_dir}")
        table = format_sweep_table(points)
        (sweep_dir / TABLE_NAME).write_text(table, encoding="utf-8")
    if failed:
        print(table)
        raise points_failed(failed, f"{len(points)} points")
    return table


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


def format_sweep_table(points: Sequence[Point]) -> str:
    """Return a Markdown table of the points that are done, those that differ in the seed as one.

    Accuracy and R are means over the seeds; the spread of the accuracy is the sample standard
    deviation, given where there are two seeds or more.
    """
    keys = list(dict.fromkeys(key for point in points for key in point.values if key != SEED))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for point in points:
        label = tuple(as_text(point.values[key]) if key in point.values else "" for key in keys)
        summary = read_summary(point.folder)
        rows = groups.setdefault(label, [])
        if summary is not None and summary["status"] == "completed":
            rows.append(summary)
    header = [*keys, "seeds", "accuracy", "loss", "R, MB", "bits per parameter"]
    lines = [header, ["---"] * len(header)]
    lines += [[*label, str(len(rows)), *_means(rows)] for label, rows in groups.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _check_same_settings(point: Point) -> None:
    """Raise ConfigError where a point's folder has a run of other settings."""
    try:
        text = (point.folder / "config.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    stored = {**DEFAULTS, **json.loads(text)["run_config"]}
    for key, wanted in point.settings.as_run_config().items():
        if stored[key] != wanted and key not in PATH_KEYS:
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
