"""Rounds through Flower against stock FedAvg, and against a plain NumPy reference, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from localgrid import LocalGrid
from simulation_job import CONFIG, NUM_CLIENTS, NUM_ROUNDS, SERVER_LR, make_strategy
from tinyapp import (
    NAMES,
    MixedApp,
    arrays_of,
    client_data,
    gradient_of,
    initial_model,
    message_app,
    new_buffers,
    numpy_app,
    record_of,
    trained,
)

from co3_flower import CO3Strategy, CodecConfig, FloatFormat, encode_update
from conftest import REPOSITORY

Model = dict[str, np.ndarray]
ULPS = 4  # of the largest operand: stock FedAvg weighs with n / N first, we divide by N last
ROUNDS_RTOL = 1e-4  # three rounds amplify the last bits
FLOAT_BUFFERS = ("norm.running_mean", "norm.running_var")


# The identity compressor against stock FedAvg


def stock_app() -> ClientApp:
    """The tiny app as stock FedAvg knows it: no mod."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        client = int(context.node_config["partition-id"])
        after = trained(arrays_of(message.content["arrays"]), client)
        metrics = MetricRecord({"num-examples": len(client_data(client)[1])})
        content = RecordDict({"arrays": record_of(after), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def fixed_app(weights: list[np.ndarray], examples: list[int], *, with_mod: bool) -> ClientApp:
    """An app whose clients return fixed weights."""
    app = ClientApp(mods=message_app()._mods if with_mod else [])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        client = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": examples[client]})
        arrays = record_of({"w": weights[client]})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def one_round(strategy: Any, app: ClientApp, model: Model) -> Model:
    grid = LocalGrid(app, NUM_CLIENTS)
    messages = strategy.configure_train(1, record_of(model), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert isinstance(arrays, ArrayRecord)
    return arrays_of(arrays)


def test_identity_compressor_gives_the_aggregate_of_stock_fedavg(rng: np.random.Generator) -> None:
    model = {"w": rng.standard_normal(10_000).astype(np.float32)}
    steps = rng.standard_normal((NUM_CLIENTS, 10_000)) * 10.0 ** rng.integers(-4, 2, (4, 1))
    weights = [model["w"] + step.astype(np.float32) for step in steps]
    examples = [17, 200, 3, 64]
    ours = one_round(
        CO3Strategy("none", num_clients=NUM_CLIENTS),
        fixed_app(weights, examples, with_mod=True),
        model,
    )
    stock = one_round(FedAvg(), fixed_app(weights, examples, with_mod=False), model)
    largest = np.max(np.abs([*weights, model["w"]]), axis=0)
    assert (np.abs(ours["w"] - stock["w"]) <= ULPS * np.spacing(largest)).all()


@pytest.mark.parametrize("apps", [message_app, numpy_app])
@pytest.mark.parametrize("payload", ["update", "gradient"])
def test_three_rounds_of_the_identity_compressor_agree_with_stock_fedavg(
    apps: Any, payload: str
) -> None:
    server_lr = SERVER_LR if payload == "gradient" else None
    ours = CO3Strategy(
        "none", payload=payload, server_lr=server_lr, num_clients=4, fraction_evaluate=0.0
    )
    stock = FedAvg(fraction_evaluate=0.0)
    results = [
        strategy.start(LocalGrid(app, NUM_CLIENTS), record_of(initial_model()), num_rounds=3)
        for strategy, app in ((ours, apps()), (stock, stock_app()))
    ]
    ours_model, stock_model = (arrays_of(result.arrays) for result in results)
    for name in NAMES:
        largest = np.abs(stock_model[name]).max()
        np.testing.assert_allclose(
            ours_model[name], stock_model[name], rtol=ROUNDS_RTOL, atol=ROUNDS_RTOL * largest
        )


# CO3 against plain NumPy


def nearest_values(z: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Nearest value of the format; ties to the even position in the ascending magnitudes."""
    magnitudes = fmt.values[fmt.zero :].astype(np.float64)
    distances = np.abs(np.abs(z.astype(np.float64))[..., None] - magnitudes)
    order = np.argsort(np.arange(len(magnitudes)) % 2, kind="stable")  # even positions first
    position = order[np.argmin(distances[..., order], axis=-1)]
    return np.copysign(magnitudes[position], z).astype(np.float32)


def convert(g: np.ndarray, m: np.ndarray, gamma: float, scale: Any, fmt: FloatFormat) -> Any:
    """Equations of a user: y, which the server will see, and the new residual."""
    v = np.float32(g + np.float32(gamma) * m)
    s = np.float32(scale)
    y = np.float32(nearest_values(np.float32(s * v), fmt) / s)
    return np.asarray(y), np.asarray(v - y)


def updates_of(model: Model, client: int) -> Model:
    """What a client wants to send: gradients, differences of buffers, new counters."""
    gradient, _ = gradient_of(model, client)
    after = new_buffers(model, client)
    update = {name: gradient[name] for name in NAMES}
    update |= {name: after[name] - model[name] for name in FLOAT_BUFFERS}
    return update | {"norm.num_batches_tracked": after["norm.num_batches_tracked"]}


def reference_rounds(config: CodecConfig) -> tuple[Model, list[int]]:
    """Run the algorithm in plain NumPy; only the scales, and the payload sizes, are the codec's."""
    fmt, buffer_fmt = FloatFormat.parse(config.format), FloatFormat.parse("e4m3")
    model = initial_model(buffers=True)
    residuals: list[Model | None] = [None] * NUM_CLIENTS
    examples = [len(client_data(client)[1]) for client in range(NUM_CLIENTS)]
    step = np.float32(SERVER_LR / sum(examples))
    mean = np.float32(1.0 / sum(examples))
    sizes = []
    for _ in range(NUM_ROUNDS):
        total = {name: np.zeros_like(model[name]) for name in NAMES + FLOAT_BUFFERS}
        for client, n in enumerate(examples):
            update = updates_of(model, client)
            settings = {"format": config.format, "gamma": config.gamma, "buffers": FLOAT_BUFFERS}
            encoded = encode_update(update, residuals[client], CodecConfig(**settings))
            scales = {row.name: row.scale for row in encoded.stats.tensors}
            sizes.append(len(encoded.payload))
            memory = residuals[client] or {name: np.zeros_like(total[name]) for name in total}
            residuals[client] = {}
            for name in total:
                is_buffer = name in FLOAT_BUFFERS
                y, residuals[client][name] = convert(
                    update[name],
                    memory[name],
                    1.0 if is_buffer else config.gamma,
                    scales[name],
                    buffer_fmt if is_buffer else fmt,
                )
                total[name] = np.float32(total[name] + np.float32(np.float32(n) * y))
        for name in NAMES:
            model[name] = np.float32(model[name] - np.float32(step * total[name]))
        for name in FLOAT_BUFFERS:
            model[name] = np.float32(model[name] + np.float32(mean * total[name]))
        model["norm.running_var"] = np.maximum(model["norm.running_var"], 0)
        model["norm.num_batches_tracked"] = update_of_most_examples(model, examples)
    return model, sizes


def update_of_most_examples(model: Model, examples: list[int]) -> np.ndarray:
    client = int(np.argmax(examples))
    return new_buffers(model, client)["norm.num_batches_tracked"]


@pytest.fixture(scope="module")
def reference() -> tuple[Model, list[int]]:
    return reference_rounds(CONFIG)


def assert_same_model(got: Model, expected: Model) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, strict=True)


def run_locally(app: Any, **grid_options: Any) -> tuple[Model, CO3Strategy]:
    grid = LocalGrid(app, NUM_CLIENTS, **grid_options)
    strategy = make_strategy()
    strategy.num_clients = NUM_CLIENTS
    result = strategy.start(grid, record_of(initial_model(buffers=True)), num_rounds=NUM_ROUNDS)
    return arrays_of(result.arrays), strategy


@pytest.mark.parametrize("app", [message_app(), numpy_app(), MixedApp()], ids=["mod", "np", "mix"])
def test_three_co3_rounds_equal_the_reference_bit_for_bit(app: ClientApp, reference: Any) -> None:
    model, strategy = run_locally(app)
    assert_same_model(model, reference[0])
    assert 8 * sum(reference[1]) == strategy.R


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_order_of_replies_changes_nothing(seed: int, reference: Any) -> None:
    model, strategy = run_locally(MixedApp(), shuffle_seed=seed)
    assert_same_model(model, reference[0])
    assert 8 * sum(reference[1]) == strategy.R


def test_order_of_nodes_changes_nothing(reference: Any) -> None:
    configs = [{"partition-id": client} for client in (2, 0, 3, 1)]
    model, _ = run_locally(MixedApp(), node_configs=configs)
    assert_same_model(model, reference[0])


def test_reference_is_not_the_identity(reference: Any) -> None:
    exact = CO3Strategy(
        "none", payload="gradient", server_lr=SERVER_LR, num_clients=4, fraction_evaluate=0.0
    )
    arrays = record_of(initial_model(buffers=True))
    result = exact.start(LocalGrid(message_app(), 4), arrays, num_rounds=NUM_ROUNDS)
    weight = arrays_of(result.arrays)["weight"]
    assert not np.array_equal(weight, reference[0]["weight"])
    np.testing.assert_allclose(weight, reference[0]["weight"], atol=0.1)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Model and R of the job that runs through Flower's simulation engine."""
    folder = tmp_path_factory.mktemp("simulation")
    paths = [str(REPOSITORY / "tests"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    job = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "simulation_job.py"), str(folder / "out.npz")],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    with np.load(Path(folder) / "out.npz") as file:
        yield dict(file)


@pytest.mark.engine
def test_simulation_with_both_kinds_of_client_equals_the_reference_bit_for_bit(
    simulated: Model, reference: Any
) -> None:
    assert_same_model({k: v for k, v in simulated.items() if k != "R"}, reference[0])


@pytest.mark.engine
def test_simulation_counts_the_bits_of_the_reference(simulated: Model, reference: Any) -> None:
    assert int(simulated["R"]) == 8 * sum(reference[1])
