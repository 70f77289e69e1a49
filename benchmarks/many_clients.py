"""Training with many simulated clients, a hundredth of which take part in a round.

Run with ``python -m benchmarks.many_clients``. Each case is a ``co3 run`` of the CNN (100 k
parameters) on the digits (each twice, so that they go round), as a user would start it: SuperLink,
Flower's simulation with one Ray process per core, residuals in files. Seconds are those between the
rounds' TensorBoard events, the first round apart. Memory is read from /proc while the run goes on:
the peak resident set of the process that holds all clients' states and the ServerApp, and of the
largest one that trains; and the peak of the sum over all processes of the run, in which shared
pages count once (PSS).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.harness import Row, parser, quartiles
from benchmarks.peak import MIB
from benchmarks.report import Report
from deploy.example_data import encode_png, write_parquet
from sim.engine import engine_processes, program

NUM_CLIENTS = (10, 100, 1000)
PARTICIPATION = 0.01
MARK = "CO3_BENCHMARK"  # environment variable of all processes of a run
SAMPLE_SECONDS = 0.5
DRIVER, ACTOR = "flwr-simulation", "ray::"  # in the command lines


class Watch:
    """Largest memory that a run's processes had in the samples so far, in bytes."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._sessions: set[int] = set()
        self.driver = self.actor = self.all = 0

    def sample(self) -> None:
        """Look once; processes that have just ended do not count."""
        total = 0
        for pid in engine_processes(self._mark, self._sessions):
            folder = Path(f"/proc/{pid}")
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                peak = _field(folder / "status", "VmHWM")
                total += _field(folder / "smaps_rollup", "Pss")
            except OSError:
                continue
            if DRIVER in command:
                self.driver = max(self.driver, peak)
            elif command.startswith(ACTOR):
                self.actor = max(self.actor, peak)
        self.all = max(self.all, total)


def write_images(folder: Path) -> None:
    """Write a data set that has two training images for each of 1,000 clients."""
    digits = load_digits()
    pngs = [encode_png(image) for image in np.round(digits.images * (255 / 16)).astype(np.uint8)]
    everyone = np.arange(len(pngs))
    write_parquet(folder / "train.parquet", pngs, digits.target, np.tile(everyone, 2))
    write_parquet(folder / "test.parquet", pngs, digits.target, everyone[::5])


def run_case(num_clients: int, options: argparse.Namespace) -> Row:
    """Train once and return the case's row of the table.

    Raises
    ------
    RuntimeError
        When the run fails; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir, data = Path(folder) / "run", Path(folder) / "data"
        write_images(data)
        settings = (
            f"num-server-rounds={options.num_rounds} eval-every={options.num_rounds}"
            f" fraction-train={PARTICIPATION} seed={options.seed} run-dir='{run_dir}'"
            f" dataset='{data}'"
        )
        command = [program("co3"), "run", "--num-clients", str(num_clients), "-c", settings]
        log = Path(folder) / "log"
        watch = Watch(f"{MARK}={folder}")
        start = time.time()
        with log.open("wb") as output:
            run = subprocess.Popen(
                command,
                env=os.environ | {MARK: folder, "XDG_CACHE_HOME": folder},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while run.poll() is None:
                watch.sample()
                time.sleep(SAMPLE_SECONDS)
        finally:
            run.terminate()  # it ends all that it started
            run.wait()
        if run.returncode != 0:
            logs = [path for path in (run_dir / "flower.log", log) if path.exists()]
            said = "".join(path.read_text(errors="replace")[-9000:] for path in logs)
            raise RuntimeError(f"co3 run failed: {said}")
        times = _round_times(run_dir)
        q1, median, q3 = quartiles([b - a for a, b in zip(times[1:], times[2:], strict=False)])
        residuals = list((run_dir / "memory").iterdir())
        return {
            "clients": num_clients,
            "a round": max(1, round(PARTICIPATION * num_clients)),
            "rounds": len(times) - 1,
            "s a round": median,
            "quartiles": f"{q1:.2f}..{q3:.2f}",
            "s before round 2": times[1] - start,
            "driver MiB": watch.driver / MIB,
            "training process MiB": watch.actor / MIB,
            "all processes MiB": watch.all / MIB,
            "clients with files": len({path.name.split(".")[1] for path in residuals}),
            "files MiB": sum(path.stat().st_size for path in residuals) / MIB,
        }


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("Simulations of many clients with 1 % participation: time and memory.")
    arguments.add_argument("--num-clients", type=int, nargs="+", default=list(NUM_CLIENTS))
    arguments.add_argument("--num-rounds", type=int, default=20, help="of each case")
    options = arguments.parse_args(argv)
    if options.quick:
        options.num_clients, options.num_rounds = [2], 3
    if options.num_rounds < 3:
        arguments.error("--num-rounds must be at least 3: the first does not count")
    report = Report("many_clients", options)
    if not Path("/proc/self/smaps_rollup").exists():
        sys.exit("the memory of processes can be read on Linux only")
    rows = [run_case(num_clients, options) for num_clients in options.num_clients]
    report.add_table("CNN, digits, 1 % of the clients in a round", rows)
    return report.finish()


def _round_times(run_dir: Path) -> list[float]:
    """Return when each round ended, from round 0 (before training) on, in seconds since 1970."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir))
    events.Reload()
    return [event.wall_time for event in events.Scalars("R")]


def _field(path: Path, name: str) -> int:
    """Return a field of a /proc file, which is in kB, in bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0  # a kernel thread


if __name__ == "__main__":
    main()
