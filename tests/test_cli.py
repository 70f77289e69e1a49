"""The command `co3`: finding the checkout, merging settings, and saying what is wrong."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from co3_flower import ConfigError
from co3_flower.cli import find_checkout, main, make_app
from sim.engine import end_sessions, engine_processes, to_toml
from sim.outputs import read_rows
from sim.resolve import (
    DEFAULT_NUM_CLIENTS,
    gpu_share,
    resolve_remote_settings,
    resolve_settings,
)
from sim.runs import last_error
from sim.settings import parse_overrides, read_config_file

REPOSITORY = Path(__file__).resolve().parents[1]


def call(*arguments: str, root: Path | None = REPOSITORY) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(make_app(root), arguments)
    return result.exit_code, result.output


def call_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["co3", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


def test_checkout_is_found_from_a_folder_inside_it() -> None:
    assert find_checkout(REPOSITORY / "co3_flower") == REPOSITORY


def test_checkout_of_another_project_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "cli.py").touch()
    assert find_checkout(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert find_checkout(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("not toml")
    assert find_checkout(tmp_path) is None


def test_version_is_the_packages() -> None:
    assert call("--version") == (0, "co3 0.1.0\n")


def test_help_lists_the_commands() -> None:
    code, text = call("--help")
    assert code == 0
    assert "run" in text and "convert, correct, compress" in text


def test_help_of_run_explains_every_option_and_the_exit_codes() -> None:
    code, text = call("run", "--help")
    assert code == 0
    for part in (
        "CONFIG.toml",
        "--run-config",
        "-c",
        "--num-clients",
        "--gpus-per-client",
        "run-dir",
        "exit code",
    ):
        assert part in text


def test_run_without_a_checkout_says_that_it_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = call_main(monkeypatch, capsys, "run", "x.toml", "-c", "lr=1")
    assert code == 2
    assert "co3 run must be started inside a checkout of co3-flower" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "gama=0.5",
            "error: run-config key must be a known one, got 'gama'; did you mean 'gamma'?",
        ),
        ("lr=-1", "error: lr must be above 0, got -1.0"),
        ("format=e5m2", "error: -c values must be numbers, true, false or quoted strings"),
        ("coder='ans'", "error: coder must be"),
        ("lr=inf", "error: lr must be finite, got inf"),
        ("dataset='cifar10' data-dir='nowhere'", "error: data-dir must be a folder with CIFAR-10"),
        ("buffers='local'", "error: buffers must be 'coded' or 'raw' here, got 'local'"),
        ("min-replies=9", "error: min-replies must be at most num-clients, got 9"),
        (
            "strategy='fedadam' payload='update' server-lr=0.5",
            "error: server-lr must be 0 or 1 with strategy 'fedadam'",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2_before_anything_starts(
    override: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(REPOSITORY)
    run_dir = tmp_path / "run"
    code, text = call_main(monkeypatch, capsys, "run", "-c", override, "-c", f"run-dir='{run_dir}'")
    assert code == 2
    assert text.startswith(message)
    assert text.count("\n") == 1
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("device", "asked", "share"),
    [
        ("auto", None, 0.25),  # one GPU for all that train at a time
        ("cuda", None, 0.25),
        ("auto", 0.1, 0.1),
        ("cpu", 0.1, 0.0),
    ],
)
def test_share_of_a_gpu_is_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: float | None, share: float
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert gpu_share(device, 4, asked) == share


@pytest.mark.parametrize("asked", [None, 0.1])
def test_no_share_of_a_gpu_is_asked_for_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, asked: float | None
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert gpu_share("auto", 4, asked) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus-per-client", "0"), "--gpus-per-client must be above 0 and at most 1, got 0.0"),
        (("--gpus-per-client", "1.5"), "--gpus-per-client must be above 0 and at most 1, got 1.5"),
        (
            ("--gpus-per-client", "0.1", "--federation", "here"),
            "--gpus-per-client must be left out with --federation",
        ),
    ],
)
def test_share_of_a_gpu_that_cannot_be_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(REPOSITORY)
    code, text = call_main(monkeypatch, capsys, "run", *arguments)
    assert code == 2
    assert text.startswith(f"error: {message}")
    assert text.count("\n") == 1


def test_settings_are_merged_option_over_override_over_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("lr = 0.5\nseed = 1\nnum-clients = 7\n")
    settings = resolve_settings(file, ["seed=2 num-clients=8"], 9, tmp_path)
    assert (settings.lr, settings.seed, settings.num_clients) == (0.5, 2, 9)


def test_number_of_clients_has_a_default(tmp_path: Path) -> None:
    assert resolve_settings(None, [], None, tmp_path).num_clients == DEFAULT_NUM_CLIENTS


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CO3_DATA", str(tmp_path / "data"))
    overrides = ["dataset='cifar10' data-dir='$CO3_DATA/cifar10' run-dir='out'"]
    settings = resolve_settings(None, overrides, None, tmp_path)
    assert settings.data_dir == str(tmp_path / "data" / "cifar10")
    assert settings.run_dir == str(tmp_path / "out")
    assert settings.memory_dir == str(tmp_path / "out" / "memory")


def test_dataset_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = resolve_settings(None, ["dataset='pictures'"], None, tmp_path)
    assert settings.dataset == str(tmp_path / "pictures")


def test_run_dir_defaults_to_a_new_folder_in_runs(tmp_path: Path) -> None:
    first = resolve_settings(None, [], None, tmp_path).run_dir
    second = resolve_settings(None, [], None, tmp_path).run_dir
    assert Path(first).parent == tmp_path / "runs"
    assert first != second


def test_uncompressed_runs_keep_no_residual(tmp_path: Path) -> None:
    assert resolve_settings(None, ["compressor='none'"], None, tmp_path).memory_dir == ""


def test_run_dir_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="run-dir must not hold a run already"):
        resolve_settings(None, [f"run-dir='{tmp_path}'"], None, tmp_path)


def test_settings_survive_the_way_through_toml(tmp_path: Path) -> None:
    values = {"a": 'it\'s "quoted" \\ ü', "b": 1e-5, "c": 3, "d": True, "e": 600.0, "f": ""}
    path = tmp_path / "x.toml"
    path.write_text(to_toml(values), encoding="utf-8")
    assert read_config_file(path) == values
    assert parse_overrides(["b=1e-05"]) == {"b": 1e-5}


def test_a_half_written_round_is_left_for_the_next_look(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []
    (tmp_path / "rounds.jsonl").write_text('{"R": 1}\n{"R": 2}\n{"R"')
    assert read_rows(tmp_path) == [{"R": 1}, {"R": 2}]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_processes_of_an_engine_are_ended_and_no_others() -> None:
    mark = f"CO3_TEST=cli-{os.getpid()}"
    # It ignores the polite signal and has a child without the mark, as Ray's agents are.
    program = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env={});"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    own = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert own.stdout is not None
        child = int(own.stdout.readline())
        sessions: set[int] = set()
        assert sorted(engine_processes(mark, sessions)) == sorted([own.pid, child])
        assert sessions == {own.pid}
        end_sessions(mark, sessions)
        assert own.wait(5) == -signal.SIGKILL
        assert engine_processes(mark, sessions) == []
        assert other.poll() is None
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


@pytest.mark.parametrize("key", ["run-dir", "memory-dir", "dataset"])
def test_paths_of_a_deployment_must_be_absolute(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be an absolute path with --federation"):
        resolve_remote_settings(None, [f"{key}='here'"], None)


def test_settings_of_a_deployment_are_left_to_its_machines() -> None:
    settings = resolve_remote_settings(None, ["dataset='~/not/here' memory-dir='/m'"], None)
    assert (settings.dataset, settings.memory_dir) == ("~/not/here", "/m")
    assert (settings.run_dir, settings.num_clients) == ("", 0)  # as the SuperLink's machine has it
    assert resolve_remote_settings(None, [], 3).num_clients == 3


def test_gradients_cannot_be_saved_in_a_deployment() -> None:
    with pytest.raises(ConfigError, match="save-gradients-every must be 0 with --federation"):
        resolve_remote_settings(None, ["save-gradients-every=2"], None)


def test_a_failed_engine_is_told_by_its_own_error_not_by_flowers_last_words() -> None:
    log = """Traceback (most recent call last):
Exception: The current node timed out during startup.
RuntimeError: Simulation Runtime crashed.
RuntimeError: An error was encountered. Ending simulation.
INFO : Finished
"""
    assert last_error(log) == "Exception: The current node timed out during startup."
    assert last_error("RuntimeError: Simulation Runtime crashed.") == (
        "RuntimeError: Simulation Runtime crashed."
    )
