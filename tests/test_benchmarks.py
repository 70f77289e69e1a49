"""Each benchmark's --quick mode runs and appends one JSON line with what it promises.

Nothing is said of how long anything takes.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Case, measure
from benchmarks.peak import is_available
from benchmarks.report import format_table

TIMING_KEYS = {
    "section",
    "name",
    "num_items",
    "repeats",
    "median_seconds",
    "q1_seconds",
    "q3_seconds",
    "best_seconds",
    "million_per_second",
    "bits_per_parameter",
    "times_product",
}
TARGET_KEYS = {"what", "sign", "reach", "unit", "got", "reached"}
MEMORY_BENCHMARKS = ("encode_memory", "server_memory")
EXPECTED_CASES = {
    "quantize": {"co3 quantize", "memcpy", "NumPy searchsorted, uint8", "ml_dtypes float4_e2m1fn"},
    "fit": {"co3 fit_gennorm", "memcpy", "scipy.stats.gennorm.fit (2 tensors)"},
    "coder": {
        "co3 Huffman",
        "constriction ANS, table per tensor",
        "constriction Huffman, sample",
        "bitarray Huffman, sample",
        "zstd -1",
        "zstd 1",
        "zstd 19",
        "zlib 6",
    },
    "roundtrip": {"co3", "co3, 2 threads", "memcpy", "NumPy + zstd -1", "NumPy + zlib 6"},
}


def run_quick(name: str, folder: Path) -> dict[str, Any]:
    """Run a benchmark on tiny data and return its JSON line."""
    if name in MEMORY_BENCHMARKS and not is_available():
        pytest.skip("the peak of a process can be set back on Linux only")
    output = folder / "results.jsonl"
    importlib.import_module(f"benchmarks.{name}").main(["--quick", "--output", str(output)])
    (line,) = output.read_text(encoding="utf-8").splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


def names_of(rows: list[dict[str, Any]]) -> set[str]:
    return {row["name"] for row in rows if "name" in row}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_mode_appends_one_json_line_with_environment_rows_and_targets(
    name: str, tmp_path: Path
) -> None:
    result = run_quick(name, tmp_path)
    assert result["benchmark"] == name
    assert {"cpu", "load", "python", "packages", "libzstd"} <= set(result["environment"])
    assert result["rows"]
    for target in result["targets"]:
        assert set(target) == TARGET_KEYS
        assert target["got"] is not None
        assert target["reached"] is None  # tiny data are not judged
    for row in result["rows"]:
        if "times_product" in row:
            assert set(row) >= TIMING_KEYS
            assert 0 < row["best_seconds"] <= row["median_seconds"]
    if name in EXPECTED_CASES:
        assert EXPECTED_CASES[name] <= names_of(result["rows"])


def test_cases_are_timed_in_turn() -> None:
    calls: list[str] = []
    cases = [Case(name, lambda name=name: calls.append(name), 1) for name in "ab"]
    timings = measure(cases, 2)
    assert "".join(calls) == "ab" + "ab" + "ba"
    assert [len(timing.seconds) for timing in timings] == [2, 2]


def test_slow_case_sits_out_the_later_repetitions() -> None:
    calls: list[str] = []
    cases = [
        Case("fast", lambda: calls.append("f"), 1),
        Case("slow", lambda: calls.append("s"), 1, max_repeats=1),
    ]
    _, slow = measure(cases, 3)
    assert calls.count("s") == 1
    assert len(slow.seconds) == 1


def test_times_compare_equal_numbers_of_items() -> None:
    product, rival = measure([Case("a", list, 100), Case("b", list, 10)], 1)
    product.seconds[:], rival.seconds[:] = [1.0, 2.0], [1.0, 2.0]
    assert rival.times(product) == 10.0


def test_table_aligns_its_columns() -> None:
    table = format_table(["", "x"], [["long name", "1"], ["b", "10"]])
    assert table.splitlines() == ["             x", "long name    1", "b           10"]


@pytest.mark.engine
def test_many_clients_are_run_and_watched(tmp_path: Path) -> None:
    (row,) = run_quick("many_clients", tmp_path)["rows"]
    assert (row["clients"], row["a round"], row["rounds"]) == (2, 1, 3)
    assert 0 < row["s a round"] < row["s before round 2"]
    assert 50 < row["training process MiB"] < row["all processes MiB"]
    assert row["driver MiB"] > 50
    assert 1 <= row["clients with files"] <= 2
    assert row["files MiB"] > 0.3


def test_gpu_benchmark_says_that_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "results.jsonl"
    module = importlib.import_module("benchmarks.gpu")
    assert module.main(["--quick", "--output", str(output)]) == 0
    assert capsys.readouterr().out == "no GPU to measure: torch sees no GPU; nothing was done\n"
    assert not output.exists()


def test_gpu_benchmark_measures_the_device_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "results.jsonl"
    module = importlib.import_module("benchmarks.gpu")
    monkeypatch.setattr(module, "STREAMS", (2, 255))
    arguments = ["--quick", "--repeats", "1", "--num-streams", "255", "--device", "cpu"]
    assert module.main([*arguments, "--output", str(output)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["environment"]["device"] == "cpu"
    names = [row[""] for row in result["rows"] if "" in row]
    assert names == [
        "co3 on the device", "memcpy on the device", "cast to float8", "co3 with numba",
        "co3 on the device", "co3 with numba",
    ]  # fmt: skip
    few, many, _ = [row for row in result["rows"] if "streams" in row]
    assert 0 < many["more than with 2"] < 0.1
    assert many["bits/parameter"] > few["bits/parameter"]
