"""Whatever real models hold: through the codec, and through both kinds of Flower client."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from localgrid import LocalGrid
from test_inner_strategies import STOCK
from tinyapp import arrays_of, record_of

from co3_flower import (
    CO3NumPyClient,
    CO3Strategy,
    CodecConfig,
    co3_mod,
    decode_update,
    encode_update,
)
from co3_flower.bitstream import chunk_size, lanes
from co3_flower.huffman import HuffmanTables
from co3_flower.layout import FLOAT_DTYPES, Kind, Layout, as_arrays
from co3_flower.nodes import RoundError
from co3_flower.payload import Parts, read_payload, write_payload
from conftest import read_only

Arrays = dict[str, np.ndarray]

CONFIGS = {
    "default": CodecConfig(),
    "rans": CodecConfig(coder="rans", format="e5m2"),
    "unit": CodecConfig(scale="unit", structure="none", gamma=0.5),
    "raw": CodecConfig(raw=(0,)),
}

RNG = np.random.default_rng(7)
NORMAL = RNG.standard_normal((40, 60)).astype(np.float32)
EMBEDDING = np.where(np.arange(500)[:, None] % 50 == 0, RNG.standard_normal((500, 16)), 0)

# One array of each awkward kind: as a model's tensor and as its change.
ODD: dict[str, np.ndarray] = {
    "float16": NORMAL.astype(np.float16),
    "float64": NORMAL.astype(np.float64) * 1e-30,
    "big endian": NORMAL.astype(">f4"),
    "0-d": np.array(0.5, np.float32),
    "0-d float64": np.array(-0.25),
    "empty": np.empty((0, 3), np.float32),
    "empty in the middle": np.empty((4, 0, 5), np.float32),
    "one element": np.float32([[[1.5]]]),
    "all zero": np.zeros((50, 50), np.float32),
    "negative zero": np.full(9, -0.0, np.float32),
    "constant": np.full((30, 40), 0.125, np.float32),
    "least subnormal": np.full(20, 1e-45, np.float32),
    "wide range": np.float32([1e-38, 1e-20, 1.0, 1e20]),
    "int8": np.arange(-5, 5, dtype=np.int8),
    "int64": np.array(2**62, np.int64),
    "uint64": np.array([2**64 - 1], np.uint64),
    "bool": np.array([[True, False], [False, True]]),
    "empty bool": np.empty(0, bool),
    "mostly zero rows": EMBEDDING.astype(np.float32),
    "transposed": NORMAL.T,
    "every other": NORMAL[::2, ::3],
    "backwards": NORMAL[::-1],
    "broadcast": np.broadcast_to(np.float32(0.5), (30, 40)),
    "read-only": read_only(NORMAL.copy()),
    "eight axes": NORMAL.reshape(2, 2, 2, 5, 2, 2, 3, 5),
}


def is_float(array: np.ndarray) -> bool:
    return array.dtype.newbyteorder("=") in FLOAT_DTYPES


def copies(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def assert_same(arrays: Arrays, expected: Arrays) -> None:
    assert list(arrays) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)


# The codec


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_odd_tensor_survives_two_rounds_and_is_not_changed(name: str, config: CodecConfig) -> None:
    update = {name: ODD[name]}
    before = copies(update)
    with np.errstate(all="raise", under="ignore"):
        first = encode_update(update, None, config)
        residual = copies(first.residual)
        second = encode_update(update, first.residual, config)
    assert_same(update, before)
    assert_same(first.residual, residual)
    decoded = decode_update(second.payload, update)[name]
    assert decoded.shape == ODD[name].shape
    if name in second.residual:
        assert decoded.dtype == np.float32
        gamma = np.float32(config.gamma)
        carried = gamma * residual[name] + ODD[name].astype(np.float32)
        np.testing.assert_allclose(decoded + second.residual[name], carried, rtol=1e-6, atol=1e-44)
    else:
        assert decoded.dtype == ODD[name].dtype.newbyteorder("=")
        np.testing.assert_array_equal(decoded, ODD[name])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_all_odd_tensors_survive_in_one_update(config: CodecConfig) -> None:
    encoded = encode_update(ODD, None, config)
    decoded = decode_update(encoded.payload, ODD)
    for name, value in ODD.items():
        assert decoded[name].shape == value.shape
        if name not in encoded.residual:
            np.testing.assert_array_equal(decoded[name], value)
        else:
            whole = decoded[name] + encoded.residual[name]
            np.testing.assert_allclose(whole, value.astype(np.float32), rtol=1e-6, atol=1e-44)


def test_all_zero_tensor_decodes_to_zeros() -> None:
    update = {"w": np.zeros((50, 50), np.float32), "v": np.float32([1, 2])}
    assert not decode_update(encode_update(update, None, CodecConfig()).payload, update)["w"].any()


def test_rows_that_are_zero_cost_next_to_nothing() -> None:
    dense = {"w": NORMAL[:10].repeat(4, 0).reshape(-1, 16)}
    sparse = {"w": np.zeros((5000, 16), np.float32)}
    sparse["w"][::50] = dense["w"][:100]
    bits = encode_update(sparse, None, CodecConfig()).stats.bits_per_parameter
    assert bits < 0.15  # 2 % of the rows at 2.9 bits, and which they are


@pytest.mark.parametrize(
    "names",
    [
        ("重み", "偏り"),
        ("вес.слой1", "смещение"),
        ("poids.\u00e9", "poids.e\u0301"),  # the same on paper: composed and decomposed
        ("وزن", "משקל"),
        ("🙂", ""),
        ("a b", "a\nb"),
        ("../x", "/etc/passwd"),
        ("0", "00"),
        ("x" * 5000, "file"),
    ],
    ids=["ja", "ru", "fr", "rtl", "emoji", "blank", "path", "digits", "long"],
)
def test_names_in_any_language_survive(names: tuple[str, str], tmp_path: Any) -> None:
    model = {name: NORMAL[:3] * (i + 1) for i, name in enumerate(names)}
    assert len(model) == 2
    encoded = encode_update(model, None, CodecConfig())
    assert list(decode_update(encoded.payload, model)) == list(encoded.residual) == list(names)
    for memory_dir in (None, str(tmp_path)):
        strategy = make_strategy(memory_dir=memory_dir)
        after = run(strategy, shifting_app({n: v + 1 for n, v in model.items()}), model, 2)
        assert list(after) == list(names)
        assert strategy.failures == []


# Sizes beyond 2**31: arithmetic only, nothing of that size is made

HUGE = Layout(
    names=("huge", "small", "ids"),
    shapes=((2**17, 2**16), (3, 5), (2**30, 2**3)),
    dtypes=(np.dtype(np.float32), np.dtype(np.float32), np.dtype(np.int64)),
)
KINDS = (Kind.CODED, Kind.CODED, Kind.RAW)


def test_layout_of_huge_tensors_counts_without_overflow() -> None:
    assert HUGE.numels == (2**33, 15, 2**33)
    assert HUGE.table_threshold(KINDS, 1024) == 1024
    plan = HUGE.plan(KINDS, 1024)
    assert plan.offsets.tolist() == [0, 2**33, 2**33 + 15]
    assert (plan.num_symbols, plan.num_own, plan.num_pooled) == (2**33 + 15, 1, 1)
    assert len(HUGE.digest((2,))) == 8


@pytest.mark.parametrize(("num_bits", "most"), [(0, 2**32 - 1), (10, 2**32 - 1), (2**33, 131072)])
def test_chunks_of_a_huge_update_fit_their_field(num_bits: int, most: int) -> None:
    assert chunk_size(2**33, num_bits) == most


def test_payload_of_a_huge_layout_is_framed_and_read_without_its_tensors() -> None:
    layout = Layout(HUGE.names[:2], HUGE.shapes[:2], HUGE.dtypes[:2])
    plan = layout.plan((Kind.CODED, Kind.CODED), 1024)
    fmt = CodecConfig().float_format
    counts = np.zeros((2, fmt.num_values), np.int64)
    counts[:, fmt.zero] = [2**33, 15]  # all zero: the code takes no bits
    tables = HuffmanTables.from_weights(counts)
    chunk = chunk_size(plan.num_symbols, 0)
    sizes = np.zeros(-(-plan.num_symbols // chunk) * lanes(tables), np.int64)
    parts = Parts(
        fmt, np.float32([0.5, 2.0]), tables, np.array([0, 1]), None, lanes(tables), chunk,
        sizes, np.zeros(0, np.uint32), (),
    )  # fmt: skip
    read, read_plan = read_payload(write_payload(parts, layout, plan), layout)
    assert (read.chunk_symbols, read.sizes.tolist()) == (chunk, sizes.tolist())
    assert read.scales.tolist() == [0.5, 2.0]
    assert read_plan.offsets.tolist() == plan.offsets.tolist()


# torch's tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_torch_parameters_of_any_float_width_are_coded(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.from_numpy(NORMAL).to(dtype))
    before = weight.detach().clone()
    encoded = encode_update({"w": weight}, None, CodecConfig())
    whole = decode_update(encoded.payload, {"w": weight})["w"] + encoded.residual["w"]
    np.testing.assert_allclose(whole, weight.detach().float().numpy(), rtol=1e-6)
    assert torch.equal(weight, before)


def test_bfloat16_of_ml_dtypes_is_coded_through_float32() -> None:
    update = {"w": NORMAL.astype(ml_dtypes.bfloat16)}
    encoded = encode_update(update, None, CodecConfig())
    expected = encode_update({"w": update["w"].astype(np.float32)}, None, CodecConfig())
    assert encoded.payload == expected.payload
    assert_same(decode_update(encoded.payload, update), decode_update(expected.payload, update))


class CudaTensor:
    """What a CUDA tensor lets one do: everything but `numpy()`, until it is on the host."""

    def __init__(self, values: torch.Tensor, device: str = "cuda:0") -> None:
        self.values, self.device, self.dtype = values, device, values.dtype
        self.shape, self.layout, self.is_meta = values.shape, values.layout, False

    def detach(self) -> CudaTensor:
        return CudaTensor(self.values.detach(), self.device)

    def float(self) -> CudaTensor:
        return CudaTensor(self.values.float(), self.device)

    def cpu(self) -> torch.Tensor:
        return self.values.cpu()

    def numpy(self) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_on_a_gpu_is_brought_to_the_host_for_a_rival(dtype: torch.dtype) -> None:
    host = torch.from_numpy(NORMAL).to(dtype)
    on_gpu = {"w": CudaTensor(host)}
    assert_same(as_arrays(on_gpu), as_arrays({"w": host}))
    assert Layout.of(on_gpu) == Layout.of({"w": host})


def test_sparse_gradient_of_an_embedding_is_coded_dense() -> None:
    net = torch.nn.Embedding(50, 8, sparse=True)
    net(torch.tensor([3, 7, 3])).sum().backward()
    gradient = net.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    payload = encode_update({"w": gradient}, None, CodecConfig(scale="unit")).payload
    np.testing.assert_array_equal(
        decode_update(payload, {"w": net.weight})["w"], gradient.to_dense().numpy()
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(3, device="meta"), "got one on the meta device in 'w'; load the weights"),
        (torch.zeros(3, dtype=torch.complex64), "dtype must be one of .*, got .*complex64 in 'w'"),
        (torch.zeros(3).to(torch.float8_e5m2), "got torch.float8_e5m2 in 'w'"),
        (np.zeros(3, ml_dtypes.float8_e5m2), "got float8_e5m2 in 'w'"),
        (np.zeros(3, np.longdouble), "got .*128 in 'w'"),
    ],
    ids=["meta", "complex", "float8", "ml_dtypes float8", "longdouble"],
)
def test_tensor_that_cannot_travel_is_named(tensor: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_update({"ok": np.ones(2, np.float32), "w": tensor}, None, CodecConfig())


# Through Flower


def make_strategy(config: CodecConfig | str = "none", **changes: Any) -> CO3Strategy:
    return CO3Strategy(config, **{"num_clients": 2, "fraction_evaluate": 0.0} | changes)


def run(strategy: CO3Strategy, app: ClientApp, model: Arrays, num_rounds: int = 1) -> Arrays:
    return arrays_of(strategy.start(LocalGrid(app, 2), record_of(model), num_rounds).arrays)


def shifting_app(after: Arrays) -> ClientApp:
    """A message-API app whose clients always return the same weights."""
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 3, "train-loss": 0.5})
        return Message(
            RecordDict({"arrays": record_of(after), "metrics": metrics}), reply_to=message
        )

    return app


def shifting_numpy_app(after: Arrays) -> ClientApp:
    """The same as a NumPyClient."""

    class Client(CO3NumPyClient):
        def local_update(self, parameters: list[np.ndarray], config: Any) -> Any:
            with np.errstate(over="ignore"):
                update = [
                    value - old if is_float(old) else value
                    for old, value in zip(parameters, after.values(), strict=True)
                ]
            return update, 3, {}

    return ClientApp(client_fn=lambda context: Client(context).to_client())


APPS = {"message": shifting_app, "numpy": shifting_numpy_app}
# Flower's Array keeps no byte order but the machine's in its dtype's name
MODEL = {name: value for name, value in ODD.items() if name != "big endian"}


@pytest.mark.parametrize("make_app", APPS.values(), ids=APPS)
@pytest.mark.parametrize(
    "config", ["none", CodecConfig(scale="unit", format="e4m3")], ids=["none", "e4m3"]
)
def test_odd_model_goes_through_flower(
    make_app: Callable[[Arrays], ClientApp], config: Any
) -> None:
    # Powers of two: a client's change is exact in the format and in every float.
    after = {n: v + v.dtype.type(1) if is_float(v) else ~v for n, v in MODEL.items()}
    strategy = make_strategy(config)
    new = run(strategy, make_app(after), MODEL)
    assert strategy.failures == []
    for name, value in MODEL.items():
        assert (new[name].shape, new[name].dtype) == (value.shape, value.dtype), name
        if is_float(value):
            np.testing.assert_allclose(new[name], after[name], rtol=2e-3, atol=2e-3, err_msg=name)
        else:
            np.testing.assert_array_equal(new[name], after[name], err_msg=name)


@pytest.mark.parametrize("name", STOCK)
def test_odd_model_goes_through_every_inner_strategy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # Flower's, after every array: minutes
    after = {n: v + v.dtype.type(1) if is_float(v) else ~v for n, v in MODEL.items()}
    strategy = make_strategy("none", inner=STOCK[name](), num_clients=7)
    grid = LocalGrid(shifting_app(after), 7)
    new = arrays_of(strategy.start(grid, record_of(MODEL), num_rounds=2).arrays)
    assert strategy.failures == []
    assert {n: (a.shape, a.dtype) for n, a in new.items()} == {
        n: (a.shape, a.dtype) for n, a in MODEL.items()
    }


@pytest.mark.parametrize("make_app", APPS.values(), ids=APPS)
def test_arrays_that_the_server_holds_are_not_changed(make_app: Any) -> None:
    record = record_of(MODEL)
    sent = {name: array.data for name, array in record.items()}
    after = {n: v + v.dtype.type(1) if is_float(v) else ~v for n, v in MODEL.items()}
    kept = copies(after)
    make_strategy(CodecConfig()).start(LocalGrid(make_app(after), 2), record, num_rounds=2)
    assert {name: array.data for name, array in record.items()} == sent
    assert_same(after, kept)


def test_frozen_tensor_stays_bit_for_bit_and_costs_next_to_nothing() -> None:
    model = {"frozen": NORMAL, "head": NORMAL[:4]}
    strategy = make_strategy(CodecConfig())
    new = run(strategy, shifting_app(model | {"head": NORMAL[:4] * 1.01}), model, 3)
    np.testing.assert_array_equal(new["frozen"], NORMAL)
    alone = make_strategy(CodecConfig())
    run(alone, shifting_app({"head": NORMAL[:4] * 1.01}), {"head": NORMAL[:4]}, 3)
    assert strategy.R - alone.R < 3 * 2 * 8 * 16  # bits: 3 rounds, 2 clients, 16 bytes each


def test_tied_tensors_stay_tied() -> None:
    model = {"embed.weight": NORMAL, "between": NORMAL[:9], "decoder.weight": NORMAL}
    after = {name: value + np.roll(value, 1) * np.float32(0.01) for name, value in model.items()}
    new = run(make_strategy(CodecConfig()), shifting_app(after), model, 3)
    assert (new["embed.weight"] != NORMAL).any()
    np.testing.assert_array_equal(new["embed.weight"], new["decoder.weight"])


def test_bfloat16_model_is_refused_by_flower_and_travels_as_float32() -> None:
    net = torch.nn.Linear(4, 3).to(torch.bfloat16)
    with pytest.raises(TypeError, match="BFloat16"):
        ArrayRecord(net.state_dict())
    model = {name: value.float().numpy() for name, value in net.state_dict().items()}
    new = run(make_strategy(), shifting_app({n: v + 1 for n, v in model.items()}), model)
    for name, value in model.items():
        np.testing.assert_array_equal(new[name], value + 1)


def returning(make: Callable[[tuple[int, ...]], Any]) -> ClientApp:
    """A NumPyClient that returns what `make` makes of each parameter's shape."""

    class Client(CO3NumPyClient):
        def local_update(self, parameters: list[np.ndarray], config: Any) -> Any:
            return [make(p.shape) for p in parameters], 3, {}

    return ClientApp(client_fn=lambda context: Client(context).to_client())


@pytest.mark.parametrize(
    "make",
    [
        lambda shape: torch.ones(shape, dtype=torch.bfloat16),
        lambda shape: torch.ones(shape).to_sparse(),
        lambda shape: np.ones(shape).tolist(),
    ],
    ids=["bfloat16", "sparse", "list"],
)
def test_numpy_client_may_return_any_tensors(make: Any) -> None:
    new = run(make_strategy(), returning(make), {"w": NORMAL})
    np.testing.assert_array_equal(new["w"], NORMAL + 1)


def test_meta_tensor_of_a_numpy_client_is_a_named_failure() -> None:
    app = returning(lambda shape: torch.ones(shape, device="meta"))
    with pytest.raises(RoundError, match="TypeError: tensor must hold data, got one on the meta"):
        run(make_strategy(), app, {"w": NORMAL})


# Networks


class Net(torch.nn.Module):
    """Everything in one: embedding, GRU, convolution, BatchNorm, LayerNorm, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(200, 8)
        self.conv = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.bn = torch.nn.BatchNorm1d(8)
        self.gru = torch.nn.GRU(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.mix = torch.nn.Linear(16, 8)
        self.ln = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 200, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))
        self.mix.bias.requires_grad_(False)  # frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y = self.bn(self.conv(self.embed(x).transpose(1, 2))).transpose(1, 2)
        return self.head(self.ln(self.mix(self.gru(y)[0])))


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def train_net(net: torch.nn.Module, client: int) -> float:
    generator = torch.Generator().manual_seed(client)
    x = torch.randint(0, 20, (16, 6), generator=generator)  # most rows of the embedding unused
    net.train()
    loss = torch.nn.functional.cross_entropy(net(x).transpose(1, 2), x)
    loss.backward()
    return float(loss.detach())


def torch_app(payload: str) -> ClientApp:
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = make_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
        loss = train_net(net, int(context.node_config["partition-id"]))
        gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in net.named_parameters(remove_duplicate=False)
        }
        records: dict[str, Any] = {
            "metrics": MetricRecord({"num-examples": 16, "train-loss": loss})
        }
        if payload == "gradient":
            records["gradient"] = ArrayRecord(gradient)
        else:
            with torch.no_grad():
                for p in net.parameters():
                    if p.grad is not None:
                        p -= 0.5 * p.grad
        records["arrays"] = ArrayRecord(net.state_dict())
        return Message(RecordDict(records), reply_to=message)

    return app


@pytest.mark.parametrize("payload", ["gradient", "update"])
def test_network_of_many_kinds_of_layers_trains(payload: str) -> None:
    net = make_net()
    start = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    options = {"payload": payload} | ({"server_lr": 0.5} if payload == "gradient" else {})
    strategy = make_strategy(CodecConfig(), **options)
    grid = LocalGrid(torch_app(payload), 2)
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=15)
    new = {name: array.numpy() for name, array in result.arrays.items()}
    net.load_state_dict(result.arrays.to_torch_state_dict(), strict=True)
    assert strategy.failures == []
    losses = [result.train_metrics_clientapp[i]["train-loss"] for i in (1, 15)]
    assert losses[1] < 0.8 * losses[0]
    assert {n: (a.shape, a.dtype) for n, a in new.items()} == {
        n: (a.shape, a.dtype) for n, a in start.items()
    }
    assert int(new["steps"]) == int(new["bn.num_batches_tracked"]) == 15
    np.testing.assert_array_equal(new["mix.bias"], start["mix.bias"])
    np.testing.assert_array_equal(new["embed.weight"], new["head.weight"])
    assert (new["bn.running_var"] != start["bn.running_var"]).all()
    assert (new["bn.running_var"] > 0).all()


def test_adapters_alone_may_be_the_model() -> None:
    # LoRA: the base stays where it is, on every client the same; only A and B travel.
    base = torch.nn.Linear(30, 20)
    rng = np.random.default_rng(1)
    adapters = {
        "lora_A": rng.standard_normal((4, 30)).astype(np.float32),
        "lora_B": np.zeros((20, 4), np.float32),
    }
    app = ClientApp(mods=[co3_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        state = message.content["arrays"].to_torch_state_dict()
        a, b = (state[name].requires_grad_() for name in ("lora_A", "lora_B"))
        x = torch.randn(64, 30, generator=torch.Generator().manual_seed(context.node_id))
        target = base(x).detach() + x @ torch.ones(30, 20) * 0.05
        loss = torch.nn.functional.mse_loss(base(x).detach() + x @ (b @ a).T, target)
        loss.backward()
        records = {
            "gradient": ArrayRecord({"lora_A": a.grad, "lora_B": b.grad}),
            "metrics": MetricRecord({"num-examples": 64, "train-loss": float(loss.detach())}),
        }
        return Message(RecordDict(records), reply_to=message)

    strategy = make_strategy(CodecConfig(), payload="gradient", server_lr=1.0)
    result = strategy.start(LocalGrid(app, 2), record_of(adapters), num_rounds=60)
    losses = [result.train_metrics_clientapp[i]["train-loss"] for i in (1, 60)]
    assert losses[1] < 0.7 * losses[0]
    assert strategy.num_parameters == 4 * 50
