"""A deployment of real processes on loopback, none of which outlives its test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import REPOSITORY
from sim.engine import end_sessions, engine_processes

BIN = Path(sys.executable).parent
READY_SECONDS = 240.0  # a crowded machine takes minutes for what else takes five seconds


def free_ports(count: int) -> list[int]:
    """Return ports that are free, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Process:
    """A process whose output goes to a file."""

    def __init__(self, command: list[str], log: Path, cwd: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 300.0) -> int:
        return self.popen.wait(seconds)

    def wait_for(self, pattern: str, seconds: float = READY_SECONDS) -> re.Match[str]:
        """Wait until the output holds a pattern."""
        found: list[re.Match[str] | None] = [None]

        def look() -> bool:
            found[0] = re.search(pattern, self.output)
            return found[0] is not None

        wait_until(look, seconds, lambda: f"{pattern!r} in {self.log.name}:\n{self.output[-3000:]}")
        assert found[0] is not None
        return found[0]

    def kill(self) -> None:
        """End it at once and all that it started, as a crash of its machine would."""
        for pid in session_of(self.popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()


def session_of(leader: int) -> list[int]:
    """Return the living processes of a session, its leader last."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            pids.append(int(folder.name))
    return sorted(pids, key=lambda pid: pid == leader)


def wait_until(
    holds: Callable[[], bool], seconds: float, what: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what()}"
        time.sleep(0.2)


class Deployment:
    """SuperLink, SuperNodes and runs of one test, in one folder."""

    def __init__(self, folder: Path, root: Path = REPOSITORY) -> None:
        self.folder = folder
        self.root = root
        self.port, *self._node_ports = free_ports(9)
        self.ports: dict[str, str] = {}
        self.mark = f"CO3_TEST={folder.name}-{time.monotonic_ns()}"
        self.sessions: set[int] = set()
        self._started: list[Process] = []
        self.home = folder / "flwr"
        self.home.mkdir(parents=True)
        self.write_connection("insecure = true")
        name, _, value = self.mark.partition("=")
        self.env = {
            **os.environ,
            name: value,
            "FLWR_HOME": str(self.home),
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def take_port(self) -> int:
        """Return a port that nothing else of this deployment uses."""
        return self._node_ports.pop()

    @staticmethod
    def program(name: str) -> str:
        """Return the path of a program of this Python."""
        return str(BIN / name)

    def write_connection(self, security: str) -> None:
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\n{security}\n'
        )

    def start(self, name: str, *command: str) -> Process:
        """Start a command in the checkout; its output goes to a file of this name."""
        process = Process(list(command), self.folder / f"{name}.log", self.root, self.env)
        self._started.append(process)
        return process

    def superlink(self, *options: str) -> Process:
        """Start the SuperLink and wait until it answers."""
        process = self.start(
            "superlink",
            str(REPOSITORY / "deploy" / "superlink.sh"),
            "--port",
            str(self.port),
            *options,
        )
        wait_until(lambda: is_healthy(self.port), READY_SECONDS, lambda: process.output[-3000:])
        return process

    def supernode(
        self, client_id: str, data_dir: Path, *options: str, port: int | None = None
    ) -> Process:
        """Start a SuperNode with its own images; ``port`` is that of a proxy."""
        return self.start(
            f"supernode-{client_id}",
            str(REPOSITORY / "deploy" / "supernode.sh"),
            *("--superlink", f"127.0.0.1:{port or self.port}"),
            *("--client-id", client_id, "--data-dir", str(data_dir)),
            *options,
            *("--port", str(self.take_port())),
        )

    def run(self, num_clients: int, name: str = "run", **settings: Any) -> Process:
        """Start `co3 run --federation here`; underscores in settings stand for hyphens."""
        values = {"run_dir": str(self.folder / name), "eval_every": 1, **settings}
        text = " ".join(
            f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in values.items()
        )
        arguments = ["--num-clients", str(num_clients), "-c", text]
        return self.start(name, self.program("co3"), "run", "--federation", "here", *arguments)

    def rows(self, name: str = "run") -> list[dict[str, Any]]:
        """Return the rounds that the run has written."""
        path = self.folder / name / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_round(self, server_round: int, process: Process, name: str = "run") -> None:
        """Wait until a round is over."""

        def look() -> bool:
            assert process.popen.poll() is None, process.output
            rows = self.rows(name)
            return bool(rows) and rows[-1]["server_round"] >= server_round

        wait_until(look, 300.0, lambda: f"round {server_round}: {process.output[-2000:]}")

    def summary(self, name: str = "run") -> dict[str, Any]:
        """Return the run's summary."""
        content: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_text())
        return content

    def processes(self) -> list[int]:
        """Return the pids of all that was started and has not ended."""
        return engine_processes(self.mark, self.sessions)

    def stop(self) -> None:
        """End everything."""
        self.processes()
        end_sessions(self.mark, self.sessions)
        for process in self._started:
            process.wait()


def is_healthy(port: int) -> bool:
    """Tell whether a SuperLink answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
