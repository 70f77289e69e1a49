"""The app through Flower's real engine: files, numbers, exit codes, and nothing left running."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from processes import checkout
from sim.engine import end_sessions, engine_processes
from sim.outputs import ROUND_KEYS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NUM_CLIENTS = 3
NUM_ROUNDS = 3
NUM_PARAMETERS = 94_762

# A ClientApp around the app's own that writes down every payload's length as it leaves the client.
RECORDING_CLIENT = """
from pathlib import Path
from flwr.clientapp import ClientApp
from sim.client_app import app as inner

app = ClientApp()

@app.train()
def train(message, context):
    reply = inner(message, context)
    log = Path(context.run_config["run-dir"]) / "lengths.txt"
    with log.open("a") as file:
        file.write(f"{len(reply.content['co3']['payload'])}\\n")
    return reply
"""

FAILING_CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    raise RuntimeError("the disk of this client is full")
"""

FAILING_SERVER = """
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    raise RuntimeError("this server app is broken")
"""


class Command:
    """A command whose processes can be told, Ray's included, while it runs and after."""

    def __init__(self, arguments: list[str], cwd: Path, **variables: str) -> None:
        self.mark = f"CO3_TEST={cwd}-{time.monotonic_ns()}"
        self.sessions: set[int] = set()
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            arguments,
            cwd=cwd,
            env={**os.environ, "COLUMNS": "100", name: value, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.output, self.errors = "", ""

    def wait(self) -> int:
        """Wait for the command to end and return its exit code."""
        while True:
            self.left_over()  # learn the sessions while their processes can still be told
            try:
                self.output, self.errors = self.process.communicate(timeout=0.5)
                return self.process.returncode
            except subprocess.TimeoutExpired:
                continue

    def left_over(self) -> list[int]:
        """Return the pids of what the command started and has not ended."""
        return engine_processes(self.mark, self.sessions)

    def end(self) -> None:
        end_sessions(self.mark, self.sessions)
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Start commands; whatever the test does, nothing of them outlives it."""
    commands: list[Command] = []

    def start(*arguments: str, cwd: Path, **variables: str) -> Command:
        commands.append(Command([str(BIN / arguments[0]), *arguments[1:]], cwd, **variables))
        return commands[-1]

    yield start
    for command in commands:
        command.end()


def overrides(run_dir: Path, text: str = "") -> str:
    return f"run-dir='{run_dir}' num-server-rounds={NUM_ROUNDS} eval-every=2 {text}"


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


def test_co3_run_writes_every_file_and_counts_every_bit(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    root, run_dir = checkout(tmp_path, client=RECORDING_CLIENT), tmp_path / "run"
    command = start(
        "co3", "run", "--num-clients", str(NUM_CLIENTS), "-c", overrides(run_dir), cwd=root
    )
    assert command.wait() == 0, command.errors
    assert command.left_over() == []

    lengths = [int(line) for line in (run_dir / "lengths.txt").read_text().split()]
    assert len(lengths) == NUM_CLIENTS * NUM_ROUNDS
    rows = read_rows(run_dir)
    assert [row["server_round"] for row in rows] == [0, 1, 2, 3]
    assert all(tuple(row) == ROUND_KEYS for row in rows)
    assert rows[-1]["R"] == 8 * sum(lengths)
    assert sum(row["uplink_bits"] for row in rows) == 8 * sum(lengths)
    assert [row["accuracy"] is not None for row in rows] == [True, False, True, True]
    assert [row["replies"] for row in rows] == [0, 3, 3, 3]
    for row in rows[1:]:
        assert row["bits_per_parameter"] == pytest.approx(
            row["uplink_bits"] / (NUM_CLIENTS * NUM_PARAMETERS)
        )
        assert row["bits_per_parameter"] < 4

    summary = json.loads((run_dir / "summary.json").read_text())
    evaluated = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    assert summary["status"] == "completed"
    assert summary["R"] == 8 * sum(lengths)
    assert summary["accuracy"] == pytest.approx(np.mean(evaluated))
    assert summary["last_accuracy"] == evaluated[-1]
    assert summary["num_parameters"] == NUM_PARAMETERS

    config = json.loads((run_dir / "config.json").read_text())
    assert config["run_config"]["num-clients"] == NUM_CLIENTS
    assert config["experiment_id"] == summary["experiment_id"]
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1
    assert len(list((run_dir / "memory").iterdir())) == 2 * NUM_CLIENTS
    assert not (run_dir / "checkpoint.npz").exists()
    with np.load(run_dir / "model.npz") as model:
        assert model["classifier.weight"].shape == (10, 128)
        assert model["features.1.num_batches_tracked"] == NUM_ROUNDS * 2  # local-steps is 2
    assert f"{8 * sum(lengths):,} bits" in command.output.splitlines()[-4]
    assert command.output.splitlines()[-2].startswith("bits per parameter")


def test_co3_run_fails_with_the_clients_reason_when_all_of_them_fail(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    root, run_dir = checkout(tmp_path, client=FAILING_CLIENT), tmp_path / "run"
    command = start(
        "co3", "run", "--num-clients", str(NUM_CLIENTS), "-c", overrides(run_dir), cwd=root
    )
    assert command.wait() == 1
    assert command.left_over() == []
    assert "the disk of this client is full" in command.errors
    assert len(command.errors.strip().splitlines()) == 1
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    assert [(row["replies"], row["failures"]) for row in read_rows(run_dir)] == [(0, 0), (0, 3)]


def test_co3_run_fails_with_the_reason_of_a_broken_server_app(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    root, run_dir = checkout(tmp_path, server=FAILING_SERVER), tmp_path / "run"
    command = start("co3", "run", "-c", overrides(run_dir), cwd=root)
    assert command.wait() == 1
    assert command.left_over() == []
    assert "this server app is broken" in command.errors
    assert len(command.errors.strip().splitlines()) == 1


def test_co3_run_leaves_no_process_when_it_is_interrupted(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = start(
        "co3", "run", "-c", overrides(run_dir, "").replace("=3", "=9999"), cwd=REPOSITORY
    )
    while not (run_dir / "rounds.jsonl").exists() or len(read_rows(run_dir)) < 2:
        assert command.process.poll() is None
        assert len(command.left_over()) > 0
        time.sleep(0.2)
    for _ in range(2):  # the second one of an impatient user must not stop the clean-up
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert command.wait() == 130
    assert "interrupted" in command.errors
    assert command.left_over() == []


def without_times(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_rows(run_dir)
    return [{key: v for key, v in row.items() if not key.endswith("_seconds")} for row in rows]


@pytest.mark.timeout(600)  # four runs
def test_run_that_is_killed_goes_on_as_if_nothing_had_happened(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    text = "fraction-train=0.67 strategy='fedadam' num-server-rounds=6 eval-every=2"
    runs = [tmp_path / name for name in ("whole", "ended")]
    settings = [f"run-dir='{run_dir}' {text}" for run_dir in runs]
    whole = start("co3", "run", "--num-clients", "3", "-c", settings[0], cwd=REPOSITORY)
    assert whole.wait() == 0, whole.errors

    command = start("co3", "run", "--num-clients", "3", "-c", settings[1], cwd=REPOSITORY)
    while not (runs[1] / "rounds.jsonl").exists() or len(read_rows(runs[1])) < 4:
        assert command.process.poll() is None
        command.left_over()
        time.sleep(0.02)
    while remaining := command.left_over():  # SIGKILL to all of the engine
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    command.process.communicate()
    assert not (runs[1] / "summary.json").exists()

    resumed = start("co3", "run", "--resume", str(runs[1]), cwd=REPOSITORY)
    assert resumed.wait() == 0, resumed.errors
    models = [(run_dir / "model.npz").read_bytes() for run_dir in runs]
    assert models[0] == models[1]
    assert without_times(runs[0]) == without_times(runs[1])
    again = start("co3", "run", "--resume", str(runs[1]), cwd=REPOSITORY)
    assert again.wait() == 2
    assert "run must not be completed to go on with it" in again.errors


def test_flwr_run_alone_works(start: Callable[..., Command], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = start(
        "flwr",
        "run",
        ".",
        "--stream",
        "-c",
        overrides(run_dir),
        cwd=REPOSITORY,
        FLWR_HOME=str(tmp_path / "flwr"),
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(port),
        PATH=os.pathsep.join([str(BIN), os.environ["PATH"]]),
    )
    assert command.wait() == 0
    if "uv sync failed" in command.output:
        pytest.skip("`flwr run` needs the package index, which cannot be reached")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed", command.output
    assert summary["R"] > 0
    assert summary["replies"] == 2 * NUM_ROUNDS  # Flower's default is two clients
    assert "smaller than float32" in command.output
