"""The two example apps, from which the README takes its diffs, run and learn."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from flwr.app import Context, RecordDict
from localgrid import LocalGrid

EXAMPLES = Path(__file__).parent / "examples"
NUM_CLIENTS = 3
MAX_LINES = 70  # an example is read at one sitting


def load_example(name: str) -> ModuleType:
    """Import an example by its path: the folder is no package."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["numpy_client_app", "message_api_app"])
def test_example_learns_and_reports_r(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example(name)
    configs = [{"partition-id": i, "num-partitions": NUM_CLIENTS} for i in range(NUM_CLIENTS)]
    grid = LocalGrid(example.client_app, NUM_CLIENTS, node_configs=configs)
    context = Context(
        run_id=1,
        node_id=1,
        node_config={},
        state=RecordDict(),
        run_config={"clients": NUM_CLIENTS},
    )
    example.main(grid, context)
    found = re.search(r"accuracy (\d\.\d+), R = (\d+) bits", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 0.9
    bits_per_parameter = int(found[2]) / (5 * NUM_CLIENTS * 650)
    assert 2 < bits_per_parameter < 4.5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES
