"""Handwritten digits with a NumPyClient whose updates go up through CO3."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits

from co3_flower import CO3NumPyClient, CO3Strategy, CodecConfig


def load_data(partition_id: int, num_partitions: int) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    return images[partition_id::num_partitions], digits.target[partition_id::num_partitions]


def predict(parameters: list[np.ndarray], images: np.ndarray) -> np.ndarray:
    weight, bias = parameters
    scores = np.exp(images @ weight + bias)
    return scores / scores.sum(axis=1, keepdims=True)


def train(parameters: list[np.ndarray], images: np.ndarray, labels: np.ndarray, lr: float) -> None:
    for first in range(0, len(labels), 32):
        batch, target = images[first : first + 32], labels[first : first + 32]
        error = predict(parameters, batch) - np.eye(10, dtype=np.float32)[target]
        parameters[0] -= lr * batch.T @ error / len(batch)
        parameters[1] -= lr * error.mean(axis=0)


class DigitsClient(CO3NumPyClient):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = context.node_config
        self.images, self.labels = load_data(config["partition-id"], config["num-partitions"])

    def local_update(self, parameters, config):
        before = [array.copy() for array in parameters]
        train(parameters, self.images, self.labels, config["lr"])
        update = [after - old for after, old in zip(parameters, before, strict=True)]
        return update, len(self.labels), {}

    def evaluate(self, parameters, config):
        scores = predict(parameters, self.images)
        loss = -np.log(scores[np.arange(len(self.labels)), self.labels]).mean()
        accuracy = (scores.argmax(axis=1) == self.labels).mean()
        return float(loss), len(self.labels), {"accuracy": float(accuracy)}


def client_fn(context: Context):
    return DigitsClient(context).to_client()


client_app = ClientApp(client_fn)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    initial = ArrayRecord([np.zeros((64, 10), np.float32), np.zeros(10, np.float32)])
    strategy = CO3Strategy(CodecConfig(format="e2m1"), num_clients=context.run_config["clients"])
    config = ConfigRecord({"lr": 0.5})
    result = strategy.start(grid, initial, num_rounds=5, train_config=config)
    accuracy = result.evaluate_metrics_clientapp[5]["accuracy"]
    print(f"accuracy {accuracy:.3f}, R = {strategy.R} bits")
