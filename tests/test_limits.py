"""The bound on the norm of a client's update: measured on what was decoded, refused or clipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg
from localgrid import FIRST_NODE, LocalGrid
from tinyapp import arrays_of, initial_model, message_app, numpy_app, record_of

from co3_flower import (
    CO3Strategy,
    CodecConfig,
    PayloadError,
    accumulate_update,
    decode_update,
    encode_raw_update,
    encode_update,
)
from co3_flower.limits import NormLimit
from co3_flower.nodes import RoundError

Arrays = dict[str, np.ndarray]

MEASURED = frozenset(["conv.weight", "fc.weight", "fc.bias"])
CONFIGS = {
    "default": CodecConfig(buffers=("conv.bias",)),
    "rans": CodecConfig(buffers=("conv.bias",), coder="rans", format="e5m2"),
    "one table per tensor": CodecConfig(buffers=("conv.bias",), structure="none"),
    "one raw": CodecConfig(buffers=("conv.bias",), raw=("fc.weight",)),
}


def payload_of(update: Arrays, case: str) -> bytes:
    if case == "none":
        return encode_raw_update(update).payload
    return encode_update(update, None, CONFIGS[case]).payload


def norm_of(decoded: Arrays) -> float:
    wide = np.concatenate([decoded[n].astype(np.float64).ravel() for n in sorted(MEASURED)])
    return float(np.linalg.norm(wide))


@pytest.mark.parametrize("case", [*CONFIGS, "none"])
def test_norm_is_that_of_the_decoded_tensors_named(small_update: Arrays, case: str) -> None:
    payload = payload_of(small_update, case)
    norm = norm_of(decode_update(payload, small_update))
    above = NormLimit(norm * (1 + 1e-12), MEASURED)
    below = NormLimit(norm * (1 - 1e-12), MEASURED)
    decode_update(payload, small_update, norm_limit=above)
    with pytest.raises(PayloadError, match=r"must have an L2 norm of at most .*, got "):
        decode_update(payload, small_update, norm_limit=below)


@pytest.mark.parametrize("case", [*CONFIGS, "none"])
def test_update_that_is_too_long_leaves_the_accumulator_as_it_was(
    small_update: Arrays, case: str
) -> None:
    sums = {name: np.ones_like(value) for name, value in small_update.items()}
    with pytest.raises(PayloadError, match="L2 norm"):
        accumulate_update(
            payload_of(small_update, case), sums, 3, small_update,
            norm_limit=NormLimit(1e-6, MEASURED),
        )  # fmt: skip
    assert all((value == 1).all() for value in sums.values())


@pytest.mark.parametrize("case", [*CONFIGS, "none"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_clip_scales_the_named_tensors_and_no_others(
    small_update: Arrays, case: str, num_threads: int
) -> None:
    payload = payload_of(small_update, case)
    whole = decode_update(payload, small_update)
    limit = NormLimit(norm_of(whole) / 3, MEASURED, clip=True)
    factor = np.float64(limit.max_norm / norm_of(whole))
    clipped = decode_update(payload, small_update, num_threads, norm_limit=limit)
    sums = {name: np.ones_like(value) for name, value in small_update.items()}
    raw = accumulate_update(payload, sums, 3, small_update, num_threads, norm_limit=limit)
    assert norm_of(clipped) == pytest.approx(limit.max_norm, rel=1e-6)  # float32 entries
    for name, value in whole.items():
        expected = (factor * value).astype(np.float32) if name in MEASURED else value
        np.testing.assert_array_equal(clipped[name], expected)
        if name in raw:
            np.testing.assert_array_equal(raw[name], expected)
        else:
            np.testing.assert_array_equal(sums[name], 1 + np.float32(3) * expected)


def test_update_within_the_bound_is_not_changed_by_clip(small_update: Arrays) -> None:
    payload = payload_of(small_update, "default")
    clipped = decode_update(payload, small_update, norm_limit=NormLimit(1e3, MEASURED, clip=True))
    for name, value in decode_update(payload, small_update).items():
        np.testing.assert_array_equal(clipped[name], value)


def test_tensor_that_the_payload_calls_a_buffer_counts_all_the_same(small_update: Arrays) -> None:
    # the kinds come from the client; what counts is the server's to say
    config = CodecConfig(buffers=tuple(small_update))
    payload = encode_update(small_update, None, config).payload
    with pytest.raises(PayloadError, match="L2 norm"):
        decode_update(payload, small_update, norm_limit=NormLimit(1e-6, MEASURED))


def test_largest_entries_there_are_have_a_finite_norm() -> None:
    update = {"w": np.full(1000, 3e38, np.float32)}
    payload = encode_raw_update(update).payload
    limit = NormLimit(1.0, frozenset(["w"]), clip=True)
    clipped = decode_update(payload, update, norm_limit=limit)["w"]
    assert np.linalg.norm(clipped.astype(np.float64)) == pytest.approx(1.0, rel=1e-6)


def test_raw_float64_as_large_as_it_goes_can_be_clipped() -> None:
    update = {"w": np.full(1000, -1e300), "v": np.float32([1e-30])}
    payload = encode_update(update, None, CodecConfig(raw=("w",))).payload
    limit = NormLimit(1.0, frozenset(update), clip=True)
    clipped = decode_update(payload, update, norm_limit=limit)
    np.testing.assert_allclose(clipped["w"], -np.sqrt(1e-3))


@pytest.mark.parametrize("clip", [False, True])
def test_update_without_the_named_tensors_is_never_too_long(clip: bool) -> None:
    update = {"w": np.ones(5, np.float32), "empty": np.empty((0, 3), np.float32)}
    payload = encode_update(update, None, CodecConfig()).payload
    limit = NormLimit(1e-9, frozenset(["empty"]), clip)
    np.testing.assert_array_equal(
        decode_update(payload, update, norm_limit=limit)["w"], decode_update(payload, update)["w"]
    )


# The strategy

BAD_NODE = FIRST_NODE + 1


def poison(node: int, reply: Message) -> Message:
    """Let client 1 send a finite update of norm 25.5; honest ones stay below 1."""
    if node == BAD_NODE:
        update = {n: np.full(a.shape, 1.0, np.float32) for n, a in initial_model().items()}
        config = CodecConfig(scale="unit")  # exact for 1.0
        reply.content["co3"]["payload"] = encode_update(update, None, config).payload
    return reply


def model_of(
    strategy: CO3Strategy,
    clients: tuple[int, ...] = (0, 1, 2, 3),
    model: Arrays | None = None,
    **grid: Any,
) -> Arrays:
    configs = [{"partition-id": i} for i in clients]
    nodes = LocalGrid(message_app(), len(clients), node_configs=configs, **grid)
    start = record_of(initial_model() if model is None else model)
    return arrays_of(strategy.start(nodes, start, num_rounds=1).arrays)


def strategy_of(**changes: Any) -> CO3Strategy:
    settings = {"num_clients": 4, "fraction_evaluate": 0.0} | changes
    return CO3Strategy(CodecConfig(), **settings)


@pytest.mark.parametrize("inner", [None, FedAvg])
def test_client_with_a_long_update_is_a_named_failure_and_the_others_round_stands(
    inner: Any,
) -> None:
    make_inner = inner or (lambda: None)
    strategy = strategy_of(inner=make_inner(), max_update_norm=1.0)
    model = model_of(strategy, tamper=poison)
    expected = model_of(strategy_of(inner=make_inner(), num_clients=3), (0, 2, 3))
    for name, value in expected.items():
        np.testing.assert_array_equal(model[name], value)
    (failure,) = strategy.failures
    assert failure.node_id == BAD_NODE
    assert "L2 norm of at most 1, got 25.4951" in failure.reason  # sqrt(650)


@pytest.mark.parametrize("inner", [None, FedAvg])
def test_reclip_holds_every_client_to_the_bound(inner: Any) -> None:
    # One client alone: the step is its clipped update.
    strategy = strategy_of(
        inner=inner and inner(), max_update_norm=0.01, reclip=True, num_clients=1
    )
    model = model_of(strategy, (1,), tamper=poison)
    step = np.concatenate([(model[n] - a).ravel() for n, a in initial_model().items()])
    assert np.linalg.norm(step) == pytest.approx(0.01, rel=1e-5)
    assert strategy.failures == []


def test_bound_is_on_the_gradient_before_server_lr() -> None:
    options = {"payload": "gradient", "server_lr": 10.0, "num_clients": 1, "reclip": True}
    model = model_of(strategy_of(max_update_norm=0.01, **options), (0,))
    step = np.concatenate([(model[n] - a).ravel() for n, a in initial_model().items()])
    assert np.linalg.norm(step) == pytest.approx(0.1, rel=1e-5)


def test_buffers_neither_count_nor_are_clipped() -> None:
    start = initial_model(buffers=True)
    start["norm.running_mean"] += np.float32(100)  # the clients' new value is far from it
    free = model_of(strategy_of(), model=start)
    held = model_of(strategy_of(max_update_norm=10.0), model=start)
    clipped = model_of(strategy_of(max_update_norm=1e-3, reclip=True), model=start)
    for name, value in free.items():
        np.testing.assert_array_equal(held[name], value)
        if name.startswith("norm."):
            np.testing.assert_array_equal(clipped[name], value)


def test_numpy_clients_are_held_to_the_bound_too() -> None:
    nodes = LocalGrid(numpy_app(), 4)
    strategy = strategy_of(max_update_norm=1e-6)
    with pytest.raises(RoundError, match="got 0: .*L2 norm of at most 1e-06"):
        strategy.start(nodes, record_of(initial_model()), num_rounds=1)
