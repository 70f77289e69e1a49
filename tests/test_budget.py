"""The uplink budget: shared out, never exceeded, refused where zeros alone are too much for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from localgrid import FIRST_NODE, LocalGrid
from tinyapp import MixedApp, accuracy, arrays_of, initial_model, message_app, numpy_app, record_of

from co3_flower import CO3Strategy, CodecConfig, ConfigError
from co3_flower.budget import UplinkBudget
from co3_flower.codec import decode_update, encode_update, least_payload_bytes
from co3_flower.nodes import RoundError

RANS = CodecConfig(coder="rans")
ROUNDS = 10


def make_strategy(config: CodecConfig | str = RANS, **changes: Any) -> CO3Strategy:
    settings = {"num_clients": 4, "fraction_evaluate": 0.0} | changes
    return CO3Strategy(config, **settings)


def run(strategy: CO3Strategy, apps: Any = None, **grid_options: Any) -> LocalGrid:
    grid = LocalGrid(message_app() if apps is None else apps, 4, **grid_options)
    model = record_of(initial_model(buffers=True))
    grid.result = strategy.start(grid, model, num_rounds=ROUNDS)  # type: ignore[attr-defined]
    return grid


def shares(grid: LocalGrid) -> list[int]:
    """What the train messages allowed, a number a message."""
    records = [message.content.config_records["config"] for message in grid.sent]
    return [int(record["co3.max-payload-bytes"]) for record in records]


def free_bytes() -> int:
    """R of the run without a budget, in bytes."""
    strategy = make_strategy()
    run(strategy)
    return used(strategy)


def used(strategy: CO3Strategy) -> int:
    """R in bytes."""
    return strategy.R // 8


def least_bytes() -> int:
    return least_payload_bytes(
        initial_model(buffers=True),
        CodecConfig(coder="rans", buffers=("norm.running_mean", "norm.running_var")),
    )


# Spending


@pytest.mark.parametrize("apps", [message_app(), numpy_app(), MixedApp()])
@pytest.mark.parametrize("share", [0.9, 0.7])
def test_budget_is_spent_and_not_exceeded(apps: Any, share: float) -> None:
    budget = int(share * free_bytes())
    strategy = make_strategy(uplink_budget_bytes=budget)
    grid = run(strategy, apps)
    assert 0.9 * budget < used(strategy) <= budget
    assert not strategy.failures
    assert accuracy(arrays_of(grid.result.arrays)) > 0.6  # type: ignore[attr-defined]


def test_budget_beyond_need_changes_nothing() -> None:
    strategy = make_strategy(uplink_budget_bytes=10**9)
    run(strategy)
    assert used(strategy) == free_bytes()


def test_what_a_round_leaves_is_there_for_the_next() -> None:
    budget = int(1.2 * free_bytes())
    grid = run(make_strategy(uplink_budget_bytes=budget))
    allowed = shares(grid)[::4]
    assert allowed[0] == budget // (4 * ROUNDS)
    assert allowed == sorted(allowed)
    assert allowed[-1] > allowed[0]


def test_budget_of_zeros_alone_sends_zeros_and_keeps_the_rest() -> None:
    budget = 4 * ROUNDS * least_bytes()
    strategy = make_strategy(uplink_budget_bytes=budget)
    grid = run(strategy)
    assert used(strategy) == budget
    assert not strategy.failures
    model = arrays_of(grid.result.arrays)  # type: ignore[attr-defined]
    assert not model["weight"].any()
    state = grid.contexts[FIRST_NODE].state
    assert state.array_records["co3.residual"]["weight"].numpy().any()


def test_huffman_codes_obey_a_budget() -> None:
    budget = int(0.7 * free_bytes())
    strategy = make_strategy(CodecConfig(), uplink_budget_bytes=budget)
    run(strategy)
    assert used(strategy) <= budget


def test_budget_and_target_go_together() -> None:
    strategy = make_strategy(
        CodecConfig(coder="rans", target_bits_per_parameter=2.5),
        uplink_budget_bytes=int(0.8 * free_bytes()),
    )
    run(strategy)
    assert used(strategy) <= int(0.8 * free_bytes())


# What may go wrong on the way


def test_lost_replies_count_with_their_share() -> None:
    budget = int(0.8 * free_bytes())
    strategy = make_strategy(uplink_budget_bytes=budget)
    lost: list[int] = []

    def lose(node: int, reply: Message) -> Message | None:
        if node != FIRST_NODE:
            return reply
        lost.append(len(reply.content.config_records["co3"]["payload"]))  # type: ignore[arg-type]
        return None

    run(strategy, tamper=lose)
    assert len(lost) == ROUNDS
    assert used(strategy) + sum(lost) <= budget


def test_reply_above_its_share_is_a_named_failure_and_counts() -> None:
    budget = 10 * free_bytes()
    strategy = make_strategy(uplink_budget_bytes=budget)
    rounds: list[int] = []

    def stuff(node: int, reply: Message) -> Message:
        if node == FIRST_NODE:
            rounds.append(1)
            if len(rounds) == 2:
                record = dict(reply.content.config_records["co3"])
                record["payload"] = bytes(budget // (4 * ROUNDS) * 2)
                reply.content["co3"] = ConfigRecord(record)
        return reply

    run(strategy, tamper=stuff)
    (failure,) = strategy.failures
    assert failure.node_id == FIRST_NODE
    assert "client's share of the uplink budget" in failure.reason
    assert budget // (4 * ROUNDS) * 2 < used(strategy) <= budget


def test_run_ends_where_a_client_has_used_up_what_others_need() -> None:
    budget = free_bytes()
    strategy = make_strategy(uplink_budget_bytes=budget)

    def stuff(node: int, reply: Message) -> Message:
        record = dict(reply.content.config_records["co3"])
        if node == FIRST_NODE:
            record["payload"] = bytes(budget)
        reply.content["co3"] = ConfigRecord(record)
        return reply

    with pytest.raises(RoundError, match="uplink budget must leave"):
        run(strategy, tamper=stuff)
    assert len(strategy.history) == 1


# Refused before round 1


@pytest.mark.parametrize("num_clients", [4, 0])
def test_budget_below_that_of_zeros_is_refused_and_names_the_least(
    num_clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 4 * ROUNDS * least_bytes()
    strategy = make_strategy(num_clients=num_clients, uplink_budget_bytes=least - 1)
    monkeypatch.setattr("co3_flower.strategy.wait_for_nodes", lambda grid, *_: grid.get_node_ids())
    grid = LocalGrid(message_app(), 4)
    with pytest.raises(ConfigError, match=f"at least {least} bytes"):
        strategy.start(grid, record_of(initial_model(buffers=True)), num_rounds=ROUNDS)
    assert grid.sent == []


def test_budget_without_a_compressor_is_refused() -> None:
    with pytest.raises(ConfigError, match="uplink_budget_bytes must be None"):
        make_strategy("none", uplink_budget_bytes=1000)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_budget_must_be_a_whole_number_of_bytes(value: Any) -> None:
    with pytest.raises(ConfigError, match="uplink_budget_bytes must be an integer"):
        make_strategy(uplink_budget_bytes=value)


def test_target_below_what_zeros_take_is_refused_before_round_1() -> None:
    strategy = make_strategy(CodecConfig(coder="rans", target_bits_per_parameter=0.5))
    grid = LocalGrid(message_app(), 4)
    with pytest.raises(ConfigError, match="an update of zeros takes"):
        strategy.start(grid, record_of(initial_model()), num_rounds=1)
    assert grid.sent == []


def test_round_by_hand_has_no_budget() -> None:
    strategy = make_strategy(uplink_budget_bytes=10**6)
    with pytest.raises(RoundError, match="start must run"):
        strategy.configure_train(
            1, record_of(initial_model()), ConfigRecord(), LocalGrid(message_app(), 4)
        )


# The least payload


@pytest.mark.parametrize("coder", ["rans", "huffman"])
@pytest.mark.parametrize("structure", ["auto", "none"])
@pytest.mark.parametrize("prior", ["gennorm", "empirical"])
def test_least_payload_is_what_a_withheld_update_takes(
    edge_update: dict[str, np.ndarray], coder: str, structure: str, prior: str
) -> None:
    config = CodecConfig(
        coder=coder, structure=structure, prior=prior, raw=("half",), buffers=("double",)
    )
    least = least_payload_bytes(edge_update, config)
    withheld = encode_update(edge_update, None, config, max_payload_bytes=least)
    assert len(withheld.payload) == least
    assert not decode_update(withheld.payload, edge_update)["heavy"].any()


def test_budget_shares_out_what_is_left() -> None:
    budget = UplinkBudget(max_bytes=1000, num_rounds=4, least_bytes=10)
    assert budget.share_out(1, 5, 0) == 50
    assert budget.share_out(2, 5, 100) == 60
    assert budget.share_out(4, 10, 100) == 90
