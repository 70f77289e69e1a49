"""One run on an engine of its own: a private SuperLink with Flower's simulation runtime.

`Engine` starts the SuperLink on a free port with its own FLWR_HOME, submits the app, and on leaving
the ``with`` block ends everything it started, whatever happened. Nothing of it touches ``~/.flwr``.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from co3_flower import Co3Error
from sim.settings import Value

CONNECTION = "co3"
START_SECONDS = 60.0  # a cold start of the SuperLink takes 3 to 15
STOP_SECONDS = 8.0  # it answers SIGTERM within 3
MARK = "CO3_ENGINE"  # environment variable that every process of one engine has
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EngineError(Co3Error, RuntimeError):
    """Flower's engine did not start or did not take the run."""


class Engine:
    """A private Flower engine that runs one app.

    Parameters
    ----------
    root : Path
        The checkout: its pyproject.toml and its sim/ are submitted. co3_flower comes from the
        installation, so that compiled kernels are found in its cache.
    log : Path
        Takes all that Flower prints.
    """

    def __init__(self, root: Path, log: Path) -> None:
        self.root = root
        self.log = log
        self._home = Path(tempfile.mkdtemp(prefix="co3-"))
        self._mark = f"{MARK}={self._home.name}"
        self._env = _environment(self._home)
        self._superlink: subprocess.Popen[bytes] | None = None
        self._stream: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        try:
            self._start_superlink()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def submit(
        self, run_config: Mapping[str, Value], *, num_clients: int, num_cpus: int, gpu_share: float
    ) -> None:
        """Submit the app; Flower's output goes to the log until the run ends.

        Parameters
        ----------
        run_config : Mapping
            Overrides of the app's run-config.
        num_clients : int
            Simulated SuperNodes.
        num_cpus : int
            Processes that train at the same time, one CPU each.
        gpu_share : float
            Share of a GPU for each of them; 0 on a machine without.
        """
        app = stage_app(self.root, self._home)
        overrides = self._home / "run-config.toml"
        overrides.write_text(to_toml(run_config), encoding="utf-8")
        federation = (
            f"num-supernodes={num_clients} client-resources-num-cpus=1"
            f" client-resources-num-gpus={gpu_share} init-args-num-cpus={num_cpus}"
        )
        command = [program("flwr"), "run", str(app), CONNECTION, "--stream"]
        command += ["-c", str(overrides), "--federation-config", federation]
        self._stream = self._spawn(command, cwd=self._home)

    def is_running(self) -> bool:
        """Tell whether the run may still be going on."""
        assert self._superlink is not None
        assert self._stream is not None
        return self._stream.poll() is None and self._superlink.poll() is None

    def wait(self, seconds: float) -> None:
        """Give a run that is done the time to end by itself."""
        assert self._stream is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._stream.wait(seconds)

    def stop(self) -> None:
        """End every process of this engine and remove its folder; may be called twice."""
        with uninterrupted():
            sessions: set[int] = set()
            engine_processes(self._mark, sessions)  # while they can still be told
            _end_children([self._stream, self._superlink])
            end_sessions(self._mark, sessions)
            shutil.rmtree(self._home, ignore_errors=True)

    def _start_superlink(self) -> None:
        port = _free_port()
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        command = [program("flower-superlink"), "--insecure", "--simulation"]
        command += ["--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--disable-runtime-dependency-installation"]
        # Its folder comes first on the path of the simulated clients, so it must hold no `sim`.
        self._superlink = self._spawn(command, cwd=self._home)
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(port):
            if self._superlink.poll() is not None:
                raise EngineError(f"Flower's SuperLink must start, got {self._last_lines()}")
            if time.monotonic() > deadline:
                raise EngineError(f"Flower's SuperLink must answer within {START_SECONDS:.0f} s")
            time.sleep(0.1)

    def _spawn(self, command: list[str], cwd: Path) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the others.
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _last_lines(self, count: int = 3) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-count:]) or "no output"


def stage_app(root: Path, folder: Path) -> Path:
    """Copy what is submitted, pyproject.toml and sim/, into a folder of its own; return that."""
    app = folder / "app"
    app.mkdir()
    shutil.copy(root / "pyproject.toml", app)
    shutil.copytree(
        root / "sim", app / "sim", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    return app


def to_toml(values: Mapping[str, Value]) -> str:
    """Write a flat table as TOML.

    Examples
    --------
    >>> print(to_toml({"lr": 0.1, "format": "e2m1", "reclip": False}), end="")
    lr = 0.1
    format = "e2m1"
    reclip = false
    """
    # A JSON string without surrogate escapes, number or boolean is a TOML one.
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()
    )


def _end_children(children: list[subprocess.Popen[bytes] | None]) -> None:
    """Ask child processes to end, wait, and kill those that did not."""
    running = [child for child in children if child is not None and child.poll() is None]
    for child in running:
        child.terminate()
    for child in running:
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_sessions(mark: str, sessions: set[int], seconds: float = STOP_SECONDS) -> None:
    """End what an engine started and what outlives its SuperLink: Ray's agents for a minute.

    A process is an engine's if its environment holds the mark, or if it belongs to the session of
    one that does: some of Ray's overwrite their environment with their title. (Needs Linux's
    /proc; elsewhere nothing is found, and Ray's own clean-up has to do.)

    Parameters
    ----------
    mark : str
        ``NAME=value`` of an environment variable that its processes have.
    sessions : set of int
        Sessions known to be the engine's.
    seconds : float
        How long to try; the first signal is SIGTERM, the next ones SIGKILL.
    """
    deadline = time.monotonic() + seconds
    sent = signal.SIGTERM
    while remaining := engine_processes(mark, sessions):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        if time.monotonic() > deadline:
            return
        time.sleep(0.3)
        sent = signal.SIGKILL


def engine_processes(mark: str, sessions: set[int]) -> list[int]:
    """Return the pids of an engine's living processes; its sessions are added to `sessions`."""
    wanted = mark.encode()
    found = list(_processes())
    own = os.getsid(0)
    sessions |= {sid for _, sid, environment in found if wanted in environment and sid != own}
    return [
        pid
        for pid, sid, environment in found
        if (wanted in environment or sid in sessions) and pid != os.getpid()
    ]


def _processes() -> Iterator[tuple[int, int, list[bytes]]]:
    """Yield pid, session id and environment of every living process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in brackets: state, parent, process group, session.
            state, _, _, sid = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or not ours
            continue
        if state != "Z":
            yield int(folder.name), int(sid), environment


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore the signals that ask for an end while it is being brought about."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(home: Path) -> dict[str, str]:
    env = dict(os.environ)
    env[MARK] = home.name
    env["FLWR_HOME"] = str(home)
    env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    env["RAY_TMPDIR"] = str(home)  # removed with it
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONUNBUFFERED"] = "1"
    for name in ("no_proxy", "NO_PROXY"):  # a proxy must not stand between us and loopback
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1"]))
    env.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    env.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads take the cores from clients
    env.setdefault("RAY_worker_niceness", "0")  # training is what the machine is here for
    env.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return env


def program(name: str) -> str:
    """Return the path of one of Flower's commands: that of this Python, else on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise EngineError(f"{name} must be installed; pip install 'co3-flower[sim]'")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _is_healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
