"""Handwritten digits with a message-API ClientApp whose updates go up through CO3."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits

from co3_flower import CO3Strategy, CodecConfig, co3_mod


def load_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    part = slice(context.node_config["partition-id"], None, context.node_config["num-partitions"])
    return (digits.data[part] / 16).astype(np.float32), digits.target[part]


def predict(model: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    scores = np.exp(images @ model["weight"] + model["bias"])
    return scores / scores.sum(axis=1, keepdims=True)


client_app = ClientApp(mods=[co3_mod])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    images, labels = load_data(context)
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    lr = message.content["config"]["lr"]
    for first in range(0, len(labels), 32):
        batch, target = images[first : first + 32], labels[first : first + 32]
        error = predict(model, batch) - np.eye(10, dtype=np.float32)[target]
        model["weight"] -= lr * batch.T @ error / len(batch)
        model["bias"] -= lr * error.mean(axis=0)
    arrays = ArrayRecord({name: Array(value) for name, value in model.items()})
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    images, labels = load_data(context)
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    accuracy = float((predict(model, images).argmax(axis=1) == labels).mean())
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    model = {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
    initial = ArrayRecord({name: Array(value) for name, value in model.items()})
    strategy = CO3Strategy(CodecConfig(format="e2m1"), num_clients=context.run_config["clients"])
    config = ConfigRecord({"lr": 0.5})
    result = strategy.start(grid, initial, num_rounds=5, train_config=config)
    accuracy = result.evaluate_metrics_clientapp[5]["accuracy"]
    print(f"accuracy {accuracy:.3f}, R = {strategy.R} bits")
