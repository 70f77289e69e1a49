"""Every compressor through Flower: decoded at the server, acknowledged, the same in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from localgrid import FIRST_NODE, LocalGrid
from tinyapp import accuracy, arrays_of, initial_model, message_app, numpy_app, record_of

from co3_flower import CO3Strategy, ConfigError, co3_mod
from co3_flower.compressors import COMPRESSORS, make_compressor
from co3_flower.layout import Layout
from co3_flower.records import derive_seed

NAMES = tuple(COMPRESSORS)
RIVALS = tuple(name for name in NAMES if name not in ("co3", "none"))
FED_BACK = tuple(
    name
    for name in RIVALS
    if "residual/w" in COMPRESSORS[name].encode({"w": np.ones(64, np.float32)}, None, 0)[1]
)
NUM_CLIENTS = 4
SMALL_MODEL = {"countsketch": {"columns": 0.5, "k": 0.05}}  # 650 parameters: 13 columns are too few


def run(
    name: str, num_rounds: int, apps: Any = None, *, buffers: bool = False, **options: Any
) -> tuple[dict[str, np.ndarray], LocalGrid, CO3Strategy]:
    """Train softmax regression with a compressor on four clients."""
    compressor = make_compressor(name, SMALL_MODEL.get(name))
    strategy = CO3Strategy(compressor, num_clients=NUM_CLIENTS, fraction_evaluate=0.0, seed=3)
    grid = LocalGrid(message_app() if apps is None else apps, NUM_CLIENTS, **options)
    model = record_of(initial_model(buffers=buffers))
    result = strategy.start(grid, model, num_rounds=num_rounds)
    return arrays_of(result.arrays), grid, strategy


@pytest.mark.parametrize("name", NAMES)
def test_training_learns_and_every_payload_counts(name: str) -> None:
    model, grid, strategy = run(name, 30, buffers=True)
    assert accuracy(model) > 0.5
    assert strategy.failures == []
    payloads = [reply.content["co3"]["payload"] for reply in grid.train_replies]
    assert 8 * sum(map(len, payloads)) == strategy.R
    assert len(payloads) == 30 * NUM_CLIENTS


@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_of_client_and_any_order_give_the_same_model(name: str) -> None:
    first, _, strategy = run(name, 3, shuffle_seed=1)
    apps = [message_app(), numpy_app(), message_app(), numpy_app()]
    second, _, other = run(name, 3, apps, shuffle_seed=2)
    assert strategy.R == other.R
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key])


@pytest.mark.parametrize("name", RIVALS)
def test_model_moves_by_the_mean_of_what_payloads_decode_to(name: str) -> None:
    model, grid, strategy = run(name, 1)
    compressor, start = make_compressor(name, SMALL_MODEL.get(name)), initial_model()
    replies = sorted(grid.train_replies, key=lambda reply: reply.content["co3"]["client-id"])
    weights = [reply.content["metrics"]["num-examples"] for reply in replies]
    total: dict[str, np.ndarray] = {}
    for client, (reply, weight) in enumerate(zip(replies, weights, strict=True)):
        decoded = compressor.decode(
            reply.content["co3"]["payload"], start, derive_seed(3, 1, client)
        )
        for key, value in decoded.items():
            total[key] = total.get(key, 0) + value.astype(np.float64) * weight / sum(weights)
    if compressor.is_sketch:
        means = {key: value.astype(np.float32) for key, value in total.items()}
        total, _ = compressor.finish(means, {}, Layout.of(start))
    assert strategy.history[0]["replies"] == NUM_CLIENTS
    for key, value in start.items():
        np.testing.assert_allclose(model[key], value + total[key], atol=2e-6)


@pytest.mark.parametrize("name", FED_BACK)
def test_lost_reply_is_made_up_for(name: str) -> None:
    """With error feedback, what went up plus what is kept is the sum of what was to be sent."""
    compressor = COMPRESSORS[name]
    rng = np.random.default_rng(0)
    updates = [rng.standard_normal((3, 64)).astype(np.float32) for _ in range(4)]
    used = np.zeros((3, 64))
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        server_round = int(message.content["config"]["server-round"])
        new = message.content["arrays"]["w"].numpy() + updates[server_round - 1]
        content = {"arrays": record_of({"w": new}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    def tamper(node: int, reply: Message) -> Message | None:
        nonlocal used
        server_round = reply.content["co3"]["server-round"]
        client = reply.content["co3"]["client-id"]
        if server_round == 2 and node == FIRST_NODE:
            return None
        if node == FIRST_NODE:
            seed = derive_seed(0, server_round, client)
            payload = reply.content["co3"]["payload"]
            used = used + compressor.decode(payload, {"w": updates[0]}, seed)["w"]
        return reply

    grid = LocalGrid(app, 2, tamper=tamper)
    strategy = CO3Strategy(name, num_clients=2, fraction_evaluate=0.0)
    strategy.start(grid, record_of({"w": np.zeros((3, 64), np.float32)}), num_rounds=4)
    kept = grid.contexts[FIRST_NODE].state["co3.residual"]["residual/w"].numpy()
    np.testing.assert_allclose(used + kept, sum(updates), atol=1e-4)
    assert [record["lost"] for record in strategy.history] == [0, 1, 0, 0]


def test_settings_travel_to_the_clients() -> None:
    compressor = make_compressor("fp16")
    strategy = CO3Strategy(compressor, num_clients=NUM_CLIENTS, fraction_evaluate=0.0)
    grid = LocalGrid(message_app(), NUM_CLIENTS)
    strategy.start(grid, record_of(initial_model()), num_rounds=1)
    assert strategy.compressor == "fp16"
    config = grid.sent[-1].content["config"]
    assert config["co3.compressor"] == "fp16"
    assert config["co3.compressor-settings"] == "{}"


def test_payload_of_another_compressor_is_a_named_failure() -> None:
    def cast(node: int, reply: Message) -> Message:
        if node == FIRST_NODE:
            update = {k: np.zeros_like(v) for k, v in initial_model().items()}
            payload, _ = COMPRESSORS["bf16"].encode(update, None, 0)
            reply.content["co3"]["payload"] = payload
        return reply

    _, _, strategy = run("fp16", 1, tamper=cast)
    assert [failure.client_id for failure in strategy.failures] == [0]
    assert "payload must be of scheme 2 (fp16), got 3" in strategy.failures[0].reason


def test_entries_beyond_the_norm_limit_are_refused() -> None:
    strategy = CO3Strategy(
        "fp16", num_clients=NUM_CLIENTS, fraction_evaluate=0.0, max_update_norm=1e-6
    )
    grid = LocalGrid(message_app(), NUM_CLIENTS)
    with pytest.raises(Exception, match="L2 norm of at most 1e-06"):
        strategy.start(grid, record_of(initial_model()), num_rounds=1)


def test_norm_limit_scales_a_rival_down() -> None:
    strategy = CO3Strategy(
        "fp16", num_clients=NUM_CLIENTS, fraction_evaluate=0.0, max_update_norm=1e-3, reclip=True
    )
    grid = LocalGrid(message_app(), NUM_CLIENTS)
    model = arrays_of(strategy.start(grid, record_of(initial_model()), num_rounds=1).arrays)
    norm = np.sqrt(sum(float((v.astype(np.float64) ** 2).sum()) for v in model.values()))
    assert 0.5e-3 < norm <= 1.0001e-3


def test_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="uplink_budget_bytes must be None with compressor 'fp1"):
        CO3Strategy("fp16", uplink_budget_bytes=1000)
