"""Peak memory of aggregating one round, CO3Strategy against stock FedAvg.

Run with ``python -m benchmarks.server_memory``. Each case has a process of its own. It makes the
replies of U clients (payloads for CO3, float32 arrays for FedAvg), and the system counts the peak
from the entry of aggregate_train on. What the replies themselves take is listed beside it: it
grows with U for both, but not alike. No engine takes part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg, Strategy

from benchmarks.harness import Row, parser
from benchmarks.peak import (
    MIB,
    Peak,
    available_bytes,
    is_available,
    release_freed_memory,
    run_child,
)
from benchmarks.report import Report
from co3_flower import CO3Strategy, CodecConfig, encode_update
from co3_flower.replies import add_reply_records, co3_scalars
from sim.grid import FIRST_NODE, InProcessGrid, identify, take_identity

MODULE = "benchmarks.server_memory"
STRATEGIES = ("CO3", "FedAvg")
NUM_CLIENTS = (4, 16, 64)
SIZES = (7_000_000, 25_000_000)
QUICK_CLIENTS, QUICK_SIZES = (3,), (300_000,)
NUM_EXAMPLES = 100
COPIES, LARGEST = 3, 2  # the limit: dense float32 copies plus so many times the largest tensor

Arrays = dict[str, np.ndarray]


def make_model(num_parameters: int, seed: int) -> Arrays:
    """Draw a float32 model: many 3x3 convolutions, each a fourteenth of it, and vectors."""
    rng = np.random.default_rng(seed)
    width = max(8, int((num_parameters / 14 / 9) ** 0.5))
    arrays: Arrays = {}
    left = num_parameters
    while left > 0:
        for name, shape in (("weight", (width, width, 3, 3)), ("bias", (width,))):
            size = min(left, int(np.prod(shape)))
            if size > 0:
                shape = shape if size == np.prod(shape) else (size,)
                arrays[f"layer{len(arrays) // 2:03d}.{name}"] = _draw(rng, shape)
                left -= size
    return arrays


def co3_replies(strategy: CO3Strategy, model: Arrays, num_clients: int) -> list[Message]:
    """Return what the clients send to a CO3Strategy after its configure_train."""
    encoded = encode_update(model, None, strategy.codec)
    sent = strategy.configure_train(
        1, ArrayRecord(_as_arrays(model)), ConfigRecord(), InProcessGrid(num_clients)
    )
    replies = []
    for client, message in enumerate(sent):
        identify(message)
        content = RecordDict({"metrics": MetricRecord({"num-examples": NUM_EXAMPLES + client})})
        payload = bytes(bytearray(encoded.payload))  # bytes of its own, as from the wire
        add_reply_records(content, co3_scalars(payload, 1, client, encoded.stats, 0.0))
        replies.append(Message(content, reply_to=message))
    return replies


def fedavg_replies(model: Arrays, num_clients: int) -> list[Message]:
    """Return what the clients send to a stock FedAvg."""
    take_identity()
    replies = []
    for client in range(num_clients):
        message = Message(RecordDict(), FIRST_NODE + client, MessageType.TRAIN)
        identify(message)
        metrics = MetricRecord({"num-examples": NUM_EXAMPLES + client})
        content = RecordDict({"arrays": ArrayRecord(_as_arrays(model)), "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    return replies


def measure_case(name: str, num_clients: int, num_parameters: int, seed: int) -> Row:
    """Aggregate one round in this process and return what the peak was."""
    model = make_model(num_parameters, seed)
    largest = max(array.nbytes for array in model.values())
    strategy: Strategy
    if name == "CO3":
        strategy = CO3Strategy(CodecConfig(), num_clients=num_clients, fraction_evaluate=0.0)
        _warm_up()
        replies = co3_replies(strategy, model, num_clients)
        held = sum(len(reply.content["co3"].get("payload", b"")) for reply in replies)
        held += sum(_array_bytes(reply) for reply in replies)
    else:
        strategy = FedAvg(fraction_evaluate=0.0)
        replies = fedavg_replies(model, num_clients)
        held = sum(_array_bytes(reply) for reply in replies)
    del model
    release_freed_memory()
    start = time.perf_counter()
    with Peak() as peak:
        arrays, _ = strategy.aggregate_train(1, replies)
    seconds = time.perf_counter() - start
    assert arrays is not None
    dense = 4 * num_parameters
    return {
        "strategy": name,
        "clients": num_clients,
        "parameters": num_parameters,
        "replies MiB": held / MIB,
        "above entry MiB": peak.above_entry / MIB,
        "dense copies": peak.above_entry / dense,
        "total peak MiB": peak.peak_bytes / MIB,
        "limit MiB": (COPIES * dense + LARGEST * largest) / MIB,
        "seconds": seconds,
    }


def needed_bytes(name: str, num_clients: int, num_parameters: int) -> int:
    """Return about how much memory a case takes: replies, a model and what aggregation adds."""
    per_reply = 4 * num_parameters if name == "FedAvg" else num_parameters // 2
    return num_clients * per_reply + 5 * 4 * num_parameters + 400 * MIB


def run_case(name: str, num_clients: int, num_parameters: int, options: argparse.Namespace) -> Row:
    """Run one case in a process of its own, or say why not."""
    needed = needed_bytes(name, num_clients, num_parameters)
    limit = min(options.memory_limit_gib * 2**30, 0.8 * available_bytes())
    if needed > limit:
        print(
            f"not run: {name}, {num_clients} clients of {num_parameters / 1e6:g} M parameters take "
            f"about {needed / 2**30:.1f} GiB, the limit is {limit / 2**30:.1f} (--memory-limit-gib)"
        )
        known = {"strategy": name, "clients": num_clients, "parameters": num_parameters}
        return known | dict.fromkeys(_MEASURED)
    arguments = ["--strategy", name, "--num-clients", str(num_clients)]
    arguments += ["--num-parameters", str(num_parameters), "--seed", str(options.seed)]
    return run_child(MODULE, arguments)


_MEASURED = (
    "replies MiB",
    "above entry MiB",
    "dense copies",
    "total peak MiB",
    "limit MiB",
    "seconds",
)


def main(argv: Sequence[str] | None = None) -> Row | None:
    """Run the benchmark."""
    arguments = parser("Peak memory of aggregate_train, CO3Strategy against stock FedAvg.")
    arguments.add_argument(
        "--memory-limit-gib", type=float, default=9.0, help="cases that need more are not run"
    )
    arguments.add_argument("--strategy", choices=STRATEGIES, help=argparse.SUPPRESS)
    arguments.add_argument("--num-clients", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--num-parameters", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args(argv)
    if options.strategy:
        case = options.strategy, options.num_clients, options.num_parameters, options.seed
        print(json.dumps(measure_case(*case)))
        return None
    report = Report("server_memory", options)
    if not is_available():
        sys.exit("the peak of a process can be set back on Linux only")
    clients = QUICK_CLIENTS if options.quick else NUM_CLIENTS
    rows = [
        run_case(name, num_clients, size, options)
        for size in (QUICK_SIZES if options.quick else SIZES)
        for num_clients in clients
        for name in STRATEGIES
    ]
    report.add_table("Peak of aggregate_train", rows)
    for row in rows:
        if row["strategy"] == "CO3":
            what = f"aggregate_train, {row['clients']} clients, {row['parameters'] / 1e6:g} M"
            limit = round(row["limit MiB"], 1)
            report.at_most(what, row["above entry MiB"], limit, "MiB above entry")
    return report.finish()


def _warm_up() -> None:
    """Load the kernels, and give back what that took."""
    strategy = CO3Strategy(CodecConfig(), num_clients=1, fraction_evaluate=0.0)
    strategy.aggregate_train(1, co3_replies(strategy, make_model(10_000, 0), 1))


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _as_arrays(model: Arrays) -> dict[str, Array]:
    return {name: Array(array) for name, array in model.items()}


def _array_bytes(reply: Message) -> int:
    records = reply.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


if __name__ == "__main__":
    main()
