"""Memory: what a client keeps between rounds, in the context or in files, and what it recalls."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from co3_flower.errors import ConfigError
from co3_flower.memory import (
    ClientMemory,
    ContextStore,
    FileStore,
    Origin,
    Recalled,
    client_store,
)
from co3_flower.records import TrainSettings

ORIGIN = Origin(b"12345678", "e2m1", 0.9)
RESIDUAL = {
    "layer/1.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.array(0.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}
Store = ContextStore | FileStore


def make_context(run_config: dict | None = None, **node_config: object) -> Context:
    return Context(
        run_id=9,
        node_id=77,
        node_config=dict(node_config),
        state=RecordDict(),
        run_config=run_config or {},
    )


def residual_of(server_round: int) -> dict[str, np.ndarray]:
    return {name: value + np.float32(server_round) for name, value in RESIDUAL.items()}


def payload_of(server_round: int) -> bytes:
    return b"payload %d" % server_round


def play(
    store: Store, server_round: int, used_round: int | None = None, origin: Origin = ORIGIN
) -> Recalled:
    """One round of a client: recall, then keep this round's residual and payload."""
    memory = ClientMemory(store, origin, server_round, used_round)
    recalled = memory.recall()
    memory.save(residual_of(server_round), payload_of(server_round))
    return recalled


def recall(
    store: Store, server_round: int, used_round: int | None = None, origin: Origin = ORIGIN
) -> Recalled:
    return ClientMemory(store, origin, server_round, used_round).recall()


def assert_recalls(recalled: Recalled, server_round: int, *, unused: bool = False) -> None:
    assert recalled.residual is not None
    expected = residual_of(server_round)
    assert list(recalled.residual) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(recalled.residual[name], value, strict=True)
    assert recalled.unused_payload == (payload_of(server_round) if unused else None)


@pytest.fixture(params=["context", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "context":
        return ContextStore(make_context())
    return FileStore(tmp_path / "memory", "experiment", 3)


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, "exp", 3)


def test_memory_is_empty_at_first(store: Store) -> None:
    assert recall(store, 1, 0) == Recalled()


def test_residual_of_a_used_round_comes_back_alone(store: Store) -> None:
    play(store, 1, 0)
    assert_recalls(recall(store, 2, 1), 1)


def test_payload_of_an_unused_round_comes_back_too(store: Store) -> None:
    play(store, 1, 0)
    assert_recalls(play(store, 2, 0), 1, unused=True)
    assert_recalls(recall(store, 3, 0), 2, unused=True)


def test_last_update_counts_as_used_where_the_server_does_not_say(store: Store) -> None:
    play(store, 1)
    assert_recalls(recall(store, 2), 1)


def test_rounds_may_be_skipped(store: Store) -> None:
    play(store, 2, 0)
    assert_recalls(play(store, 7, 2), 2)
    assert_recalls(recall(store, 9, 2), 7, unused=True)


def test_scales_hold_until_the_next_fit_and_come_back_for_a_repeated_round(store: Store) -> None:
    def play(server_round: int) -> dict[str, float] | None:
        memory = ClientMemory(store, ORIGIN, server_round, None, scale_refit_every=3)
        recalled = memory.recall().scales
        scales = recalled or {"w": server_round + float(np.float32(0.1)), "b": 0.5}
        memory.save(residual_of(server_round), payload_of(server_round), scales)
        return recalled

    first, fourth = ({"w": n + float(np.float32(0.1)), "b": 0.5} for n in (1, 4))
    assert [play(n) for n in (1, 2, 3, 4, 5)] == [None, first, first, None, fourth]
    assert [play(n) for n in (5, 5, 6)] == [fourth, fourth, fourth]
    assert play(9) is None


def test_file_without_scales_is_read(files: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = json.dumps

    def without_scales(header: dict[str, object]) -> str:
        return dumps({key: value for key, value in header.items() if key != "scales"})

    with monkeypatch.context() as patch:
        patch.setattr("co3_flower.memory.json.dumps", without_scales)
        play(files, 1, 0)
    assert_recalls(ClientMemory(files, ORIGIN, 2, 1, scale_refit_every=9).recall(), 1)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_repeated_round_recalls_what_it_recalled_before(store: Store, used: int) -> None:
    play(store, 1, 0)
    play(store, 2, min(used, 1))
    first = play(store, 3, used)
    for _ in range(3):
        again = play(store, 3, used)
        assert_recalls(again, 2, unused=first.unused_payload is not None)
    assert_recalls(recall(store, 4, 3), 3)


def test_repeated_first_round_recalls_nothing(store: Store) -> None:
    play(store, 4, 0)
    assert play(store, 4, 0) == Recalled()
    assert_recalls(recall(store, 5, 4), 4)


def test_earlier_round_recalls_what_the_last_one_did(store: Store) -> None:
    for server_round in range(1, 6):
        play(store, server_round, server_round - 1)
    assert_recalls(play(store, 3, 2), 4)
    assert_recalls(recall(store, 4, 3), 3)


def test_new_run_starts_from_zero(store: Store) -> None:
    for server_round in (1, 2, 3):
        play(store, server_round, server_round - 1)
    assert play(store, 1, 0) == Recalled()
    assert_recalls(play(store, 2, 1), 1)
    assert_recalls(play(store, 2, 1), 1)


def test_residual_older_than_what_was_used_is_set_aside(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    play(store, 1, 0)
    assert recall(store, 5, 3) == Recalled()
    assert "its round must be 3 or later" in caplog.text and "got round 1" in caplog.text
    assert store.generations() == []


def test_missing_residual_is_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert recall(store, 5, 4) == Recalled()
    assert "residual of round 4 is not there; error feedback starts from zero" in caplog.text


@pytest.mark.parametrize(
    "other, said",
    [
        (Origin(b"87654321", "e2m1", 0.9), b"12345678".hex()),
        (Origin(b"12345678", "e5m2", 0.9), "its format must be 'e2m1', got 'e5m2'"),
        (Origin(b"12345678", "e2m1", 0.5), "its gamma must be 0.9, got 0.5"),
    ],
    ids=["layout", "format", "gamma"],
)
def test_residual_of_another_origin_is_named_and_set_aside(
    store: Store, other: Origin, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    play(store, 1, 0, other)
    assert play(store, 2, 1) == Recalled()
    assert said in caplog.text and "starts from zero" in caplog.text
    assert_recalls(recall(store, 3, 2), 2)
    if isinstance(store, FileStore):
        assert len(list(store.paths[0].parent.glob("*.unusable"))) == 1


def test_repeated_round_without_its_base_starts_from_zero(
    files: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    play(files, 1, 0)
    play(files, 2, 1)
    files.paths[0].unlink()  # round 1
    assert recall(files, 2, 1) == Recalled()
    assert "it must be what round 2 was built on" in caplog.text


def test_context_holds_the_documented_records() -> None:
    context = make_context()
    play(ContextStore(context), 4, 0)
    assert list(context.state["co3.residual"]) == list(RESIDUAL)
    assert dict(context.state["co3.state"]) == {
        "sequence": 1,
        "server-round": 4,
        "base": 0,
        "base-unused": False,
        "digest": ORIGIN.digest,
        "format": "e2m1",
        "gamma": 0.9,
        "payload": payload_of(4),
    }


def test_residual_lies_in_the_context_by_default() -> None:
    assert isinstance(client_store(make_context(), TrainSettings(server_round=1)), ContextStore)


def test_residual_lies_in_files_when_the_server_names_a_directory(tmp_path: Path) -> None:
    settings = TrainSettings(server_round=1, memory_dir=str(tmp_path), experiment_id="exp")
    store = client_store(make_context(**{"partition-id": 2}), settings)
    assert isinstance(store, FileStore)
    assert store.paths == (tmp_path / "exp.2.a.residual", tmp_path / "exp.2.b.residual")


def test_node_config_wins_over_the_server(tmp_path: Path) -> None:
    settings = TrainSettings(server_round=1, memory_dir="/elsewhere", experiment_id="exp")
    store = client_store(make_context(**{"memory-dir": str(tmp_path)}), settings)
    assert isinstance(store, FileStore)
    assert store.paths[0].parent == tmp_path


def test_files_carry_the_run_where_no_experiment_is_named(tmp_path: Path) -> None:
    context = make_context({"memory-dir": str(tmp_path)}, **{"partition-id": 2})
    store = client_store(context, TrainSettings(server_round=1))
    assert isinstance(store, FileStore)
    assert store.paths[0].name == "run-9.2.a.residual"


def test_files_of_different_clients_and_experiments_differ(tmp_path: Path) -> None:
    names = [("a", 3), ("a", "3"), ("b", 3), ("a/../b", 3), ("a", "../3")]
    paths = {p for experiment, c in names for p in FileStore(tmp_path, experiment, c).paths}
    assert len(paths) == 2 * len(names)
    assert {path.parent for path in paths} == {tmp_path}


def test_files_outlive_the_store(tmp_path: Path) -> None:
    play(FileStore(tmp_path, "exp", 3), 1, 0)
    assert_recalls(recall(FileStore(tmp_path, "exp", 3), 2, 1), 1)


def test_files_are_two_at_most(files: FileStore, tmp_path: Path) -> None:
    for server_round in range(1, 8):
        play(files, server_round, server_round - 1)
    assert sorted(tmp_path.iterdir()) == sorted(files.paths)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_memory_is_whole_when_a_write_fails(
    files: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    for server_round in range(1, rounds + 1):
        play(files, server_round, server_round - 1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def crash(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(ConfigError, match=r"memory-dir must be .*, got .* \(disk full\)"):
        play(files, rounds + 1, rounds)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_recalls(recall(files, rounds + 1, rounds), rounds)


@pytest.mark.parametrize("keep", [0, 3, 10, 100, -1], ids=["empty", "magic", "stub", "half", "end"])
def test_corrupted_file_is_named_and_set_aside(
    files: FileStore, tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    play(files, 1, 0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert recall(files, 2, 1) == Recalled()
    assert path.name in caplog.text and "starts from zero" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [path.name + ".unusable"]


def test_base_is_not_used_in_place_of_a_corrupted_last_file(files: FileStore) -> None:
    play(files, 1, 0)
    play(files, 2, 1)
    files.paths[1].write_bytes(b"")
    assert recall(files, 3, 2) == Recalled()


def test_base_is_used_where_the_round_of_the_corrupted_file_was_not(files: FileStore) -> None:
    play(files, 1, 0)
    play(files, 2, 1)
    files.paths[1].write_bytes(b"")
    assert_recalls(recall(files, 3, 1), 1)


def test_every_flipped_byte_is_noticed(files: FileStore, tmp_path: Path) -> None:
    play(files, 1, 0)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert recall(files, 2, 1) == Recalled(), position


def test_file_of_another_version_is_set_aside(
    files: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("co3_flower.memory.FILE_VERSION", 3)
        play(files, 1, 0)
    assert recall(files, 2, 1) == Recalled()
    assert "version must be 2, got 3" in caplog.text
