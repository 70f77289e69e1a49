"""One run on a SuperLink that is there already, of a deployment on any number of machines.

`Federation` submits the app to a SuperLink named in Flower's own configuration, follows the log
that the ServerApp writes there, and stops the run when it is left before its end. It starts and
ends no SuperLink and no SuperNode.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sim.engine import EngineError, program, stage_app, to_toml, uninterrupted
from sim.outputs import Row, parse_announcement
from sim.settings import Value

CALL_SECONDS = 120.0  # for one call of Flower's command line
SILENT_SECONDS = 60.0  # that the SuperLink may be away before the run is given up
RETRY_SECONDS = 3.0


class Federation:
    """A run on a SuperLink that someone else looks after.

    Parameters
    ----------
    root : Path
        The checkout: its pyproject.toml and its sim/ are submitted. co3_flower must be installed
        on every machine.
    name : str
        Connection in ``$FLWR_HOME/config.toml`` (default ``~/.flwr/config.toml``).
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.run_id = ""
        self.log = ""
        self._rows: dict[int, Row] = {}
        self._summary: Row | None = None
        self._status = ""
        self._is_complete = False  # the log is being read for the last time
        self._silent_since: float | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="co3-"))
        self._stream: subprocess.Popen[bytes] | None = None
        self._read = 0

    def __enter__(self) -> "Federation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with uninterrupted():
            if self._stream is not None and self._stream.poll() is None:
                self._stream.terminate()
                self._stream.wait()
            is_over = self._has_ended() or self._summary is not None
            if self.run_id and not is_over and self._silent_since is None:
                with contextlib.suppress(EngineError):
                    self._call("stop", self.run_id, self.name)
            shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self, run_config: Mapping[str, Value]) -> None:
        """Submit the app.

        Parameters
        ----------
        run_config : Mapping
            Overrides of the app's run-config.

        Raises
        ------
        EngineError
            There is no such connection, the SuperLink does not answer, or refuses the run.
        """
        overrides = self._folder / "run-config.toml"
        overrides.write_text(to_toml(run_config), encoding="utf-8")
        app = stage_app(self.root, self._folder)
        answer = self._call("run", str(app), self.name, "-c", str(overrides))
        self.run_id = str(answer["run-id"])
        self._follow_log()

    def is_running(self) -> bool:
        """Tell whether the run may still be going on.

        Raises
        ------
        EngineError
            The SuperLink has been away for a minute.
        """
        assert self._stream is not None
        if self._stream.poll() is None:
            return True
        asked = time.monotonic()
        try:
            self._status = self._ask_status()
        except EngineError as error:
            self._silent_since = self._silent_since or asked
            if time.monotonic() - self._silent_since > SILENT_SECONDS:
                raise EngineError(
                    f"SuperLink {self.name!r} must answer within {SILENT_SECONDS:.0f} s, got"
                    f" {error}; if it still runs, `flwr log {self.run_id} {self.name}` follows the"
                    " run"
                ) from None
            time.sleep(RETRY_SECONDS)
            return True
        self._silent_since = None
        if self._has_ended() and (self.summary() is not None or self._is_complete):
            return False
        # The link broke, not the run; or the run ended while the last lines were on their way.
        self._is_complete = self._has_ended()
        self._follow_log()
        return True

    def wait(self, seconds: float) -> None:
        """Give a run that is done the time to end by itself."""
        deadline = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.2)

    def rows(self) -> list[Row]:
        """Return the rounds that the ServerApp has announced so far."""
        self._read_log()
        return [self._rows[number] for number in sorted(self._rows)]

    def summary(self) -> Row | None:
        """Return the summary that the ServerApp ended with; None before its end."""
        self._read_log()
        return self._summary

    def failure(self) -> str:
        """Return the reason of a run that ended without a summary, as Flower words it."""
        return self._status or "no status"

    def _has_ended(self) -> bool:
        return self._status.startswith("finished")

    def _follow_log(self) -> None:
        log = self._folder / "flower.log"
        self._read = 0  # Flower sends a log from its beginning
        with log.open("wb") as output:
            self._stream = subprocess.Popen(
                [program("flwr"), "log", self.run_id, self.name],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours alone
            )

    def _read_log(self) -> None:
        """Take in the whole lines that are new."""
        if not self.run_id:
            return
        with (self._folder / "flower.log").open("rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        for line in new.decode(errors="replace").splitlines():
            announced = parse_announcement(line)
            if announced is None:
                self.log += line + "\n"
            elif "server_round" in announced:
                self._rows[announced["server_round"]] = announced
            else:
                self._summary = announced

    def _ask_status(self) -> str:
        runs = self._call("list", self.name, "--run-id", self.run_id)["runs"]
        if not runs:
            raise EngineError(f"SuperLink {self.name!r} must know run {self.run_id}, got no run")
        status = str(runs[0]["status"])
        details = runs[0].get("status-details") or ""
        return f"{status} {details}".strip()

    def _call(self, *arguments: str) -> dict[str, Any]:
        """Call Flower's command line and return the JSON object that it prints."""
        try:
            done = subprocess.run(
                [program("flwr"), *arguments, "--format", "json"],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CALL_SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"`flwr {arguments[0]}` must end within {CALL_SECONDS:.0f} s, got no answer from"
                f" SuperLink {self.name!r}"
            ) from None
        begin = done.stdout.find("{")
        try:
            answer: dict[str, Any] = json.loads(done.stdout[begin:]) if begin >= 0 else {}
        except json.JSONDecodeError:
            answer = {}
        if done.returncode != 0 or not answer.get("success"):
            said = answer.get("error-message") or done.stderr or done.stdout
            lines = [line for line in str(said).splitlines() if line.strip()]
            raise EngineError(
                f"SuperLink {self.name!r} of Flower's configuration must take `flwr"
                f" {arguments[0]}`, got {lines[-1].strip() if lines else 'no output'}"
            )
        return answer


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONUNBUFFERED"] = "1"
    env["COLUMNS"] = "1000"  # no line breaks inside an error
    env["NO_COLOR"] = "1"
    env.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    return env
