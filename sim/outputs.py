"""What a run leaves in its run-dir, and the table it ends with.

config.json    the run-config, an experiment-id, versions
rounds.jsonl   one line per round, `ROUND_KEYS`
summary.json   accuracy, R, rates; status "completed" or "failed" with the reason
model.npz      the last model, one member per tensor
events...      the same numbers for TensorBoard, and histograms of saved gradients
checkpoint.npz what the PS needs to go on with a run that was ended; gone once it is completed
"""

import contextlib
import fcntl
import json
import logging
import os
import platform
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np

from co3_flower import Co3Error, ConfigError
from co3_flower.checkpoint import read_checkpoint
from sim.settings import Settings

ROUND_KEYS = (
    "server_round",
    "accuracy",
    "loss",
    "uplink_bits",
    "R",
    "bits_per_parameter",
    "code_bits",
    "side_info_bits",
    "structure_bits",
    "raw_bits",
    "entropy_bits",
    "overhead_bits",
    "downlink_bits",
    "sqnr_db",
    "residual_ratio",
    "replies",
    "failures",
    "lost",
    "encode_seconds",
    "decode_seconds",
)
COUNTED = ("uplink_bits", "R", "overhead_bits", "downlink_bits", "replies", "failures", "lost")
PACKAGES = ("co3-flower", "flwr", "numpy", "numba", "torch")
MIN_AVERAGED = 5  # evaluations behind the reported accuracy, at least, where there are as many

ANNOUNCEMENT = "co3 "  # begins a line of the ServerApp's log that holds a round or the summary

PROBE_BYTES = 2**20  # that a folder must have room for before a run starts

Row = dict[str, Any]

logger = logging.getLogger("flwr.co3")


class OutputError(Co3Error, RuntimeError):
    """The disk does not take what a run has to leave; no half-written file is left."""


def round_row(server_round: int, record: Mapping[str, Any] | None, score: Any | None) -> Row:
    """Return one line of rounds.jsonl.

    Parameters
    ----------
    server_round : int
        0 before training.
    record : Mapping or None
        The strategy's record of the round; None for round 0, where nothing has been sent.
    score : sim.task.Score or None
        None where the round was not evaluated.
    """
    row: Row = dict.fromkeys(ROUND_KEYS)
    row.update(dict.fromkeys(COUNTED, 0))
    if record is not None:
        row.update({key: record[key] for key in ROUND_KEYS if key in record})
    row["server_round"] = server_round
    if score is not None:
        row.update(accuracy=score.accuracy, loss=score.loss)
    return row


class RunFolder:
    """The run-dir of one run: made once, appended to each round, closed with a summary."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Make the folder and its config.json.

        Raises
        ------
        ConfigError
            The folder already holds a run, or cannot be written.
        """
        check_is_unused(path)
        self._open(path, str(uuid.uuid4()))
        content = {
            "experiment_id": self.experiment_id,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "run_config": settings.as_run_config(),
            "versions": {"python": platform.python_version(), **_versions()},
        }
        with _named(path):
            _write_json(path / "config.json", content)
        self._hold()

    @classmethod
    def reopen(cls, path: Path, settings: Settings) -> "RunFolder":
        """Open the folder of a run that was ended; what is newer than its checkpoint is dropped.

        Raises
        ------
        ConfigError
            The folder holds no run, a completed one, or one of other settings.
        """
        config = read_config(path)
        old = settings.as_run_config() | config["run_config"]
        differing = [
            f"{key} = {old[key]!r}, got {value!r}"
            for key, value in settings.as_run_config().items()
            if value != old[key] and key not in ("resume", "run-dir", "memory-dir")
        ]
        if differing:
            raise ConfigError(
                f"settings must be those of the run in {path}: {'; '.join(differing)}"
            )
        folder = cls.__new__(cls)
        folder._open(path, config["experiment_id"])
        folder._hold()
        folder.can_resume = folder.checkpoint_path.exists()
        folder._next_round = (
            read_checkpoint(folder.checkpoint_path)["server_round"] if folder.can_resume else 0
        )
        folder.rows = [row for row in read_rows(path) if row["server_round"] < folder._next_round]
        text = "".join(json.dumps(row) + "\n" for row in folder.rows)
        with _named(path):
            (path / "summary.json").unlink(missing_ok=True)
            _write_whole(path / "rounds.jsonl", lambda file: file.write(text.encode()))
        return folder

    def _open(self, path: Path, experiment_id: str) -> None:
        check_writable(path, "run-dir")
        self.path = path
        self.experiment_id = experiment_id
        self.checkpoint_path = path / "checkpoint.npz"
        self.can_resume = False
        self.rows: list[Row] = []
        self._next_round: int | None = None  # of a run that goes on
        self._started = time.monotonic()
        self._events: Any = None
        self._held: int | None = None

    def _hold(self) -> None:
        """Hold config.json against a second process that goes on with the same run."""
        self._held = os.open(self.path / "config.json", os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(
                f"run must have ended to go on with it, got one that still runs in {self.path}"
            ) from None

    def close(self) -> None:
        """Let another process go on with the run; may be called twice."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def add_round(self, row: Row) -> None:
        """Append one round to rounds.jsonl and to the TensorBoard events.

        Raises
        ------
        OutputError
            The disk is full.
        """
        self.rows.append(row)
        with _named(self.path):
            self._append(row)
        _announce(row)

    def _append(self, row: Row) -> None:
        with (self.path / "rounds.jsonl").open("ab", buffering=0) as file:
            end = file.tell()
            try:
                _write_all(file, json.dumps(row).encode() + b"\n")
            except OSError:
                os.truncate(file.fileno(), end)
                raise
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # two seconds to import

            self._events = SummaryWriter(log_dir=str(self.path), purge_step=self._next_round)
        for key, value in row.items():
            if key != "server_round" and value is not None:
                self._events.add_scalar(key, value, row["server_round"])
        self._events.flush()

    def add_histograms(self, server_round: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Add histograms of tensors' entries to the TensorBoard events, after a first round."""
        with _named(self.path):
            for name, entries in tensors.items():
                self._events.add_histogram(name, entries, server_round)
            self._events.flush()

    def finish(self, model: Mapping[str, np.ndarray], num_parameters: int | None) -> Row:
        """Write model.npz and the summary of a completed run, and return the summary.

        Raises
        ------
        OutputError
            The disk is full.
        """
        with _named(self.path):
            _write_whole(self.path / "model.npz", lambda file: np.savez(file, **model))
        summary = self._close({"status": "completed"}, num_parameters)
        self.checkpoint_path.unlink(missing_ok=True)
        return summary

    def fail(self, reason: str, num_parameters: int | None) -> Row:
        """Write the summary of a failed run, and return it; a full disk is logged only."""
        outcome = {"status": "failed", "error": reason}
        try:
            return self._close(outcome, num_parameters)
        except OutputError as error:
            logger.warning("no summary.json could be written: %s", error)
            _announce(outcome)
            return outcome

    def _close(self, outcome: Row, num_parameters: int | None) -> Row:
        if self._events is not None:
            with contextlib.suppress(OSError):  # a full disk; rounds.jsonl holds the same
                self._events.close()
        summary = {
            **outcome,
            "experiment_id": self.experiment_id,
            **summarize(self.rows, num_parameters),
            "seconds": round(time.monotonic() - self._started, 3),
            "run_dir": str(self.path),
        }
        with _named(self.path):
            _write_json(self.path / "summary.json", summary)
        _announce(summary)
        return summary


def _announce(content: Row) -> None:
    """Print a round or a summary: the log of a ServerApp elsewhere is all that a caller sees."""
    with contextlib.suppress(OSError):  # a full disk under the log must not end the run
        print(f"{ANNOUNCEMENT}{json.dumps(content)}", flush=True)


def parse_announcement(line: str) -> Row | None:
    """Return the round or the summary that a line of a ServerApp's log holds, None for others.

    Examples
    --------
    >>> parse_announcement('co3 {"server_round": 1, "R": 8}')
    {'server_round': 1, 'R': 8}
    >>> parse_announcement("INFO : Starting")
    """
    if not line.startswith(ANNOUNCEMENT + "{"):
        return None
    try:
        content: Row = json.loads(line[len(ANNOUNCEMENT) :])
    except json.JSONDecodeError:  # cut off by the end of the process
        return None
    return content


def summarize(rows: Sequence[Row], num_parameters: int | None) -> Row:
    """Reduce the rounds of a run to its summary.

    The accuracy is the mean of the last tenth of the evaluations, of five at least (or of all,
    where there are fewer): single iterates scatter by several points.

    Parameters
    ----------
    rows : sequence of dict
        Lines of rounds.jsonl.
    num_parameters : int or None
        Entries of the float tensors that are not buffers.
    """
    evaluated = [row for row in rows if row["accuracy"] is not None]
    averaged = evaluated[-max(MIN_AVERAGED, len(evaluated) // 10) :]
    num_replies = sum(row["replies"] for row in rows)
    rate = _mean_rate(rows)
    total_bits = rows[-1]["R"] if rows else 0
    overhead_bits = sum(row["overhead_bits"] or 0 for row in rows)
    return {
        "accuracy": _mean([row["accuracy"] for row in averaged]),
        "loss": _mean([row["loss"] for row in averaged]),
        "last_accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "num_evaluations": len(evaluated),
        "num_averaged": len(averaged),
        "R": total_bits,
        "R_megabytes": total_bits / 8e6,
        "overhead_bits": overhead_bits,
        "R_with_overhead": total_bits + overhead_bits,
        "downlink_bits": sum(row["downlink_bits"] or 0 for row in rows),
        "num_parameters": num_parameters,
        "bits_per_parameter": rate,
        "times_smaller_than_float32": 32 / rate if rate else None,
        "num_server_rounds": max((row["server_round"] for row in rows), default=0),
        "replies": num_replies,
        "failures": sum(row["failures"] for row in rows),
        "lost": sum(row["lost"] for row in rows),
    }


def format_table(summary: Row) -> str:
    """Return the table a run ends with, as text.

    Examples
    --------
    >>> row = round_row(1, {"R": 8_000_000, "bits_per_parameter": 2.5, "replies": 4}, None)
    >>> print(format_table(summarize([row], num_parameters=800_000)))
    accuracy                    not evaluated
    R (all uplink payloads)     8,000,000 bits = 1.000 MB
    R with message overhead     8,000,000 bits = 1.000 MB
    bits per parameter          2.500
    smaller than float32        12.8 times
    """
    if summary["accuracy"] is None:
        accuracy = "not evaluated"
    else:
        accuracy = (
            f"{summary['accuracy']:.2%} (mean of the last {summary['num_averaged']}"
            f" evaluations; the last {summary['last_accuracy']:.2%})"
        )
    rate, factor = summary["bits_per_parameter"], summary["times_smaller_than_float32"]
    lines = {
        "accuracy": accuracy,
        "R (all uplink payloads)": _bits(summary["R"]),
        "R with message overhead": _bits(summary["R_with_overhead"]),
        "bits per parameter": "unknown" if rate is None else f"{rate:.3f}",
        "smaller than float32": "unknown" if factor is None else f"{factor:.1f} times",
    }
    if summary["failures"] or summary["lost"]:
        lines["replies"] = (
            f"{summary['replies']} good, {summary['failures']} failed, {summary['lost']} lost"
        )
    return "\n".join(f"{name:<28}{value}" for name, value in lines.items())


def read_rows(folder: Path) -> list[Row]:
    """Return the rounds that a run has written so far; none where there is no such file."""
    try:
        text = (folder / "rounds.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1]  # the last line may be half written
    return [json.loads(line) for line in complete.splitlines()]


def read_summary(folder: Path) -> Row | None:
    """Return a run's summary, or None where it has not ended."""
    try:
        summary: Row = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return summary


def read_config(folder: Path) -> Row:
    """Return the config.json of a run that can go on.

    Raises
    ------
    ConfigError
        The folder holds no run, or a completed one.
    """
    try:
        config: Row = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run-dir must hold the run to go on with, got {str(folder)!r} ({error})"
        ) from None
    summary = read_summary(folder)
    if summary is not None and summary["status"] == "completed":
        raise ConfigError(f"run must not be completed to go on with it, got {str(folder)!r}")
    return config


def default_run_dir(parent: Path) -> Path:
    """Return ``runs/<time>-<id>`` under a folder."""
    return parent / "runs" / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def check_is_unused(path: Path) -> None:
    """Raise ConfigError where a folder already holds a run."""
    if (path / "config.json").exists():
        raise ConfigError(f"run-dir must not hold a run already, got {str(path)!r}")


def check_writable(folder: Path, key: str) -> None:
    """Make a folder and write into it, so that a full or read-only disk is found before a run.

    Raises
    ------
    ConfigError
        It cannot be made, or written; the message names the setting.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
            _write_all(file, bytes(PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{key} must be a folder that can be written, got {str(folder)!r}"
            f" ({error.strerror or error})"
        ) from None


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses into one line that names the setting."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"run-dir must have room for what a run leaves, got {str(folder)!r}"
            f" ({error.strerror or error})"
        ) from error


def _bits(bits: int) -> str:
    return f"{bits:,} bits = {bits / 8e6:,.3f} MB"


def _mean_rate(rows: Sequence[Row]) -> float | None:
    rates = [(row["bits_per_parameter"], row["replies"]) for row in rows]
    known = [(rate, weight) for rate, weight in rates if rate is not None and weight]
    if not known:
        return None
    return sum(rate * weight for rate, weight in known) / sum(weight for _, weight in known)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _write_json(path: Path, content: Row) -> None:
    """Write a JSON file that a reader sees whole or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    _write_whole(path, lambda file: file.write(text.encode()))


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write to an unbuffered file, which takes what there is room for before it complains."""
    while data:
        data = data[file.write(data) :]


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file that a reader sees whole or not at all."""
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
