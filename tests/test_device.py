"""Flower's half with tensors on a device: replies that stay there, sums that are made there.

torch's CPU plays the device: with ``on_device`` every torch tensor counts as one that is away.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from localgrid import LocalGrid
from tinyapp import (
    TinyNumPyClient,
    arrays_of,
    initial_model,
    message_app,
    numpy_app,
    record_of,
)

from co3_flower import CO3Strategy, CodecConfig, ConfigError, co3_mod, device_record
from co3_flower import client as client_module
from co3_flower import dense as dense_module
from co3_flower.dense import HostDense, bring_to_host, dense_for
from co3_flower.layout import is_tensor
from co3_flower.memory import FileStore

torch = pytest.importorskip("torch")
from co3_flower.dense_torch import TorchDense  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SPARSE = CodecConfig(scale_multiplier=0.3, gamma=0.9, min_numel=100)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take every torch tensor for one that lives on a device; note how much is coded there."""
    monkeypatch.setattr(dense_module, "is_on_device", is_tensor)
    coded: list[int] = []
    encode = TorchDense.encode

    def noted(dense: TorchDense, choice: Any, symbols: Any, *rest: Any) -> Any:
        coded.append(symbols.numel())
        return encode(dense, choice, symbols, *rest)

    monkeypatch.setattr(TorchDense, "encode", noted)
    return coded


def to_tensors(message: Message, context: Context, call_next: Any) -> Message:
    """Make an app's arrays tensors, as an app in torch has them: a mod behind co3_mod."""
    reply = call_next(message, context)
    for name, record in list(reply.content.array_records.items()):
        tensors = {key: torch.tensor(array.numpy()) for key, array in record.items()}
        reply.content[name] = device_record(tensors)
    return reply


class TorchClient(TinyNumPyClient):
    """A NumPyClient that gives tensors."""

    def local_update(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        update, num_examples, metrics = super().local_update(parameters, config)
        return [torch.tensor(value) for value in update], num_examples, metrics


def torch_message_app() -> ClientApp:
    return message_app(to_tensors)


def torch_numpy_app() -> ClientApp:
    return ClientApp(client_fn=lambda context: TorchClient(context).to_client())


APPS = {"message": (message_app, torch_message_app), "numpy": (numpy_app, torch_numpy_app)}


def app_giving(make: Callable[[Message, Context], Any], mod: Any = co3_mod) -> ClientApp:
    """Return a message-API app whose clients send these tensors as their new weights."""
    app = ClientApp(mods=[mod])

    @app.train()
    def step(message: Message, context: Context) -> Message:
        records = {
            "arrays": device_record(make(message, context)),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    return app


def tensors_of(message: Message) -> dict[str, Any]:
    """Return the model of a train message."""
    return {k: torch.tensor(v.numpy()) for k, v in message.content["arrays"].items()}


class Lossy:
    """Lose client 1's reply of every second round."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, node: int, reply: Message) -> Message | None:
        self.calls += 1
        return None if self.calls % 8 == 2 else reply


def train(
    app: ClientApp, config: Any, *, has_buffers: bool = True, num_rounds: int = 3, **changes: Any
) -> tuple[dict[str, bytes], int, list[bytes]]:
    """Train, and return the bytes of the model, R, and those of all residuals."""
    grid = LocalGrid(app, 4, tamper=Lossy())
    settings = {"num_clients": 4, "fraction_evaluate": 0.0, "min_replies": 3, "buffer_keys": None}
    strategy = CO3Strategy(config, **settings | changes)
    model = record_of(initial_model(buffers=has_buffers))
    result = strategy.start(grid, model, num_rounds=num_rounds)
    assert result.arrays is not None
    final = {name: value.tobytes() for name, value in arrays_of(result.arrays).items()}
    residuals = [
        array.numpy().tobytes()
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
        for array in record.values()
    ]
    return final, strategy.R, residuals


# An Array around a tensor


def test_array_is_an_ordinary_one_to_everyone_else() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T  # not in C order
    stock, ours = ArrayRecord({"w": tensor}), device_record({"w": tensor})
    assert ours["w"].numpy().tolist() == tensor.tolist()
    assert (ours["w"].dtype, ours["w"].shape, ours["w"].stype) == (
        stock["w"].dtype,
        stock["w"].shape,
        stock["w"].stype,
    )
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(other["w"]) is Array
        assert other["w"] == stock["w"]
    assert ours.object_id == stock.object_id
    assert ours.count_bytes() == stock.count_bytes()
    assert torch.equal(ours.to_torch_state_dict()["w"], tensor)


def test_bytes_are_made_once_and_only_when_they_are_asked_for() -> None:
    tensor = torch.zeros(3)
    array = device_record({"w": tensor})["w"]
    tensor += 1
    assert array.numpy().tolist() == [1, 1, 1]
    assert array.data is array.data


def test_scalars_integers_and_bfloat16_are_taken() -> None:
    record = device_record(
        {
            "steps": torch.tensor(7),
            "mask": torch.tensor([True, False]),
            "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        }
    )
    assert {k: (v.dtype, v.shape, v.numpy().tolist()) for k, v in record.items()} == {
        "steps": ("int64", (), 7),
        "mask": ("bool", (2,), [True, False]),
        "half": ("float32", (2,), [1.5, 2.5]),
    }


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device in 'w'"),
        (lambda: torch.zeros(2, dtype=torch.complex64), "complex64 in 'w'"),
    ],
)
def test_tensor_that_cannot_travel_is_refused_by_name(
    tensor: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        device_record({"w": tensor()})


# A whole training


@pytest.mark.parametrize("buffers", ["coded", "raw"])
@pytest.mark.parametrize("payload", ["update", "gradient"])
@pytest.mark.parametrize("kind", APPS)
def test_training_on_a_device_gives_the_same_bytes(
    kind: str, payload: str, buffers: str, on_device: list[int]
) -> None:
    with_arrays, with_tensors = (make() for make in APPS[kind])
    settings = {"payload": payload, "buffers": buffers}
    if payload == "gradient":
        settings["server_lr"] = 0.5
    if kind == "numpy":
        settings["buffer_keys"] = ("norm.running_mean", "norm.running_var")
    expected = train(with_arrays, SPARSE, **settings)
    assert any(expected[2])
    assert not on_device
    assert train(with_tensors, SPARSE, **settings) == expected
    assert len(on_device) >= 12
    assert train(with_tensors, SPARSE, device="cpu", **settings) == expected


@pytest.mark.parametrize(
    "config",
    ["none", "topk", "countsketch", CodecConfig(target_bits_per_parameter=2.0, min_numel=100)],
    ids=["none", "topk", "countsketch", "target"],
)
@pytest.mark.usefixtures("on_device")
def test_other_compressors_and_targets_give_the_same_bytes(config: Any) -> None:
    expected = train(message_app(), config)
    assert train(torch_message_app(), config) == expected
    assert train(message_app(), config, device="cpu") == expected


@pytest.mark.usefixtures("on_device")
def test_residual_in_files_is_the_same(tmp_path: Path) -> None:
    kept: dict[str, list[Any]] = {}
    for name, app in (("host", message_app()), ("device", torch_message_app())):
        folder = tmp_path / name
        train(app, SPARSE, memory_dir=str(folder), experiment_id="e")
        assert len(list(folder.iterdir())) == 8
        kept[name] = []
        for client in range(4):
            store = FileStore(folder, "e", client)
            for generation in store.generations():
                found = store.read(generation)
                assert found is not None
                residual, payload = found
                arrays = {key: value.tobytes() for key, value in residual.items()}
                kept[name].append((generation, arrays, payload))
    assert len(kept["host"]) == 8
    assert kept["device"] == kept["host"]


@pytest.mark.usefixtures("on_device")
def test_only_the_residual_comes_to_the_host_with_an_entry_per_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 400_000

    def noise(message: Message, context: Context) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        return {"w": torch.randn(1000, size // 1000, generator=generator)}

    moved: list[int] = []
    cpu = torch.Tensor.cpu

    def counted(tensor: Any) -> Any:
        moved.append(tensor.numel() * tensor.element_size())
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    grid = LocalGrid(app_giving(noise), 1)
    model = record_of({"w": np.zeros((1000, size // 1000), np.float32)})
    strategy = CO3Strategy(CodecConfig(structure="none"), num_clients=1, fraction_evaluate=0.0)
    strategy.start(grid, model, num_rounds=2)
    dense = [size_in_bytes for size_in_bytes in moved if size_in_bytes >= size]
    assert dense == [4 * size] * 2  # the residual, once a round
    assert sum(moved) - sum(dense) < 2 * size  # histograms, and codes of some 3 bits


@pytest.mark.parametrize(
    "make",
    [
        lambda value: torch.tensor(value).to(torch.bfloat16),
        lambda value: torch.tensor(value).to_sparse(),
        lambda value: torch.tensor(value, dtype=torch.float64),
    ],
    ids=["bfloat16", "sparse", "float64"],
)
def test_numpy_client_may_give_any_tensors_of_a_device(make: Any, on_device: list[int]) -> None:
    class Client(TinyNumPyClient):
        def local_update(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            return [make(np.ones_like(value)) for value in parameters], 3, {}

    app = ClientApp(client_fn=lambda context: Client(context).to_client())
    strategy = CO3Strategy(CodecConfig(scale="unit"), num_clients=1, fraction_evaluate=0.0)
    result = strategy.start(LocalGrid(app, 1), record_of(initial_model()), num_rounds=1)
    assert result.arrays is not None
    new = arrays_of(result.arrays)
    assert all((value == 1).all() for value in new.values())
    assert on_device


@pytest.mark.usefixtures("on_device")
def test_observer_sees_the_tensors() -> None:
    seen: list[client_module.SentUpdate] = []
    mod = partial(co3_mod, observe=lambda context, sent: seen.append(sent))
    app = app_giving(lambda message, _: {k: v + 1 for k, v in tensors_of(message).items()}, mod)
    train(app, SPARSE, has_buffers=False, num_rounds=1)
    assert len(seen) == 4
    assert torch.equal(seen[0].update["weight"], torch.ones(10, 64))
    assert is_tensor(seen[0].encoded.residual["weight"])


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model | {"weight": model["weight"][:5]}, "keep shape"),
        (lambda model: model | {"weight": model["weight"] * torch.nan}, "NaN or infinite"),
        (
            lambda model: (
                model
                | {"norm.num_batches_tracked": model["norm.num_batches_tracked"].to(torch.int32)}
            ),
            "must have dtype int64, got int32 in tensor 'norm.num_batches_tracked'",
        ),
    ],
)
def test_bad_reply_is_named_as_on_the_host(change: Any, reason: str) -> None:
    app = app_giving(lambda message, _: change(tensors_of(message)))
    grid = LocalGrid([app, message_app()], 2)
    strategy = CO3Strategy(SPARSE, num_clients=2, fraction_evaluate=0.0)
    strategy.start(grid, record_of(initial_model(buffers=True)), num_rounds=1)
    assert [reason in failure.reason for failure in strategy.failures] == [True]


# Sums on a device


def test_bad_reply_leaves_the_sum_on_a_device_as_it_was() -> None:
    def tamper(node: int, reply: Message) -> Message:
        payload = reply.content["co3"]["payload"]
        if node == 1001:
            reply.content["co3"]["payload"] = payload[:-3] + b"abc"
        return reply

    models = []
    for device in (None, "cpu"):
        grid = LocalGrid(message_app(), 4, tamper=tamper)
        strategy = CO3Strategy(
            SPARSE, num_clients=4, fraction_evaluate=0.0, device=device, max_update_norm=0.05,
            reclip=True,
        )  # fmt: skip
        result = strategy.start(grid, record_of(initial_model(buffers=True)), num_rounds=2)
        assert len(strategy.failures) == 2
        assert result.arrays is not None
        models.append({k: v.tobytes() for k, v in arrays_of(result.arrays).items()})
    assert models[0] == models[1]


@pytest.mark.parametrize(("inner", "num_sums"), [(None, 10), (FedAvg(), 0)], ids=["alone", "inner"])
def test_sums_are_made_on_the_device_unless_an_inner_strategy_makes_them(
    inner: Any, num_sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[int] = []
    accumulate = TorchDense.accumulate

    def noted(dense: TorchDense, *arguments: Any) -> None:
        sums.append(1)
        accumulate(dense, *arguments)

    monkeypatch.setattr(TorchDense, "accumulate", noted)
    train(message_app(), SPARSE, inner=inner, device="cpu")
    assert len(sums) == num_sums


@pytest.mark.parametrize("device", ["gpu7", "cuda:99"])
def test_device_that_torch_does_not_have_is_refused(device: str) -> None:
    reason = f"device must be one that torch has here, got '{device}'"
    with pytest.raises(ConfigError, match=reason):
        CO3Strategy(SPARSE, device=device)


# The operations


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_differences_round_as_on_the_host(rng: np.random.Generator, dtype: str) -> None:
    before, after = (rng.standard_normal((2, 40, 3)) * 1e4).astype(dtype)
    host, device = HostDense(1), dense_for({}, "cpu", 1)
    expected = host.difference(after, before)
    assert expected.dtype == np.float32
    found = device.difference(torch.tensor(after), before)
    assert found.numpy().tobytes() == expected.tobytes()
    assert device.as_float32(torch.tensor(after).T).numpy().tobytes() == (
        host.as_float32(after.T).tobytes()
    )


def test_differences_that_overflow_are_left_to_the_codec() -> None:
    huge = np.float64([1e300, -1e300])
    host, device = HostDense(1), dense_for({}, "cpu", 1)
    assert host.difference(huge, -huge).tolist() == [np.inf, -np.inf]
    assert device.difference(torch.tensor(huge), -huge).tolist() == [np.inf, -np.inf]


@pytest.mark.usefixtures("on_device")
def test_residual_comes_home_in_any_order(rng: np.random.Generator) -> None:
    flat = torch.tensor(rng.standard_normal(10).astype(np.float32))
    residual = {"b": flat[4:10].reshape(2, 3), "a": flat[:4], "none": flat[:0]}
    home = bring_to_host(residual)
    assert {k: v.tolist() for k, v in home.items()} == {k: v.tolist() for k, v in residual.items()}
    assert all(isinstance(value, np.ndarray) for value in home.values())
    assert bring_to_host({}) == {}
