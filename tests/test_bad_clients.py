"""What one bad client can do: be a named failure, while the others' round stands."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from localgrid import FIRST_NODE, LocalGrid
from tinyapp import arrays_of, initial_model, message_app, record_of

from co3_flower import (
    CO3Strategy,
    CodecConfig,
    PayloadError,
    accumulate_update,
    decode_update,
    encode_raw_update,
    encode_update,
)
from co3_flower.aggregation import largest_entry
from co3_flower.nodes import RoundError

BAD_NODE = FIRST_NODE + 1
MODEL = initial_model()
HEADER_BYTES = 48

Tamper = Callable[[int, Message], Message | None]


def scaled_up(payload: bytes, scale: float) -> bytes:
    """The payload with this scale for every coded tensor and buffer, and a right checksum."""
    kinds = -(-len(MODEL) // 4) if payload[6] & 1 else 0
    floats = sum(a.dtype.kind == "f" for a in MODEL.values())
    at = HEADER_BYTES + kinds
    body = payload[:at] + struct.pack("<f", scale) * floats + payload[at + 4 * floats : -4]
    return body + struct.pack("<I", zlib.crc32(body))


def sending(make: Callable[[bytes], bytes]) -> Tamper:
    """Let client 1 send something else than its payload."""

    def tamper(node: int, reply: Message) -> Message:
        if node == BAD_NODE:
            record = reply.content["co3"]
            record["payload"] = make(record["payload"])
        return reply

    return tamper


def claiming(num_examples: int) -> Tamper:
    """Let client 1 claim so many examples."""

    def tamper(node: int, reply: Message) -> Message:
        if node == BAD_NODE:
            reply.content["metrics"] = MetricRecord({"num-examples": num_examples})
        return reply

    return tamper


def huge(payload: bytes) -> bytes:
    """A float32 update of entries that only just are numbers."""
    update = {n: np.full(a.shape, 3e38, a.dtype) if a.dtype.kind == "f" else a
              for n, a in MODEL.items()}  # fmt: skip
    return encode_raw_update(update).payload


OTHER_MODEL = encode_update({"w": np.ones((4, 5), np.float32)}, None, CodecConfig()).payload

BAD: dict[str, tuple[Tamper, str]] = {
    "nothing": (sending(lambda p: b""), "payload must hold at least"),
    "garbage": (sending(lambda p: b"\xa5" * len(p)), "payload must start with"),
    "noise": (
        sending(lambda p: p[:60] + np.random.default_rng(1).bytes(len(p) - 60)),
        "payload must have checksum",
    ),
    "another model": (sending(lambda p: OTHER_MODEL), "it was made for another model"),
    "values above 2**90": (
        sending(lambda p: scaled_up(p, 2.0**-100)),
        "decoded entries must be at most",
    ),
    "the largest values": (
        sending(lambda p: scaled_up(p, 2.0**-119)),
        "decoded entries must be at most",
    ),
    "huge float32": (sending(huge), "decoded entries must be at most"),
    "no examples": (claiming(0), "num-examples must be an integer of at least 1"),
    "-1 examples": (claiming(-1), "num-examples must be an integer of at least 1"),
    "one example too many": (claiming(1001), "at most 1000, got 1001"),
    "most examples there are": (claiming(2**63 - 1), "at most 1000"),
}


def strategy_of(config: CodecConfig | str = "co3", **changes: Any) -> CO3Strategy:
    settings = {"num_clients": 4, "fraction_evaluate": 0.0, "max_examples": 1000} | changes
    return CO3Strategy(CodecConfig() if config == "co3" else config, **settings)


def model_of(strategy: CO3Strategy, clients: tuple[int, ...] = (0, 1, 2, 3), **grid: Any) -> Any:
    """The model after a round of these clients."""
    configs = [{"partition-id": i} for i in clients]
    nodes = LocalGrid(message_app(), len(clients), node_configs=configs, **grid)
    return arrays_of(strategy.start(nodes, record_of(MODEL), num_rounds=1).arrays)


@pytest.mark.parametrize("inner", [None, FedAvg])
@pytest.mark.parametrize("case", BAD)
def test_bad_client_is_a_named_failure_and_the_others_round_stands(case: str, inner: Any) -> None:
    tamper, reason = BAD[case]
    make_inner = (lambda: FedAvg()) if inner else (lambda: None)
    strategy = strategy_of(inner=make_inner(), min_replies=3)
    model = model_of(strategy, tamper=tamper)
    expected = model_of(strategy_of(inner=make_inner(), num_clients=3), (0, 2, 3))
    for name, value in expected.items():
        np.testing.assert_array_equal(model[name], value)
        assert np.isfinite(model[name]).all()
    (failure,) = strategy.failures
    assert failure.node_id == BAD_NODE
    assert reason in failure.reason


@pytest.mark.parametrize("inner", [None, FedAvg])
def test_last_rounds_payload_under_its_old_round_is_a_named_failure(inner: Any) -> None:
    first: dict[int, Message] = {}

    def replay(node: int, reply: Message) -> Message:
        if node == BAD_NODE and node in first:
            for name in ("co3", "metrics"):
                reply.content[name] = first[node].content[name]
        first.setdefault(node, reply)
        return reply

    strategy = strategy_of(inner=FedAvg() if inner else None, min_replies=3)
    nodes = LocalGrid(message_app(), 4, tamper=replay)
    model = arrays_of(strategy.start(nodes, record_of(MODEL), num_rounds=2).arrays)
    (failure,) = strategy.failures
    assert (failure.node_id, failure.server_round) == (BAD_NODE, 2)
    assert "server-round must be 2, got 1" in failure.reason
    assert [record["replies"] for record in strategy.history] == [4, 3]
    assert all(np.isfinite(value).all() for value in model.values())


def test_values_that_overflow_only_with_their_weight_are_refused() -> None:
    # 2**63 examples of a value of 2**80 are beyond float32, though both pass by themselves.
    def tamper(node: int, reply: Message) -> Message:
        reply = sending(lambda p: scaled_up(p, 2.0**-80))(node, reply)
        return claiming(2**62)(node, reply)

    strategy = strategy_of(max_examples=None, min_replies=3)
    model = model_of(strategy, tamper=tamper)
    assert all(np.isfinite(value).all() for value in model.values())
    (failure,) = strategy.failures
    assert "decoded entries must be at most" in failure.reason


def test_run_fails_by_name_where_all_clients_send_huge_values() -> None:
    def tamper(node: int, reply: Message) -> Message:
        reply.content["co3"]["payload"] = huge(b"")
        return reply

    with pytest.raises(RoundError, match="decoded entries must be at most"):
        model_of(strategy_of("none"), tamper=tamper)


@pytest.mark.parametrize("exponent", [89, 90])
def test_entries_up_to_the_limit_are_used(exponent: int) -> None:
    update = {"w": np.float32([1.0, -2.0]), "x": np.float32([2.0**exponent])}
    payload = encode_raw_update(update).payload
    sums = {n: np.zeros(a.shape, np.float32) for n, a in update.items()}
    raw = accumulate_update(payload, sums, 1, like=update, max_magnitude=largest_entry(1))
    assert raw["x"].tolist() == [2.0**exponent]


@pytest.mark.parametrize("coder", ["huffman", "rans"])
def test_largest_value_that_does_not_occur_is_no_reason_to_refuse(coder: str) -> None:
    # At a scale of 2**-100 the format reaches 3 * 2**100, but all entries are zero.
    update = {"w": np.float32([0.0] * 20), "v": np.float32([1.0] * 20)}
    config = CodecConfig(scale="unit", scale_multiplier=2.0**-100, coder=coder)
    payload = encode_update(update, None, config).payload
    assert not decode_update(payload, update, max_magnitude=2.0**90)["v"].any()


@pytest.mark.parametrize("coder", ["huffman", "rans"])
def test_coded_entries_beyond_the_limit_leave_the_accumulator_as_it_was(coder: str) -> None:
    update = {"small": np.ones(9, np.float32), "large": np.float32([0.0, -(2.0**91)])}
    payload = encode_update(update, None, CodecConfig(coder=coder)).payload
    sums = {n: np.ones(a.shape, np.float32) for n, a in update.items()}
    with pytest.raises(PayloadError, match=r"must be at most .* got .* in 'large'"):
        accumulate_update(payload, sums, 1, max_magnitude=2.0**90)
    assert all((array == 1).all() for array in sums.values())
    with pytest.raises(PayloadError, match="'large'"):
        decode_update(payload, update, max_magnitude=2.0**90)
    assert np.isfinite(decode_update(payload, update)["large"]).all()
