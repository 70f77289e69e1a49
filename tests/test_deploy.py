"""The deployment guide, command by command, and `co3 run --federation` with nothing to run on."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY
from deployment import Deployment, wait_until
from processes import checkout

pytestmark = pytest.mark.timeout(600)

GUIDE = (REPOSITORY / "docs" / "deploy.md").read_text()
SECTIONS = {
    "plain": "On one machine, without encryption",
    "tls": "With TLS, and only for SuperNodes that are known",
}
BLOCK = re.compile(r"^```sh( background (?P<role>\w+))?\n(?P<text>.*?)^```", re.M | re.S)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A deployment in a checkout of its own, to write in as the guide does."""
    root = checkout(tmp_path)
    (root / "deploy").symlink_to(REPOSITORY / "deploy")
    here = Deployment(tmp_path / "d", root)
    yield here
    here.stop()
    assert here.processes() == []


def follow_guide(section: str, deployment: Deployment) -> str:
    """Run a section's commands as they stand, but for ports; return what the last one printed."""
    begin = GUIDE.index(f"## {SECTIONS[section]}")
    blocks = list(BLOCK.finditer(GUIDE[begin : GUIDE.index("\n## ", begin)]))
    for port, free in (
        ("8000", deployment.port),
        ("9094", deployment.take_port()),
        ("9095", deployment.take_port()),
    ):
        assert any(port in block["text"] for block in blocks)
        deployment.ports[port] = str(free)
    output = ""
    for block in blocks:
        text = re.sub(r"\b(8000|9094|9095)\b", lambda m: deployment.ports[m[0]], block["text"])
        if block["role"]:
            process = deployment.start(f"{block['role']}-{block.start()}", "bash", "-ec", text)
            if block["role"] == "superlink":
                process.wait_for("Uvicorn running")
            continue
        exports = [line for line in text.splitlines() if line.startswith("export ")]
        for line in exports:
            name, _, value = line.removeprefix("export ").partition("=")
            deployment.env[name] = value.replace("$PWD", str(deployment.root))
        done = deployment.start(f"block-{block.start()}", "bash", "-ec", text)
        assert done.wait() == 0, done.output
        output = done.output
    return output


def check_run(deployment: Deployment, output: str) -> None:
    (run_dir,) = (deployment.root / "runs").iterdir()
    rows = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert [(row["replies"], row["failures"], row["lost"]) for row in rows[1:]] == [(2, 0, 0)] * 3
    assert "round 3/3  accuracy " in output  # the progress, as in a simulation
    assert f"run-dir  {run_dir}" in output
    assert f"{rows[-1]['R']:,} bits" in output
    assert rows[-1]["R"] > 0
    # the clinic's residual lies on its own disk
    names = [path.name for path in (deployment.root / "deployment" / "memory").iterdir()]
    assert names and all("clinic" in name for name in names)


@pytest.mark.engine
def test_the_guides_commands_bring_up_a_run(deployment: Deployment) -> None:
    check_run(deployment, follow_guide("plain", deployment))


@pytest.mark.deploy
def test_the_guides_commands_bring_up_a_run_with_tls_and_authentication(
    deployment: Deployment,
) -> None:
    data = deployment.root / "deployment" / "data"
    subprocess.run(
        [deployment.program("python"), "deploy/example_data.py", str(data)],
        cwd=deployment.root,
        check=True,
    )
    check_run(deployment, follow_guide("tls", deployment))
    # a key that is not registered is refused at once
    key = deployment.folder / "stranger"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)], check=True
    )
    stranger = deployment.supernode(
        *("stranger", data / "school"),
        *("--ca", str(deployment.root / "deployment" / "certificates" / "ca.crt")),
        *("--key", str(key)),
    )
    assert stranger.wait() != 0
    assert "Failed to activate SuperNode" in stranger.output


@pytest.mark.engine
def test_a_connection_that_flower_does_not_know_is_named(deployment: Deployment) -> None:
    process = deployment.start("run", deployment.program("co3"), "run", "--federation", "nowhere")
    assert process.wait() == 1
    assert "SuperLink 'nowhere' of Flower's configuration must take `flwr run`" in process.output
    assert len(process.output.strip().splitlines()) == 1


@pytest.mark.deploy
def test_too_few_nodes_end_the_run_within_node_timeout(deployment: Deployment) -> None:
    deployment.superlink()
    process = deployment.run(2, node_timeout=8.0)
    assert process.wait() == 1
    assert "2 nodes must be connected within node_timeout 8 s, got 0" in process.output
    assert deployment.summary()["status"] == "failed"


@pytest.mark.deploy
def test_an_interrupted_run_is_stopped_on_the_superlink(deployment: Deployment) -> None:
    superlink = deployment.superlink()
    process = deployment.run(2)
    process.wait_for("round 0/")
    process.popen.send_signal(2)
    assert process.wait() == 130
    assert "is stopped" in process.output
    assert superlink.popen.poll() is None
    listed = deployment.start("list", deployment.program("flwr"), "list", "here")
    assert listed.wait() == 0
    wait_until(lambda: "stopped" in listed.output, 1.0, lambda: listed.output)
