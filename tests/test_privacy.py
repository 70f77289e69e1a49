"""Flower's privacy tools beside co3_flower: accepted where they protect, refused where not."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import LocalDpMod as LegacyLocalDpMod
from flwr.client.mod import fixedclipping_mod as legacy_fixedclipping_mod
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow, default_workflows
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    Strategy,
)
from localgrid import LocalGrid
from tinyapp import (
    TinyNumPyClient,
    accuracy,
    arrays_of,
    client_data,
    gradient_of,
    initial_model,
    message_app,
    record_of,
    trained,
)

from co3_flower import CO3Strategy, CodecConfig, ConfigError, co3_mod, decode_update
from co3_flower.nodes import RoundError
from co3_flower.replies import SECAGG_RECORD

Arrays = dict[str, np.ndarray]

NUM_CLIENTS = 4
NORM = 0.05  # honest updates of the tiny app are longer than that
# Coarse cells and gamma 1: what is sent follows the residual more than the gradient.
COARSE = CodecConfig(scale_multiplier=0.3, gamma=1.0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Flower draws its noise from NumPy's global generator."""
    np.random.seed(5)  # noqa: NPY002


def server_fixed(noise: float, inner: Strategy | None = None, norm: float = NORM) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(inner or FedAvg(), noise, norm, NUM_CLIENTS)


def server_adaptive(noise: float) -> Strategy:
    return DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), noise, NUM_CLIENTS, NORM)


def client_fixed(noise: float, norm: float = NORM) -> Strategy:
    return DifferentialPrivacyClientSideFixedClipping(FedAvg(), noise, norm, NUM_CLIENTS)


def client_adaptive(noise: float) -> Strategy:
    return DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), noise, NUM_CLIENTS, NORM)


def make_strategy(inner: Strategy | None, **changes: Any) -> CO3Strategy:
    settings = {"num_clients": NUM_CLIENTS, "fraction_evaluate": 0.0, "config": CodecConfig()}
    return CO3Strategy(inner=inner, **settings | changes)


def app_with(*mods: Any, outer: tuple[Any, ...] = (co3_mod,), payload: str = "update") -> ClientApp:
    """The tiny app with mods behind co3_mod, on training messages only."""
    app = ClientApp(mods=list(outer))

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = arrays_of(message.content["arrays"])
        gradient, loss = gradient_of(model, client)
        metrics = {"num-examples": len(client_data(client)[1]), "train-loss": loss}
        name, arrays = (
            ("gradient", gradient) if payload == "gradient" else ("arrays", trained(model, client))
        )
        content = RecordDict({name: record_of(arrays), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app


def run(
    strategy: Strategy, app: ClientApp, num_rounds: int = 1, model: Arrays | None = None
) -> tuple[list[Arrays], LocalGrid]:
    """The models after 0, 1, 2, ... rounds."""
    grid = LocalGrid(app, NUM_CLIENTS)
    start = record_of(initial_model() if model is None else model)
    result = strategy.start(grid, start, num_rounds=num_rounds)
    sent = [arrays_of(grid.sent[i * NUM_CLIENTS].content["arrays"]) for i in range(num_rounds)]
    return [*sent, arrays_of(result.arrays)], grid


def norm_of(arrays: Arrays) -> float:
    return float(np.linalg.norm(np.concatenate([a.ravel() for a in arrays.values()])))


def difference(after: Arrays, before: Arrays) -> Arrays:
    return {name: after[name] - before[name] for name in before}


def sent_norms(models: list[Arrays], grid: LocalGrid) -> list[float]:
    """Length of every update as it came in, round by round, client by client."""
    return [
        norm_of(decode_update(reply.content["co3"]["payload"], models[0]))
        for reply in grid.train_replies
    ]


# On the server, inside CO3Strategy


def clipped_mean(replies: list[Message], model: Arrays, norm: float) -> Arrays:
    """Mean by examples of the decoded updates, each scaled down to a norm by hand."""
    weights = [len(client_data(client)[1]) for client in range(NUM_CLIENTS)]
    mean = {name: np.zeros_like(value) for name, value in model.items()}
    for weight, reply in zip(weights, replies, strict=True):
        update = decode_update(reply.content["co3"]["payload"], model)
        factor = min(1.0, norm / norm_of(update)) * weight / sum(weights)
        for name, value in update.items():
            mean[name] += np.float32(factor) * value
    return mean


def assert_clipped(models: list[Arrays], grid: LocalGrid, norms: list[float]) -> None:
    """Hold every round's step to the one with clipping by hand."""
    for i, norm in enumerate(norms):
        replies = grid.train_replies[i * NUM_CLIENTS : (i + 1) * NUM_CLIENTS]
        expected = clipped_mean(replies, models[0], norm)
        for name, value in difference(models[i + 1], models[i]).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-6)


def test_server_side_wrapper_clips_what_was_decoded() -> None:
    models, grid = run(make_strategy(server_fixed(0.0)), message_app())
    assert min(sent_norms(models, grid)) > NORM
    assert_clipped(models, grid, [NORM])


@pytest.mark.parametrize("make", [server_fixed, client_fixed], ids=["server", "client"])
def test_wrapper_adds_its_noise_to_the_step(make: Any) -> None:
    app = app_with(fixedclipping_mod) if make is client_fixed else message_app()
    options = {"reclip": True} if make is client_fixed else {}
    quiet, _ = run(make_strategy(make(0.0), **options), app)
    noisy, _ = run(make_strategy(make(40.0), **options), app)
    noise = np.concatenate([a.ravel() for a in difference(noisy[1], quiet[1]).values()])
    std = 40.0 * NORM / NUM_CLIENTS
    assert noise.std() == pytest.approx(std, rel=0.1)  # of 650 normal numbers
    assert abs(noise.mean()) < 4 * std / np.sqrt(noise.size)


def test_adaptive_server_side_wrapper_moves_its_norm() -> None:
    inner = server_adaptive(0.1)
    models, _ = run(make_strategy(inner), message_app(), 10)
    assert inner.clipping_norm != NORM  # type: ignore[attr-defined]
    assert accuracy(models[-1]) > 0.3


def test_wrapper_may_wrap_any_stock_strategy() -> None:
    models, _ = run(make_strategy(server_fixed(0.01, FedAdam(eta=0.05))), message_app(), 20)
    assert accuracy(models[-1]) > 0.6


@pytest.mark.parametrize("make", [server_fixed, server_adaptive])
def test_server_side_wrapper_works_on_gradients(make: Any) -> None:
    strategy = make_strategy(make(0.0), payload="gradient", server_lr=0.5)
    models, _ = run(strategy, app_with(payload="gradient"))
    assert norm_of(difference(models[1], models[0])) <= NORM * 1.0001


def test_buffers_that_no_wrapper_protects_bring_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "flwr.co3"):
        run(make_strategy(server_fixed(0.0)), message_app(), 2, initial_model(buffers=True))
    assert sum("trainable tensors only: 3 buffers, such as" in m for m in caplog.messages) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr.co3"):
        run(
            make_strategy(server_fixed(0.0), buffers="local"),
            message_app(),
            model=initial_model(buffers=True),
        )
        run(make_strategy(FedAvg()), message_app(), model=initial_model(buffers=True))
    assert not any("buffers, such as" in m for m in caplog.messages)


# On the server, around CO3Strategy


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: DifferentialPrivacyServerSideFixedClipping(s, 1.0, NORM, NUM_CLIENTS),
        lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, 0.1, NUM_CLIENTS),
        lambda s: DifferentialPrivacyClientSideFixedClipping(s, 1.0, NORM, NUM_CLIENTS),
        lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 0.1, NUM_CLIENTS),
    ],
    ids=["server fixed", "server adaptive", "client fixed", "client adaptive"],
)
def test_wrapper_around_the_strategy_would_clip_nothing_and_is_refused(wrap: Any) -> None:
    strategy = wrap(make_strategy(None))
    with pytest.raises(ConfigError, match=r"must be outermost, got Diff.* would clip nothing; use"):
        run(strategy, message_app())


# On the clients


@pytest.mark.parametrize("make", [client_fixed, client_adaptive])
def test_client_side_clipping_without_reclip_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"reclip must be True where clients clip .* 0\.05"):
        make_strategy(make(0.1))


def test_client_side_clipping_to_another_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_update_norm must be None or .* 0\.05, got 0\.1"):
        make_strategy(client_fixed(1.0), reclip=True, max_update_norm=0.1)
    make_strategy(client_fixed(1.0), reclip=True, max_update_norm=NORM)


def test_client_side_clipping_of_gradients_is_refused() -> None:
    options = {"payload": "gradient", "server_lr": 1.0, "reclip": True}
    with pytest.raises(ConfigError, match="payload must be 'update' where clients clip"):
        make_strategy(client_fixed(1.0), **options)


def test_clipping_norm_set_by_hand_needs_reclip_too() -> None:
    # what Flower's mod reads, without Flower's wrapper
    grid = LocalGrid(app_with(fixedclipping_mod), NUM_CLIENTS)
    arguments = {"num_rounds": 1, "train_config": ConfigRecord({"clipping_norm": NORM})}
    with pytest.raises(ConfigError, match="reclip must be True where clients clip"):
        make_strategy(None).start(grid, record_of(initial_model()), **arguments)
    strategy = make_strategy(None, reclip=True, max_update_norm=NORM)
    result = strategy.start(grid, record_of(initial_model()), **arguments)
    step = difference(arrays_of(result.arrays), initial_model())
    assert norm_of(step) <= NORM * 1.0001


def test_feedback_makes_updates_longer_than_the_clients_clip_and_reclip_cuts_them() -> None:
    mod = app_with(fixedclipping_mod)
    strategy = make_strategy(client_fixed(0.0), config=COARSE, reclip=True)
    models, grid = run(strategy, mod, 10)
    assert max(sent_norms(models, grid)) > 1.2 * NORM  # the reason for all this
    assert_clipped(models, grid, [NORM] * 10)
    assert strategy.failures == []


def test_client_side_adaptive_clipping_follows_the_norm_of_each_round() -> None:
    inner = client_adaptive(0.1)
    strategy = make_strategy(inner, reclip=True)
    grid = LocalGrid(app_with(adaptiveclipping_mod), NUM_CLIENTS)
    result = strategy.start(grid, record_of(initial_model()), num_rounds=6)
    norms = [message.content["config"]["clipping_norm"] for message in grid.sent[::NUM_CLIENTS]]
    assert len(set(norms)) == 6
    assert strategy.failures == []
    assert accuracy(arrays_of(result.arrays)) > 0.2


def test_adaptive_clipping_holds_each_client_to_the_norm_it_was_sent() -> None:
    strategy = make_strategy(client_adaptive(0.0), config=COARSE, reclip=True)
    models, grid = run(strategy, app_with(adaptiveclipping_mod), 8)
    norms = [message.content["config"]["clipping_norm"] for message in grid.sent[::NUM_CLIENTS]]
    assert len(set(norms)) > 1
    assert_clipped(models, grid, norms)


def test_local_dp_behind_the_mod_clips_and_adds_noise_before_compression() -> None:
    clip = LocalDpMod(clipping_norm=NORM, sensitivity=1e-9, epsilon=1.0, delta=1e-5)
    models, grid = run(make_strategy(None, config="none"), app_with(clip))
    assert sent_norms(models, grid) == pytest.approx([NORM] * NUM_CLIENTS, rel=1e-3)
    noise = LocalDpMod(clipping_norm=1e-9, sensitivity=0.01, epsilon=1.0, delta=1e-5)
    models, grid = run(make_strategy(None, config="none"), app_with(noise))
    std = 0.01 * np.sqrt(2 * np.log(1.25e5))
    for norm in sent_norms(models, grid):
        assert norm / np.sqrt(650) == pytest.approx(std, rel=0.15)


def test_local_dp_behind_the_mod_trains() -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=0.001, epsilon=1.0, delta=1e-5)
    strategy = make_strategy(None)
    models, _ = run(strategy, app_with(mod), 20)
    assert strategy.failures == []
    assert accuracy(models[-1]) > 0.6


@pytest.mark.parametrize(
    "mod",
    [LocalDpMod(1.0, 1.0, 1.0, 1e-5), fixedclipping_mod, adaptiveclipping_mod],
    ids=["LocalDpMod", "fixedclipping_mod", "adaptiveclipping_mod"],
)
@pytest.mark.parametrize("where", ["on the function", "on the app"])
def test_clipping_mod_behind_the_mod_is_refused_in_gradient_mode(mod: Any, where: str) -> None:
    # It would clip the gradient minus the weights.
    if where == "on the app":
        app = app_with(outer=(co3_mod, mod), payload="gradient")
    else:
        app = app_with(mod, payload="gradient")
    strategy = make_strategy(None, payload="gradient", server_lr=1.0)
    name = getattr(mod, "__name__", type(mod).__name__)
    with pytest.raises(RoundError, match=f"payload must be 'update' with {name} behind co3_mod"):
        run(strategy, app)


def test_harmless_mod_behind_the_mod_is_accepted_in_gradient_mode() -> None:
    def passing(message: Message, context: Context, call_next: Any) -> Message:
        return call_next(message, context)

    strategy = make_strategy(None, payload="gradient", server_lr=1.0)
    run(strategy, app_with(passing, payload="gradient"))
    assert strategy.failures == []


def test_clipping_mod_before_the_mod_is_a_named_failure() -> None:
    app = app_with(outer=(LocalDpMod(1.0, 1.0, 1.0, 1e-5), co3_mod))
    with pytest.raises(RoundError, match="LocalDpMod expects exactly one ArrayRecord"):
        run(make_strategy(None), app)


@pytest.mark.parametrize(
    "mod", [LegacyLocalDpMod(1.0, 1.0, 1.0, 1e-5), legacy_fixedclipping_mod], ids=["local", "fixed"]
)
def test_legacy_clipping_mod_around_a_numpy_client_never_passes_for_working(mod: Any) -> None:
    # It finds no weights in the reply; the client must not be counted as protected.
    app = ClientApp(client_fn=lambda context: TinyNumPyClient(context).to_client(), mods=[mod])
    strategy = make_strategy(None, reclip=True, max_update_norm=1.0)
    grid = LocalGrid(app, NUM_CLIENTS)
    with pytest.raises(RoundError, match="got 0: "):
        strategy.start(
            grid,
            record_of(initial_model()),
            num_rounds=1,
            train_config=ConfigRecord({"clipping_norm": 1.0}),
        )


# Secure aggregation


def numpy_client_with(mod: Any) -> ClientApp:
    return ClientApp(client_fn=lambda context: TinyNumPyClient(context).to_client(), mods=[mod])


@pytest.mark.parametrize(
    "app",
    [
        app_with(secaggplus_mod),
        app_with(outer=(secaggplus_mod, co3_mod)),
        numpy_client_with(secaggplus_mod),
    ],
    ids=["behind co3_mod", "before co3_mod", "NumPyClient"],
)
def test_secagg_mod_on_the_clients_is_refused_with_the_reason(app: ClientApp) -> None:
    with pytest.raises(RoundError, match=r"SecAgg\+ must not be combined .* before it can be adde"):
        run(make_strategy(None), app)


def test_secagg_workflow_around_the_strategy_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected = threading.Event()
    connected.set()
    monkeypatch.setattr(  # a thread that polls the grid and outlives an error
        default_workflows,
        "start_update_client_manager_thread",
        lambda *_: (threading.Thread(), threading.Event(), connected),
    )
    grid = LocalGrid(message_app(), NUM_CLIENTS)
    context = LegacyContext(
        context=next(iter(grid.contexts.values())),
        config=ServerConfig(num_rounds=1),
        strategy=make_strategy(None),  # type: ignore[arg-type]
        client_manager=SimpleClientManager(),
    )
    workflow = DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2))
    with pytest.raises(
        ConfigError, match=r"own start\(grid, arrays\), .* SecAgg\+ must not be com"
    ):
        workflow(grid, context)


def test_secagg_message_is_refused_by_the_mod() -> None:
    grid = LocalGrid(message_app(), 1)
    (node,) = grid.contexts
    message = Message(
        RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({"stage": "setup"})}), node, "train"
    )
    with pytest.raises(ConfigError, match=r"SecAgg\+ must not be combined with co3_flower"):
        message_app()(message, grid.contexts[node])


def test_key_of_secagg_is_flowers() -> None:
    assert SECAGG_RECORD == RECORD_KEY_CONFIGS
