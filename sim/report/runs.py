"""Runs as they lie on disk, and what they say about accuracy against R."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from co3_flower import ConfigError
from sim.outputs import Row, read_rows, read_summary
from sim.settings import DEFAULTS, Value

# Of the machine and the measuring, or what is averaged over: not what tells settings apart.
PLACES = (
    "run-dir",
    "memory-dir",
    "data-dir",
    "seed",
    "num-threads",
    "device",
    "save-gradients-every",
)
COMPRESSOR_KEYS = ("compressor", "compressor-settings")
CODEC_KEYS = (
    "format",
    "gamma",
    "scale",
    "scale-multiplier",
    "scale-refit-every",
    "prior",
    "coder",
    "min-numel",
    "structure",
    "target-bits-per-parameter",
    "uplink-budget-mb",
)


@dataclass(frozen=True)
class Run:
    """One completed run.

    Attributes
    ----------
    folder : Path
    config : dict
        Its run-config, every key.
    rows : list of dict
        Lines of rounds.jsonl.
    summary : dict
    """

    folder: Path
    config: dict[str, Value]
    rows: list[Row]
    summary: Row

    @property
    def evaluated(self) -> list[Row]:
        """Rounds that ended with an evaluation."""
        return [row for row in self.rows if row["accuracy"] is not None]

    @property
    def is_float32(self) -> bool:
        """Whether nothing was compressed."""
        return self.config["compressor"] == "none"

    @property
    def is_co3(self) -> bool:
        """Whether the codec made the payloads: only then its settings mean anything."""
        return self.config["compressor"] == "co3"


@dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but the seed.

    Attributes
    ----------
    label : str
        What tells it from the others.
    runs : tuple of Run
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Value]:
        """The run-config of the first run."""
        return self.runs[0].config

    @property
    def is_float32(self) -> bool:
        """Whether nothing was compressed."""
        return self.runs[0].is_float32

    @property
    def family(self) -> str:
        """The number format, or what stands for those of other compressors."""
        return str(self.config["format"]) if self.runs[0].is_co3 else "other compressors"

    def mean(self, key: str) -> float | None:
        """Return the mean of a summary's entry over the runs that have it."""
        values = [run.summary[key] for run in self.runs if run.summary[key] is not None]
        return statistics.fmean(values) if values else None

    def spread(self, key: str) -> float | None:
        """Return the sample standard deviation over the runs; None for fewer than two."""
        values = [run.summary[key] for run in self.runs if run.summary[key] is not None]
        return statistics.stdev(values) if len(values) > 1 else None

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return means over the runs of two entries of rounds.jsonl, evaluation by evaluation.

        Only rounds that every run has evaluated count.
        """
        by_round = [{row["server_round"]: row for row in run.evaluated} for run in self.runs]
        shared = sorted(set.intersection(*map(set, by_round)))
        means = [
            [statistics.fmean(rows[number][key] for rows in by_round) for number in shared]
            for key in (x, y)
        ]
        return means[0], means[1]


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Load run-dirs; a sweep's folder stands for its points.

    Raises
    ------
    ConfigError
        A folder that holds no completed run.
    """
    runs = []
    for folder in folders:
        points = sorted(path.parent for path in folder.glob("*/config.json"))
        found = [run for path in (points or [folder]) if (run := _load(path)) is not None]
        if not found:
            raise ConfigError(
                f"RUN_DIR must hold a completed run, or a sweep's, got {str(folder)!r}"
            )
        runs += found
    return runs


def group_by_setting(runs: Sequence[Run]) -> list[Setting]:
    """Put runs together that differ only in their seed, and label them by what they differ in."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        kept = {key: value for key, value in run.config.items() if key not in PLACES}
        if not run.is_co3:
            kept = {key: value for key, value in kept.items() if key not in CODEC_KEYS}
        groups.setdefault(json.dumps(kept, sort_keys=True), []).append(run)
    firsts = [group[0] for group in groups.values()]
    coded = [run for run in firsts if run.is_co3]
    differing = [
        key
        for key in DEFAULTS
        if key not in PLACES
        and len({str(run.config[key]) for run in (coded if key in CODEC_KEYS else firsts)}) > 1
    ]
    return [Setting(_label(group[0], differing), tuple(group)) for group in groups.values()]


def lower_envelope(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return L_T(R): for each R the least loss of any point that took no more, where it changes.

    Parameters
    ----------
    points : sequence of (R, loss)

    Returns
    -------
    list of (R, loss)
        R rising, loss falling.

    Examples
    --------
    >>> lower_envelope([(3.0, 0.5), (1.0, 0.9), (2.0, 1.0), (4.0, 0.7)])
    [(1.0, 0.9), (3.0, 0.5)]
    """
    steps: list[tuple[float, float]] = []
    for bits, loss in sorted(points):
        if not steps or loss < steps[-1][1]:
            steps.append((bits, loss))
    return steps


def _load(folder: Path) -> Run | None:
    summary = read_summary(folder)
    if summary is None or summary["status"] != "completed":
        return None
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))["run_config"]
    return Run(folder, {**DEFAULTS, **stored}, read_rows(folder), summary)


def _label(run: Run, differing: Sequence[str]) -> str:
    if not run.is_co3:
        settings = str(run.config["compressor-settings"])
        parts = ["float32" if run.is_float32 else f"{run.config['compressor']} {settings}".strip()]
        differing = [key for key in differing if key not in CODEC_KEYS]
    elif "format" in differing or not differing or set(differing) <= set(COMPRESSOR_KEYS):
        parts = [str(run.config["format"])]
    else:
        parts = []
    rest = [key for key in differing if key not in ("format", *COMPRESSOR_KEYS)]
    texts = [
        f"{key} {str(run.config[key]).removesuffix('.0')}"
        for key in rest
        if run.config[key]
        or DEFAULTS[key]  # a setting that is off by default and here goes without
    ]
    return ", ".join(parts + texts) or str(run.config["format"])
