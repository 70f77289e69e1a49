"""A process that runs one point of a sweep after another.

torch, numba's kernels and the images are loaded once and then serve every point. The parent writes
one line of JSON per point, its run-config, to the worker's standard input, and reads one line back:
the run's summary. What Flower and the point print goes to flower.log in the point's run-dir. A
worker ends with its parent, whatever ended that.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from sim.outputs import Row, read_summary
from sim.settings import Settings, Value

LOG_NAME = "flower.log"
STOP_SECONDS = 5.0


class Worker:
    """The parent's end: start it, give it points, stop it.

    Parameters
    ----------
    root : Path
        The checkout, whose sim/ the worker runs.
    num_threads : int
        Threads of the libraries that a client trains with; one, as in Flower's simulation.
    """

    def __init__(self, root: Path, num_threads: int = 1) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH", "")]))
        env["OMP_NUM_THREADS"] = str(num_threads)  # one, as Flower's engine sets it
        env.setdefault("FLWR_TELEMETRY_ENABLED", "0")
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sim.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env=env,
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def run(self, run_config: Mapping[str, Value]) -> Row:
        """Run one point and return its summary; its status says whether it completed.

        A worker that dies on the way gives a summary too, of status "failed".
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.write(json.dumps(dict(run_config)) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            code = self._process.wait()
            return {"status": "failed", "error": f"its process ended with exit code {code}"}
        summary: Row = json.loads(answer)
        return summary

    def is_alive(self) -> bool:
        """Tell whether it can take another point."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process; may be called twice, and from another thread than `run`."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_point(settings: Settings) -> Row:
    """Run one experiment in this process and return its summary, of a failed run too.

    Parameters
    ----------
    settings : Settings
        With a run-dir and a number of clients.
    """
    import torch

    from sim import client_app, server_app
    from sim.grid import InProcessGrid, make_context

    torch.set_num_threads(1)
    run_config = settings.as_run_config()
    try:
        grid = InProcessGrid(settings.num_clients, client_app.app, run_config)
        server_app.app(grid, make_context(1, {}, run_config))
    except Exception as error:
        reason = server_app.failure_reason(error)
        return read_summary(Path(settings.run_dir)) or {"status": "failed", "error": reason}
    summary = read_summary(Path(settings.run_dir))
    assert summary is not None
    return summary


def main() -> None:
    """Answer the parent's lines until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    while True:
        settings = Settings.from_run_config(json.loads(lines.get()))
        log = Path(settings.run_dir) / LOG_NAME
        log.parent.mkdir(parents=True, exist_ok=True)
        with _output_to(log):
            summary = run_point(settings)
        answers.write(json.dumps(summary) + "\n")
        answers.flush()


def _read_lines(lines: "queue.SimpleQueue[str]") -> None:
    """Pass on what the parent writes; end the process when the parent is gone."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # in the middle of a point too


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what this process prints to a file, libraries in C included."""
    with path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(nothing.fileno(), stream.fileno())


if __name__ == "__main__":
    main()
