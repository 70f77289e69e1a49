"""Softmax regression on scikit-learn's digits in NumPy, as both kinds of ClientApp; no torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

from co3_flower import CO3NumPyClient, co3_mod

NUM_CLASSES = 10
LR = 0.5
NAMES = ("weight", "bias")
BUFFERS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
BUFFERED_NAMES = NAMES + BUFFERS


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images as float32 [1797, 64] in [0, 1] and labels."""
    data = load_digits()
    return (data.data / 16).astype(np.float32), data.target


def client_data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every fourth image, and fewer of them for later clients: unequal examples."""
    images, labels = digits()
    part = slice(client % 4, None, 4)
    keep = 200 - 20 * client
    return images[part][:keep], labels[part][:keep]


def initial_model(*, buffers: bool = False) -> dict[str, np.ndarray]:
    """Return zero weights, with BatchNorm's buffers if asked for."""
    model = {
        "weight": np.zeros((NUM_CLASSES, 64), np.float32),
        "bias": np.zeros(NUM_CLASSES, np.float32),
    }
    if buffers:
        model |= {
            "norm.running_mean": np.zeros(64, np.float32),
            "norm.running_var": np.ones(64, np.float32),
            "norm.num_batches_tracked": np.array(0, np.int64),
        }
    return model


def record_of(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    """Return an ArrayRecord with the arrays' names."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a record by name."""
    return {name: array.numpy() for name, array in record.items()}


def product(subscripts: str, *operands: np.ndarray) -> np.ndarray:
    """Return a matrix product without BLAS: the same bits with any number of threads."""
    return np.einsum(subscripts, *operands, optimize=False)


def gradient_of(model: dict[str, np.ndarray], client: int) -> tuple[dict[str, np.ndarray], float]:
    """Return the gradient of the mean cross-entropy over a client's images, and the loss."""
    images, labels = client_data(client)
    logits = product("ij,kj->ik", images, model["weight"]) + model["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    probabilities[np.arange(len(labels)), labels] -= 1
    gradient = {
        "weight": product("ik,ij->kj", probabilities, images) / np.float32(len(labels)),
        "bias": probabilities.mean(axis=0, dtype=np.float32),
    }
    return gradient, float(loss)


def new_buffers(model: dict[str, np.ndarray], client: int) -> dict[str, np.ndarray]:
    """Return what one training-mode batch of all images makes of the buffers; {} without any."""
    if "norm.running_mean" not in model:
        return {}
    images, _ = client_data(client)
    mean, var = images.mean(axis=0), images.var(axis=0)
    return {
        "norm.running_mean": np.float32(0.9) * model["norm.running_mean"] + np.float32(0.1) * mean,
        "norm.running_var": np.float32(0.9) * model["norm.running_var"] + np.float32(0.1) * var,
        "norm.num_batches_tracked": model["norm.num_batches_tracked"] + np.int64(client + 1),
    }


def trained(model: dict[str, np.ndarray], client: int) -> dict[str, np.ndarray]:
    """Return the model after one local step."""
    gradient, _ = gradient_of(model, client)
    after = {name: model[name] - np.float32(LR) * gradient[name] for name in NAMES}
    return after | new_buffers(model, client)


def accuracy(model: dict[str, np.ndarray]) -> float:
    """Return the share of all digits that the model gets right."""
    images, labels = digits()
    return float(((images @ model["weight"].T + model["bias"]).argmax(axis=1) == labels).mean())


def message_app(*mods: Any) -> ClientApp:
    """Return a message-API app with co3_mod, then these mods; the partition-id is the client."""
    app = ClientApp(mods=[co3_mod, *mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = arrays_of(message.content["arrays"])
        gradient, loss = gradient_of(model, client)
        metrics = {"num-examples": len(client_data(client)[1]), "train-loss": loss}
        if message.content["config"]["co3.payload-kind"] == "gradient":
            records = {"gradient": record_of(gradient)}
            if buffers := new_buffers(model, client):
                records["arrays"] = record_of(buffers)
        else:
            records = {"arrays": record_of(trained(model, client))}
        records["metrics"] = MetricRecord(metrics)
        return Message(RecordDict(records), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        _, loss = gradient_of(arrays_of(message.content["arrays"]), client)
        metrics = MetricRecord({"num-examples": len(client_data(client)[1]), "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class TinyNumPyClient(CO3NumPyClient):
    """The same training as a NumPyClient: parameters come as a list, without names."""

    def local_update(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        client = int(self.client_id)
        model = dict(zip(BUFFERED_NAMES, parameters, strict=False))
        gradient, loss = gradient_of(model, client)
        after = trained(model, client)
        if config["co3.payload-kind"] == "update":
            gradient = {name: after[name] - model[name] for name in NAMES}
        for name in list(model)[len(NAMES) :]:
            is_float = model[name].dtype.kind == "f"
            gradient[name] = after[name] - model[name] if is_float else after[name]
        return list(gradient.values()), len(client_data(client)[1]), {"train-loss": loss}

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        client = int(self.client_id)
        _, loss = gradient_of(dict(zip(BUFFERED_NAMES, parameters, strict=False)), client)
        return loss, len(client_data(client)[1]), {}


class MixedApp(ClientApp):
    """Run even partitions as message-API apps and odd ones as NumPyClients."""

    def __call__(self, message: Message, context: Context) -> Message:
        odd = int(context.node_config["partition-id"]) % 2
        return (numpy_app() if odd else message_app())(message, context)


def numpy_app() -> ClientApp:
    """Return the app of the NumPyClient."""
    return ClientApp(client_fn=lambda context: TinyNumPyClient(context).to_client())
