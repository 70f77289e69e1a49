"""The two trainings of the simulation benchmark, round by round in turn.

Imported, not run: Ray's processes find the ClientApp by this module's name.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import nn

from benchmarks.harness import Row
from co3_flower import CO3Strategy, CodecConfig, co3_mod
from co3_flower.nodes import wait_for_nodes
from co3_flower.records import client_id, count_bytes, derive_seed
from sim.data import Images, load_data
from sim.grid import InProcessGrid
from sim.models import build_model
from sim.task import local_sgd, seed_everything

MODELS = ("cnn", "densenet121")
ENLARGED = {"cnn": 1, "densenet121": 4}  # digits are 8x8; DenseNet121 halves the image five times
NODE_TIMEOUT, ROUND_TIMEOUT = 120.0, 600.0
NUM_CLASSES = 10
LR = 0.05


def build_net(model: str) -> nn.Module:
    """Build a network for ten classes, weights from torch's generator."""
    if model == "cnn":
        return build_model("cnn", NUM_CLASSES)
    from torchvision.models import densenet121  # a second to import

    return densenet121(weights=None, num_classes=NUM_CLASSES)


@lru_cache(maxsize=1)
def all_images(enlarged: int) -> Images:
    """Return the digits' train split, each pixel repeated in both directions."""
    images = load_data("digits").train
    pixels = images.pixels.repeat(enlarged, axis=1).repeat(enlarged, axis=2)
    return Images(pixels, images.labels, images.white)


def client_images(context: Context, enlarged: int) -> Images:
    """Return the images of one client: every U-th one."""
    images = all_images(enlarged)
    number, of = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    return images.subset(np.arange(number, len(images), of))


def co3_if_asked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Apply co3_mod to the messages of a CO3Strategy, and nothing to those of FedAvg."""
    if "co3.format" in message.content["config"]:
        return co3_mod(message, context, call_next)
    return call_next(message, context)


client_app = ClientApp(mods=[co3_if_asked])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Run local SGD and reply with the new weights, whoever asked."""
    config = message.content["config"]
    model, server_round = str(config["model"]), int(config["server-round"])
    images = client_images(context, ENLARGED[model])
    rng = seed_everything(derive_seed(0, server_round, client_id(context)))
    net = build_net(model)
    state = message.content["arrays"].to_torch_state_dict()
    net.load_state_dict(state, strict=True)
    start = time.perf_counter()
    loss = local_sgd(
        net,
        images,
        batch_size=int(config["batch-size"]),
        num_local=int(config["local-steps"]),
        lr=LR,
        rng=rng,
        device=torch.device("cpu"),
    )
    metrics = {
        "num-examples": len(images),
        "train-loss": loss,
        "train-seconds": time.perf_counter() - start,
    }
    reply = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(reply), reply_to=message)


class SideBySide:
    """Two strategies, their models, and what each round of theirs took.

    Parameters
    ----------
    options : argparse.Namespace
        Of this benchmark.
    memory_dir : str
        Folder for CO3's residuals.
    """

    def __init__(self, options: argparse.Namespace, memory_dir: str) -> None:
        torch.manual_seed(options.seed)
        initial = ArrayRecord(build_net(options.model).state_dict())
        self.options = options
        self.co3 = CO3Strategy(
            CodecConfig(format=options.format, structure=options.structure),
            num_clients=options.num_clients,
            fraction_evaluate=0.0,
            memory_dir=memory_dir,
        )
        fedavg = FedAvg(
            fraction_evaluate=0.0,
            min_train_nodes=options.num_clients,
            min_available_nodes=options.num_clients,
        )
        self.strategies: dict[str, Strategy] = {"CO3": self.co3, "FedAvg": fedavg}
        self.arrays = dict.fromkeys(self.strategies, initial)
        self.rounds: dict[str, list[Row]] = {name: [] for name in self.strategies}

    def run(self, grid: Grid) -> None:
        """Run all rounds, the two strategies in turn."""
        wait_for_nodes(grid, self.options.num_clients, NODE_TIMEOUT)
        names = list(self.strategies)
        for server_round in range(1, self.options.num_rounds + 1):
            for name in names if server_round % 2 else reversed(names):
                self.rounds[name].append(self._run_round(name, server_round, grid))

    def _run_round(self, name: str, server_round: int, grid: Grid) -> Row:
        strategy = self.strategies[name]
        start = time.perf_counter()
        messages = strategy.configure_train(
            server_round, self.arrays[name], self._train_config(), grid
        )
        replies = list(grid.send_and_receive(list(messages), timeout=ROUND_TIMEOUT))
        received = time.perf_counter()
        bits = sum(8 * count_bytes(reply.content) for reply in replies if reply.has_content())
        counted = time.perf_counter()
        arrays, metrics = strategy.aggregate_train(server_round, replies)
        assert arrays is not None
        assert metrics is not None
        self.arrays[name] = arrays
        end = time.perf_counter()
        return {
            "seconds": end - start - (counted - received),
            "aggregate_seconds": end - counted,
            "train_seconds": metrics["train-seconds"],
            "train_loss": metrics["train-loss"],
            "bits_per_client": bits / len(replies),
        }

    def _train_config(self) -> ConfigRecord:
        options = self.options
        return ConfigRecord(
            {
                "model": options.model,
                "batch-size": options.batch_size,
                "local-steps": options.local_steps,
            }
        )

    def result(self) -> Row:
        """Return what the rounds took, and CO3's own account."""
        return {"rounds": self.rounds, "history": self.co3.history}


def run_engine(options: argparse.Namespace) -> Row:
    """Run through Flower's simulation, in this process."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)  # a process of its own
    finished: list[Row] = []
    server_app = ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        with tempfile.TemporaryDirectory() as memory_dir:
            both = SideBySide(options, memory_dir)
            both.run(grid)
            finished.append(both.result())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=options.num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {
                "num_cpus": min(options.num_clients, os.cpu_count() or 1),
                "logging_level": "ERROR",
                "include_dashboard": False,
            },
        },
    )
    return finished[0]


def run_in_process(options: argparse.Namespace) -> Row:
    """Run without an engine, one client after the other, in one thread."""
    with _one_quiet_thread(), tempfile.TemporaryDirectory() as memory_dir:
        both = SideBySide(options, memory_dir)
        both.run(InProcessGrid(options.num_clients, client_app))
        return both.result()


@contextmanager
def _one_quiet_thread() -> Iterator[None]:
    logger, num_threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        logger.setLevel(level)
