"""The file of a comparison, and the points that each of its stages has.

A comparison is a config of the settings that all points share; tables ``[[entry]]``, one a
compressor at one strength; and tables ``[[stage]]``, done in order::

    model = "cnn"
    target-share = 0.95            # of float32's accuracy: the target of "MB to the target"

    [[entry]]
    label = "top-k 1 %"
    compressor = "topk"
    compressor-settings = "ratio=0.01"

    [[stage]]
    name = "search"
    seed = [0]
    lr = [0.05, 0.2]               # without lr: each entry's best of the first stage

    [[stage]]
    name = "final"
    seed = [0, 1, 2]
    entries = ["float32"]          # without: all
    best = 4                       # and so many rivals, the best of the stage before
    num-server-rounds = 60         # further keys are settings
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from co3_flower import ConfigError
from sim.compare.results import LABEL, STAGE, Result, best_by_label, rank_rivals, scores
from sim.points import Point, Values, point_name
from sim.settings import Settings, check_keys, check_scalar, read_toml

TARGET_SHARE = "target-share"
DEFAULT_TARGET_SHARE = 0.95


@dataclass(frozen=True)
class Stage:
    """Some of the entries, over step sizes and seeds.

    Attributes
    ----------
    name : str
    values : dict
        Settings of this stage.
    seeds : tuple of int
    lrs : tuple of float
        Step sizes; none stands for each entry's best one of the first stage.
    labels : tuple of str
        The entries.
    best : int
        Further ones: the best rivals of the stage before.
    """

    name: str
    values: Values
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    labels: tuple[str, ...]
    best: int


@dataclass(frozen=True)
class Comparison:
    """A comparison's file.

    Attributes
    ----------
    shared : dict
        Settings of all points.
    target_share : float
        Part of float32's accuracy that is the target.
    entries : dict
        Settings by label.
    stages : tuple of Stage
    """

    shared: Values
    target_share: float
    entries: dict[str, Values]
    stages: tuple[Stage, ...]

    def points(
        self, stage: Stage, results: Sequence[Result], folder: Path, settle: Any
    ) -> list[Point]:
        """Return the points of a stage; the stages before it are done.

        Parameters
        ----------
        stage : Stage
        results : sequence of Result
            Of the stages before.
        folder : Path
            The comparison's.
        settle : callable
            Makes checked settings with absolute paths of a run-config.
        """
        before = [[r for r in results if r.stage == other.name] for other in self.stages]
        number = self.stages.index(stage)
        labels = list(stage.labels)
        if stage.best:
            ranked = rank_rivals(scores(before[number - 1]), self.target_share)
            labels += [s.label for s in ranked[: stage.best] if s.label not in labels]
        best = best_by_label(scores(before[0])) if number else {}
        points = []
        for label in labels:
            for lr in stage.lrs or (best[label].lr,):
                for seed in stage.seeds:
                    own = {**self.entries[label], "lr": lr, "seed": seed}
                    settings: Settings = settle({**self.shared, **stage.values, **own})
                    name = point_name({LABEL: label, "lr": lr, "seed": seed})
                    path = folder / "runs" / stage.name / name
                    values: Values = {STAGE: stage.name, LABEL: label}
                    points.append(Point(values, replace(settings, run_dir=str(path))))
        return points


def read_comparison(path: Path) -> Comparison:
    """Read a comparison's file.

    Raises
    ------
    ConfigError
        No such file, not TOML, or a table that does not fit.
    """
    table = read_toml(path)
    entries = _entries(table.pop("entry", None), path)
    stages = table.pop("stage", None)
    share = table.pop(TARGET_SHARE, DEFAULT_TARGET_SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{TARGET_SHARE} must be in (0, 1], got {share!r} in {path}")
    for key, value in table.items():
        check_scalar(key, value, path)
    if not _are_tables(stages):
        raise ConfigError(f"a comparison must have tables [[stage]], got none in {path}")
    found: list[Stage] = []
    for number, stage in enumerate(stages):
        found.append(_stage(stage, tuple(entries), is_first=number == 0, path=path))
    if len({stage.name for stage in found}) < len(found):
        raise ConfigError(f"stages must have a name each, got one twice in {path}")
    searched = set(found[0].labels)
    for stage in found[1:]:
        if missing := [label for label in stage.labels if label not in searched and not stage.lrs]:
            raise ConfigError(
                f"entries without lr must be in the first stage, got {missing} in stage"
                f" {stage.name!r} of {path}"
            )
    return Comparison(table, float(share), entries, tuple(found))


def _entries(tables: Any, path: Path) -> dict[str, Values]:
    if not _are_tables(tables):
        raise ConfigError(f"a comparison must have tables [[entry]], got none in {path}")
    entries: dict[str, Values] = {}
    for table in tables:
        values = dict(table)
        label = values.pop(LABEL, None)
        if not isinstance(label, str) or not label or label in entries:
            raise ConfigError(f"{LABEL} must be a text of its own, got {label!r} in {path}")
        for key, value in values.items():
            check_scalar(key, value, path)
        check_keys(values)
        entries[label] = values
    return entries


def _stage(
    table: Mapping[str, Any], known: tuple[str, ...], *, is_first: bool, path: Path
) -> Stage:
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str) or not name.replace("-", "").isalnum():
        raise ConfigError(f"a stage's name must be letters and digits, got {name!r} in {path}")
    where = f"in stage {name!r} of {path}"
    best = values.pop("best", 0)
    if isinstance(best, bool) or not isinstance(best, int) or best < 0 or (best and is_first):
        raise ConfigError(f"best must count rivals of the stage before, got {best!r} {where}")
    listed = values.pop("entries", list(known))
    if not isinstance(listed, list) or (not listed and not best):
        raise ConfigError(f"entries must be a list of labels, got {listed!r} {where}")
    labels = tuple(listed)
    if unknown := [label for label in labels if label not in known]:
        raise ConfigError(f"entries must be labels of [[entry]], got {unknown} {where}")
    if len(set(labels)) < len(labels):
        raise ConfigError(f"entries must be labels, each once, got {listed!r} {where}")
    seeds = tuple(_list(values.pop("seed", [0]), "seed", path))
    if not seeds:
        raise ConfigError(f"seed must be a list of at least one number, got none {where}")
    lrs = tuple(_list(values.pop("lr", []), "lr", path))
    if is_first and not lrs:
        raise ConfigError(f"lr must be a list of step sizes in the first stage, got none {where}")
    for key, value in values.items():
        check_scalar(key, value, path)
    check_keys(values)
    return Stage(name, values, seeds, tuple(map(float, lrs)), labels, best)


def _list(values: Any, key: str, path: Path) -> list[Any]:
    listed = values if isinstance(values, list) else [values]
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} must be a list of numbers, got {value!r} in {path}")
    if len(set(listed)) < len(listed):
        raise ConfigError(f"{key} must be a list of numbers, each once, got {values!r} in {path}")
    return listed


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(t, dict) for t in value)
