"""Acknowledged updates: what the server did not use comes back, to the last bit, in every case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from localgrid import FIRST_NODE, LocalGrid, is_train
from replay import check_nothing_is_lost
from tinyapp import record_of

import naive
from co3_flower import (
    CO3NumPyClient,
    CO3Strategy,
    CodecConfig,
    PayloadError,
    co3_mod,
    decode_update,
    encode_update,
)
from co3_flower.memory import FileStore, client_store
from co3_flower.records import TrainSettings

Arrays = dict[str, np.ndarray]

SHAPES = {"weight": (40, 50), "bias": (7,), "norm.running_mean": (30,), "scalar": ()}
BUFFER = "norm.running_mean"  # its gamma is 1, whatever the setting
NUM_CLIENTS, NUM_ROUNDS, MOST_LOST = 6, 12, 2
NODES = [FIRST_NODE + client for client in range(NUM_CLIENTS)]


def initial_model() -> Arrays:
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def draw_update(client: int, server_round: int) -> Arrays:
    """What a client wants to send in a round; its size moves by a factor of 30 between rounds."""
    rng = np.random.default_rng((client, server_round))
    spread = 10.0 ** rng.uniform(-3, -1.5)
    return {
        name: (rng.standard_normal(shape) * spread).astype(np.float32)
        for name, shape in SHAPES.items()
    }


class Client(CO3NumPyClient):
    def local_update(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        update = draw_update(int(self.client_id), config["server-round"])
        return list(update.values()), 10, {}


def numpy_app() -> ClientApp:
    return ClientApp(client_fn=lambda context: Client(context).to_client())


def message_app() -> ClientApp:
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        update = draw_update(client, message.content["config"]["server-round"])
        buffer = message.content["arrays"][BUFFER].numpy() + update.pop(BUFFER)
        content = {
            "gradient": record_of(update),
            "arrays": ArrayRecord({BUFFER: Array(buffer)}),
            "metrics": MetricRecord({"num-examples": 10}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def payload_in(reply: Message) -> bytes:
    content = reply.content.config_records
    return (
        content["co3"]["payload"] if "co3" in content else content["fitres.metrics"]["co3.payload"]
    )


class Losses:
    """Lose replies by chance, and note what each client sent and what the server was given."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sent: dict[int, list[tuple[int, bytes, bool]]] = defaultdict(list)
        self.lost: dict[int, int] = defaultdict(int)

    def __call__(self, node: int, reply: Message) -> Message | None:
        records = reply.content.config_records
        server_round = (
            records["co3"]["server-round"]
            if "co3" in records
            else records["fitres.metrics"]["co3.server-round"]
        )
        is_lost = self.lost[server_round] < MOST_LOST and self.rng.random() < 0.5
        self.lost[server_round] += is_lost
        self.sent[node].append((server_round, payload_in(reply), not is_lost))
        return None if is_lost else reply


def make_strategy(config: CodecConfig, **changes: Any) -> CO3Strategy:
    settings: dict[str, Any] = {
        "payload": "gradient",
        "server_lr": 0.1,
        "num_clients": NUM_CLIENTS,
        "fraction_train": 0.5,
        "fraction_evaluate": 0.0,
    }
    return CO3Strategy(config, **settings | changes)


def what_is_left(context: Context, settings: TrainSettings) -> Arrays:
    """Residual in the last generation of a client; a NumPyClient's has no names."""
    store = client_store(context, settings)
    found = store.read(store.generations()[0])
    assert found is not None
    return dict(zip(SHAPES, found[0].values(), strict=True))


@pytest.mark.parametrize("make_app", [numpy_app, message_app])
@pytest.mark.parametrize("where", ["context", "files"])
@pytest.mark.parametrize("gamma", [0.0, 0.6, 0.9, 1.0])
def test_nothing_is_lost_over_random_losses_and_skipped_rounds(
    make_app: Callable[[], ClientApp], where: str, gamma: float, tmp_path: Path
) -> None:
    config = CodecConfig(format="e2m1", gamma=gamma)
    losses = Losses(seed=int(10 * gamma))
    grid = LocalGrid(make_app(), NUM_CLIENTS, shuffle_seed=1, tamper=losses)
    memory_dir = str(tmp_path) if where == "files" else None
    strategy = make_strategy(config, memory_dir=memory_dir, experiment_id="exp")
    model = initial_model()
    result = strategy.start(grid, record_of(model), num_rounds=NUM_ROUNDS)
    assert sum(losses.lost.values()) > NUM_ROUNDS / 2
    settings = TrainSettings(server_round=1, memory_dir=memory_dir or "", experiment_id="exp")

    for node, sent in losses.sent.items():
        client = node - FIRST_NODE
        rounds = []
        for server_round, payload, used in sent:
            update = draw_update(client, server_round)
            if make_app is message_app:  # the buffer went there as a value and back
                before = model_before(grid, server_round)[BUFFER]
                update[BUFFER] = (before + update[BUFFER]) - before
            rounds.append((update, payload, used))
        residual = check_nothing_is_lost(rounds, replace(config, buffers=(BUFFER,)))
        kept = what_is_left(grid.contexts[node], settings)
        for name in SHAPES:
            assert kept[name].tobytes() == residual[name].tobytes()
    assert set(result.arrays) == set(SHAPES)


def model_before(grid: LocalGrid, server_round: int) -> Arrays:
    message = next(
        m for m in grid.sent if is_train(m) and m.content["config"]["server-round"] == server_round
    )
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


def used_rounds_told(grid: LocalGrid, server_round: int) -> dict[int, Any]:
    return {
        m.metadata.dst_node_id: m.content["config"].get("co3.used-round")
        for m in grid.sent
        if is_train(m) and m.content["config"]["server-round"] == server_round
    }


def test_each_client_is_told_the_last_round_it_was_used_in() -> None:
    def tamper(node: int, reply: Message) -> Message | None:
        server_round = reply.content["co3"]["server-round"]
        return None if (node, server_round) in ((NODES[0], 2), (NODES[1], 1)) else reply

    grid = LocalGrid(message_app(), NUM_CLIENTS, tamper=tamper)
    make_strategy(CodecConfig(), fraction_train=1.0).start(
        grid, record_of(initial_model()), num_rounds=4
    )
    assert set(used_rounds_told(grid, 1).values()) == {0}
    assert list(used_rounds_told(grid, 2).values()) == [1, 0, 1, 1, 1, 1]
    assert list(used_rounds_told(grid, 3).values()) == [1, 2, 2, 2, 2, 2]
    assert set(used_rounds_told(grid, 4).values()) == {3}


def test_clients_that_are_told_the_same_share_one_message() -> None:
    grid = LocalGrid(message_app(), NUM_CLIENTS)
    make_strategy(CodecConfig(), fraction_train=1.0).start(
        grid, record_of(initial_model()), num_rounds=2
    )
    contents = {id(m.content) for m in grid.sent if is_train(m)}
    assert len(contents) == 2  # one a round


def test_refused_update_is_sent_again() -> None:
    def tamper(node: int, reply: Message) -> Message:
        record = reply.content["co3"]
        if node == NODES[0] and record["server-round"] == 1:
            record["payload"] = record["payload"][:-1]
        return reply

    grid = LocalGrid(message_app(), NUM_CLIENTS, tamper=tamper)
    strategy = make_strategy(CodecConfig(), fraction_train=1.0)
    strategy.start(grid, record_of(initial_model()), num_rounds=2)
    assert [failure.node_id for failure in strategy.failures] == [NODES[0]]
    assert used_rounds_told(grid, 2)[NODES[0]] == 0


@pytest.mark.parametrize("make_app", [numpy_app, message_app])
def test_client_that_comes_back_at_another_node_is_known(
    make_app: Callable[[], ClientApp], tmp_path: Path
) -> None:

    class Moving(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            messages = list(messages)
            replies = super().send_and_receive(messages, timeout=timeout)
            if NODES[2] in self.contexts:
                for table in (self.contexts, self.apps):
                    table[5000] = table.pop(NODES[2])
                self.contexts[5000].state = RecordDict()  # as after a restart
            return replies

    grid = Moving(make_app(), NUM_CLIENTS)
    strategy = make_strategy(
        CodecConfig(), fraction_train=1.0, memory_dir=str(tmp_path), experiment_id="exp"
    )
    strategy.start(grid, record_of(initial_model()), num_rounds=3)
    assert used_rounds_told(grid, 2)[5000] == 1
    assert not strategy.failures
    last = FileStore(tmp_path, "exp", 2).generations()[0]
    assert (last.server_round, last.sequence, last.base_unused) == (3, 3, False)


def test_new_node_that_does_not_tell_its_client_is_told_nothing() -> None:
    silent = ClientApp()

    class Growing(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = super().send_and_receive(messages, timeout=timeout)
            if 5000 not in self.contexts:
                self.contexts[5000], self.apps[5000] = self.contexts[NODES[0]], silent
            return replies

    grid = Growing(message_app(), NUM_CLIENTS)
    strategy = make_strategy(CodecConfig(), fraction_train=1.0)
    strategy.start(grid, record_of(initial_model()), num_rounds=4)
    assert "co3.used-round" not in next(
        m.content["config"] for m in grid.sent if m.metadata.dst_node_id == 5000 and is_train(m)
    )
    assert {failure.node_id for failure in strategy.failures} == {5000}
    asked = [m for m in grid.sent if m.metadata.dst_node_id == 5000 and not is_train(m)]
    assert len(asked) == 3  # once, by each kind of message


# The codec's part


def test_unused_payload_joins_undecayed_bit_for_bit(small_update: Arrays) -> None:
    config = CodecConfig(format="e2m1", gamma=0.7)
    first = encode_update(small_update, None, config)
    decoded = decode_update(first.payload, small_update)
    again = encode_update(small_update, first.residual, config, unused_payload=first.payload)
    compensated = {
        name: (g + naive.carry(first.residual[name], 0.7, decoded[name])).astype(np.float32)
        for name, g in small_update.items()
    }
    expected = encode_update(compensated, None, config)
    assert again.payload == expected.payload
    for name in small_update:
        assert again.residual[name].tobytes() == expected.residual[name].tobytes()


def test_unused_payload_counts_in_a_limited_size_too(small_update: Arrays) -> None:
    config = CodecConfig(format="e2m1", gamma=0.7)
    first = encode_update(small_update, None, config)
    kept = encode_update(
        small_update, first.residual, config, max_payload_bytes=1, unused_payload=first.payload
    )
    decoded = decode_update(first.payload, small_update)
    for name, g in small_update.items():  # zeros went up: all of it is residual
        compensated = g + naive.carry(first.residual[name], 0.7, decoded[name])
        assert kept.residual[name].tobytes() == compensated.astype(np.float32).tobytes()


def test_unused_payload_without_a_residual_joins_alone(small_update: Arrays) -> None:
    config = CodecConfig()
    payload = encode_update(small_update, None, config).payload
    decoded = decode_update(payload, small_update)
    twice = {name: g + decoded[name] for name, g in small_update.items()}
    again = encode_update(small_update, None, config, unused_payload=payload)
    assert again.payload == encode_update(twice, None, config).payload


def test_raw_tensors_of_an_unused_payload_are_not_made_up_for(edge_update: Arrays) -> None:
    config = CodecConfig(raw=("heavy",))
    first = encode_update(edge_update, None, config)
    again = encode_update(edge_update, first.residual, config, unused_payload=first.payload)
    decoded = decode_update(again.payload, edge_update)
    for name in ("heavy", "counter", "indices", "mask"):
        np.testing.assert_array_equal(decoded[name], edge_update[name])


def test_unused_payload_of_another_layout_is_refused(small_update: Arrays) -> None:
    other = encode_update({"w": np.ones(3, np.float32)}, None, CodecConfig()).payload
    with pytest.raises(PayloadError):
        encode_update(small_update, None, CodecConfig(), unused_payload=other)
