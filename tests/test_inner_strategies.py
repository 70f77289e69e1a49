"""Flower's stock strategies inside CO3Strategy: the same result as on the same dense weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from localgrid import FIRST_NODE, LocalGrid
from tinyapp import LR, accuracy, arrays_of, client_data, initial_model, message_app, record_of

from co3_flower import CO3Strategy, CodecConfig, ConfigError, decode_update, encode_update
from co3_flower.nodes import RoundError

Arrays = dict[str, np.ndarray]

LEARNT = 0.65  # accuracy after twenty rounds; chance is 0.1

NUM_CLIENTS = 7  # Bulyan needs 4 * 1 + 3
BAD_NODE = FIRST_NODE + 2

# All that Flower has for weights. Steps are larger than the defaults: twenty rounds must do.
STOCK: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.9, server_momentum=0.5),
    "FedAdam": lambda: FedAdam(eta=0.05),
    "FedAdagrad": lambda: FedAdagrad(eta=0.1),
    "FedYogi": lambda: FedYogi(eta=0.05),
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": lambda: FedTrimmedAvg(beta=0.2),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=LR, q=0.2, train_loss_key="train-loss"),
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=4),
    "Bulyan": lambda: Bulyan(num_malicious_nodes=1),
}
ROBUST = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")


@pytest.fixture(autouse=True)
def no_forced_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower collects garbage after every array that QFedAvg and Bulyan take out: minutes here."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def make_strategy(inner: Strategy | None, **changes: Any) -> CO3Strategy:
    settings = {"num_clients": NUM_CLIENTS, "fraction_evaluate": 0.0} | changes
    return CO3Strategy(CodecConfig(), inner, **settings)


def run(
    strategy: CO3Strategy, num_rounds: int, model: Arrays | None = None, **grid_options: Any
) -> tuple[list[Arrays], LocalGrid]:
    """The models after 0, 1, 2, ... rounds."""
    grid = LocalGrid(message_app(), NUM_CLIENTS, **grid_options)
    start = record_of(initial_model() if model is None else model)
    result = strategy.start(grid, start, num_rounds=num_rounds)
    sent = [arrays_of(grid.sent[i * NUM_CLIENTS].content["arrays"]) for i in range(num_rounds)]
    return [*sent, arrays_of(result.arrays)], grid


def dense_weights(model: Arrays, reply: Message, step: float) -> Arrays:
    """What a client's payload says that its weights are."""
    update = decode_update(reply.content["co3"]["payload"], model)
    return {name: model[name] + np.float32(step) * value for name, value in update.items()}


@pytest.mark.parametrize("payload", ["update", "gradient"])
@pytest.mark.parametrize("name", STOCK)
def test_inner_strategy_does_what_it_does_with_the_same_dense_weights(
    name: str, payload: str
) -> None:
    server_lr = {"server_lr": LR} if payload == "gradient" else {}
    models, grid = run(make_strategy(STOCK[name](), payload=payload, **server_lr), 3)
    stock, arrays = STOCK[name](), record_of(models[0])
    for round_, (model, after) in enumerate(zip(models, models[1:], strict=False), start=1):
        sent = list(stock.configure_train(round_, arrays, ConfigRecord(), grid))
        replies = []
        for client in range(NUM_CLIENTS):
            reply = grid.train_replies[(round_ - 1) * NUM_CLIENTS + client]
            dense = dense_weights(model, reply, -LR if payload == "gradient" else 1.0)
            metrics = {
                "num-examples": len(client_data(client)[1]),
                "train-loss": reply.content["metrics"]["train-loss"],
            }
            content = RecordDict({"arrays": record_of(dense), "metrics": MetricRecord(metrics)})
            replies.append(Message(content, reply_to=sent[client]))
        result, _ = stock.aggregate_train(round_, replies)
        assert isinstance(result, ArrayRecord)
        arrays = record_of({k: v.astype(np.float32) for k, v in arrays_of(result).items()})
        for key, value in arrays_of(arrays).items():
            np.testing.assert_array_equal(after[key], value)


@pytest.mark.parametrize("name", STOCK)
def test_inner_strategy_learns_and_keeps_dtypes_and_buffers(name: str) -> None:
    models, _ = run(make_strategy(STOCK[name]()), 20, initial_model(buffers=True))
    assert accuracy(models[-1]) > LEARNT
    assert {key: value.dtype for key, value in models[-1].items()} == {
        key: value.dtype for key, value in initial_model(buffers=True).items()
    }
    assert (models[-1]["norm.running_var"] != models[0]["norm.running_var"]).any()


def poison(node: int, reply: Message) -> Message:
    """Let one client send a finite update far off the others."""
    if node == BAD_NODE:
        update = {name: np.full_like(value, 1) for name, value in initial_model().items()}
        update["weight"][::2] = -1
        config = CodecConfig(scale="absmax")
        reply.content["co3"]["payload"] = encode_update(update, None, config).payload
    return reply


def honest_range(models: list[Arrays], grid: LocalGrid) -> dict[str, tuple[Any, Any]]:
    """Least and largest value of each entry among the honest clients' weights of round 1."""
    dense = [
        dense_weights(models[0], reply, 1.0)
        for client, reply in enumerate(grid.train_replies[:NUM_CLIENTS])
        if FIRST_NODE + client != BAD_NODE
    ]
    return {
        name: (np.min([d[name] for d in dense], 0), np.max([d[name] for d in dense], 0))
        for name in dense[0]
    }


def is_within(model: Arrays, bounds: dict[str, tuple[Any, Any]]) -> bool:
    slack = 1e-6  # of a mean of float32 values of 0.1
    return all(
        ((model[n] >= low - slack) & (model[n] <= high + slack)).all()
        for n, (low, high) in bounds.items()
    )


def poison_hugely(node: int, reply: Message) -> Message:
    """Let one client send what only just is not refused: squares overflow float32."""
    if node == BAD_NODE:
        update = {name: np.full_like(value, 2.0**89) for name, value in initial_model().items()}
        config = CodecConfig(scale="absmax")
        reply.content["co3"]["payload"] = encode_update(update, None, config).payload
    return reply


@pytest.mark.parametrize("name", ROBUST)
def test_hugely_poisoned_client_leaves_a_robust_inner_among_the_honest(name: str) -> None:
    strategy = make_strategy(STOCK[name]())
    models, grid = run(strategy, 2, tamper=poison_hugely)
    assert strategy.failures == []
    assert is_within(models[1], honest_range(models, grid))


@pytest.mark.parametrize("name", ROBUST)
def test_poisoned_client_leaves_a_robust_inner_among_the_honest(name: str) -> None:
    models, grid = run(make_strategy(STOCK[name]()), 20, tamper=poison)
    assert is_within(models[1], honest_range(models, grid))
    assert accuracy(models[-1]) > LEARNT


@pytest.mark.parametrize("name", [None, *sorted(set(STOCK) - set(ROBUST))])
def test_poisoned_client_moves_the_model_where_nothing_defends_it(name: str | None) -> None:
    # No defence: the README says so, and this is the control of the test above.
    models, grid = run(make_strategy(STOCK[name]() if name else None), 5, tamper=poison)
    honest, _ = run(make_strategy(STOCK[name]() if name else None), 5)
    assert not is_within(models[1], honest_range(models, grid))
    assert accuracy(models[-1]) < accuracy(honest[-1]) - 0.2


@pytest.mark.parametrize("name", [None, "FedAvg", "FedAdam"])
def test_poisoned_client_is_refused_by_max_update_norm(name: str | None) -> None:
    inner = STOCK[name]() if name else None
    models, _ = run(make_strategy(inner, max_update_norm=2.0), 20, tamper=poison)
    assert accuracy(models[-1]) > LEARNT


def test_bulyan_with_too_few_replies_ends_the_run_by_name() -> None:
    strategy = make_strategy(Bulyan(num_malicious_nodes=2))
    with pytest.raises(RoundError, match=r"Bulyan must return .*, got None in round 1 of 7 repl"):
        run(strategy, 1)


def test_qfedavg_without_a_loss_ends_the_run_by_name() -> None:
    strategy = make_strategy(QFedAvg(client_learning_rate=LR, train_loss_key="no-such-loss"))
    with pytest.raises(RoundError, match="QFedAvg must aggregate round 1, .* 'no-such-loss'"):
        run(strategy, 1)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (FedXgbBagging(), "inner must aggregate weights, got FedXgbBagging"),
        (FedXgbCyclic(), "inner must aggregate weights, got FedXgbCyclic"),
        (FedAvg, "got the class flwr.serverapp.strategy.fedavg.FedAvg"),
        (
            "fedavg",
            "inner must be an instance of a strategy of .*, got an instance of builtins.str",
        ),
        (LegacyFedAvg(), "got an instance of flwr.*server.strategy.fedavg.FedAvg"),
        (CO3Strategy("none"), "inner must aggregate dense weights, got another CO3Strategy"),
    ],
    ids=["bagging", "cyclic", "a class", "a name", "legacy", "itself"],
)
def test_inner_that_cannot_work_is_refused(inner: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CO3Strategy("none", inner)
