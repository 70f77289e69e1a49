"""`co3 compare`: the file, the stages' points, results as lines, ranking, table and figure."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from co3_flower import ConfigError
from co3_flower.compressors import COMPRESSORS, is_rival
from conftest import REPOSITORY
from sim.compare.figure import COLORS, MARKERS, draw_comparison, save_figure
from sim.compare.plan import Comparison, read_comparison
from sim.compare.results import (
    FILE_NAME,
    Result,
    add_result,
    best_by_label,
    rank_rivals,
    read_results,
    scores,
    target_accuracy,
)
from sim.compare.run import compare_dir
from sim.compare.table import format_comparison
from sim.settings import Settings

SHARED = """
num-clients = 2
num-server-rounds = 2
local-steps = 1
eval-every = 1
payload = "update"
"""
ENTRIES = """
[[entry]]
label = "float32"
compressor = "none"
[[entry]]
label = "CO3"
format = "e2m1"
[[entry]]
label = "fp16"
compressor = "fp16"
[[entry]]
label = "fp8"
compressor = "fp8"
"""
STAGES = """
[[stage]]
name = "search"
lr = [0.1, 0.2]
[[stage]]
name = "final"
seed = [0, 1]
entries = ["float32", "CO3"]
best = 1
num-server-rounds = 3
"""

STAGE = """
[[stage]]
name = "s"
lr = 1
"""


def read(folder: Path, text: str) -> Comparison:
    path = folder / "compare.toml"
    path.write_text(text)
    return read_comparison(path)


def result(label: str, compressor: str, **changes: Any) -> Result:
    """A result that reaches 40 % with 4,000 bits and 50 % with 8,000."""
    config = {
        "compressor": compressor,
        "lr": changes.pop("lr", 0.1),
        "seed": changes.pop("seed", 0),
    }
    fields: dict[str, Any] = {
        "stage": "search",
        "label": label,
        "config": config,
        "accuracy": 0.5,
        "loss": 1.0,
        "R": 8_000,
        "bits_per_parameter": 2.0,
        "encode_seconds": 0.002,
        "decode_seconds": 0.001,
        "curve": [(0, 0.1), (4_000, 0.4), (8_000, 0.5)],
    }
    return Result(**fields | changes)


def settle(values: Mapping[str, Any]) -> Settings:
    return Settings.from_run_config(values)


def test_first_stage_has_every_entry_at_every_step_size(tmp_path: Path) -> None:
    comparison = read(tmp_path, SHARED + ENTRIES + STAGES)
    points = comparison.points(comparison.stages[0], [], tmp_path, settle)
    found = [(p.values["label"], p.settings.lr, p.settings.seed) for p in points]
    labels = ["float32", "CO3", "fp16", "fp8"]
    assert found == [(label, lr, 0) for label in labels for lr in (0.1, 0.2)]
    assert len({p.folder for p in points}) == 8
    assert points[4].settings.compressor == "fp16"
    assert points[4].settings.num_server_rounds == 2


def test_later_stage_takes_the_best_rivals_at_their_best_step_size(tmp_path: Path) -> None:
    comparison = read(tmp_path, SHARED + ENTRIES + STAGES)
    results = [
        result("float32", "none", lr=0.1),
        result("float32", "none", lr=0.2, accuracy=0.6),
        result("CO3", "co3", lr=0.1),
        result("CO3", "co3", lr=0.2, accuracy=0.4),
        result("fp16", "fp16", lr=0.1, accuracy=0.7, curve=[(0, 0.1), (9_000, 0.7)]),
        result("fp16", "fp16", lr=0.2, accuracy=0.3),
        result("fp8", "fp8", lr=0.1, accuracy=0.3, curve=[(0, 0.1), (900, 0.3)]),
        result("fp8", "fp8", lr=0.2, accuracy=0.58, curve=[(0, 0.1), (900, 0.58)]),
    ]
    points = comparison.points(comparison.stages[1], results, tmp_path, settle)
    found = [(p.values["label"], p.settings.lr, p.settings.seed) for p in points]
    assert found == [
        *(("float32", 0.2, seed) for seed in (0, 1)),
        *(("CO3", 0.1, seed) for seed in (0, 1)),
        *(("fp8", 0.2, seed) for seed in (0, 1)),  # reaches 57 % with a tenth of fp16's bits
    ]
    assert all(p.settings.num_server_rounds == 3 for p in points)


def test_rivals_that_miss_the_target_come_behind_by_accuracy() -> None:
    found = scores(
        [
            result("float32", "none"),
            result("a", "topk", accuracy=0.45, curve=[(0, 0.1), (10, 0.45)]),
            result("b", "qsgd", accuracy=0.46, curve=[(0, 0.1), (10, 0.46)]),
            result("c", "fp16"),
            result("d", "fp16", accuracy=0.9, curve=[(0, 0.1), (7_000, 0.9)]),
        ]
    )
    assert target_accuracy(found, 0.95) == pytest.approx(0.475)
    assert [s.label for s in rank_rivals(found, 0.95)] == ["d", "b", "a"]


def test_rivals_are_ranked_by_their_better_strength_and_by_what_they_hold() -> None:
    found = scores(
        [
            result("float32", "none"),
            result("late, weak", "topk", curve=[(0, 0.1), (90_000, 0.5)]),
            result("early", "topk", curve=[(0, 0.1), (10, 0.5)]),
            result("middle", "stc", curve=[(0, 0.1), (20, 0.5)]),
            result("by chance", "sidco", accuracy=0.4, curve=[(0, 0.1), (5, 0.5), (10, 0.3)]),
            result("never", "qsgd", accuracy=0.45, curve=[(0, 0.1), (10, 0.45)]),
        ]
    )
    labels = [s.label for s in rank_rivals(found, 0.95)]
    assert labels == ["early", "middle", "by chance", "never"]


def test_scores_are_means_over_seeds_only() -> None:
    first, second, other = scores(
        [
            result("a", "topk", seed=0, accuracy=0.4),
            result("a", "topk", seed=1, accuracy=0.6, curve=[(0, 0.1), (16_000, 0.6)]),
            result("a", "topk", lr=0.2),
            result("b", "topk"),
        ]
    )
    assert (first.mean("accuracy"), first.spread) == (0.5, pytest.approx(0.02**0.5))
    assert first.megabytes_to(0.4) == (4_000 + 16_000) / 2 / 8e6
    assert first.megabytes_to(0.55) is None  # one of two
    assert second.spread is None
    assert first.accuracy_per_megabyte == pytest.approx(40 / 0.001)
    assert best_by_label([first, second, other])["a"] is first


def test_results_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    add_result(tmp_path, result("a", "topk"))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"stage": "sea')
    assert read_results(tmp_path) == [result("a", "topk")]
    add_result(tmp_path, result("b", "topk"))
    assert read_results(tmp_path) == [result("a", "topk"), result("b", "topk")]


def test_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"stage": "search"}\n')
    with pytest.raises(ConfigError, match="must hold results, got another line 1"):
        read_results(tmp_path)


def test_table_says_what_was_measured() -> None:
    found = scores(
        [
            result("float32", "none", R=80_000_000, curve=[(0, 0.1), (80_000_000, 0.5)]),
            result("a", "topk", seed=0, accuracy=0.48, R=8_000_000, curve=[(0, 0.1), (8, 0.48)]),
            result("a", "topk", seed=1, accuracy=0.50, R=8_000_000, curve=[(0, 0.1), (8, 0.40)]),
        ]
    )
    assert format_comparison(found, 0.95).splitlines()[2:] == [
        "| float32 | 0.1 | 50.00 % | 2.000 | 10.000 | 10.000 | 4 | 2.0 | 1.0 |",
        "| a | 0.1 | 49.00 ± 1.41 % | 2.000 | 1.000 | not reached | 39 | 2.0 | 1.0 |",
    ]
    assert "MB to 47.5%" in format_comparison(found, 0.95)
    piped = scores([result("a|b", "topk")])
    assert format_comparison(piped, 0.95).splitlines()[2].startswith("| a\\|b | ")


def test_figure_joins_the_strengths_of_a_compressor(tmp_path: Path) -> None:
    results = [
        result("float32", "none", R=64_000),
        result("topk 1 %", "topk", R=1_000),
        result("topk 10 %", "topk", R=6_000),
        result("CO3", "co3", R=500),
    ]
    figure = draw_comparison({"search": scores(results)})
    lines = {c.get_label(): c for c in figure.axes[0].containers}
    assert list(lines) == ["float32", "topk", "CO3"]
    assert len(lines["topk"][0].get_xdata()) == 2
    save_figure({"search": scores(results)}, tmp_path)
    assert (tmp_path / "accuracy-against-R.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "accuracy-against-R.svg").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SHARED + STAGES, "must have tables \\[\\[entry\\]\\], got none"),
        (SHARED + ENTRIES, "must have tables \\[\\[stage\\]\\], got none"),
        (SHARED + ENTRIES + '[[entry]]\nlabel = "CO3"\n' + STAGES, "must be a text of its own"),
        (
            SHARED + ENTRIES + '[[entry]]\nlabel = "x"\nfornat = 3\n' + STAGES,
            "did you mean 'format'",
        ),
        (
            SHARED + ENTRIES + '[[stage]]\nname = "s"\n',
            "lr must be a list of step sizes in the fir",
        ),
        (SHARED + ENTRIES + '[[stage]]\nname = "s"\nlr = [0.1]\nbest = 2\n', "best must count"),
        (SHARED + ENTRIES + '[[stage]]\nname = "s"\nlr = "x"\n', "lr must be a list of numbers"),
        (SHARED + ENTRIES + '[[stage]]\nname = "a/b"\nlr = 1\n', "name must be letters and digits"),
        (SHARED + ENTRIES + '[[stage]]\nname = "s"\nlr = 1\nentries = ["y"]\n', "got \\['y'\\]"),
        (SHARED + "entry = [1]\n" + STAGES, "must have tables \\[\\[entry\\]\\]"),
        (SHARED + "stage = [1]\n" + ENTRIES, "must have tables \\[\\[stage\\]\\]"),
        (
            SHARED + ENTRIES + STAGE + 'entries = "fp8"\n',
            "entries must be a list of labels, got 'fp",
        ),
        (
            SHARED + ENTRIES + STAGE + "entries = []\n",
            "entries must be a list of labels, got \\[\\]",
        ),
        (SHARED + ENTRIES + STAGE + 'entries = ["fp8", "fp8"]\n', "labels, each once"),
        (SHARED + ENTRIES + STAGE + "seed = []\n", "seed must be a list of at least one number"),
        (SHARED + ENTRIES + STAGE + "seed = [1, 1]\n", "seed must be a list of numbers, each once"),
        ("target-share = 2\n" + SHARED + ENTRIES + STAGES, "target-share must be in \\(0, 1\\]"),
        (SHARED + ENTRIES + STAGES.replace('"final"', '"search"'), "got one twice"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SHARED + ENTRIES + STAGES + "lr = [-1.0]\n", "lr must be above 0, got -1.0"),
        (SHARED + ENTRIES + STAGES.replace("[0, 1]", "[0.5]"), "seed must be an integer, got 0.5"),
        (SHARED + "lr = 0.3\n" + ENTRIES + STAGES, r"lr must be given in \[\[stage\]\] alone"),
        (SHARED + ENTRIES + "seed = 3\n" + STAGES, r"seed must be given in \[\[stage\]\] alone"),
    ],
)
def test_a_mistake_in_a_later_stage_is_named_before_the_first(
    tmp_path: Path, text: str, message: str
) -> None:
    comparison = read(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        compare_dir(comparison, tmp_path / "compare.toml", tmp_path)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("compare-*.toml")))
def test_shipped_files_are_sound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = read_comparison(path)
    for stage in comparison.stages:
        for values in comparison.entries.values():
            settle({**comparison.shared, **stage.values, **values})


def test_comparison_goes_on_where_it_was_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "compare.toml"
    path.write_text(SHARED + ENTRIES + STAGES)

    def compare(*more: str) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).parent / "co3", "compare", path, *more]
        command += ["-c", f"run-dir='{tmp_path / 'out'}'"]
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False
        )

    first = compare("--until", "search")
    assert first.returncode == 0, first.stderr
    lines = (tmp_path / "out" / FILE_NAME).read_text().splitlines()
    assert len(lines) == 8
    (tmp_path / "out" / FILE_NAME).write_text("\n".join(lines[:7]) + "\n" + lines[7][:50])
    second = compare()
    assert second.returncode == 0, second.stderr
    assert "stage search: 7 of 8 points are done" in second.stdout
    again = (tmp_path / "out" / FILE_NAME).read_text().splitlines()
    assert len(again) == 8 + 6
    key = ("accuracy", "R", "curve")
    assert [json.loads(again[7])[k] for k in key] == [json.loads(lines[7])[k] for k in key]
    assert "final\n" in (tmp_path / "out" / "table.md").read_text()
    path.write_text(path.read_text().replace("local-steps = 1", "local-steps = 2"))
    third = compare()
    assert third.returncode == 2
    assert "local-steps must be 1 as in" in third.stderr


def test_every_rival_has_a_look_of_its_own() -> None:
    rivals = [name for name in COMPRESSORS if is_rival(name)]
    assert len({*zip(COLORS, MARKERS, strict=True)}) >= len(rivals)
