"""One training run with CO3 and one with stock FedAvg in float32, round by round side by side.

Run with ``python -m benchmarks.simulation``; ``--model densenet121`` takes torchvision's network
on digits enlarged to 32x32. Both runs go through the same Flower simulation and the same training
code: a round of the one, then a round of the other, the first of them in turn. Clients do the same
local SGD and send the weight difference (CO3, residuals in files) or the weights (FedAvg). Round 1,
in which processes start and kernels are loaded, does not count.

The break-even bandwidth is the uplink rate of a client below which CO3's round is the shorter one:
the bits a client saves, over the seconds a round takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from benchmarks.harness import Row, parser, quartiles
from benchmarks.peak import run_child
from benchmarks.report import Report
from benchmarks.sides import MODELS, run_engine, run_in_process

MODULE = "benchmarks.simulation"
MAX_RATIO = 1.10


def summarize(result: Row) -> list[Row]:
    """Return a row per strategy: medians over the rounds after the first."""
    rows = []
    base = result["rounds"]["FedAvg"][1:]
    for name, rounds in result["rounds"].items():
        counted = rounds[1:]
        q1, median, q3 = quartiles([r["seconds"] for r in counted])
        pairs = zip(counted, base, strict=True)
        rows.append(
            {
                "strategy": name,
                "median s": median,
                "quartiles": f"{q1:.3f}..{q3:.3f}",
                "x FedAvg": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
                "round 1 s": rounds[0]["seconds"],
                "aggregate s": statistics.median(r["aggregate_seconds"] for r in counted),
                "train s a client": statistics.median(r["train_seconds"] for r in counted),
                "MB up a client": statistics.median(r["bits_per_client"] for r in counted) / 8e6,
                "last loss": rounds[-1]["train_loss"],
            }
        )
    return rows


def break_even(result: Row) -> list[Row]:
    """Return the uplink rates per client below which CO3's round is the shorter one.

    Once from the measured wall clock, once from what the codec itself took: the slowest thing about
    a client is its own encoding, about the server the decoding of all replies.
    """
    rounds = result["rounds"]
    co3, fedavg = rounds["CO3"][1:], rounds["FedAvg"][1:]
    saved = statistics.median(
        b["bits_per_client"] - a["bits_per_client"] for a, b in zip(co3, fedavg, strict=True)
    )
    wall = statistics.median(a["seconds"] - b["seconds"] for a, b in zip(co3, fedavg, strict=True))
    history = result["history"][1:]
    codec = statistics.median(
        h["encode_seconds"] / h["replies"] + h["decode_seconds"] for h in history
    )
    return [
        {
            "from": name,
            "extra s a round": seconds,
            "bits saved a client": saved,
            "break-even Mbit/s": saved / seconds / 1e6 if seconds > 0 else None,
        }
        for name, seconds in (("wall clock", wall), ("encode and decode seconds", codec))
    ]


def main(argv: Sequence[str] | None = None) -> Row | None:
    """Run the benchmark."""
    options = _parse(argv)
    if options.child:
        print(json.dumps(run_engine(options)))
        return None
    report = Report("simulation", options)
    result = run_in_process(options) if options.quick else _run_child(options)
    rows = summarize(result)
    where = f"{options.model}, {options.num_clients} clients, {options.local_steps} local steps"
    report.add_table(f"{where}: rounds after the first", rows)
    rates = break_even(result)
    report.add_table("Uplink below which CO3 is faster", rates)
    for rate in rates:
        if rate["break-even Mbit/s"] is None:
            print(f"By {rate['from']} CO3 is faster at any bandwidth.")
    what = f"simulation against FedAvg float32, {options.model}"
    report.at_most(what, rows[0]["x FedAvg"], MAX_RATIO, "x wall clock")
    return report.finish()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser("CO3 and stock FedAvg through Flower's simulation, round by round.")
    arguments.add_argument("--model", choices=MODELS, default="cnn", help="network")
    arguments.add_argument("--format", default="e2m1", help="CO3's float format")
    arguments.add_argument("--structure", choices=("auto", "none"), default="auto", help="CO3's")
    arguments.add_argument("--num-clients", type=int, default=4, help="simulated clients")
    arguments.add_argument("--num-rounds", type=int, default=12, help="of each strategy")
    arguments.add_argument("--local-steps", type=int, default=2, help="minibatches a round")
    arguments.add_argument("--batch-size", type=int, default=64, help="images a minibatch")
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args(argv)
    if options.quick:
        options.num_clients, options.num_rounds, options.local_steps = 2, 2, 1
    if options.num_rounds < 2:
        arguments.error("--num-rounds must be at least 2: the first does not count")
    return options


def _run_child(options: argparse.Namespace) -> Row:
    """Run the engine in a process of its own: Ray leaves threads and handlers behind."""
    arguments = ["--child", "--model", options.model, "--format", options.format]
    arguments += ["--structure", options.structure]
    for name in ("num_clients", "num_rounds", "local_steps", "batch_size", "seed"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return run_child(MODULE, arguments, timeout=3600.0)


if __name__ == "__main__":
    main()
