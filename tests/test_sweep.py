"""`co3 sweep`: the grid, the points' folders, resuming, failed points, and the table."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from co3_flower import ConfigError
from conftest import REPOSITORY
from sim.outputs import read_summary
from sim.points import Point, point_name, sole_owner
from sim.resolve import DEFAULT_NUM_CLIENTS
from sim.settings import read_config_file
from sim.sweep import format_sweep_table, pending_points, resolve_points

BIN = Path(sys.executable).parent
NUM_ROUNDS = 2

BASE = f"""
num-server-rounds = {NUM_ROUNDS}
num-clients = 2
local-steps = 1
"""
TWO_GRIDS = """
lr = 0.5
[[grid]]
seed = [0, 1]
gamma = [0, 0.5]
[[grid]]
compressor = "none"
seed = [0, 1]
"""
DIES_AT_SEED_0 = """
original = _check_shares

def _check_shares(settings, data):
    import os
    if settings.seed == 0:
        os._exit(9)
    original(settings, data)
"""
NAMES_OF_TWO_GRIDS = [
    "seed=0,gamma=0",
    "seed=0,gamma=0.5",
    "seed=1,gamma=0",
    "seed=1,gamma=0.5",
    "compressor=none,seed=0",
    "compressor=none,seed=1",
]


def write(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def points_of(folder: Path, text: str, *overrides: str) -> list[Point]:
    return resolve_points(write(folder, text), list(overrides), folder)[1]


def finish(point: Point, **summary: object) -> None:
    point.folder.mkdir(parents=True, exist_ok=True)
    config = {"run_config": point.settings.as_run_config()}
    (point.folder / "config.json").write_text(json.dumps(config))
    done = {"status": "completed", "accuracy": 0.5, "loss": 1.0, "R_megabytes": 2.0}
    text = json.dumps({**done, "bits_per_parameter": 3.0, **summary})
    (point.folder / "summary.json").write_text(text)


def command(*arguments: str) -> list[str]:
    return [str(BIN / "co3"), "sweep", *arguments]


def run(root: Path, config: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(str(config), "-c", f"run-dir='{run_dir}'", *more),
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
    )


# The grid


def test_points_are_every_combination_in_the_order_of_the_file(tmp_path: Path) -> None:
    points = points_of(tmp_path, TWO_GRIDS)
    assert [point.name for point in points] == NAMES_OF_TWO_GRIDS
    assert points[1].settings.lr == 0.5
    assert points[1].settings.gamma == 0.5
    assert points[5].settings.compressor == "none"
    assert all(point.settings.num_clients == DEFAULT_NUM_CLIENTS for point in points)


def test_points_in_two_grids_are_run_once(tmp_path: Path) -> None:
    points = points_of(tmp_path, "[[grid]]\nseed = [0, 1]\n[[grid]]\nseed = [1, 2]\n")
    assert [point.name for point in points] == ["seed=0", "seed=1", "seed=2"]


def test_points_lie_in_runs_under_the_files_name_by_default(tmp_path: Path) -> None:
    folder, points = resolve_points(write(tmp_path, TWO_GRIDS), [], tmp_path)
    assert folder == tmp_path / "runs" / "grid"
    assert points[0].folder == folder / "seed=0,gamma=0"


def test_overrides_change_what_the_points_share_but_not_the_grid(tmp_path: Path) -> None:
    points = points_of(tmp_path, TWO_GRIDS, "lr=0.25 gamma=1 run-dir='here'")
    assert {point.settings.lr for point in points} == {0.25}
    assert [point.settings.gamma for point in points[:2]] == [0, 0.5]
    assert points[0].folder == tmp_path / "here" / "seed=0,gamma=0"


def test_name_of_a_point_has_no_path_separator() -> None:
    assert point_name({"dataset": "/a b/c"}) == "dataset=%2Fa%20b%2Fc"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 0.1", "a sweep must have tables"),
        ("grid = 3", "a sweep must have tables"),
        ("[[grid]]\nseed = []", "seed must have at least one value"),
        ("[[grid]]\ngama = [1]", "did you mean 'gamma'"),
        ("[[grid]]\nrun-dir = ['a']", "run-dir must stand above"),
        ("[[grid]]\nlr = [0.1, -1]", "lr must be above 0, got -1"),
        ("[[grid]]\nlr = [[1]]", "lr must be a string, number or boolean, got a list"),
        ("lr = [1]\n[[grid]]\nseed = [1]", "lr must be a string, number or boolean, got a list"),
        ("lr = 'a'\n[[grid]]\nseed = [1]", "lr must be a number"),
        ("[[grid]]\nformat = ['e2m1', 'fp4']", "got 'fp4'"),
    ],
)
def test_a_wrong_sweep_file_is_one_error_before_anything_runs(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        points_of(tmp_path, text)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("sweep-*.toml")))
def test_configs_of_sweeps_are_sound(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CO3_DATA", str(tmp_path))
    folder, points = resolve_points(path, [], tmp_path)
    assert len({point.name for point in points}) == len(points) > 10
    assert path.read_text().startswith(f"# co3 sweep configs/{path.name} --jobs ")


def test_run_refuses_a_sweep_file_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grid must be in a sweep only, .*; use `co3 sweep"):
        read_config_file(write(tmp_path, TWO_GRIDS))


# The folder


def test_points_that_are_done_are_not_pending(tmp_path: Path) -> None:
    points = points_of(tmp_path, TWO_GRIDS)
    finish(points[0])
    finish(points[1], status="failed", error="boom")
    points[2].folder.mkdir()
    assert pending_points(points) == points[1:]


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    finish(points_of(tmp_path, TWO_GRIDS)[0])
    with pytest.raises(ConfigError, match=r"lr must be 0\.5 as in .* got 0\.25; give a changed"):
        pending_points(points_of(tmp_path, TWO_GRIDS, "lr=0.25"))


def test_a_sweep_goes_on_where_other_folders_are_named(tmp_path: Path) -> None:
    points = points_of(tmp_path, TWO_GRIDS)
    finish(points[0])
    moved = points_of(tmp_path, TWO_GRIDS, f"memory-dir='{tmp_path}/elsewhere'")
    assert moved[0].settings.memory_dir != points[0].settings.memory_dir
    assert pending_points(moved) == moved[1:]


def test_a_second_sweep_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with sole_owner(tmp_path / "a"):
        with pytest.raises(ConfigError, match="one sweep at a time"), sole_owner(tmp_path / "a"):
            pass
        with sole_owner(tmp_path / "b"):
            pass
    with sole_owner(tmp_path / "a"):
        pass


def test_table_takes_the_seeds_together(tmp_path: Path) -> None:
    points = points_of(tmp_path, TWO_GRIDS)
    finish(points[0], accuracy=0.5, R_megabytes=1.0)
    finish(points[2], accuracy=0.6, R_megabytes=2.0)
    finish(points[4], accuracy=None, loss=None, bits_per_parameter=None)
    assert format_sweep_table(points).splitlines() == [
        "| gamma | compressor | seeds | accuracy | loss | R, MB | bits per parameter |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 0 |  | 2 | 55.00 ± 7.07 % | 1.0000 | 1.500 | 3.000 |",
        "| 0.5 |  | 0 |  |  |  |  |",
        "|  | none | 1 |  |  | 2.000 |  |",
    ]


# The command


def test_a_failed_point_is_reported_and_only_it_is_tried_again(tmp_path: Path) -> None:
    config = write(tmp_path, BASE + "[[grid]]\nmax-update-norm = [0.0, 1e-9, 100.0]\n")
    run_dir = tmp_path / "sweep"
    first = run(REPOSITORY, config, run_dir, "--jobs", "2")
    assert first.returncode == 1, first.stderr
    assert first.stderr.startswith("error: 1 of 3 points failed, the others are done: max-update")
    assert first.stderr.count("\n") == 1
    assert "L2 norm of at most 1e-09" in first.stderr
    statuses = {
        folder.name: json.loads((folder / "summary.json").read_text())["status"]
        for folder in run_dir.iterdir()
        if folder.is_dir()
    }
    assert statuses == {
        "max-update-norm=0": "completed",
        "max-update-norm=1e-09": "failed",
        "max-update-norm=100": "completed",
    }
    assert "aggregate_train" in (run_dir / "max-update-norm=0" / "flower.log").read_text()
    assert "\n| 1e-09 | 0 |  |  |  |  |\n" in (run_dir / "table.md").read_text()

    stamps = {path: path.stat().st_mtime_ns for path in run_dir.glob("*/model.npz")}
    second = run(REPOSITORY, config, run_dir)
    assert second.returncode == 1
    assert "2 of 3 points are done already" in second.stdout
    assert {path: path.stat().st_mtime_ns for path in run_dir.glob("*/model.npz")} == stamps
    assert len(stamps) == 2


def test_a_killed_sweep_ends_its_workers_and_goes_on_where_it_was(tmp_path: Path) -> None:
    config = write(tmp_path, BASE + "[[grid]]\nnum-server-rounds = [2, 9999]\n")
    run_dir = tmp_path / "sweep"
    done, cut = run_dir / "num-server-rounds=2", run_dir / "num-server-rounds=9999"
    process = subprocess.Popen(
        command(str(config), "-c", f"run-dir='{run_dir}'"),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: (cut / "rounds.jsonl").exists())
    process.kill()
    process.wait()
    wait_for(lambda: not is_written(cut / "rounds.jsonl"))  # the worker has ended too
    assert read_summary(cut) is None
    stamp = (done / "model.npz").stat().st_mtime_ns

    config.write_text(BASE + "[[grid]]\nnum-server-rounds = [2]\n")
    second = run(REPOSITORY, config, run_dir)
    assert second.returncode == 0, second.stderr
    assert "1 of 1 points are done already" in second.stdout
    assert (done / "model.npz").stat().st_mtime_ns == stamp


def test_an_unfinished_point_starts_afresh(tmp_path: Path) -> None:
    (point,) = points_of(tmp_path, BASE + "[[grid]]\nseed = [0]\n")
    finish(point)
    (point.folder / "summary.json").unlink()
    (point.folder / "rounds.jsonl").write_text('{"server_round": 0}\n')
    result = run(REPOSITORY, tmp_path / "grid.toml", point.folder.parent)
    assert result.returncode == 0, result.stderr
    assert len((point.folder / "rounds.jsonl").read_text().splitlines()) == NUM_ROUNDS + 1


def test_an_interrupted_sweep_says_how_to_go_on(tmp_path: Path) -> None:
    config = write(tmp_path, BASE + "[[grid]]\nnum-server-rounds = [9999]\n")
    rounds = tmp_path / "sweep" / "num-server-rounds=9999" / "rounds.jsonl"
    process = subprocess.Popen(
        command(str(config), "-c", f"run-dir='{tmp_path / 'sweep'}'"),
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_for(rounds.exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command goes on where it was" in errors
    assert not is_written(rounds)


def test_a_worker_that_dies_is_replaced_and_its_point_failed(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "sim", root / "sim", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    with (root / "sim" / "server_app.py").open("a") as file:
        file.write(DIES_AT_SEED_0)
    config = write(tmp_path, BASE + "[[grid]]\nseed = [0, 1]\n")
    result = run(root, config, tmp_path / "sweep")
    assert result.returncode == 1
    assert "1 of 2 points failed" in result.stderr
    assert "seed=0: its process ended with exit code 9" in result.stderr
    summary = read_summary(tmp_path / "sweep" / "seed=1")
    assert summary is not None and summary["status"] == "completed"


@pytest.mark.engine
def test_a_point_gives_the_model_and_r_of_co3_run_bit_for_bit(tmp_path: Path) -> None:
    (point,) = points_of(tmp_path, BASE + "[[grid]]\nseed = [3]\n", "run-dir='sweep'")
    swept = run(REPOSITORY, tmp_path / "grid.toml", tmp_path / "sweep")
    assert swept.returncode == 0, swept.stderr
    config = tmp_path / "run.toml"
    config.write_text(BASE + f"seed = 3\nrun-dir = '{tmp_path / 'run'}'\n")
    subprocess.run([BIN / "co3", "run", config], cwd=REPOSITORY, check=True, timeout=200)
    ours, theirs = read_summary(point.folder), read_summary(tmp_path / "run")
    assert ours is not None and theirs is not None
    assert (ours["R"], ours["accuracy"]) == (theirs["R"], theirs["accuracy"])
    with np.load(point.folder / "model.npz") as a, np.load(tmp_path / "run" / "model.npz") as b:
        assert a.files == b.files
        assert all(np.array_equal(a[name], b[name]) for name in a.files)


def wait_for(holds: object, seconds: float = 100) -> None:
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_written(path: Path) -> bool:
    size = path.stat().st_size
    time.sleep(1)
    return path.stat().st_size != size
