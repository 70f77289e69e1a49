"""What a run leaves: one line a round, a summary that can be trusted, a table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from co3_flower import ConfigError
from sim.outputs import (
    ROUND_KEYS,
    RunFolder,
    check_is_unused,
    default_run_dir,
    format_table,
    round_row,
    summarize,
)
from sim.settings import Settings
from sim.task import Score

RECORD = {
    "server_round": 1,
    "uplink_bits": 800,
    "R": 800,
    "bits_per_parameter": 4.0,
    "overhead_bits": 80,
    "downlink_bits": 6400,
    "replies": 2,
    "failures": 0,
    "lost": 0,
    "failure_reasons": [],
}


def rows_with(accuracies: list[float | None]) -> list[dict[str, Any]]:
    rows = [round_row(i, None, None) for i in range(len(accuracies))]
    for row, accuracy in zip(rows, accuracies, strict=True):
        row["accuracy"], row["loss"] = accuracy, accuracy
    return rows


def test_round_row_has_the_fixed_keys_in_their_order() -> None:
    assert tuple(round_row(1, RECORD, Score(0.5, 0.9))) == ROUND_KEYS
    assert tuple(round_row(0, None, None)) == ROUND_KEYS


def test_round_row_tells_nothing_sent_from_not_known() -> None:
    row = round_row(0, None, Score(2.3, 0.1))
    assert (row["R"], row["uplink_bits"], row["replies"]) == (0, 0, 0)
    assert row["bits_per_parameter"] is None and row["sqnr_db"] is None
    assert (row["accuracy"], row["loss"]) == (0.1, 2.3)


@pytest.mark.parametrize(
    ("num_evaluations", "num_averaged"),
    [(1, 1), (4, 4), (5, 5), (50, 5), (59, 5), (60, 6), (100, 10)],  # a tenth, five at least
)
def test_accuracy_is_the_mean_of_the_last_tenth_of_the_evaluations(
    num_evaluations: int, num_averaged: int
) -> None:
    accuracies = [i / 100 for i in range(num_evaluations)]
    summary = summarize(rows_with(accuracies), 10)
    assert summary["accuracy"] == pytest.approx(np.mean(accuracies[-num_averaged:]))
    assert summary["num_averaged"] == num_averaged
    assert summary["last_accuracy"] == accuracies[-1]


def test_rounds_without_an_evaluation_do_not_count_in_the_accuracy() -> None:
    summary = summarize(rows_with([0.2, None, 0.4, None]), 10)
    assert summary["accuracy"] == pytest.approx(0.3)


def test_summary_adds_up_the_bits_and_weighs_the_rates_by_replies() -> None:
    first = round_row(1, RECORD, None)
    second = round_row(
        2, {**RECORD, "R": 1200, "uplink_bits": 400, "replies": 1, "bits_per_parameter": 1.0}, None
    )
    summary = summarize([first, second], 100)
    assert summary["R"] == 1200
    assert summary["R_with_overhead"] == 1200 + 160
    assert summary["downlink_bits"] == 12_800
    assert summary["bits_per_parameter"] == pytest.approx((2 * 4.0 + 1 * 1.0) / 3)
    assert summary["times_smaller_than_float32"] == pytest.approx(32 / 3)


def test_summary_of_a_run_without_rounds_knows_nothing() -> None:
    summary = summarize([], None)
    assert summary["accuracy"] is None and summary["bits_per_parameter"] is None
    assert summary["R"] == 0
    assert "not evaluated" in format_table(summary)


def test_table_tells_of_replies_only_when_some_are_missing() -> None:
    row = round_row(1, RECORD, None)
    assert "replies" not in format_table(summarize([row], 10))
    row["lost"] = 1
    assert format_table(summarize([row], 10)).endswith("2 good, 0 failed, 1 lost")


def test_run_folder_is_readable_at_every_moment(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", Settings())
    config = json.loads((folder.path / "config.json").read_text())
    assert config["run_config"] == Settings().as_run_config()
    folder.add_round(round_row(0, None, Score(2.3, 0.1)))
    folder.add_round(round_row(1, RECORD, Score(0.5, 0.9)))
    lines = (folder.path / "rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["R"] == 800
    summary = folder.finish({"weight": np.ones(3, np.float32)}, 100)
    assert summary == json.loads((folder.path / "summary.json").read_text())
    assert summary["status"] == "completed"
    with np.load(folder.path / "model.npz") as model:
        np.testing.assert_array_equal(model["weight"], np.ones(3, np.float32))


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path, Settings())
    folder.add_round(round_row(0, None, None))
    folder.add_round(round_row(1, RECORD, Score(0.5, 0.75)))
    folder.finish({}, 100)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("R")] == [(0, 0.0), (1, 800.0)]
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(1, 0.75)]


def test_a_folder_that_holds_a_run_is_not_written_to(tmp_path: Path) -> None:
    RunFolder(tmp_path, Settings())
    with pytest.raises(ConfigError, match="run-dir must not hold a run already"):
        RunFolder(tmp_path, Settings())
    with pytest.raises(ConfigError):
        check_is_unused(tmp_path)


def test_a_failed_run_says_why_in_its_summary(tmp_path: Path) -> None:
    summary = RunFolder(tmp_path, Settings()).fail("the reason", None)
    assert (summary["status"], summary["error"]) == ("failed", "the reason")
    assert not (tmp_path / "model.npz").exists()


def test_default_run_dir_is_new_every_time(tmp_path: Path) -> None:
    first, second = default_run_dir(tmp_path), default_run_dir(tmp_path)
    assert first.parent == second.parent == tmp_path / "runs"
    assert first != second
