"""CO3Strategy: choice of clients, aggregation, buffers, bad replies, counting, settings."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    DEFAULT_TTL,
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from localgrid import FIRST_NODE, LocalGrid
from tinyapp import (
    BUFFERS,
    accuracy,
    arrays_of,
    client_data,
    initial_model,
    message_app,
    numpy_app,
    record_of,
    trained,
)

from co3_flower import CO3Strategy, CodecConfig, ConfigError, co3_mod, encode_raw_update
from co3_flower.nodes import RoundError, error_reason, sample_nodes, wait_for_nodes

EXAMPLES = [len(client_data(client)[1]) for client in range(4)]


def make_strategy(config: CodecConfig | str = "none", **changes: Any) -> CO3Strategy:
    return CO3Strategy(config, **{"num_clients": 4, "fraction_evaluate": 0.0} | changes)


def run(
    strategy: CO3Strategy,
    apps: Any = None,
    model: dict[str, np.ndarray] | None = None,
    num_rounds: int = 1,
    **grid_options: Any,
) -> tuple[dict[str, np.ndarray], LocalGrid]:
    """Run some rounds on four clients and return the last model and the grid."""
    grid = LocalGrid(message_app() if apps is None else apps, 4, **grid_options)
    arrays = record_of(initial_model() if model is None else model)
    result = strategy.start(grid, arrays, num_rounds=num_rounds)
    return arrays_of(result.arrays), grid


def app_sending(update: dict[str, np.ndarray], num_examples: Any = 1) -> ClientApp:
    """An app that sends this update losslessly, whatever it receives."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        record = ConfigRecord(
            {
                "payload": encode_raw_update(update).payload,
                "server-round": int(message.content["config"]["server-round"]),
                "client-id": int(context.node_config["partition-id"]),
            }
        )
        metrics = MetricRecord({"num-examples": num_examples})
        return Message(RecordDict({"co3": record, "metrics": metrics}), reply_to=message)

    return app


def sending(*values: float, num_examples: Iterable[int] = (1, 1, 1, 1)) -> list[ClientApp]:
    """Four apps that send an update of one number each."""
    return [
        app_sending({"w": np.float32([v])}, n) for v, n in zip(values, num_examples, strict=True)
    ]


ONE_NUMBER = {"w": np.float32([10.0])}


# Aggregation


def test_update_mode_adds_the_mean_weighted_by_examples() -> None:
    model, _ = run(make_strategy(), sending(1, 2, 3, 4, num_examples=(1, 1, 1, 5)), ONE_NUMBER)
    assert model["w"].tolist() == [13.25]  # 10 + (1 + 2 + 3 + 20) / 8


def test_uniform_weighting_gives_every_client_one_vote() -> None:
    strategy = make_strategy(weighting="uniform")
    model, _ = run(strategy, sending(1, 2, 3, 4, num_examples=(1, 1, 1, 5)), ONE_NUMBER)
    assert model["w"].tolist() == [12.5]


def test_gradient_mode_steps_down_by_server_lr() -> None:
    strategy = make_strategy(payload="gradient", server_lr=0.5)
    model, _ = run(strategy, sending(1, 2, 3, 6), ONE_NUMBER)
    assert model["w"].tolist() == [8.5]  # 10 - 0.5 * 3


def test_server_lr_scales_updates() -> None:
    model, _ = run(make_strategy(server_lr=2.0), sending(1, 2, 3, 6), ONE_NUMBER)
    assert model["w"].tolist() == [16.0]


def test_aggregation_rounds_to_float32_as_written(rng: np.random.Generator) -> None:
    updates = [{"w": rng.standard_normal(1000).astype(np.float32)} for _ in range(4)]
    examples = [3, 7, 11, 1000003]
    start = {"w": rng.standard_normal(1000).astype(np.float32)}
    apps = [app_sending(u, n) for u, n in zip(updates, examples, strict=True)]
    strategy = make_strategy(payload="gradient", server_lr=0.3)
    model, _ = run(strategy, apps, start)
    total = np.zeros(1000, np.float32)
    for update, n in zip(updates, examples, strict=True):
        product = np.float32(n) * update["w"]
        total = total + product
    step = np.float32(0.3 / sum(examples)) * total
    np.testing.assert_array_equal(model["w"], start["w"] - step)


def test_model_keeps_names_shapes_and_dtypes() -> None:
    start = initial_model(buffers=True) | {"bias": np.zeros(10, np.float16)}
    start = {"scalar": np.array(1.0, np.float64)} | start
    app = app_sending(
        {k: np.ones(v.shape, v.dtype if v.dtype == int else np.float32) for k, v in start.items()}
    )
    model, _ = run(make_strategy(), app, start)
    assert list(model) == list(start)
    for name, value in model.items():
        assert (value.shape, value.dtype) == (start[name].shape, start[name].dtype)


def test_training_learns_with_a_four_bit_format() -> None:
    model, _ = run(make_strategy(CodecConfig(format="e2m1")), num_rounds=50)
    assert accuracy(model) > 0.9


@pytest.mark.parametrize("num_clients", [2, 8])
@pytest.mark.parametrize("config", [CodecConfig(), "none"], ids=["co3", "none"])
@pytest.mark.parametrize("limit", [{}, {"max_update_norm": 0.5, "reclip": True}], ids=str)
def test_memory_does_not_grow_with_the_number_of_clients(
    config: CodecConfig | str, num_clients: int, limit: dict[str, Any], rng: np.random.Generator
) -> None:
    model = {f"w{i}": rng.standard_normal(200_000).astype(np.float32) for i in range(8)}
    dense, largest = 8 * 800_000, 800_000
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        arrays = {name: array.numpy() * 2 for name, array in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 3})
        content = RecordDict({"arrays": record_of(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = make_strategy(config, num_clients=num_clients, **limit)
    grid = LocalGrid(app, num_clients)
    messages = strategy.configure_train(1, record_of(model), ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    tracemalloc.start()
    try:
        strategy.aggregate_train(1, replies)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 3 * dense + 2 * largest


# Buffers


def test_float_buffers_move_by_the_mean_in_gradient_mode_too() -> None:
    strategy = make_strategy(payload="gradient", server_lr=0.01)
    model, _ = run(strategy, model=initial_model(buffers=True))
    start = initial_model(buffers=True)
    expected = sum(
        n * (trained(start, c)["norm.running_mean"] - 0.0) for c, n in enumerate(EXAMPLES)
    ) / sum(EXAMPLES)
    np.testing.assert_allclose(model["norm.running_mean"], expected, rtol=1e-5, atol=1e-7)


def test_variance_is_clamped_at_zero_and_a_mean_is_not() -> None:
    start = {"running_var": np.float32([1, 0.5]), "running_mean": np.zeros(2, np.float32)}
    update = {name: np.float32([-2, 1]) for name in start}
    model, _ = run(make_strategy(), app_sending(update), start)
    assert model["running_var"].tolist() == [0, 1.5]
    assert model["running_mean"].tolist() == [-2, 1]


def test_integer_buffer_takes_the_value_of_the_reply_with_most_examples() -> None:
    start = {"w": np.float32([0]), "n": np.array(5, np.int64)}
    apps = [
        app_sending({"w": np.float32([0]), "n": np.array(value, np.int64)}, examples)
        for value, examples in ((2**60 + 1, 9), (7, 3), (8, 9), (9, 1))  # a tie: the first client
    ]
    model, _ = run(make_strategy(weighting="uniform"), apps, start)
    assert (model["n"], model["n"].dtype) == (2**60 + 1, np.int64)


def test_bool_buffer_is_replaced() -> None:
    start = {"w": np.float32([0]), "mask": np.array([False, True])}
    update = {"w": np.float32([0]), "mask": np.array([True, True])}
    model, _ = run(make_strategy(), app_sending(update), start)
    assert model["mask"].tolist() == [True, True]


def test_local_buffers_stay_as_they_were() -> None:
    start = initial_model(buffers=True)
    model, _ = run(make_strategy(CodecConfig(), buffers="local"), model=start)
    for name in BUFFERS:
        np.testing.assert_array_equal(model[name], start[name])


def test_server_does_not_evaluate_a_model_with_local_buffers() -> None:
    strategy = make_strategy(buffers="local")
    grid = LocalGrid(message_app(), 4)
    arrays = record_of(initial_model(buffers=True))
    with pytest.raises(ConfigError, match="buffers must be 'coded' or 'raw' where the server"):
        strategy.start(grid, arrays, evaluate_fn=lambda *_: None)


@pytest.mark.parametrize("buffers", ["coded", "raw"])
def test_buffers_follow_the_clients(buffers: str) -> None:
    model, _ = run(
        make_strategy(CodecConfig(), buffers=buffers),
        model=initial_model(buffers=True),
        num_rounds=20,
    )
    means = np.mean([client_data(c)[0].mean(axis=0) for c in range(4)], axis=0)
    expected = (1 - 0.9**20) * means
    np.testing.assert_allclose(model["norm.running_mean"], expected, atol=0.01)
    assert (model["norm.running_var"] >= 0).all()


def test_server_sends_the_positions_of_the_buffers() -> None:
    _, grid = run(make_strategy(CodecConfig()), model=initial_model(buffers=True))
    config = grid.sent[0].content["config"]
    assert config["co3.buffers"] == "2,3,4"
    assert "co3.raw" not in config  # Flower cannot count the bytes of an empty text


def test_train_message_can_be_counted_by_flower() -> None:
    _, grid = run(make_strategy(CodecConfig()))
    assert all(record.count_bytes() > 0 for record in grid.sent[0].content.values())


@pytest.mark.parametrize(("timeout", "lifetime"), [(5.0, 65.0), (float("inf"), DEFAULT_TTL)])
def test_train_message_lives_a_minute_longer_than_its_reply_is_waited_for(
    timeout: float, lifetime: float
) -> None:
    grid = LocalGrid(message_app(), 2)
    make_strategy(num_clients=2).start(
        grid, record_of(initial_model()), num_rounds=1, timeout=timeout
    )
    assert {message.metadata.ttl for message in grid.sent} == {lifetime}


def test_unnamed_arrays_bring_a_warning_that_asks_for_buffer_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = initial_model(buffers=True)
    unnamed = ArrayRecord({str(i): Array(array) for i, array in enumerate(model.values())})
    strategy = make_strategy(CodecConfig())
    strategy._find_roles(unnamed)
    assert "give buffer_keys" in caplog.text
    caplog.clear()
    make_strategy(CodecConfig(), buffer_keys=())._find_roles(unnamed)
    assert "give buffer_keys" not in caplog.text


def test_server_sends_raw_buffers_as_raw_positions() -> None:
    _, grid = run(make_strategy(CodecConfig(), buffers="raw"), model=initial_model(buffers=True))
    assert grid.sent[0].content["config"]["co3.raw"] == "2,3"  # 4 is an integer, raw in any case


def test_buffer_keys_say_which_float_tensors_are_buffers() -> None:
    strategy = make_strategy(CodecConfig(), buffer_keys=("bias", "running_var"))
    _, grid = run(strategy, model=initial_model(buffers=True))
    assert grid.sent[0].content["config"]["co3.buffers"] == "1,3,4"
    assert strategy.num_parameters == 640 + 64  # running_mean is trained now


def test_buffer_key_without_a_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_keys must name tensors of the model, got 'gone'"):
        run(make_strategy(buffer_keys=["gone"]))


def test_raw_tensors_are_chosen_by_name_or_position() -> None:
    for raw in (("bias",), (1,)):
        _, grid = run(make_strategy(CodecConfig(raw=raw)))
        assert grid.sent[0].content["config"]["co3.raw"] == "1"


# Inner strategies


def test_inner_fedavg_gives_the_streaming_result() -> None:
    streamed, _ = run(make_strategy(CodecConfig()))
    dense, _ = run(make_strategy(CodecConfig(), inner=FedAvg()))
    for name, value in streamed.items():
        np.testing.assert_allclose(dense[name], value, rtol=1e-5, atol=1e-8)


def test_inner_sees_gradients_as_weights() -> None:
    options = {"payload": "gradient", "server_lr": 0.5}
    streamed, _ = run(make_strategy(CodecConfig(), **options))
    dense, _ = run(make_strategy(CodecConfig(), inner=FedAvg(), **options))
    for name, value in streamed.items():
        np.testing.assert_allclose(dense[name], value, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("apps", [message_app, numpy_app])
def test_inner_fedadam_learns_and_keeps_dtypes(apps: Any) -> None:
    strategy = make_strategy(CodecConfig(), inner=FedAdam(eta=0.05))
    model, _ = run(strategy, apps(), initial_model(buffers=True), num_rounds=20)
    assert accuracy(model) > 0.85
    assert {value.dtype.name for value in model.values()} == {"float32", "int64"}


class Recorder(FedAvg):
    """FedAvg that notes what it is shown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.seen.append(list(arrays))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        for reply in replies:
            (record,) = reply.content.array_records.values()
            (metrics,) = reply.content.metric_records.values()
            self.seen.append((list(record), metrics["num-examples"]))
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize(("weighting", "weights"), [("examples", EXAMPLES), ("uniform", [1] * 4)])
def test_inner_sees_trainable_tensors_and_weights_only(weighting: str, weights: list[int]) -> None:
    inner = Recorder()
    strategy = make_strategy(CodecConfig(), inner=inner, weighting=weighting)
    run(strategy, model=initial_model(buffers=True))
    trainable = ["weight", "bias"]
    assert inner.seen == [trainable, *[(trainable, weight) for weight in weights]]


def test_inner_may_add_to_the_config() -> None:
    _, grid = run(make_strategy(CodecConfig(), inner=FedProx(proximal_mu=0.25)))
    assert grid.sent[0].content["config"]["proximal-mu"] == 0.25


def test_inner_that_wants_more_nodes_than_there_are_does_not_wait() -> None:
    inner = FedAvg(min_available_nodes=50, min_train_nodes=20)
    _, grid = run(make_strategy(CodecConfig(), inner=inner))
    assert len(grid.sent) == 4


class Broken(FedAvg):
    """FedAvg that fails in a chosen way."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result, None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (ZeroDivisionError("oh"), "Broken must aggregate round 1, got ZeroDivisionError: oh"),
        (None, r"Broken must return \['bias', 'weight'\], got None"),
        (ArrayRecord({"weight": Array(np.zeros(1))}), r"got \['weight'\] in round 1"),
        (
            record_of({"weight": np.zeros(1), "bias": np.zeros(10)}),
            r"must keep shape \(10, 64\), got \(1,\) in 'weight'",
        ),
        (
            record_of({"weight": np.full((10, 64), np.nan), "bias": np.zeros(10)}),
            "aggregate must be finite, got 640 NaN or infinite values in 'weight'",
        ),
    ],
)
def test_failing_inner_strategy_ends_the_run(result: Any, message: str) -> None:
    strategy = make_strategy(CodecConfig(), inner=Broken(result))
    with pytest.raises(RoundError, match=message):
        run(strategy)


def test_overflow_ends_the_run() -> None:
    huge = {"w": np.float32([1e26])}
    with pytest.raises(RoundError, match="aggregate must be finite, got 1 NaN or infinite"):
        run(make_strategy(server_lr=1e20), app_sending(huge), {"w": np.float32([3e38])})


# Bad replies


def replaced(content: dict[str, Any], **co3: Any) -> Any:
    """Change records of the reply of client 1."""

    def tamper(node: int, reply: Message) -> Message:
        if node == FIRST_NODE + 1:
            for name, record in content.items():
                reply.content[name] = record
            for key, value in co3.items():
                reply.content["co3"][key.replace("_", "-")] = value
        return reply

    return tamper


def lost(node: int, reply: Message) -> Message | None:
    return None if node == FIRST_NODE + 1 else reply


def error_of_flower(node: int, reply: Message) -> Message:
    """What SuperLink makes when a node is gone: another node id, code 5."""
    if node != FIRST_NODE + 1:
        return reply
    error = Message(Error(5, "Node Unavailable"), reply_to=reply)
    error.metadata.__dict__["_src_node_id"] = 1
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return error


BAD = {
    "undecodable": (replaced({}, payload=b"junk"), "payload must"),
    "cut": (lambda n, r: replaced({}, payload=r.content["co3"]["payload"][:-9])(n, r), "payload"),
    "stale": (replaced({}, server_round=7), "server-round must be 1, got 7"),
    "no examples": (
        replaced({"metrics": MetricRecord({"num-examples": 0})}),
        "num-examples must be an integer of at least 1",
    ),
    "fractional examples": (
        replaced({"metrics": MetricRecord({"num-examples": 0.5})}),
        "num-examples must be an integer",
    ),
    "too many examples": (
        replaced({"metrics": MetricRecord({"num-examples": 1001})}),
        "at most 1000, got 1001",
    ),
    "no metrics": (replaced({"metrics": ConfigRecord()}), "reply must hold one MetricRecord"),
    "lost": (lost, "no reply came in"),
    "node gone": (error_of_flower, "Node Unavailable"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_reply_is_a_named_failure_and_the_round_goes_on(case: str) -> None:
    tamper, reason = BAD[case]
    strategy = make_strategy(CodecConfig(), max_examples=1000, min_replies=3)
    model, _ = run(strategy, tamper=tamper, num_rounds=1)
    without = LocalGrid(message_app(), 3, node_configs=[{"partition-id": i} for i in (0, 2, 3)])
    other = make_strategy(CodecConfig(), num_clients=3)
    expected = arrays_of(other.start(without, record_of(initial_model()), num_rounds=1).arrays)
    for name, value in expected.items():
        np.testing.assert_array_equal(model[name], value)
    (failure,) = strategy.failures
    assert failure.node_id == FIRST_NODE + 1
    assert reason in failure.reason
    record = strategy.history[0]
    assert (record["replies"], record["failures"] + record["lost"]) == (3, 1)
    assert record["lost"] == (case in ("lost", "node gone"))
    assert record["failure_reasons"] == [str(failure)]


def test_client_that_raises_is_a_named_failure() -> None:
    broken = ClientApp()

    @broken.train()
    def train(message: Message, context: Any) -> Message:
        raise ValueError("no data here")

    strategy = make_strategy(CodecConfig())
    run(strategy, [message_app(), broken, message_app(), message_app()])
    (failure,) = strategy.failures
    assert "no data here" in failure.reason


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("<class 'ValueError'>:<'no data'>", "ValueError: no data"),
        ("<class 'co3_flower.errors.ConfigError'>:<'a\n b'>", "ConfigError: a b"),
        ("<class 'KeyError'>:<''w''>", "KeyError: 'w'"),
        (
            "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::run()\n  File x\n"
            "Exception ClientAppException occurred. Message: no data'>",
            "no data",
        ),
        (
            "Traceback (most recent call last):\n  File x, line 3\nValueError: no data\n",
            "ValueError: no data",
        ),
        (
            "ray::run()\n  File x\nException ClientAppException occurred. Message: no data\nhere",
            "no data here",
        ),
        (None, "no reason given"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_reason_of_an_error_is_one_line(reason: str | None, expected: str) -> None:
    grid = LocalGrid(message_app(), 1)
    message = Message(RecordDict({"config": ConfigRecord()}), grid.get_node_ids()[0], "train")
    assert error_reason(Message(Error(2, reason), reply_to=message)) == expected


def test_two_replies_under_one_client_id_are_both_refused() -> None:
    strategy = make_strategy(CodecConfig())
    configs = [{"partition-id": i} for i in (0, 2, 2, 3)]
    _, grid = run(strategy, node_configs=configs)
    assert [failure.node_id for failure in strategy.failures] == [FIRST_NODE + 1, FIRST_NODE + 2]
    assert "client-id must be unique in a round, got 2 from 2 nodes" in strategy.failures[0].reason


def test_client_id_may_not_change() -> None:
    rounds = itertools.count()

    def tamper(node: int, reply: Message) -> Message:
        if next(rounds) >= 4 and node == FIRST_NODE:
            reply.content["co3"]["client-id"] = 9
        return reply

    strategy = make_strategy(CodecConfig())
    run(strategy, tamper=tamper, num_rounds=2)
    (failure,) = strategy.failures
    assert failure.reason == "client-id must stay 0, got 9"


def test_reply_that_nobody_asked_for_is_refused() -> None:
    strategy = make_strategy(CodecConfig())
    grid = LocalGrid(message_app(), 4)
    messages = strategy.configure_train(1, record_of(initial_model()), ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    strategy.aggregate_train(1, [*replies, replies[0]])
    assert "got one more" in strategy.failures[0].reason
    assert strategy.history[0]["replies"] == 4


def test_run_fails_when_too_few_replies_are_good() -> None:
    strategy = make_strategy(CodecConfig(), min_replies=4)
    with pytest.raises(RoundError) as caught:
        run(strategy, tamper=BAD["stale"][0])
    text = str(caught.value)
    assert "round 1 must have at least 4 good replies, got 3" in text
    assert f"node {FIRST_NODE + 1}: server-round must be 1, got 7" in text
    assert strategy.history[0]["replies"] == 3  # the books are closed first


def test_run_fails_when_all_clients_fail() -> None:
    with pytest.raises(RoundError, match="must have at least 1 good replies, got 0"):
        run(make_strategy(CodecConfig()), tamper=lambda node, reply: None)


# Counting


def test_r_is_the_sum_of_payload_bytes() -> None:
    strategy = make_strategy(CodecConfig())
    _, grid = run(strategy, num_rounds=3)
    payloads = [reply.content["co3"]["payload"] for reply in grid.train_replies]
    assert len(payloads) == 12
    assert strategy.R == 8 * sum(map(len, payloads)) == strategy.history[-1]["R"]
    assert sum(record["uplink_bits"] for record in strategy.history) == strategy.R


def test_r_is_the_same_for_a_numpy_client() -> None:
    strategies = [make_strategy(CodecConfig()) for _ in range(2)]
    for strategy, app in zip(strategies, (message_app, numpy_app), strict=True):
        run(strategy, app())
    assert strategies[0].R == strategies[1].R


def test_r_counts_refused_payloads() -> None:
    honest, strategy = make_strategy(CodecConfig()), make_strategy(CodecConfig())
    run(honest)
    run(strategy, tamper=replaced({}, server_round=7))
    assert strategy.R == honest.R
    assert strategy.history[0]["bits_per_parameter"] == pytest.approx(
        honest.history[0]["bits_per_parameter"], rel=0.1
    )


def test_r_does_not_count_lost_payloads() -> None:
    strategy = make_strategy()
    run(strategy, tamper=lost)
    _, grid = run(make_strategy())
    sizes = [len(reply.content["co3"]["payload"]) for reply in grid.train_replies]
    assert 8 * sum(sizes[:3]) == strategy.R  # raw payloads are all of one size


def test_bits_per_parameter_are_payload_bits_over_trainable_entries() -> None:
    strategy = make_strategy(CodecConfig())
    run(strategy, model=initial_model(buffers=True))
    assert strategy.num_parameters == 650
    record = strategy.history[0]
    assert record["bits_per_parameter"] == strategy.R / (4 * 650)


def test_float32_costs_a_little_more_than_32_bits_per_parameter() -> None:
    strategy = make_strategy("none")
    run(strategy)
    assert 32 < strategy.history[0]["bits_per_parameter"] < 33


def test_overhead_and_downlink_stand_beside_r() -> None:
    strategy = make_strategy(CodecConfig())
    run(strategy, num_rounds=2)
    assert 0 < strategy.overhead_bits < 8 * 8 * 1000
    assert strategy.downlink_bits > 2 * 4 * 32 * 650
    for key in ("overhead_bits", "downlink_bits"):
        assert sum(record[key] for record in strategy.history) == getattr(strategy, key)


def test_history_has_the_keys_of_the_rounds_file() -> None:
    strategy = make_strategy(CodecConfig())
    run(strategy)
    known = (
        "server_round uplink_bits R bits_per_parameter code_bits side_info_bits structure_bits "
        "raw_bits entropy_bits overhead_bits downlink_bits sqnr_db residual_ratio replies "
        "failures lost encode_seconds decode_seconds"
    )
    record = strategy.history[0]
    assert set(known.split()) <= set(record)
    assert all(record[key] is not None for key in known.split())
    bits = sum(record[key] for key in ("code_bits", "side_info_bits", "structure_bits", "raw_bits"))
    assert bits == record["uplink_bits"]


def test_counters_start_again_with_every_run() -> None:
    strategy = make_strategy(CodecConfig())
    run(strategy)
    first = strategy.R
    run(strategy)
    assert first == strategy.R
    assert len(strategy.history) == 1


def test_history_is_there_when_the_server_evaluates() -> None:
    strategy = make_strategy(CodecConfig())
    seen = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        seen.append((server_round, len(strategy.history)))

    grid = LocalGrid(message_app(), 4)
    strategy.start(grid, record_of(initial_model()), num_rounds=2, evaluate_fn=evaluate)
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_train_metrics_are_means_by_examples() -> None:
    strategy = make_strategy(CodecConfig())
    grid = LocalGrid(message_app(), 4)
    result = strategy.start(grid, record_of(initial_model()), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["train-loss"] == pytest.approx(np.log(10), rel=1e-5)  # zero weights
    assert metrics["R"] == strategy.R


# Choice of clients


@pytest.mark.parametrize("make_apps", [message_app, numpy_app])
def test_fraction_train_samples_the_same_clients_in_every_run(make_apps: Any) -> None:
    chosen = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):  # nodes register in any order, with any id
        strategy = make_strategy(CodecConfig(), fraction_train=0.5, seed=4)
        configs = [{"partition-id": i} for i in order]
        _, grid = run(strategy, make_apps(), node_configs=configs, num_rounds=6)
        ids = {node: c.node_config["partition-id"] for node, c in grid.contexts.items()}
        nodes = [m.metadata.src_node_id for m in grid.train_replies]
        chosen.append([{ids[n] for n in nodes[i : i + 2]} for i in range(0, 12, 2)])
        assert strategy.history[0]["num_sampled"] == 2
    assert chosen[0] == chosen[1]
    assert len({frozenset(c) for c in chosen[0]}) > 1


def test_fraction_train_asks_a_query_function_of_the_app() -> None:
    app = message_app()

    @app.query()
    def query(message: Message, context: Any) -> Message:
        pytest.fail("co3_mod answers")

    _, grid = run(make_strategy(CodecConfig(), fraction_train=0.5), app)
    assert [m.metadata.message_type for m in grid.sent] == ["query"] * 4 + ["train"] * 2


def test_nodes_are_asked_for_their_client_id_once() -> None:
    _, grid = run(make_strategy(CodecConfig(), fraction_train=0.5), numpy_app(), num_rounds=3)
    types = [m.metadata.message_type for m in grid.sent]
    assert types == ["query"] * 4 + ["get_properties"] * 4 + ["train"] * 6


def test_nodes_that_cannot_tell_a_client_id_end_the_run() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        return Message(RecordDict(), reply_to=message)

    with pytest.raises(RoundError, match="nodes must tell their client-id"):
        run(make_strategy(fraction_train=0.5), app)


def test_one_client_id_at_two_nodes_ends_a_sampled_run() -> None:
    configs = [{"partition-id": i} for i in (0, 2, 2, 3)]
    with pytest.raises(RoundError, match="client-id must be unique, got 2 from nodes"):
        run(make_strategy(fraction_train=0.5), node_configs=configs)


def test_sample_has_the_size_of_stock_fedavg() -> None:
    ids = {node: node for node in range(100)}
    for fraction, size in ((0.29, 29), (0.3, 30), (0.001, 1), (0.999, 99)):
        assert len(sample_nodes(ids, fraction, 1, (0,))) == size
    assert len(sample_nodes(ids, 0.01, 5, (0,))) == 5  # min_replies


class SlowGrid(LocalGrid):
    """A grid whose nodes register one by one, one at each look."""

    def __init__(self, apps: Any, num_nodes: int) -> None:
        super().__init__(apps, num_nodes)
        self.looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return list(self.contexts)[: self.looks - 1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleep moves."""
    now = [0.0]
    monkeypatch.setattr("co3_flower.nodes.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "co3_flower.nodes.time.sleep", lambda s: now.__setitem__(0, now[0] + max(s, 0.01))
    )
    return now


@pytest.mark.parametrize("num_clients", [4, 0])
def test_first_round_waits_until_all_nodes_are_there(num_clients: int, clock: list[float]) -> None:
    strategy = make_strategy(CodecConfig(), num_clients=num_clients)
    grid = SlowGrid(message_app(), 4)
    strategy.start(grid, record_of(initial_model()), num_rounds=1)
    assert strategy.history[0]["replies"] == 4


def test_unknown_number_of_nodes_must_be_steady_for_three_seconds(clock: list[float]) -> None:
    wait_for_nodes(LocalGrid(message_app(), 4), 0, 600)
    assert clock[0] == pytest.approx(3.0, abs=0.3)


def test_too_few_nodes_end_the_run_after_node_timeout(clock: list[float]) -> None:
    strategy = make_strategy(CodecConfig(), num_clients=5, node_timeout=20)
    with pytest.raises(RoundError, match="5 nodes must be connected within node_timeout 20 s"):
        run(strategy)
    assert clock[0] == pytest.approx(20, abs=0.5)


def test_later_rounds_do_without_a_node_that_is_gone(clock: list[float]) -> None:
    strategy = make_strategy(CodecConfig(), node_timeout=20)
    grid = LocalGrid(message_app(), 4)
    arrays = record_of(initial_model())
    for server_round in (1, 2):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        grid.contexts.pop(FIRST_NODE, None)
    assert [record["replies"] for record in strategy.history] == [4, 3]


# Evaluation


@pytest.mark.parametrize(
    "apps", [message_app(), numpy_app(), [message_app(), numpy_app(), message_app(), numpy_app()]]
)
def test_clients_evaluate_as_in_stock_fedavg(apps: Any) -> None:
    strategy = make_strategy(CodecConfig(), fraction_evaluate=1.0)
    grid = LocalGrid(apps, 4)
    result = strategy.start(grid, record_of(initial_model()), num_rounds=1)
    loss = result.evaluate_metrics_clientapp[1]["loss"]
    stock = LocalGrid(message_app(), 4)
    messages = FedAvg().configure_evaluate(1, result.arrays, ConfigRecord(), stock)
    for message in messages:
        message.content["config"]["co3.payload-kind"] = "update"
    expected = FedAvg().aggregate_evaluate(1, stock.send_and_receive(messages))
    assert loss == pytest.approx(expected["loss"], rel=1e-12)


def test_fraction_evaluate_samples_clients() -> None:
    strategy = make_strategy(CodecConfig(), fraction_evaluate=0.5)
    _, grid = run(strategy)
    assert [m.metadata.message_type for m in grid.sent].count("evaluate") == 2


def test_failing_evaluation_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken = ClientApp()
    strategy = make_strategy(CodecConfig(), fraction_evaluate=1.0)
    good = message_app()
    broken._registered_funcs["train.default"] = good._registered_funcs["train.default"]
    grid = LocalGrid([good, broken, good, good], 4)
    result = strategy.start(grid, record_of(initial_model()), num_rounds=1)
    assert "loss" in result.evaluate_metrics_clientapp[1]
    assert f"evaluate, round 1, node {FIRST_NODE + 1}" in caplog.text


def test_inner_strategy_aggregates_evaluations() -> None:
    inner = FedAvg(
        evaluate_metrics_aggr_fn=lambda records, key: MetricRecord({"mine": len(records)})
    )
    strategy = make_strategy(CodecConfig(), inner=inner, fraction_evaluate=1.0)
    grid = LocalGrid(message_app(), 4)
    result = strategy.start(grid, record_of(initial_model()), num_rounds=1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"mine": 4}


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": "zip"}, "compressor must be one of 'co3', 'none', .*got 'zip'"),
        ({"payload": "weights"}, "payload must be one of 'update', 'gradient', got 'weights'"),
        ({"payload": "gradient"}, "server_lr must be set in gradient mode"),
        ({"server_lr": 0}, r"server_lr must be in \(0, inf\], got 0"),
        ({"server_lr": float("nan")}, "server_lr must be in"),
        ({"max_update_norm": 0}, "max_update_norm must be a number above 0 and finite, got 0"),
        ({"max_update_norm": float("inf")}, "max_update_norm must be a number above 0 and finite"),
        ({"max_update_norm": "1"}, "max_update_norm must be a number above 0 and finite, got '1'"),
        ({"reclip": 1}, "reclip must be True or False, got 1"),
        ({"reclip": True}, "max_update_norm must be set with reclip, got None"),
        ({"server_lr": 0.5, "inner": FedAvg()}, "server_lr must be 1 with an inner strategy"),
        ({"weighting": "size"}, "weighting must be one of 'examples', 'uniform'"),
        ({"buffers": "sent"}, "buffers must be one of 'coded', 'raw', 'local'"),
        ({"buffer_keys": "bias"}, "buffer_keys must be a sequence of names"),
        ({"num_clients": -1}, "num_clients must be an integer of at least 0"),
        ({"fraction_train": 0}, r"fraction_train must be in \(0, 1\], got 0"),
        ({"fraction_train": 1.5}, r"fraction_train must be in \(0, 1\], got 1.5"),
        ({"fraction_evaluate": -0.1}, r"fraction_evaluate must be in \[0, 1\]"),
        ({"min_replies": 0}, "min_replies must be an integer of at least 1"),
        ({"min_replies": 5, "num_clients": 4}, "min_replies must be at most 4, got 5"),
        ({"node_timeout": -1}, "node_timeout must be in"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"max_examples": -1}, "max_examples must be an integer"),
    ],
)
def test_impossible_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CO3Strategy(**{"config": CodecConfig()} | changes)


def test_codec_settings_reach_the_clients() -> None:
    config = CodecConfig(format="e5m2", gamma=0.25, scale="unit", prior="empirical")
    _, grid = run(make_strategy(config))
    sent = grid.sent[0].content["config"]
    assert (sent["co3.format"], sent["co3.gamma"], sent["co3.scale"]) == ("e5m2", 0.25, "unit")
    assert sent["server-round"] == sent["co3.server-round"] == 1


def test_config_of_the_user_reaches_the_clients_unchanged() -> None:
    strategy = make_strategy(CodecConfig())
    grid = LocalGrid(message_app(), 4)
    config = ConfigRecord({"lr": 0.25})
    strategy.start(grid, record_of(initial_model()), num_rounds=1, train_config=config)
    assert grid.sent[0].content["config"]["lr"] == 0.25
    assert dict(config) == {"lr": 0.25}


def test_summary_prints_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="flwr.co3")
    make_strategy(CodecConfig(format="e5m2"), inner=FedAdam()).summary()
    for text in ("e5m2", "FedAdam", "weighting examples", "buffers coded"):
        assert text in caplog.text


def test_aggregate_before_configure_is_refused() -> None:
    with pytest.raises(RoundError, match="configure_train must come before"):
        make_strategy().aggregate_train(1, [])
