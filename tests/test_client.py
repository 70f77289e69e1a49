"""Clients: what a CO3NumPyClient and an app behind co3_mod send, keep and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from localgrid import LocalGrid
from tinyapp import (
    BUFFERED_NAMES,
    TinyNumPyClient,
    arrays_of,
    initial_model,
    message_app,
    numpy_app,
    record_of,
    trained,
)

from co3_flower import CO3NumPyClient, CodecConfig, ConfigError, co3_mod, decode_update
from co3_flower.layout import Layout
from co3_flower.records import TrainSettings, message_content
from co3_flower.replies import MAX_RECORD_BYTES
from co3_flower.roles import find_roles

UNIT = CodecConfig(format="e4m3", scale="unit", gamma=0.5)


def make_context(client: int = 0, state: RecordDict | None = None, **node_config: Any) -> Context:
    return Context(
        run_id=1,
        node_id=77,
        node_config={"partition-id": client, **node_config},
        state=RecordDict() if state is None else state,
        run_config={},
    )


def settings_for(model: dict[str, np.ndarray], **changes: Any) -> TrainSettings:
    """What CO3Strategy sends for a model."""
    kind = changes.get("buffers_kind", "coded")
    roles = find_roles(Layout.of(model), changes.get("codec", CodecConfig()), kind)
    defaults = {"server_round": 1, "raw": roles.raw, "buffers": roles.buffers}
    return TrainSettings(**defaults | changes)


def train_message(model: dict[str, np.ndarray], **changes: Any) -> Message:
    """A train message of CO3Strategy."""
    LocalGrid(message_app(), 1)  # sets the ids that a Message asks for
    config = ConfigRecord({"lr": 0.5} | settings_for(model, **changes).to_scalars())
    return Message(message_content(record_of(model), config, "fitins"), 77, "train")


def payload_of(reply: Message) -> bytes:
    """Payload of a reply of either kind."""
    content = reply.content
    if "co3" in content:
        return content["co3"]["payload"]
    return content["fitres.metrics"]["co3.payload"]


def app_returning(**records: Any) -> ClientApp:
    """A message-API app behind the mod that returns these records."""
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"metrics": metrics} | records), reply_to=message)

    return app


@pytest.mark.parametrize("make_app", [message_app, numpy_app])
@pytest.mark.parametrize("kind", ["update", "gradient"])
def test_both_kinds_of_client_send_what_they_trained(make_app: Any, kind: str) -> None:
    model = initial_model(buffers=True)
    message = train_message(model, payload_kind=kind, compressor="none")
    decoded = decode_update(payload_of(make_app()(message, make_context())), model)
    after = trained(model, 0)
    scale = 1.0 if kind == "update" else -0.5  # lr
    for name in ("weight", "bias"):
        np.testing.assert_allclose(scale * decoded[name], after[name], rtol=1e-6, atol=1e-9)
    mean = "norm.running_mean"
    np.testing.assert_array_equal(decoded[mean], after[mean] - model[mean])
    assert decoded["norm.num_batches_tracked"] == 1  # the new value, not a difference


def test_both_kinds_of_client_send_the_same_bytes() -> None:
    model = initial_model(buffers=True)
    replies = [app()(train_message(model), make_context()) for app in (message_app, numpy_app)]
    assert payload_of(replies[0]) == payload_of(replies[1])


def test_numpy_client_sends_no_arrays() -> None:
    model = initial_model()
    client = TinyNumPyClient(make_context())
    config = settings_for(model).to_scalars()
    arrays, num_examples, metrics = client.fit(list(model.values()), dict(config))
    assert arrays == []
    assert num_examples == 200
    assert isinstance(metrics["co3.payload"], bytes)
    assert (metrics["co3.server-round"], metrics["co3.client-id"]) == (1, 0)
    assert metrics["train-loss"] > 0


def test_mod_replaces_the_arrays_and_keeps_the_metrics() -> None:
    reply = message_app()(train_message(initial_model()), make_context())
    assert sorted(reply.content) == ["co3", "metrics"]
    assert set(reply.content["metrics"]) == {"num-examples", "train-loss"}


def test_every_reply_carries_the_same_keys() -> None:
    model = initial_model()
    first = message_app()(train_message(model), make_context())
    second = message_app()(train_message(model, compressor="none"), make_context())
    third = numpy_app()(train_message(model, server_round=2), make_context())
    keys = set(first.content["co3"])
    assert keys == set(second.content["co3"])
    co3_keys = {k[4:] for k in third.content["fitres.metrics"] if k.startswith("co3.")}
    assert keys == co3_keys


def test_mod_shows_the_app_a_stock_message() -> None:
    seen = []
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(sorted(message.content))
        return Message(Error(0, "enough seen"), reply_to=message)

    app(train_message(initial_model()), make_context())
    assert seen == [["arrays", "config"]]


def test_residual_is_kept_for_the_next_round() -> None:
    model = {"w": np.zeros(3, np.float32)}
    context = make_context()
    app = app_returning(arrays=record_of({"w": np.float32([1.05, 0, 0])}))  # e4m3: 1 or 1.125
    app(train_message(model, codec=UNIT), context)
    kept = context.state["co3.residual"]["w"].numpy()
    np.testing.assert_allclose(kept, [0.05, 0, 0], atol=1e-6)
    assert context.state["co3.state"]["server-round"] == 1
    reply = app(train_message(model, codec=UNIT, server_round=2), context)
    decoded = decode_update(payload_of(reply), model)
    assert decoded["w"][0] == 1.125  # 1.05 + 0.5 * 0.05 = 1.075 is beyond the middle, 1.0625


def test_residual_of_an_identity_compressor_is_not_kept() -> None:
    context = make_context()
    message_app()(train_message(initial_model(), compressor="none"), context)
    assert not context.state


def test_residual_is_untouched_when_the_update_fails() -> None:
    model = {"w": np.zeros(3, np.float32)}
    context = make_context()
    app_returning(arrays=record_of({"w": np.float32([1, 2, 3.3])}))(train_message(model), context)
    before = context.state["co3.residual"]["w"].numpy()
    bad = app_returning(arrays=record_of({"w": np.float32([1, np.nan, 3])}))
    with pytest.raises(ValueError, match="'w'"):
        bad(train_message(model, server_round=2), context)
    np.testing.assert_array_equal(context.state["co3.residual"]["w"].numpy(), before)
    assert context.state["co3.state"]["server-round"] == 1


def test_residual_starts_from_zero_when_the_model_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = make_context()
    app_returning(arrays=record_of({"w": np.float32([1, 2])}))(
        train_message({"w": np.zeros(2, np.float32)}), context
    )
    model = {"v": np.zeros(3, np.float32)}
    app = app_returning(arrays=record_of({"v": np.float32([1, 2, 3])}))
    reply = app(train_message(model), context)
    assert "starts from zero" in caplog.text
    fresh = app(train_message(model), make_context())
    assert payload_of(reply) == payload_of(fresh)


@pytest.mark.parametrize("make_app", [message_app, numpy_app])
def test_residual_lies_in_a_file_when_a_directory_is_set(make_app: Any, tmp_path: Any) -> None:
    model = initial_model()
    in_context, in_file = make_context(), make_context(**{"memory-dir": str(tmp_path)})
    for server_round in (1, 2):
        message = train_message(model, server_round=server_round)
        expected = payload_of(make_app()(message, in_context))
        message = train_message(model, server_round=server_round)
        assert payload_of(make_app()(message, in_file)) == expected
    assert not in_file.state
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run-1.0.a.residual", "run-1.0.b.residual"]


def test_buffers_travel_raw_when_the_server_says_so() -> None:
    model = initial_model(buffers=True)
    after = trained(model, 0)
    message = train_message(model, buffers_kind="raw")
    decoded = decode_update(payload_of(message_app()(message, make_context())), model)
    for name in ("norm.running_mean", "norm.running_var"):
        np.testing.assert_array_equal(decoded[name], after[name] - model[name])


def test_local_buffers_are_not_sent() -> None:
    model = initial_model(buffers=True)
    context = make_context()
    reply = message_app()(train_message(model, buffers_kind="local"), context)
    like = {name: model[name] for name in ("weight", "bias")}
    assert list(decode_update(payload_of(reply), like)) == ["weight", "bias"]
    assert list(context.state["co3.residual"]) == ["weight", "bias"]


def test_gradient_mode_needs_no_arrays_when_buffers_are_local() -> None:
    model = initial_model(buffers=True)
    gradient = record_of({name: model[name] + 1 for name in ("weight", "bias")})
    message = train_message(model, buffers_kind="local", payload_kind="gradient")
    assert payload_of(app_returning(gradient=gradient)(message, make_context()))


def test_numpy_client_names_tensors_by_position() -> None:
    model = initial_model(buffers=True)
    context = make_context()
    numpy_app()(train_message(model), context)
    assert list(context.state["co3.residual"]) == ["0", "1", "2", "3"]  # "4" counts batches
    assert BUFFERED_NAMES[4] == "norm.num_batches_tracked"


def test_half_and_double_models_send_float32_differences() -> None:
    model = {"half": np.ones(4, np.float16), "double": np.ones(4, np.float64)}
    after = {"half": np.float16([1, 2, 3, 4]), "double": np.ones(4) + 1e-12}
    reply = app_returning(arrays=record_of(after))(
        train_message(model, compressor="none"), make_context()
    )
    like = {name: np.zeros(4, np.float32) for name in model}
    decoded = decode_update(payload_of(reply), like)
    np.testing.assert_array_equal(decoded["half"], np.float32([0, 1, 2, 3]))
    np.testing.assert_array_equal(decoded["double"], np.float32(after["double"] - 1.0))


def test_large_payload_of_a_numpy_client_travels_as_one_array() -> None:
    model = {"w": np.zeros(MAX_RECORD_BYTES // 4 + 1, np.float32)}

    class Client(CO3NumPyClient):
        def local_update(self, parameters: Any, config: Any) -> Any:
            return [np.ones_like(parameters[0])], 1, {}

    app = ClientApp(client_fn=lambda context: Client(context).to_client())
    reply = app(train_message(model, compressor="none"), make_context())
    assert "co3.payload" not in reply.content["fitres.metrics"]
    (array,) = reply.content["fitres.parameters"].values()
    assert array.stype == "co3.v1"
    np.testing.assert_array_equal(decode_update(array.data, model)["w"], 1)


def test_evaluate_message_passes_through_the_mod() -> None:
    message = train_message(initial_model())
    message = Message(message.content, 77, "evaluate")
    seen = []

    def call_next(received: Message, context: Context) -> Message:
        seen.append(received)
        return Message(RecordDict(), reply_to=received)

    co3_mod(message, make_context(), call_next)
    assert seen == [message]
    assert "evaluateins.parameters" not in seen[0].content
    assert "fitins.parameters" in seen[0].content  # nothing was taken out


def test_query_message_passes_through_the_mod() -> None:
    message = Message(RecordDict({"config": ConfigRecord({"what": "else"})}), 77, "query")
    reply = co3_mod(message, make_context(), lambda m, c: Message(RecordDict(), reply_to=m))
    assert not reply.content


def test_mod_tells_the_client_id_when_asked() -> None:
    message = Message(RecordDict({"config": ConfigRecord({"co3.query": "client-id"})}), 77, "query")
    context = make_context(client=5)
    reply = co3_mod(message, context, lambda m, c: pytest.fail("the app must not be asked"))
    assert reply.content["co3"]["client-id"] == 5


def test_numpy_client_tells_the_client_id_when_asked() -> None:
    client = TinyNumPyClient(make_context(client=5))
    assert client.get_properties({}) == {"co3.client-id": 5}


def test_error_reply_of_the_app_passes_through_the_mod() -> None:
    def fail(message: Message, context: Context) -> Message:
        return Message(Error(6, "a mod failed"), reply_to=message)

    reply = co3_mod(train_message(initial_model()), make_context(), fail)
    assert reply.error.reason == "a mod failed"


def test_gradient_mode_refuses_a_reply_without_gradient() -> None:
    model = initial_model()
    app = app_returning(arrays=record_of(model))
    with pytest.raises(ValueError, match="use payload='update'"):
        app(train_message(model, payload_kind="gradient"), make_context())


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({}, "new weights in ArrayRecord 'arrays'"),
        ({"a": ArrayRecord(), "b": ArrayRecord()}, "new weights in ArrayRecord 'arrays'"),
        ({"arrays": record_of({"w": np.zeros(2, np.float32)})}, r"got no \['b'\]"),
        (
            {"arrays": record_of({"w": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})},
            r"must keep shape \(2,\), got \(3,\) in 'w'",
        ),
    ],
)
def test_mod_refuses_arrays_that_do_not_fit(records: dict, message: str) -> None:
    model = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    with pytest.raises(ValueError, match=message):
        app_returning(**records)(train_message(model), make_context())


def test_mod_accepts_weights_under_the_name_of_the_app() -> None:
    model = {"w": np.zeros(2, np.float32)}
    reply = app_returning(model=record_of({"w": np.float32([1, 2])}))(
        train_message(model, codec=UNIT), make_context()
    )
    assert decode_update(payload_of(reply), model)["w"].tolist() == [1, 2]
    assert "model" not in reply.content


def test_mod_refuses_a_server_without_co3() -> None:
    LocalGrid(message_app(), 1)
    arrays = record_of(initial_model())
    message = Message(
        RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 1})}), 77, "train"
    )
    with pytest.raises(ConfigError, match="give the ServerApp a CO3Strategy"):
        message_app()(message, make_context())


class Returning(CO3NumPyClient):
    """A client that returns what it was made with."""

    def __init__(self, *result: Any) -> None:
        super().__init__(make_context())
        self.result = result

    def local_update(self, parameters: Any, config: Any) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (([], 1, {}), "update must have 1 arrays, one a parameter, got 0"),
        (([np.zeros(3, np.float32)], 1, {}), r"update must have shape \(2,\), got \(3,\)"),
        (([np.zeros(2, np.float32)], 1.5, {}), "num_examples must be an integer, got 1.5"),
        (([np.zeros(2, np.float32)], True, {}), "num_examples must be an integer, got True"),
        (([np.float32([1, np.inf])], 1, {}), "'0'"),
    ],
)
def test_numpy_client_refuses_an_update_that_does_not_fit(result: Any, message: str) -> None:
    model = {"w": np.zeros(2, np.float32)}
    config = dict(settings_for(model).to_scalars())
    with pytest.raises(ValueError, match=message):
        Returning(*result).fit(list(model.values()), config)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1, 2], "must return a tuple .update, num_examples, metrics., got list"),
        ((1, 2), "must return a tuple .update, num_examples, metrics., got a tuple of 2"),
        (
            (np.zeros((1, 2)), 1, {}),
            "update must be a list of arrays, one a parameter, got ndarray",
        ),
        (({"0": np.zeros(2)}, 1, {}), "update must be a list of arrays, one a parameter, got dict"),
        (([np.zeros(2)], 1, None), "metrics must be a dict of scalars, got NoneType"),
        (([None], 1, {}), "dtype must be one of .*, got object in '0'"),
        (None, "must return a tuple .update, num_examples, metrics., got NoneType"),
    ],
)
def test_wrong_return_of_local_update_is_named(result: Any, message: str) -> None:
    model = {"w": np.zeros(2, np.float32)}
    client = Returning()
    client.result = result
    with pytest.raises(TypeError, match=message):
        client.fit(list(model.values()), dict(settings_for(model).to_scalars()))


class Forgetful(CO3NumPyClient):
    """A client whose constructor does not call the one above it."""

    def __init__(self, context: Context) -> None:
        self.own = context


def test_client_that_forgot_super_init_says_so() -> None:
    client = Forgetful(make_context())
    for call in (lambda: client.fit([], {}), lambda: client.get_properties({})):
        with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__"):
            call()


def test_client_without_a_context_is_refused() -> None:
    with pytest.raises(TypeError, match=r"context must be the Context that .*, got str"):
        CO3NumPyClient("0")  # type: ignore[arg-type]


def test_integer_tensor_must_keep_its_dtype() -> None:
    model = {"w": np.zeros(2, np.float32), "n": np.array(0, np.int64)}
    config = dict(settings_for(model).to_scalars())
    client = Returning([np.zeros(2, np.float32), np.array(1.0)], 1, {})
    with pytest.raises(ValueError, match="update must have dtype int64, got float64 in tensor '1'"):
        client.fit(list(model.values()), config)


def test_numpy_client_without_local_update_says_so() -> None:
    model = {"w": np.zeros(2, np.float32)}
    with pytest.raises(NotImplementedError, match="local_update"):
        CO3NumPyClient(make_context()).fit(
            list(model.values()), dict(settings_for(model).to_scalars())
        )


@pytest.mark.parametrize("value", [-1, 1.5, "two"])
def test_num_threads_is_checked(value: object) -> None:
    with pytest.raises(ConfigError, match="num-threads must be an integer"):
        message_app()(train_message(initial_model()), make_context(**{"num-threads": value}))


def test_num_threads_of_the_client_do_not_change_the_bytes() -> None:
    model = initial_model()
    one = message_app()(train_message(model), make_context())
    two = message_app()(train_message(model), make_context(**{"num-threads": 2}))
    assert payload_of(one) == payload_of(two)


def test_arrays_are_not_changed_by_the_mod() -> None:
    model = initial_model(buffers=True)
    message = train_message(model)
    record = message.content["arrays"]
    message_app()(message, make_context())
    for name, value in arrays_of(record).items():
        np.testing.assert_array_equal(value, model[name])
