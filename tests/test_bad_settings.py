"""What cannot work is one line before anything starts: settings, data, and folders."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flwr.app import Context, RecordDict
from test_app_data import own_cache, write_parquet
from test_app_server import TestRun

import sim.runs
from co3_flower import ConfigError
from co3_flower.cli import main
from co3_flower.memory import ClientMemory, FileStore, Origin
from co3_flower.nodes import RoundError
from sim import server_app
from sim.outputs import OutputError, RunFolder, check_writable, round_row
from sim.settings import DEFAULTS, Settings
from sim.task import Score

__all__ = ["own_cache"]  # a fixture that every test here uses

REPOSITORY = Path(__file__).resolve().parents[1]

# Out of range or unknown, for every key there is; a wrong type is added below.
BAD: dict[str, list[Any]] = {
    "num-server-rounds": [0, -1, 2**63],
    "num-clients": [-1, 719, 2**63],  # 1437 digits are enough for 718
    "dataset": ["mnist", "", "/no/such/folder", "/dev/null", "$NO_SUCH_VARIABLE/x"],
    "data-dir": ["/no/such/folder", "/dev/null"],
    "partition": ["", "IID", "shards"],
    "dirichlet-alpha": [0.0, -1.0],
    "model": ["", "vgg"],
    "augment": [],  # both values are good
    "batch-size": [1, 0, -1],
    "local-steps": [0, -1],
    "local-epochs": [-1],
    "lr": [0.0, -0.1],
    "server-lr": [-0.1],
    "payload": ["", "both"],
    "weighting": ["", "loss"],
    "compressor": ["", "zip"],
    "compressor-settings": ["ratio=0.1", "gamma=", "gamma"],  # with co3, which has keys of its own
    "format": ["", "fp4", "e9m9", "e0m3", "e5m2fn"],
    "gamma": [-0.1, 1.1],
    "scale": ["", "max"],
    "scale-multiplier": [0.0, -1.0],
    "scale-refit-every": [0, -1, 2**31],
    "prior": ["", "cauchy"],
    "coder": ["", "ans"],
    "min-numel": [0, -1, 2**32],
    "target-bits-per-parameter": [-1.0],
    "uplink-budget-mb": [-1.0],
    "buffers": ["", "zip", "local"],
    "strategy": ["sgd", "FedAvg", "fedprox"],
    "fraction-train": [0.0, -0.5, 1.5],
    "min-replies": [0, -1, 5],  # of 4 clients
    "node-timeout": [0.0, -1.0],
    "reply-timeout": [0.0, -1.0],
    "max-update-norm": [-1.0],
    "max-examples": [0, -1],
    "reclip": [True],  # without max-update-norm
    "seed": [-1, 2**32],
    "device": ["", "gpu", "tpu"],
    "structure": ["", "blocks"],
    "num-threads": [0, -1, 1025],
    "eval-every": [0, -1],
    "save-gradients-every": [-1],
    "run-dir": ["/dev/null/x", "/dev/null", "$NO_SUCH_VARIABLE/x"],
    "resume": [True],  # without a run in run-dir
    "memory-dir": ["/dev/null/x", "/dev/null", "$NO_SUCH_VARIABLE/x"],
}
WRONG_TYPE: dict[type, list[Any]] = {
    str: [3, 1.5, True],
    int: ["3", 1.5, True],
    float: ["0.1", True, float("nan"), float("inf")],
    bool: [0, 1.0, "true"],
}
NEEDS = {"data-dir": "dataset='cifar10'"}  # a key that is judged only with another


def test_every_key_has_its_bad_values() -> None:
    assert set(BAD) == set(DEFAULTS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, id=f"{key}={value!r}")
        for key, default in DEFAULTS.items()
        for value in WRONG_TYPE[type(default)]
    ],
)
def test_wrong_type_is_one_line_that_names_the_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_run_config({key: value})
    assert str(caught.value).startswith(f"{key} must be ")
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where Flower is started."""

    def start(*_: Any) -> None:
        raise AssertionError("Flower was started")

    monkeypatch.setattr(sim.runs, "Engine", start)


def call_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *overrides: str
) -> str:
    """The one line with which `co3 run` ends, its exit code being 2."""
    arguments = [part for text in overrides if text for part in ("-c", text)]
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["co3", "run", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error.removeprefix("error: ")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, id=f"{key}={value!r}")
        for key, values in BAD.items()
        for value in values
    ],
)
def test_bad_value_ends_co3_run_in_one_line_before_flower_starts(
    key: str,
    value: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run_dir = "" if key == "run-dir" else f"run-dir='{tmp_path / 'run'}'"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    error = call_run(monkeypatch, capsys, NEEDS.get(key, ""), run_dir, f"{key}={text}")
    named = "max-update-norm" if key == "reclip" else key
    assert error.startswith(f"{named} must ")
    assert "\n" not in error.rstrip("\n")
    assert "Errno" not in error


CHOSEN = [k for k, v in BAD.items() if ("" in v or k == "strategy") and k != "dataset"]


@pytest.mark.parametrize("key", CHOSEN)
def test_unknown_choice_lists_the_choices(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} must be .*'\w*', '"):
        Settings.from_run_config({key: "no-such"})


# Data


def pictures(folder: Path, num_train: int = 4) -> Path:
    images = [np.full((4, 4, 3), i, np.uint8) for i in range(num_train)]
    write_parquet(folder / "train-0.parquet", images, [i % 2 for i in range(num_train)])
    write_parquet(folder / "test-0.parquet", images[:2], [0, 1])
    return folder


def garbage(path: Path) -> None:
    path.write_bytes(b"PAR1 this is no parquet file PAR1")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(x ^ 0x55 for x in data[4:200])  # pages of the columns
    path.write_bytes(data)


def no_picture(path: Path) -> None:
    pq.write_table(pa.table({"img": [{"bytes": b"?", "path": ""}], "label": [0]}), path)


def other_columns(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "score": [0.5]}), path)


def missing(path: Path) -> None:
    path.unlink()


BREAKS = (garbage, cut_short, empty, flipped, no_picture, other_columns, missing)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("break_file", BREAKS)
def test_broken_parquet_file_is_found_before_flower_starts(
    break_file: Any,
    split: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = pictures(tmp_path / "pictures")
    break_file(folder / f"{split}-0.parquet")
    overrides = f"dataset='{folder}' num-clients=2 run-dir='{tmp_path / 'run'}'"
    error = call_run(monkeypatch, capsys, overrides)
    assert str(folder) in error
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num-clients=21", "num-clients must be at most 20 for 40 images (2 each), got 21"),
        ("num-clients=21 partition='dirichlet'", "num-clients must be at most 20 for 40 images"),
        (
            "num-clients=20 partition='dirichlet' dirichlet-alpha=0.001",
            "dirichlet-alpha must leave every client 2 images, got 0.001 for 20 clients and 40",
        ),
    ],
)
def test_too_few_images_are_found_before_flower_starts(
    setting: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = pictures(tmp_path / "pictures", num_train=40)
    overrides = f"dataset='{folder}' run-dir='{tmp_path / 'run'}'"
    assert call_run(monkeypatch, capsys, overrides, setting).startswith(message)


# Folders


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Let the operating system refuse to write beyond so many bytes of a file: EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def read_only_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every file that is to be made, as a read-only file system does: root can write all."""
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.usefixtures("no_engine", "read_only_disk")
@pytest.mark.parametrize("key", ["run-dir", "memory-dir"])
def test_read_only_disk_is_found_before_flower_starts(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if key == "memory-dir":
        checked = sim.runs.check_writable
        monkeypatch.setattr(
            sim.runs, "check_writable", lambda p, k: None if k == "run-dir" else checked(p, k)
        )
    error = call_run(monkeypatch, capsys, f"run-dir='{tmp_path}/run' {key}='{tmp_path}/there'")
    assert error.startswith(f"{key} must be a folder that can be written, got '{tmp_path}/there' (")
    assert "Read-only file system" in error


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("key", ["run-dir", "memory-dir"])
def test_full_disk_is_found_before_flower_starts(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = sim.runs.check_writable

    def check(path: Path, name: str) -> None:
        with files_up_to(1000 if name == key else 2**30):
            real(path, name)

    monkeypatch.setattr(sim.runs, "check_writable", check)
    error = call_run(monkeypatch, capsys, f"run-dir='{tmp_path}/run' {key}='{tmp_path}/there'")
    assert error.startswith(f"{key} must be a folder that can be written, got '{tmp_path}/there'")
    assert list((tmp_path / "there").iterdir()) == []


def test_folder_that_can_be_written_is_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "run-dir")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def make_context(settings: Settings) -> Context:
    return Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings.as_run_config()
    )


def test_run_dir_that_cannot_be_written_is_found_by_the_server_app(tmp_path: Path) -> None:
    # what `flwr run` goes through, without `co3 run`
    (tmp_path / "file").touch()
    settings = Settings.from_run_config({"run-dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="run-dir must be a folder that can be written, got "):
        server_app.main(None, make_context(settings))


def test_disk_that_gets_full_in_a_run_leaves_whole_files_and_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", Settings())
    row = round_row(0, None, Score(0.5, 0.25))
    folder.add_round(row)
    before = (folder.path / "rounds.jsonl").read_bytes()
    with files_up_to(len(before) + 100):
        with pytest.raises(OutputError, match=r"run-dir must have room .* \(File too large\)"):
            folder.add_round({**row, "server_round": 1})
        assert (folder.path / "rounds.jsonl").read_bytes() == before
        with pytest.raises(OutputError, match="run-dir must have room"):
            folder.finish({"w": np.zeros(1000, np.float32)}, 1000)
        folder.fail("the reason", 1000)  # no error on top of the one that ended the run
    assert sorted(p.name for p in folder.path.iterdir() if "events" not in p.name) == [
        "config.json",
        "rounds.jsonl",
    ]


def test_run_whose_disk_gets_full_fails_by_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TestRun(tmp_path / "run", memory_dir="")
    added = RunFolder.add_round

    def add_round(folder: RunFolder, row: dict[str, Any]) -> None:
        limit = 2**30
        if row["server_round"] == 2:
            limit = (folder.path / "rounds.jsonl").stat().st_size + 10
        with files_up_to(limit):
            added(folder, row)

    monkeypatch.setattr(RunFolder, "add_round", add_round)
    with pytest.raises(OutputError, match="run-dir must have room"):
        run.start()
    assert run.summary()["status"] == "failed"
    assert "run-dir must have room" in run.summary()["error"]
    assert [row["server_round"] for row in run.rows()] == [0, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_full_disk_is_noticed_by_the_tensorboard_writer_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", Settings())
    row = round_row(0, None, Score(0.5, 0.25))
    folder.add_round(row)
    (events,) = folder.path.glob("events*")
    assert events.stat().st_size > (folder.path / "rounds.jsonl").stat().st_size
    with files_up_to(events.stat().st_size), pytest.raises(OutputError, match="File too large"):
        folder.add_round({**row, "server_round": 1})
        folder.add_round({**row, "server_round": 2})  # the writer is a thread: the next call tells
    folder.fail("the reason", 1000)


RESIDUAL = {"w": np.ones((30, 40), np.float32)}
ORIGIN = Origin(b"digest", "e2m1", 0.9)


def test_full_memory_dir_is_one_line_and_keeps_the_last_residual(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "exp", 3)
    ClientMemory(store, ORIGIN, 1, 0).save(RESIDUAL, b"payload")
    memory = ClientMemory(store, ORIGIN, 2, 1)
    kept = memory.recall().residual
    assert kept is not None
    with (
        files_up_to(2000),
        pytest.raises(ConfigError, match=r"memory-dir must be a folder .* \(File too large\)"),
    ):
        memory.save({"w": RESIDUAL["w"] * 2}, b"payload")
    after = memory.recall().residual
    assert after is not None
    np.testing.assert_array_equal(after["w"], RESIDUAL["w"])
    assert list(tmp_path.iterdir()) == [store.paths[0]]


@pytest.mark.usefixtures("read_only_disk")
def test_read_only_memory_dir_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory-dir must be .* \(Read-only file system\)"):
        ClientMemory(FileStore(tmp_path, "exp", 3), ORIGIN, 1, 0).save(RESIDUAL, b"payload")
    assert list(tmp_path.iterdir()) == []


def test_memory_dir_that_cannot_be_written_fails_the_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = TestRun(tmp_path / "run", memory_dir=str(tmp_path / "file"))
    with pytest.raises(RoundError, match="memory-dir must be a folder that can be read and writ"):
        run.start()
    assert "memory-dir must be a folder" in run.summary()["error"]
