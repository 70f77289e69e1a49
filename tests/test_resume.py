"""Resume: a training that is killed anywhere and goes on ends with the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedYogi,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from localgrid import LocalGrid, is_train
from test_app_server import TestRun, own_cache
from tinyapp import MixedApp, initial_model, record_of

from co3_flower import CO3Strategy, CodecConfig, ConfigError
from co3_flower.checkpoint import (
    read_checkpoint,
    restore_strategy,
    strategy_state,
    write_checkpoint,
)

__all__ = ["own_cache"]  # a fixture that every test here uses

NUM_CLIENTS, NUM_ROUNDS = 4, 4


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program gets to react."""


class Bomb:
    """Count steps of a training, and end it before the step of a number."""

    def __init__(self, fuse: int | None = None) -> None:
        self.fuse = fuse
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.fuse:
            raise Killed


class Grid(LocalGrid):
    """A step before each client trains, after its residual is kept, and after all have answered."""

    bomb = Bomb()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            if is_train(message):
                self.bomb.step()
            ids += super().push_messages([message])
            if is_train(message):
                self.bomb.step()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = super().pull_messages(message_ids)
        self.bomb.step()
        return found


def lose_some(node: int, reply: Message) -> Message | None:
    """Lose a third of the replies, the same ones in every try."""
    records = reply.content.config_records
    server_round = (
        records["co3"]["server-round"]
        if "co3" in records
        else records["fitres.metrics"]["co3.server-round"]
    )
    return None if (node + server_round) % 3 == 0 else reply


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the flushing to the system: these trainings survive a kill, not a loss of power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Training:
    """One training in a folder, which may be ended and begun again."""

    def __init__(self, folder: Path, inner: type[Strategy] | Any = None, **changes: Any) -> None:
        self.folder = folder
        self.make_inner = inner or (lambda: None)
        self.every = changes.pop("scale_refit_every", 1)
        self.changes = {"fraction_train": 0.75} | changes
        self.evaluated: list[int] = []

    def run(self, *, fuse: int | None = None, resume: bool = False) -> CO3Strategy:
        self.bomb = Bomb(fuse)
        grid = Grid(MixedApp(), NUM_CLIENTS, shuffle_seed=fuse, tamper=lose_some)
        grid.bomb = self.bomb
        strategy = CO3Strategy(
            CodecConfig(format="e2m1", gamma=0.9, scale_refit_every=self.every),
            self.make_inner(),
            num_clients=NUM_CLIENTS,
            fraction_evaluate=0.0,
            memory_dir=str(self.folder / "memory"),
            experiment_id="experiment",
            checkpoint_path=self.folder / "checkpoint.npz",
            **self.changes,
        )

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            self.bomb.step()
            self.evaluated.append(server_round)
            return MetricRecord({"round": server_round})

        initial = record_of(initial_model(buffers=True))
        self.result = strategy.start(
            grid, initial, num_rounds=NUM_ROUNDS, evaluate_fn=evaluate, resume=resume
        )
        return strategy

    def run_with_kills(self, fuses: Iterable[int]) -> CO3Strategy:
        """Run to the end, killed after so many steps of each try."""
        for fuse in fuses:
            try:
                return self.run(fuse=fuse, resume=(self.folder / "checkpoint.npz").exists())
            except Killed:
                continue
        return self.run(resume=(self.folder / "checkpoint.npz").exists())

    def model(self) -> list[bytes]:
        return [array.data for array in self.result.arrays.values()]


def books(strategy: CO3Strategy) -> Any:
    rows = [
        {key: value for key, value in row.items() if not key.endswith("_seconds")}
        for row in strategy.history
    ]
    failures = [str(failure) for failure in strategy.failures]
    return rows, failures, strategy.R, strategy.overhead_bits, strategy.downlink_bits


INNERS: dict[str, Any] = {
    "none": None,
    "fedavg": FedAvg,
    "fedavgm": lambda: FedAvgM(server_momentum=0.9),
    "fedadam": FedAdam,
    "fedadagrad": FedAdagrad,
    "fedyogi": FedYogi,
    "fedmedian": FedMedian,
    "multikrum": lambda: MultiKrum(num_malicious_nodes=0, num_nodes_to_select=2),
    "qfedavg": lambda: QFedAvg(client_learning_rate=0.5, train_loss_key="train-loss"),
}


@pytest.mark.parametrize("every", [1, 3])
def test_training_ends_the_same_wherever_it_was_killed(every: int, tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", scale_refit_every=every)
    expected = books(whole.run())
    assert any(row["lost"] for row in expected[0])
    num_steps = whole.bomb.steps
    assert num_steps > 7 * NUM_ROUNDS
    for fuse in range(1, num_steps + 1):
        killed = Training(tmp_path / f"fu{fuse:03d}"[-5:], scale_refit_every=every)
        assert books(killed.run_with_kills([fuse])) == expected, fuse
        assert killed.model() == whole.model(), fuse


@pytest.mark.parametrize("name", INNERS)
@pytest.mark.parametrize("changes", [{"fraction_train": 1.0}, {"uplink_budget_bytes": 3_500}])
def test_training_ends_the_same_after_many_kills(
    name: str, changes: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    if INNERS[name] is None:
        changes = changes | {"payload": "gradient", "server_lr": 0.5}
    whole = Training(tmp_path / "whole", INNERS[name], **changes)
    expected = books(whole.run())
    killed = Training(tmp_path / "ended", INNERS[name], **changes)
    assert books(killed.run_with_kills(rng.integers(8, 20, 4).tolist())) == expected
    assert killed.model() == whole.model()


def test_resumed_result_has_the_rounds_from_there_on(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(Killed):
        training.run(fuse=20)
    begun = read_checkpoint(tmp_path / "checkpoint.npz")["server_round"]
    assert 1 < begun < NUM_ROUNDS
    training.evaluated.clear()
    training.run(resume=True)
    rest = list(range(begun, NUM_ROUNDS + 1))
    assert training.evaluated == rest
    assert list(training.result.train_metrics_clientapp) == rest
    assert list(training.result.evaluate_metrics_serverapp) == rest


def test_crash_while_the_checkpoint_is_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.npz"
    write_checkpoint(path, {"server_round": 1})

    def crash(descriptor: int) -> None:
        raise Killed

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(Killed):
        write_checkpoint(path, {"server_round": 2})
    assert read_checkpoint(path)["server_round"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoint_gives_back_what_it_was_given(tmp_path: Path) -> None:
    content = {
        "numbers": [1, -2.5, float("inf"), True, None],
        "by id": {0: 1, "0": 2, "a": (1, [2])},
        "scalar": np.float64(0.1),
        "array": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "empty": np.zeros((0, 3), np.float16),
        "nested": {"m": {"w": np.array(7, np.int64)}},
    }
    write_checkpoint(tmp_path / "c.npz", content)
    found = read_checkpoint(tmp_path / "c.npz")
    assert found.pop("version") == 1
    for key in ("array", "empty"):
        np.testing.assert_array_equal(found.pop(key), content.pop(key), strict=True)
    m = found.pop("nested")["m"]["w"]
    assert (m.dtype, m.shape, m) == (np.int64, (), 7)
    del content["nested"]
    assert found == content
    assert type(found["scalar"]) is np.float64


@pytest.mark.parametrize("damage", [b"", b"PK", b"not a zip"], ids=["empty", "stub", "other"])
def test_damaged_checkpoint_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "c.npz"
    path.write_bytes(damage)
    with pytest.raises(ConfigError, match=r"checkpoint must be readable, got '.*c\.npz'"):
        read_checkpoint(path)
    with pytest.raises(ConfigError, match="checkpoint must exist"):
        read_checkpoint(tmp_path / "d.npz")


class Odd(FedAvg):
    """A strategy of a user's, with a state that nobody else can write down."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)


def test_inner_strategy_with_a_state_of_its_own_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inner must hold plain values .* got Odd.random"):
        CO3Strategy(CodecConfig(), Odd(), checkpoint_path=tmp_path / "c.npz")
    CO3Strategy(CodecConfig(), Odd())


def test_state_of_a_wrapped_strategy_is_restored() -> None:
    def wrapped() -> Any:
        return DifferentialPrivacyServerSideAdaptiveClipping(FedAdam(), 0.1, 4)

    old, new = wrapped(), wrapped()
    old.clipping_norm, old.strategy.m_t = 0.5, {"w": np.ones(3)}
    restore_strategy(new, strategy_state(old))
    assert new.clipping_norm == 0.5
    np.testing.assert_array_equal(new.strategy.m_t["w"], np.ones(3))
    with pytest.raises(
        ConfigError, match="inner must be the checkpoint's .*FedAdam, got .*FedYogi"
    ):
        restore_strategy(FedYogi(), strategy_state(FedAdam()))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"inner": FedAdam}, "inner must be None or not"),
        ({"initial": {"w": np.zeros(3, np.float32)}}, "initial arrays must have the names"),
        ({"num_rounds": 1}, "num_rounds must be at least"),
        ({"checkpoint_path": None}, "checkpoint_path must be set with resume"),
    ],
)
def test_resume_of_another_training_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    training = Training(tmp_path)
    with pytest.raises(Killed):
        training.run(fuse=20)
    path = changes.get("checkpoint_path", tmp_path / "checkpoint.npz")
    inner = changes["inner"]() if "inner" in changes else None
    strategy = CO3Strategy(CodecConfig(), inner, checkpoint_path=path)
    initial = record_of(changes.get("initial", initial_model(buffers=True)))
    with pytest.raises(ConfigError, match=message):
        strategy.start(
            LocalGrid(MixedApp(), NUM_CLIENTS),
            initial,
            num_rounds=changes.get("num_rounds", NUM_ROUNDS),
            resume=True,
        )


# The app


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


APP = {"num_server_rounds": 4, "eval_every": 2, "fraction_train": 0.67, "strategy": "fedavgm"}


def app_run(folder: Path, fuse: int | None = None, *, resume: bool = False) -> TestRun:
    bomb = Bomb(fuse)

    def tamper(node: int, reply: Message) -> Message:
        bomb.step()
        return reply

    memory_dir = str(folder / "memory")
    run = TestRun(folder, tamper, memory_dir=memory_dir, resume=resume, **APP)
    run.start()
    return run


def without_times(run: TestRun) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in run.rows()]


@pytest.mark.parametrize("fuse", [1, 2, 4, 7, 8])
def test_app_goes_on_as_if_nothing_had_happened(fuse: int, tmp_path: Path) -> None:
    whole = app_run(tmp_path / "whole")
    folder = tmp_path / "ended"
    with pytest.raises(Killed):
        app_run(folder, fuse)
    experiment_id = json.loads((folder / "config.json").read_text())["experiment_id"]
    resumed = app_run(folder, resume=True)
    assert (folder / "model.npz").read_bytes() == (whole.folder / "model.npz").read_bytes()
    assert without_times(resumed) == without_times(whole)
    assert resumed.summary()["experiment_id"] == experiment_id
    assert resumed.summary()["R"] == whole.summary()["R"]
    assert not (folder / "checkpoint.npz").exists()
    assert {path.name.partition(".")[0] for path in (folder / "memory").iterdir()} == {
        experiment_id
    }


def test_row_that_is_newer_than_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        app_run(tmp_path, 5)
    rounds = tmp_path / "rounds.jsonl"
    row = json.loads(rounds.read_text().splitlines()[-1])
    with rounds.open("a") as file:
        file.write(json.dumps({**row, "server_round": row["server_round"] + 1}) + "\n{half a li")
    assert [row["server_round"] for row in app_run(tmp_path, resume=True).rows()] == [0, 1, 2, 3, 4]


def test_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        app_run(tmp_path, 1)
    (tmp_path / "checkpoint.npz").unlink()
    assert [row["server_round"] for row in app_run(tmp_path, resume=True).rows()] == [0, 1, 2, 3, 4]


def test_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        app_run(tmp_path, 5)
    run = TestRun(tmp_path, resume=True, **APP | {"gamma": 0.5})
    with pytest.raises(ConfigError, match=r"settings must be those of .*: gamma = 0.9, got 0.5"):
        run.start()


def test_completed_or_missing_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run-dir must hold the run to go on with"):
        app_run(tmp_path, resume=True)
    app_run(tmp_path)
    with pytest.raises(ConfigError, match="run must not be completed to go on with it"):
        app_run(tmp_path, resume=True)


def test_run_that_is_still_going_on_is_not_resumed(tmp_path: Path) -> None:
    def tamper(node: int, reply: Message) -> Message:
        with pytest.raises(ConfigError, match="run must have ended to go on with it"):
            app_run(tmp_path, resume=True)
        return reply

    run = TestRun(tmp_path, tamper, memory_dir=str(tmp_path / "memory"), **APP)
    assert run.start()["status"] == "completed"
