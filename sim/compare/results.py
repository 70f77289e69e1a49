"""What the points of a comparison gave, a line of JSON each, and how they rank."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from co3_flower import ConfigError
from co3_flower.compressors import is_rival
from sim.outputs import Row, read_rows, read_summary
from sim.points import Point
from sim.settings import PATH_KEYS, Value

FILE_NAME = "results.jsonl"
LABEL, STAGE = "label", "stage"  # beside a point's settings


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished training.

    Attributes
    ----------
    stage, label : str
        Of the comparison's file.
    config : dict
        The run-config, without paths.
    accuracy, loss : float
        Means of the last evaluations, as in summary.json.
    R : int
        Bits of all payloads.
    bits_per_parameter : float
    encode_seconds, decode_seconds : float
        Per client, medians over the rounds: the first one may load kernels.
    curve : list of (R, accuracy)
        Every evaluation, round 0 first.
    """

    stage: str
    label: str
    config: dict[str, Value]
    accuracy: float
    loss: float
    R: int
    bits_per_parameter: float
    encode_seconds: float
    decode_seconds: float
    curve: list[tuple[int, float]]

    def bits_to(self, target: float) -> int | None:
        """Return R at the first evaluation that reached an accuracy, None if none did."""
        return next((bits for bits, accuracy in self.curve if accuracy >= target), None)


@dataclass(frozen=True)
class Score:
    """Results that differ in the seed only.

    Attributes
    ----------
    results : tuple of Result
    """

    results: tuple[Result, ...]

    @property
    def label(self) -> str:
        """The entry of the file."""
        return self.results[0].label

    @property
    def lr(self) -> float:
        """Step size of the clients."""
        return float(self.results[0].config["lr"])

    @property
    def compressor(self) -> str:
        """Its name."""
        return str(self.results[0].config["compressor"])

    @property
    def is_rival(self) -> bool:
        """Whether it is neither CO3 nor float32."""
        return is_rival(self.compressor)

    def mean(self, key: str) -> float:
        """Return the mean of a field."""
        return statistics.fmean(getattr(result, key) for result in self.results)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of the accuracy, None for one seed."""
        values = [result.accuracy for result in self.results]
        return statistics.stdev(values) if len(values) > 1 else None

    def megabytes_to(self, target: float) -> float | None:
        """Return the mean uplink in MB to an accuracy, None unless every seed reached it."""
        bits = [result.bits_to(target) for result in self.results]
        known = [value for value in bits if value is not None]
        return statistics.fmean(known) / 8e6 if len(known) == len(bits) else None

    @property
    def accuracy_per_megabyte(self) -> float:
        """Accuracy gained since round 0 per MB of uplink, in percentage points."""
        gain = statistics.fmean(r.accuracy - r.curve[0][1] for r in self.results)
        return 100 * gain / (self.mean("R") / 8e6)


def result_of(point: Point) -> Result:
    """Return what a finished point gave."""
    summary, rows = read_summary(point.folder), read_rows(point.folder)
    assert summary is not None
    config = point.settings.as_run_config()
    for key in PATH_KEYS:
        del config[key]
    return Result(
        stage=str(point.values[STAGE]),
        label=str(point.values[LABEL]),
        config=config,
        accuracy=summary["accuracy"],
        loss=summary["loss"],
        R=summary["R"],
        bits_per_parameter=summary["bits_per_parameter"],
        encode_seconds=_median_of_clients(rows, "encode_seconds"),
        decode_seconds=_median_of_clients(rows, "decode_seconds"),
        curve=[(row["R"], row["accuracy"]) for row in rows if row["accuracy"] is not None],
    )


def _median_of_clients(rows: Sequence[Row], key: str) -> float:
    per_client = [row[key] / row["replies"] for row in rows if row["replies"] and row[key]]
    return statistics.median(per_client) if per_client else 0.0


def read_results(folder: Path) -> list[Result]:
    """Return the results so far; a last line that a kill has cut off does not count.

    Raises
    ------
    ConfigError
        A line that is no result.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    results = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            fields = json.loads(line)
            fields["curve"] = [(bits, accuracy) for bits, accuracy in fields["curve"]]
            results.append(Result(**fields))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{FILE_NAME} must hold results, got another line {number} in {str(path)!r}"
                f" ({error})"
            ) from None
    return results


def add_result(folder: Path, result: Result) -> None:
    """Append a line; what a kill has cut off is written over."""
    path = folder / FILE_NAME
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(asdict(result)).encode() + b"\n")


def scores(results: Iterable[Result]) -> list[Score]:
    """Put results together that differ only in the seed, in the order of their first."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        kept = {key: value for key, value in result.config.items() if key != "seed"}
        key = json.dumps([result.stage, result.label, kept], sort_keys=True)
        groups.setdefault(key, []).append(result)
    return [Score(tuple(group)) for group in groups.values()]


def best_by_label(found: Sequence[Score]) -> dict[str, Score]:
    """Return each entry's score at the step size with the highest mean accuracy."""
    best: dict[str, Score] = {}
    for score in found:
        if score.label not in best or score.mean("accuracy") > best[score.label].mean("accuracy"):
            best[score.label] = score
    return best


def target_accuracy(found: Sequence[Score], share: float) -> float | None:
    """Return a share of the best float32 accuracy, None without float32."""
    accuracies = [score.mean("accuracy") for score in found if score.compressor == "none"]
    return share * max(accuracies) if accuracies else None


def rank_rivals(found: Sequence[Score], share: float) -> list[Score]:
    """Return every rival at its best, those first that hold the target, by the bits it took them.

    To hold it is to have it in the mean of the last evaluations: one may pass it by chance. The
    others come behind, those that reached it once before those that did not.
    """
    target = target_accuracy(found, share)

    def order(score: Score) -> tuple[bool, float, float]:
        megabytes = None if target is None else score.megabytes_to(target)
        accuracy = score.mean("accuracy")
        holds = target is None or accuracy >= target
        return (not holds, math.inf if megabytes is None else megabytes, -accuracy)

    best: dict[str, Score] = {}
    for score in sorted((s for s in best_by_label(found).values() if s.is_rival), key=order):
        best.setdefault(score.compressor, score)
    return list(best.values())
