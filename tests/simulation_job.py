"""Run tinyapp through Flower's simulation engine: ``simulation_job.py OUTPUT.npz``.

Even clients are message-API apps, odd ones NumPyClients. OUTPUT gets the model, R as "R", and
what was sent by whom. A process of its own, because Ray leaves threads and handlers behind.
"""

from __future__ import annotations

import sys

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from tinyapp import MixedApp, arrays_of, initial_model, record_of

from co3_flower import CO3Strategy, CodecConfig

NUM_CLIENTS = 4
NUM_ROUNDS = 3
SERVER_LR = 0.5
CONFIG = CodecConfig(format="e2m1", gamma=0.9)

app = ServerApp()
finished = []


def make_strategy() -> CO3Strategy:
    """Return the strategy of the job; num_clients 0 must wait for all nodes by itself."""
    return CO3Strategy(
        CONFIG, payload="gradient", server_lr=SERVER_LR, num_clients=0, fraction_evaluate=0.0
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and leave model and R for the process."""
    strategy = make_strategy()
    result = strategy.start(grid, record_of(initial_model(buffers=True)), num_rounds=NUM_ROUNDS)
    finished.append((arrays_of(result.arrays), strategy.R))


if __name__ == "__main__":
    run_simulation(
        app,
        MixedApp(),
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "logging_level": "ERROR", "include_dashboard": False},
        },
    )
    ((model, bits),) = finished
    np.savez(sys.argv[1], R=bits, **model)
