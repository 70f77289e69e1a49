"""Processes that die, links that break and replies that come late, on a real deployment.

After each run the server's model is made again in NumPy out of what the clients sent, and every
client is held to the law of acknowledged updates. Flower notices a dead node after its windows of
some 60 s, so each of these tests takes a minute or two; `make test-deploy` runs them.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay import Arrays, check_nothing_is_lost

import naive
from co3_flower import decode_update
from co3_flower.roles import BUFFER_ENDINGS
from conftest import REPOSITORY
from deployment import Deployment, Process, wait_until
from processes import checkout
from proxy import Proxy
from sim.models import build_model
from sim.settings import Settings

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

EXAMPLES = {"clinic": 5, "school": 3}
SETTINGS = Settings()

# A client in NumPy (the app's own takes seconds to import for every message), which writes down
# what it sends, and stops at a place where the test has left a file: to die there, or to wait until
# the file is gone. Its gradient is drawn from client and round, plus a part of the weights.
FAULTY_CLIENT = (
    f"EXAMPLES = {EXAMPLES}"
    + """
import os, time
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import co3_flower.client
from co3_flower import co3_mod
from co3_flower.records import derive_seed

FAULTS = Path(os.environ["CO3_FAULTS"])
encode_update = co3_flower.client.encode_update

def stop_at(place):
    file = FAULTS / f"{place}-{client}-{server_round}"
    if not file.exists():
        return
    file.with_suffix(".reached").touch()
    if file.read_text() == "die":
        os._exit(9)
    while file.exists():
        time.sleep(0.1)

def encode_and_stop(*arguments, **keywords):
    encoded = encode_update(*arguments, **keywords)
    stop_at("encode")
    return encoded

def write_down(context, sent):
    path = FAULTS / f"{time.time_ns()}-{client}-{server_round}.npz"
    payload = np.frombuffer(sent.encoded.payload, np.uint8)
    np.savez(path.with_suffix(".tmp.npz"), payload=payload, **sent.update)
    path.with_suffix(".tmp.npz").rename(path)

def stop_before_and_after(message, context, call_next):
    global client, server_round
    client = context.node_config["client-id"]
    server_round = int(message.content["config"].get("server-round", 0))
    stop_at("train")
    reply = call_next(message, context)
    stop_at("reply")
    return reply

co3_flower.client.encode_update = encode_and_stop
app = ClientApp(mods=[stop_before_and_after, partial(co3_mod, observe=write_down)])

@app.query()
def query(message, context):
    raise AssertionError("co3_mod answers for it")

@app.train()
def train(message, context):
    rng = np.random.default_rng(derive_seed(0, server_round, client))
    gradient, buffers = {}, {}
    for name, array in message.content["arrays"].items():
        before = array.numpy()
        drawn = rng.gamma(1.0, 1e-2, before.shape) * rng.choice([-1, 1], before.shape)
        if before.dtype.kind == "i":
            buffers[name] = Array(np.asarray(before + 1))
        elif "running" in name:
            buffers[name] = Array(np.asarray(before + np.abs(drawn), np.float32))
        else:
            gradient[name] = Array(np.asarray(drawn + 0.1 * before, np.float32))
    return Message(RecordDict({
        "gradient": ArrayRecord(gradient),
        "arrays": ArrayRecord(buffers),
        "metrics": MetricRecord({"num-examples": EXAMPLES[client], "train-loss": 0.0}),
    }), reply_to=message)
"""
)

Sent = tuple[str, int, bytes, Arrays]  # client, round, payload, update


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

    def sent(self) -> list[Sent]:
        """Return what left the clients' encoders, the oldest first."""
        found = []
        for path in sorted(self.folder.glob("*[0-9].npz")):
            _, client, server_round = path.stem.split("-")
            with np.load(path) as members:
                update = {name: members[name] for name in members.files}
            found.append((client, int(server_round), update.pop("payload").tobytes(), update))
        return found


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
    return start_node(deployment, data, "clinic"), start_node(deployment, data, "school")


def start_node(deployment: Deployment, data: Path, client: str, **options: Any) -> Process:
    """Start a SuperNode with a disk of its own for its residual."""
    memory_dir = ("--memory-dir", str(deployment.folder / client))
    return deployment.supernode(client, data / client, *memory_dir, **options)


def finish(
    deployment: Deployment,
    run: Process,
    sent: Callable[[], list[Sent]],
    unused: Sequence[tuple[str, int]] = (),
) -> list[tuple[int, int, int]]:
    """Wait for a run to complete; return replies, failures and lost ones of its rounds.

    R, the model and the clients' residuals must be what comes of all that was sent, but for the
    ``unused`` (client, round).
    """
    assert run.wait(600) == 0, run.output
    assert deployment.summary()["status"] == "completed"
    rows = deployment.rows()
    assert all(math.isfinite(row["loss"]) for row in rows)
    used = [item for item in sent() if item[:2] not in unused]
    assert rows[-1]["R"] == 8 * sum(len(payload) for _, _, payload, _ in used)
    model = read_model(deployment)
    assert all(np.isfinite(value).all() for value in model.values())
    for name, value in model_of(used).items():
        assert model[name].tobytes() == value.tobytes(), name
    for client in EXAMPLES:
        rounds = [
            (update, payload, (client, number) not in unused)
            for who, number, payload, update in sent()
            if who == client
        ]
        buffers = tuple(name for name in model if "running" in name)
        check_nothing_is_lost(rounds, replace(SETTINGS.codec_config(), buffers=buffers))
    return outcomes(rows)


def read_model(deployment: Deployment, name: str = "run") -> Arrays:
    with np.load(deployment.folder / name / "model.npz") as members:
        return {key: members[key] for key in members.files}


def model_of(used: list[Sent]) -> Arrays:
    """Return the trained tensors that a server in NumPy makes of what it uses."""
    torch.manual_seed(SETTINGS.seed)
    state = build_model(SETTINGS.model).state_dict()
    model = {n: t.numpy() for n, t in state.items() if not n.endswith(BUFFER_ENDINGS)}
    for server_round in sorted({number for _, number, _, _ in used}):
        replies = sorted(item for item in used if item[1] == server_round)
        total = sum(EXAMPLES[client] for client, _, _, _ in replies)
        sums = {name: np.zeros_like(value) for name, value in model.items()}
        for client, _, payload, update in replies:
            decoded = decode_update(payload, update)
            weight = EXAMPLES[client]
            sums = {n: naive.accumulate(a, decoded[n], weight) for n, a in sums.items()}
        model = {
            n: naive.server_step(w, sums[n], SETTINGS.ps_step, total, -1) for n, w in model.items()
        }
    return model


def outcomes(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["replies"], row["failures"], row["lost"]) for row in rows[1:]]


@pytest.mark.parametrize(
    "place",
    [("train", "school", 2), ("train", "clinic", 1)],
    ids=["while it trains", "after its reply and before it is asked again"],
)
def test_run_goes_on_when_a_supernode_dies(
    place: tuple[str, str, int], deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    _, school = start_nodes(deployment, data)
    stop = faults.set(*place)
    run = deployment.run(2, num_server_rounds=3)
    faults.wait_for(stop)
    if place[1] == "clinic":  # round 1 waits for it
        school.wait_for("Sent successfully")
    school.kill()
    stop.unlink()
    # its reply of round 1 had reached the SuperLink, and counts
    assert finish(deployment, run, faults.sent) == [(2, 0, 0), (1, 0, 1), (1, 0, 0)]
    assert ("school", 2) not in [item[:2] for item in faults.sent()]


def test_supernode_that_dies_before_its_reply_leaves_makes_up_for_it_when_it_is_back(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    _, school = start_nodes(deployment, data)
    stop = faults.set("reply", "school", 2)  # its residual is kept
    run = deployment.run(2, num_server_rounds=4)
    faults.wait_for(stop)
    school.kill()
    stop.unlink()
    start_node(deployment, data, "school")
    found = finish(deployment, run, faults.sent, unused=[("school", 2)])
    assert found == [(2, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 0)]


def test_run_goes_on_when_a_client_process_dies_in_the_middle_of_encoding(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    start_nodes(deployment, data)
    faults.set("encode", "school", 2, "die")
    found = finish(deployment, deployment.run(2, num_server_rounds=3), faults.sent)
    assert found == [(2, 0, 0), (1, 1, 0), (2, 0, 0)]  # the SuperNode lives on
    assert ("school", 2) not in [item[:2] for item in faults.sent()]


def test_reply_after_the_timeout_does_not_count_and_is_made_up_for(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    start_nodes(deployment, data)
    stop = faults.set("train", "school", 2)
    run = deployment.run(2, num_server_rounds=4, reply_timeout=60.0)
    deployment.wait_for_round(2, run)
    stop.unlink()
    assert run.wait(600) == 0, run.output
    # on a crowded machine a reply of round 3 may be late, too
    found = outcomes(deployment.rows())
    unused = [("school", n) for n, (replies, *_) in enumerate(found, 1) if replies == 1]
    assert ("school", 2) in unused and ("school", 4) not in unused
    assert finish(deployment, run, faults.sent, unused=unused) == found
    assert ("school", 2) in [item[:2] for item in faults.sent()]  # it was sent, late


def test_cut_connection_loses_no_reply_and_replies_cost_little_more_than_their_payload(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    counting, cutting = Proxy(deployment.port), Proxy(deployment.port)
    try:
        start_node(deployment, data, "clinic", port=counting.port)
        start_node(deployment, data, "school", port=cutting.port)
        cutting.cut_next("/v1/fleet/push-messages")
        cutting.cut_next("/v1/fleet/push-object", times=2)
        found = finish(deployment, deployment.run(2, num_server_rounds=3), faults.sent)
    finally:
        counting.close()
        cutting.close()
    assert cutting.cuts == 3
    assert found == [(2, 0, 0)] * 3

    payload = sum(len(item[2]) for item in faults.sent() if item[0] == "clinic")
    pushed = sum(n for path, n in counting.sent_bytes.items() if "/push-" in path)
    assert counting.requests["/v1/fleet/push-messages"] == 3
    overhead = (pushed - payload) / 3
    print(f"payload {payload / 3:.0f} bytes a reply, {overhead:.0f} bytes more on the wire")
    assert 0 < overhead <= 10_000 + 0.02 * payload / 3


def test_run_whose_superlink_died_is_resumed_and_ends_with_the_same_bytes(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    database = ("--database", str(deployment.folder / "state.db"))
    superlink = deployment.superlink(*database)
    start_nodes(deployment, data)
    settings = {"num_server_rounds": 3, "strategy": "fedavgm"}
    assert deployment.run(2, "whole", **settings).wait(600) == 0
    stop = faults.set("reply", "school", 2)
    run = deployment.run(2, "run", **settings)
    faults.wait_for(stop)
    superlink.kill()
    stop.unlink()
    assert run.wait() == 1
    assert "SuperLink 'here' must answer within 60 s" in run.output

    deployment.superlink(*database)
    run = deployment.run(2, "run", resume=True, **settings)
    assert run.wait(600) == 0, run.output
    rows, whole = deployment.rows(), deployment.rows("whole")
    assert outcomes(rows) == outcomes(whole) == [(2, 0, 0)] * 3
    assert [row["R"] for row in rows] == [row["R"] for row in whole]
    model, expected = read_model(deployment), read_model(deployment, "whole")
    assert list(model) == list(expected)
    for name, value in expected.items():
        assert model[name].tobytes() == value.tobytes(), name


def test_node_that_joins_late_takes_part_from_then_on(
    deployment: Deployment, faults: Faults, data: Path
) -> None:
    deployment.superlink()
    start_node(deployment, data, "clinic")
    stop = faults.set("train", "clinic", 1)
    run = deployment.run(1, num_server_rounds=3)
    faults.wait_for(stop)
    start_node(deployment, data, "school").wait_for("SuperNode ID")
    stop.unlink()
    assert finish(deployment, run, faults.sent) == [(1, 0, 0), (2, 0, 0), (2, 0, 0)]
