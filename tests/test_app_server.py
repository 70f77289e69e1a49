"""The whole app in one process: every kind of run trains, repeats itself and leaves its files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import FedAdam
from localgrid import LocalGrid
from test_app_data import write_parquet

from co3_flower import ConfigError, PayloadError
from co3_flower.nodes import RoundError
from sim import client_app, server_app
from sim.outputs import ROUND_KEYS
from sim.settings import STRATEGIES, Settings
from sim.task import Score

NUM_CLIENTS = 3


class TestRun:
    """One run of the app on a LocalGrid."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        tamper: Any = None,
        nodes: list[dict[str, Any]] | None = None,
        **run_config: Any,
    ) -> None:
        run_config = {key.replace("_", "-"): value for key, value in run_config.items()}
        defaults = {"num-server-rounds": 2, "num-clients": NUM_CLIENTS, "run-dir": str(folder)}
        settings = Settings.from_run_config({**defaults, **run_config})
        shares = [{"partition-id": i, "num-partitions": NUM_CLIENTS} for i in range(NUM_CLIENTS)]
        self.grid = LocalGrid(
            client_app.app,
            NUM_CLIENTS,
            node_configs=nodes or shares,
            run_config=settings.as_run_config(),
            shuffle_seed=1,
            tamper=tamper,
        )
        self.folder = folder
        self.context = Context(
            run_id=1,
            node_id=1,
            node_config={},
            state=RecordDict(),
            run_config=settings.as_run_config(),
        )

    def start(self) -> dict[str, Any]:
        server_app.main(self.grid, self.context)
        return self.summary()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def rows(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "rounds.jsonl").read_text().splitlines()
        ]

    def payloads(self) -> list[bytes]:
        return [reply.content["co3"]["payload"] for reply in self.grid.train_replies]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Train on one thread, as a simulated client does: many for so small a net only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "run_config",
    [
        {},
        {"payload": "update", "local_steps": 4},
        {"payload": "update", "local_epochs": 1, "weighting": "uniform"},
        {"compressor": "none"},
        {"compressor": "none", "payload": "update"},
        {"strategy": "fedavg"},
        {"strategy": "fedadam", "payload": "update"},
        {"partition": "dirichlet", "dirichlet_alpha": 0.3, "format": "e5m2", "scale": "unit"},
        {"buffers": "raw", "gamma": 0.0, "prior": "auto"},
        *({"strategy": name} for name in STRATEGIES if name not in ("", "fedavg")),
        {"max_update_norm": 1e-3, "reclip": True},
    ],
    ids=lambda run_config: (
        " ".join(f"{key}={value}" for key, value in run_config.items()) or "defaults"
    ),
)
def test_every_kind_of_run_is_completed_and_counts_its_payloads(
    tmp_path: Path, run_config: dict[str, Any]
) -> None:
    run = TestRun(tmp_path / "run", **run_config)
    summary = run.start()
    assert summary["status"] == "completed"
    assert summary["R"] == 8 * sum(len(payload) for payload in run.payloads())
    assert summary["replies"] == 2 * NUM_CLIENTS
    assert all(tuple(row) == ROUND_KEYS for row in run.rows())
    assert 0 < summary["accuracy"] < 1


def test_target_bits_are_met_in_every_round(tmp_path: Path) -> None:
    run = TestRun(tmp_path / "run", target_bits_per_parameter=0.3, coder="rans")
    run.start()
    rates = [row["bits_per_parameter"] for row in run.rows()[1:]]
    assert rates == pytest.approx([0.3] * len(rates), rel=0.02)


def test_uplink_budget_is_spent_and_not_exceeded(tmp_path: Path) -> None:
    # float digits gradients in e2m1 would take some 30 kB each
    run = TestRun(tmp_path / "run", uplink_budget_mb=0.02 * NUM_CLIENTS, coder="rans")
    total = run.start()["R"] / 8
    assert 0.95 * 20_000 * NUM_CLIENTS < total <= 20_000 * NUM_CLIENTS


def test_uplink_budget_below_zeros_ends_the_run_before_round_1(tmp_path: Path) -> None:
    run = TestRun(tmp_path / "run", uplink_budget_mb=0.0001)
    with pytest.raises(ConfigError, match="uplink budget must be at least"):
        run.start()
    assert run.payloads() == []


def test_clients_beyond_max_update_norm_are_refused(tmp_path: Path) -> None:
    run = TestRun(tmp_path / "run", max_update_norm=1e-3)
    with pytest.raises(RoundError, match=r"L2 norm of at most 0\.001"):
        run.start()
    assert "L2 norm of at most 0.001" in run.summary()["error"]


@pytest.mark.parametrize("compressor", ["co3", "none"])
def test_training_learns_the_digits(tmp_path: Path, compressor: str) -> None:
    run = TestRun(tmp_path / "run", num_server_rounds=40, compressor=compressor, lr=0.3)
    assert run.start()["last_accuracy"] > 0.9


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    runs = [TestRun(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))]
    for run in runs:
        run.start()
    first, second, third = (sorted(run.payloads()) for run in runs)
    assert first == second
    assert first != third


def test_residuals_in_files_give_the_same_run_as_in_the_context(tmp_path: Path) -> None:
    kept = TestRun(tmp_path / "kept")
    filed = TestRun(tmp_path / "filed", memory_dir=str(tmp_path / "memory"))
    kept.start()
    filed.start()
    assert sorted(kept.payloads()) == sorted(filed.payloads())
    # two generations of each: the one that the next round builds on, and the one before it
    assert len(list((tmp_path / "memory").iterdir())) == 2 * NUM_CLIENTS


def test_fraction_train_asks_only_some_of_the_clients(tmp_path: Path) -> None:
    summary = TestRun(tmp_path / "run", fraction_train=0.34, min_replies=1).start()
    assert summary["replies"] == 2  # one client in each of two rounds


def test_evaluation_happens_at_round_0_every_so_many_rounds_and_the_last(tmp_path: Path) -> None:
    run = TestRun(tmp_path / "run", num_server_rounds=5, eval_every=2)
    run.start()
    evaluated = [row["server_round"] for row in run.rows() if row["accuracy"] is not None]
    assert evaluated == [0, 2, 4, 5]


def test_model_file_holds_the_model_of_the_last_evaluation(tmp_path: Path) -> None:
    from sim.data import load_data
    from sim.models import build_model
    from sim.task import evaluate

    run = TestRun(tmp_path / "run")
    run.start()
    net = build_model("cnn")
    with np.load(tmp_path / "run" / "model.npz") as model:
        net.load_state_dict({name: torch.from_numpy(model[name]) for name in model.files})
    score = evaluate(net, load_data("digits").test, torch.device("cpu"))
    assert score == Score(run.rows()[-1]["loss"], run.rows()[-1]["accuracy"])


def test_a_bad_reply_is_a_failure_in_the_files_and_the_run_goes_on(tmp_path: Path) -> None:
    def spoil(node: int, reply: Message) -> Message:
        if node % NUM_CLIENTS == 0:
            reply.content["co3"]["payload"] = b"rubbish"
        return reply

    run = TestRun(tmp_path / "run", tamper=spoil)
    summary = run.start()
    assert (summary["replies"], summary["failures"]) == (4, 2)
    assert summary["R"] == 8 * sum(len(payload) for payload in run.payloads())


def test_a_failed_round_is_written_down_with_its_reason(tmp_path: Path) -> None:
    def spoil(node: int, reply: Message) -> Message:
        reply.content["co3"]["payload"] = b"rubbish"
        return reply

    run = TestRun(tmp_path / "run", tamper=spoil)
    with pytest.raises(RoundError):
        run.start()
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["error"].startswith(
        "round 1 must have at least 1 good replies, 3 clients failed"
    )
    assert "(3 clients)" in summary["error"]  # said once, not three times
    assert [row["failures"] for row in run.rows()] == [0, 3]
    assert run.rows()[-1]["R"] == 3 * 8 * len(b"rubbish")


def test_local_buffers_are_refused_because_the_ps_cannot_evaluate(tmp_path: Path) -> None:
    run = TestRun(tmp_path / "run", buffers="local")
    with pytest.raises(ConfigError, match="buffers"):
        run.start()
    assert run.summary()["status"] == "failed"


def test_more_clients_than_there_are_images_for_are_refused_before_any_training(
    tmp_path: Path,
) -> None:
    run = TestRun(tmp_path / "run", num_clients=719)
    with pytest.raises(ConfigError, match="must be at most 718 for 1437 images"):
        run.start()
    assert run.summary()["status"] == "failed"
    assert run.grid.sent == []


def test_client_without_a_partition_says_how_to_give_it_one(tmp_path: Path) -> None:
    run = TestRun(tmp_path / "run")
    for context in run.grid.contexts.values():
        del context.node_config["num-partitions"]
    with pytest.raises(RoundError, match="node-config must hold data-dir, or partition-id and"):
        run.start()


def test_inner_strategy_is_the_one_that_was_asked_for() -> None:
    settings = Settings.from_run_config({"strategy": "fedadam"})
    assert isinstance(server_app.make_strategy(settings, "x").inner, FedAdam)


@pytest.mark.parametrize(
    ("strategy", "num_clients", "fraction", "num_malicious"),
    [
        ("krum", 10, 1.0, 3),  # 10 >= 2 * 3 + 3
        ("krum", 10, 0.5, 1),  # 5 take part
        ("krum", 2, 1.0, 0),
        ("krum", 0, 1.0, 0),  # not known how many
        ("multikrum", 9, 1.0, 3),
        ("bulyan", 10, 1.0, 1),  # 10 >= 4 * 1 + 3
        ("bulyan", 11, 1.0, 2),
    ],
)
def test_robust_strategy_is_told_as_many_malicious_clients_as_it_can_bear(
    strategy: str, num_clients: int, fraction: float, num_malicious: int
) -> None:
    run_config = {"strategy": strategy, "num-clients": num_clients, "fraction-train": fraction}
    inner: Any = server_app.make_inner(Settings.from_run_config(run_config))
    assert inner.num_malicious_nodes == num_malicious
    if strategy == "multikrum":
        assert inner.num_nodes_to_select == num_clients - num_malicious


@pytest.mark.parametrize(("payload", "rate"), [("gradient", 0.7), ("update", 0.2)])
def test_qfedavg_is_told_the_step_that_the_weights_it_sees_have_made(
    payload: str, rate: float
) -> None:
    run_config: dict[str, Any] = {"strategy": "qfedavg", "payload": payload, "lr": 0.2}
    if payload == "gradient":
        run_config["server-lr"] = 0.7
    inner: Any = server_app.make_inner(Settings.from_run_config(run_config))
    assert inner.client_learning_rate == rate


def test_failure_reason_is_one_line() -> None:
    reason = server_app.failure_reason(PayloadError("payload must\n  be whole"))
    assert reason == "PayloadError: payload must be whole"


@pytest.fixture
def own_images(tmp_path: Path, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Node-configs of clients with images of one class each; the PS has a test set of all."""
    images = list(rng.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8))
    write_parquet(tmp_path / "server" / "test.parquet", images, [i % 4 for i in range(12)])
    for i in range(NUM_CLIENTS):
        write_parquet(tmp_path / f"own-{i}" / "a.parquet", images[4 * i : 4 * i + 4], [i] * 4)
    return [
        {"client-id": f"hospital-{i}", "data-dir": str(tmp_path / f"own-{i}")}
        for i in range(NUM_CLIENTS)
    ]


def test_clients_train_on_images_of_their_own(
    tmp_path: Path, own_images: list[dict[str, Any]]
) -> None:
    run = TestRun(tmp_path / "run", nodes=own_images, dataset=str(tmp_path / "server"))
    summary = run.start()
    assert summary["replies"] == 2 * NUM_CLIENTS
    assert [reply.content["metrics"]["num-examples"] for reply in run.grid.train_replies] == [4] * (
        2 * NUM_CLIENTS
    )
    ids = {reply.content["co3"]["client-id"] for reply in run.grid.train_replies}
    assert ids == {node["client-id"] for node in own_images}
    with np.load(run.folder / "model.npz") as model:
        assert model["classifier.weight"].shape[0] == 4  # the test set's classes, not a client's


def test_client_without_images_where_there_are_none_to_share_says_so(
    tmp_path: Path, own_images: list[dict[str, Any]]
) -> None:
    run = TestRun(tmp_path / "run", dataset=str(tmp_path / "server"))
    with pytest.raises(RoundError, match="dataset folder must hold train.* got '.*server'"):
        run.start()
