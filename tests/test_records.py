"""Records: settings on the way down, client-ids, seeds, and the bytes of a message."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from localgrid import LocalGrid
from tinyapp import message_app, record_of

from co3_flower import CodecConfig, ConfigError
from co3_flower.records import (
    TrainSettings,
    client_id,
    client_order,
    count_bytes,
    derive_seed,
    message_content,
)
from co3_flower.replies import (
    MAX_RECORD_BYTES,
    PAYLOAD_STYPE,
    STATS_KEYS,
    ReplyError,
    add_reply_records,
    common_metrics,
    count_payload_bytes,
    parse_evaluate_reply,
    parse_train_reply,
)

SETTINGS = TrainSettings(
    server_round=3,
    payload_kind="gradient",
    codec=CodecConfig(format="e5m2", gamma=0.5, scale="unit", prior="empirical", min_numel=7),
    raw=(0, 4),
    buffers=(2, 3),
    buffers_kind="raw",
    memory_dir="/somewhere",
    experiment_id="first",
)


def make_context(**node_config: object) -> Context:
    return Context(
        run_id=1, node_id=77, node_config=dict(node_config), state=RecordDict(), run_config={}
    )


def reply_to_nothing(content: RecordDict) -> Message:
    """A reply without the message it answers."""
    LocalGrid(message_app(), 1)  # sets the ids that a Message asks for
    return Message(content, dst_node_id=1, message_type="train")


def message_reply(**changes: object) -> Message:
    """A good message-API reply of round 3, with changes to ConfigRecord "co3"."""
    scalars = {"payload": b"12345", "server-round": 3, "client-id": 8}
    scalars |= dict.fromkeys(STATS_KEYS, 1.0) | changes
    content = RecordDict({"metrics": MetricRecord({"num-examples": 32, "loss": 0.5})})
    add_reply_records(content, {k: v for k, v in scalars.items() if v is not None})
    return reply_to_nothing(content)


def reply_with_text_for_a_payload() -> Message:
    message = message_reply()
    message.content["co3"]["payload"] = "text"
    return message


def numpy_reply(num_examples: int = 32, code: int = 0, **metrics: object) -> Message:
    """A good NumPyClient reply of round 3, in the form Flower gives it."""
    fields = {"payload": b"12345", "server-round": 3, "client-id": 8}
    named = {f"co3.{key}": value for key, value in fields.items()} | {"loss": 0.5} | metrics
    return reply_to_nothing(
        RecordDict(
            {
                "fitres.metrics": ConfigRecord(named),
                "fitres.num_examples": MetricRecord({"num_examples": num_examples}),
                "fitres.parameters": ArrayRecord({"_empty": Array("", (), "numpy", b"")}),
                "fitres.status": ConfigRecord({"code": code, "message": "as it went"}),
            }
        )
    )


def test_settings_survive_the_way_to_a_client() -> None:
    assert TrainSettings.from_scalars(SETTINGS.to_scalars()) == SETTINGS


def test_settings_survive_a_config_record() -> None:
    assert TrainSettings.from_scalars(ConfigRecord(SETTINGS.to_scalars())) == SETTINGS


def test_settings_have_the_documented_keys() -> None:
    scalars = SETTINGS.to_scalars()
    assert scalars["co3.format"] == "e5m2"
    assert scalars["co3.gamma"] == 0.5
    assert scalars["co3.scale-multiplier"] == 1.0
    assert scalars["co3.payload-kind"] == "gradient"
    assert scalars["co3.server-round"] == 3
    assert scalars["co3.raw"] == "0,4"
    assert scalars["co3.buffers"] == "2,3"


def test_settings_are_scalars_without_the_threads_of_the_server() -> None:
    scalars = TrainSettings(server_round=1, codec=CodecConfig(num_threads=4)).to_scalars()
    assert all(isinstance(value, (int, float, str)) for value in scalars.values())
    assert "co3.num-threads" not in scalars
    assert TrainSettings.from_scalars(scalars).codec.num_threads == 1


def test_settings_are_missed_when_the_server_runs_another_strategy() -> None:
    with pytest.raises(ConfigError, match="give the ServerApp a CO3Strategy"):
        TrainSettings.from_scalars({"lr": 0.1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("co3.payload-kind", "weights", "co3.payload-kind must be one of"),
        ("co3.compressor", "zip", "co3.compressor must be one of"),
        ("co3.buffers-kind", "none", "co3.buffers-kind must be one of"),
        ("co3.format", "fp4", "format must be"),
        ("co3.raw", "1;2", "co3.raw must be comma-joined positions"),
    ],
)
def test_settings_that_are_not_available_are_named(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings.from_scalars(SETTINGS.to_scalars() | {key: value})


def test_message_holds_the_same_objects_for_both_kinds_of_client() -> None:
    arrays, config = record_of({"w": np.zeros(3, np.float32)}), ConfigRecord({"lr": 0.1})
    content = message_content(arrays, config, "fitins")
    assert content["arrays"] is content["fitins.parameters"]
    assert content["config"] is content["fitins.config"]


@pytest.mark.parametrize(
    ("node_config", "expected"),
    [
        ({"partition-id": 3, "client-id": "ward"}, 3),  # partition-id first
        ({"client-id": "ward"}, "ward"),
        ({"num-partitions": 2}, 77),  # the node id last
    ],
)
def test_client_id_is_taken_from_the_node_config(node_config: dict, expected: object) -> None:
    assert client_id(make_context(**node_config)) == expected


@pytest.mark.parametrize("value", [True, 0.5, ""])
def test_client_id_must_be_an_integer_or_a_string(value: object) -> None:
    with pytest.raises(ConfigError, match="client-id must be"):
        client_id(make_context(**{"client-id": value}))


def test_client_order_puts_integers_by_value_before_strings() -> None:
    assert sorted(["b", 10, "a", 9], key=client_order) == [9, 10, "a", "b"]


def test_seed_depends_on_seed_round_and_client() -> None:
    seeds = {derive_seed(s, r, c) for s in (0, 1) for r in (1, 2) for c in (0, 1, "0")}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, 1, 2) == 5458876493991123480


def test_bytes_of_a_message_are_names_keys_and_values() -> None:
    content = RecordDict(
        {
            "a": ConfigRecord({"k": 1, "s": "four", "b": b"12", "t": True}),  # 1 + 9 + 5 + 3 + 2
            "m": MetricRecord({"l": [1.0, 2.0]}),  # 1 + 1 + 16
        }
    )
    assert count_bytes(content) == 20 + 18


def test_bytes_of_a_shared_record_count_once() -> None:
    record = record_of({"w": np.zeros(1000, np.float32)})
    alone = count_bytes(RecordDict({"arrays": record}))
    assert count_bytes(RecordDict({"arrays": record, "again": record})) == alone + len("again")


def test_bytes_count_empty_values() -> None:
    assert count_bytes(RecordDict({"a": ConfigRecord({"k": b"", "s": "", "l": []})})) == 4


@pytest.mark.parametrize("make", [message_reply, numpy_reply])
def test_reply_of_either_kind_is_read(make: object) -> None:
    reply = parse_train_reply(make(), node_id=5, server_round=3, max_examples=None)
    assert (reply.payload, reply.client_id, reply.num_examples) == (b"12345", 8, 32)
    assert reply.metrics == {"loss": 0.5}


def test_reply_has_the_documented_records() -> None:
    record = message_reply().content["co3"]
    assert {"payload", "server-round", "client-id"} <= set(record)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (message_reply(**{"server-round": 2}), "server-round must be 3, got 2"),  # stale
        (message_reply(**{"server-round": None}), "server-round must be 3, got None"),
        (message_reply(**{"client-id": 0.5}), "client-id must be an integer or a string"),
        (reply_with_text_for_a_payload(), "reply must hold one payload, got 0"),
        (numpy_reply(num_examples=0), "num-examples must be an integer of at least 1"),
        (numpy_reply(num_examples=101), "at most 100, got 101"),
        (numpy_reply(num_examples=2.5), "num-examples must be an integer"),
        (numpy_reply(code=3), "status must be 0, got 3: 'as it went'"),
        (reply_to_nothing(RecordDict()), "reply must hold ConfigRecord 'co3'"),
        (
            reply_to_nothing(RecordDict({"co3": ConfigRecord({"payload": b"1"})})),
            "reply must hold one MetricRecord",
        ),
    ],
)
def test_bad_reply_says_what_must_hold(reply: Message, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        parse_train_reply(reply, node_id=5, server_round=3, max_examples=100)


def test_small_payload_travels_in_the_config_record() -> None:
    content = message_reply(payload=b"x" * MAX_RECORD_BYTES).content
    assert len(content["co3"]["payload"]) == MAX_RECORD_BYTES
    assert not content.array_records


def test_large_payload_travels_as_one_array() -> None:
    payload = b"x" * (MAX_RECORD_BYTES + 1)
    message = message_reply(payload=payload)
    (record,) = message.content.array_records.values()
    (array,) = record.values()
    assert array.stype == PAYLOAD_STYPE == "co3.v1"
    assert "payload" not in message.content["co3"]
    assert parse_train_reply(message, 5, 3, None).payload == payload
    assert count_payload_bytes(message.content) == len(payload)


def test_payload_bytes_count_even_where_the_reply_is_malformed() -> None:
    content = RecordDict({"co3": ConfigRecord({"payload": b"12345"})})
    assert count_payload_bytes(content) == 5
    assert count_payload_bytes(RecordDict({"other": ConfigRecord({"x": b"12345"})})) == 0


def test_evaluate_reply_of_a_numpy_client_is_read() -> None:
    message = reply_to_nothing(
        RecordDict(
            {
                "evaluateres.loss": MetricRecord({"loss": 0.25}),
                "evaluateres.num_examples": MetricRecord({"num_examples": 9}),
                "evaluateres.metrics": ConfigRecord({"accuracy": 0.5, "note": "text"}),
                "evaluateres.status": ConfigRecord({"code": 0, "message": "ok"}),
            }
        )
    )
    assert parse_evaluate_reply(message) == {"num-examples": 9, "loss": 0.25, "accuracy": 0.5}


def test_common_metrics_leave_out_what_cannot_be_averaged() -> None:
    first = {"loss": 1.0, "per-class": [1.0, 2.0], "only-here": 1, "odd": 1}
    second = {"loss": 2, "per-class": [3.0, 4.0], "odd": [1]}
    assert common_metrics([first, second]) == [
        {"loss": 1.0, "per-class": [1.0, 2.0]},
        {"loss": 2, "per-class": [3.0, 4.0]},
    ]
