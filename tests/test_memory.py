"""Memory: where a residual waits for the next round, in the context or in a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from co3_flower.errors import ConfigError
from co3_flower.memory import ContextStore, FileStore, residual_store
from co3_flower.records import TrainSettings

DIGEST, OTHER = b"12345678", b"87654321"
RESIDUAL = {
    "layer/1.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.array(0.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


def make_context(run_config: dict | None = None, **node_config: object) -> Context:
    return Context(
        run_id=9,
        node_id=77,
        node_config=dict(node_config),
        state=RecordDict(),
        run_config=run_config or {},
    )


def assert_same(got: dict | None, expected: dict) -> None:
    assert got is not None
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, strict=True)


@pytest.fixture(params=["context", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ContextStore | FileStore:
    if request.param == "context":
        return ContextStore(make_context())
    return FileStore(tmp_path / "memory", "experiment", 3)


def test_store_is_empty_at_first(store: ContextStore) -> None:
    assert store.load(DIGEST) is None


def test_store_gives_back_what_it_was_given(store: ContextStore) -> None:
    store.save(RESIDUAL, 1, DIGEST)
    assert_same(store.load(DIGEST), RESIDUAL)


def test_store_keeps_the_last_round_only(store: ContextStore) -> None:
    store.save(RESIDUAL, 1, DIGEST)
    store.save({"bias": RESIDUAL["bias"]}, 2, DIGEST)
    assert_same(store.load(DIGEST), {"bias": RESIDUAL["bias"]})


def test_store_starts_from_zero_with_a_warning_when_the_layout_changed(
    store: ContextStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(RESIDUAL, 1, OTHER)
    assert store.load(DIGEST) is None
    assert "starts from zero" in caplog.text
    assert DIGEST.hex() in caplog.text and OTHER.hex() in caplog.text


def test_context_holds_the_documented_records() -> None:
    context = make_context()
    ContextStore(context).save(RESIDUAL, 4, DIGEST)
    assert list(context.state["co3.residual"]) == list(RESIDUAL)
    assert dict(context.state["co3.state"]) == {"server-round": 4, "digest": DIGEST}


def test_residual_lies_in_the_context_by_default() -> None:
    assert isinstance(residual_store(make_context(), TrainSettings(server_round=1)), ContextStore)


def test_residual_lies_in_a_file_when_the_server_names_a_directory(tmp_path: Path) -> None:
    settings = TrainSettings(server_round=1, memory_dir=str(tmp_path), experiment_id="exp")
    store = residual_store(make_context(**{"partition-id": 2}), settings)
    assert isinstance(store, FileStore)
    assert store.path == tmp_path / "exp.2.residual"


def test_node_config_wins_over_the_server(tmp_path: Path) -> None:
    settings = TrainSettings(server_round=1, memory_dir="/elsewhere", experiment_id="exp")
    store = residual_store(make_context(**{"memory-dir": str(tmp_path)}), settings)
    assert isinstance(store, FileStore)
    assert store.path.parent == tmp_path


def test_file_carries_the_run_where_no_experiment_is_named(tmp_path: Path) -> None:
    context = make_context({"memory-dir": str(tmp_path)}, **{"partition-id": 2})
    store = residual_store(context, TrainSettings(server_round=1))
    assert isinstance(store, FileStore)
    assert store.path.name == "run-9.2.residual"


def test_files_of_different_clients_and_experiments_differ(tmp_path: Path) -> None:
    names = [("a", 3), ("a", "3"), ("b", 3), ("a/../b", 3), ("a", "../3")]
    paths = {FileStore(tmp_path, experiment, client).path for experiment, client in names}
    assert len(paths) == len(names)
    assert {path.parent for path in paths} == {tmp_path}


def test_file_outlives_the_store(tmp_path: Path) -> None:
    FileStore(tmp_path, "exp", 3).save(RESIDUAL, 1, DIGEST)
    assert_same(FileStore(tmp_path, "exp", 3).load(DIGEST), RESIDUAL)


def test_file_is_whole_when_a_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, "exp", 3)
    store.save(RESIDUAL, 1, DIGEST)

    def crash(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(ConfigError, match=r"memory-dir must be .*, got .* \(disk full\)"):
        store.save({"bias": RESIDUAL["bias"]}, 2, DIGEST)
    assert_same(store.load(DIGEST), RESIDUAL)
    assert list(tmp_path.iterdir()) == [store.path]


@pytest.mark.parametrize("keep", [0, 10, 100, -1], ids=["empty", "stub", "half", "last byte"])
def test_corrupted_file_is_named_and_set_aside(
    tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, "exp", 3)
    store.save(RESIDUAL, 1, DIGEST)
    store.path.write_bytes(store.path.read_bytes()[:keep])
    assert store.load(DIGEST) is None
    assert store.path.name in caplog.text and "starts from zero" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [store.path.name + ".unusable"]


def test_flipped_bit_in_the_data_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, "exp", 3)
    store.save(RESIDUAL, 1, DIGEST)
    content = bytearray(store.path.read_bytes())
    position = content.index(RESIDUAL["layer/1.weight"].tobytes()) + 7
    content[position] ^= 1
    store.path.write_bytes(content)
    assert store.load(DIGEST) is None
    assert "cannot be read" in caplog.text


def test_file_of_another_layout_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, "exp", 3)
    store.save(RESIDUAL, 1, OTHER)
    assert store.load(DIGEST) is None
    assert "its layout digest must be" in caplog.text
    assert not store.path.exists()
    store.save(RESIDUAL, 2, DIGEST)
    assert_same(store.load(DIGEST), RESIDUAL)


def test_file_of_a_later_version_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, "exp", 3)
    with monkeypatch.context() as patch:
        patch.setattr("co3_flower.memory.FILE_VERSION", 2)
        store.save(RESIDUAL, 1, DIGEST)
    assert store.load(DIGEST) is None
    assert "version must be 1, got 2" in caplog.text
