"""Processes that die, links that break and replies that come late, on a real deployment.

Flower notices a dead node after its windows of some 60 s, so each of these tests takes a minute or
two; `make test-deploy` runs them.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import REPOSITORY
from deployment import Deployment, Process, wait_until
from processes import checkout
from proxy import Proxy

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

# The app's own client, which writes down every payload's length as it leaves the client, and stops
# at a place where the test has left a file: to die there, or to wait until the file is gone.
FAULTY_CLIENT = """
import json, os, time
from pathlib import Path
from flwr.clientapp import ClientApp
import co3_flower.client
from sim.client_app import app as inner

app = ClientApp()

def stop_at(place):
    file = Path(os.environ["CO3_FAULTS"]) / place
    if not file.exists():
        return
    file.with_suffix(".reached").touch()
    if file.read_text() == "die":
        os._exit(9)
    while file.exists():
        time.sleep(0.1)

@app.train()
def train(message, context):
    client = context.node_config["client-id"]
    server_round = int(message.content["config"]["server-round"])
    stop_at(f"train-{client}-{server_round}")
    encode = co3_flower.client.encode_update

    def encode_and_stop(*arguments, **keywords):
        encoded = encode(*arguments, **keywords)
        stop_at(f"encode-{client}-{server_round}")
        return encoded

    co3_flower.client.encode_update = encode_and_stop
    reply = inner(message, context)
    length = len(reply.content["co3"]["payload"])
    with (Path(os.environ["CO3_FAULTS"]) / "lengths.jsonl").open("a") as file:
        file.write(json.dumps([client, server_round, length]) + "\\n")
    return reply
"""


class Faults:
    """Places at which a client of the deployment stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def set(self, place: str, client: str, server_round: int, action: str = "wait") -> Path:
        path = self.folder / f"{place}-{client}-{server_round}"
        path.write_text(action)
        return path

    def wait_for(self, path: Path) -> None:
        wait_until(path.with_suffix(".reached").exists, 240.0, lambda: f"{path.name} reached")

    def lengths(self) -> dict[tuple[str, int], int]:
        """Return the payloads' bytes by client and round, as they left the clients."""
        lines = (self.folder / "lengths.jsonl").read_text().splitlines()
        return {(client, number): length for client, number, length in map(json.loads, lines)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    script = REPOSITORY / "deploy" / "example_data.py"
    python = Deployment.program("python")
    subprocess.run([python, str(script), str(folder)], check=True)
    return folder


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    here = Deployment(tmp_path / "d", checkout(tmp_path, client=FAULTY_CLIENT))
    here.env["CO3_FAULTS"] = str(tmp_path / "faults")
    yield here
    here.stop()
    assert here.processes() == []


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


def start_nodes(deployment: Deployment, data: Path) -> tuple[Process, Process]:
    clinic = deployment.supernode("clinic", data / "clinic")
    school = deployment.supernode("school", data / "school")
    return clinic, school


def finish(deployment: Deployment, run: Process, name: str = "run") -> list[dict[str, Any]]:
    """Wait for a run to complete with a finite model, and return its rounds from 1 on."""
    assert run.wait(400) == 0, run.output
    assert deployment.summary(name)["status"] == "completed"
    with np.load(deployment.folder / name / "model.npz") as model:
        assert all(np.isfinite(model[key]).all() for key in model.files)
    rows = deployment.rows(name)
    assert all(math.isfinite(row["loss"]) for row in rows if row["loss"] is not None)
    return rows[1:]


def outcomes(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["replies"], row["failures"], row["lost"]) for row in rows]


def test_run_goes_on_when_a_supernode_dies_while_it_trains(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    _, school = start_nodes(deployment, data)
    place = faults.set("train", "school", 2)
    run = deployment.run(2, num_server_rounds=3)
    faults.wait_for(place)
    school.kill()
    rows = finish(deployment, run)
    assert outcomes(rows) == [(2, 0, 0), (1, 0, 1), (1, 0, 0)]
    assert rows[-1]["R"] == 8 * sum(faults.lengths().values())
    assert ("school", 2) not in faults.lengths()


def test_run_goes_on_when_a_supernode_dies_before_it_is_asked(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    # The school is killed while round 1 waits for the clinic, so it is asked in round 2, dead.
    deployment.superlink()
    _, school = start_nodes(deployment, data)
    place = faults.set("train", "clinic", 1)
    run = deployment.run(2, num_server_rounds=3)
    faults.wait_for(place)
    school.wait_for("Sent successfully")
    school.kill()
    place.unlink()
    rows = finish(deployment, run)
    # its reply of round 1 had reached the SuperLink, and counts
    assert outcomes(rows) == [(2, 0, 0), (1, 0, 1), (1, 0, 0)]
    assert rows[0]["R"] == 8 * sum(faults.lengths()[client, 1] for client in ("clinic", "school"))
    assert rows[-1]["R"] == 8 * sum(faults.lengths().values())


def test_run_goes_on_when_a_client_process_dies_in_the_middle_of_encoding(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    start_nodes(deployment, data)
    faults.set("encode", "school", 2, "die")
    rows = finish(deployment, deployment.run(2, num_server_rounds=3))
    assert outcomes(rows) == [(2, 0, 0), (1, 1, 0), (2, 0, 0)]  # the SuperNode lives on
    assert rows[-1]["R"] == 8 * sum(faults.lengths().values())
    assert ("school", 2) not in faults.lengths()


def test_reply_after_the_timeout_is_lost_and_does_not_count(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    start_nodes(deployment, data)
    place = faults.set("train", "school", 2)
    run = deployment.run(2, num_server_rounds=4, reply_timeout=60.0)
    deployment.wait_for_round(2, run)
    place.unlink()
    rows = finish(deployment, run)
    assert outcomes(rows)[:2] == [(2, 0, 0), (1, 0, 1)]
    assert rows[-1]["replies"] == 2  # it has caught up
    lengths = faults.lengths()
    assert ("school", 2) in lengths  # it was sent, late
    counted = {key: length for key, length in lengths.items() if key != ("school", 2)}
    assert rows[-1]["R"] == 8 * sum(counted.values())


def test_cut_connection_loses_no_reply_and_replies_cost_little_more_than_their_payload(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    counting, cutting = Proxy(deployment.port), Proxy(deployment.port)
    try:
        deployment.supernode("clinic", data / "clinic", port=counting.port)
        deployment.supernode("school", data / "school", port=cutting.port)
        cutting.cut_next("/v1/fleet/push-messages")
        cutting.cut_next("/v1/fleet/push-object", times=2)
        rows = finish(deployment, deployment.run(2, num_server_rounds=3))
    finally:
        counting.close()
        cutting.close()
    assert cutting.cuts == 3
    assert outcomes(rows) == [(2, 0, 0)] * 3
    lengths = faults.lengths()
    assert rows[-1]["R"] == 8 * sum(lengths.values())

    payload = sum(length for (client, _), length in lengths.items() if client == "clinic")
    pushed = sum(n for path, n in counting.sent_bytes.items() if "/push-" in path)
    assert counting.requests["/v1/fleet/push-messages"] == 3
    overhead = (pushed - payload) / 3
    print(f"payload {payload / 3:.0f} bytes a reply, {overhead:.0f} bytes more on the wire")
    assert 0 < overhead <= 10_000 + 0.02 * payload / 3


def test_superlink_that_dies_ends_the_run_and_nodes_come_back_when_it_does(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    database = ("--database", str(deployment.folder / "state.db"))
    superlink = deployment.superlink(*database)
    start_nodes(deployment, data)
    run = deployment.run(2, num_server_rounds=99)
    deployment.wait_for_round(1, run)
    superlink.kill()
    assert run.wait() == 1
    assert "SuperLink 'here' must answer within 60 s" in run.output

    deployment.superlink(*database)
    rows = finish(deployment, deployment.run(2, "second", num_server_rounds=2), "second")
    assert outcomes(rows) == [(2, 0, 0)] * 2


def test_node_that_joins_late_takes_part_from_then_on(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    deployment.supernode("clinic", data / "clinic")
    place = faults.set("train", "clinic", 1)
    run = deployment.run(1, num_server_rounds=3)
    faults.wait_for(place)
    school = deployment.supernode("school", data / "school")
    school.wait_for("SuperNode ID")
    place.unlink()
    rows = finish(deployment, run)
    assert outcomes(rows) == [(1, 0, 0), (2, 0, 0), (2, 0, 0)]
    assert rows[-1]["R"] == 8 * sum(faults.lengths().values())
