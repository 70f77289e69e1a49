"""Fixtures shared by all tests: a seeded generator, real data where it lies, awkward updates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

# Set before anything imports flwr or ray: the tests talk to no one.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# A shell starts what runs in its background deaf to Ctrl-C, and children inherit that: tests that
# interrupt a process would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[1]
GRADIENT_FILE = Path("gradients") / "densenet121_step40.npz"

settings.register_profile(
    "co3",
    deadline=None,  # the first call of a kernel compiles it
    derandomize=True,  # the same examples on every machine
    max_examples=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("co3")


@pytest.fixture
def rng() -> np.random.Generator:
    """Give every test the same fresh generator, so that its order in the run does not matter."""
    return np.random.default_rng(20220309044)


@pytest.fixture(scope="session")
def co3_data() -> Path:
    """Folder with cifar10/ and gradients/: $CO3_DATA, else ../shared/data beside the checkout."""
    named = os.environ.get("CO3_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data is not at {folder}; set CO3_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def real_gradient(co3_data: Path) -> dict[str, np.ndarray]:
    """DenseNet121's gradient at step 40 on CIFAR-10: 364 float32 tensors in model order."""
    path = co3_data / GRADIENT_FILE
    if not path.is_file():
        pytest.skip(f"the real gradient is not at {path}; set CO3_DATA to the folder that holds it")
    with np.load(path) as members:
        return {name.partition("__")[2]: read_only(members[name]) for name in sorted(members.files)}


@pytest.fixture(scope="session")
def small_real_gradient(real_gradient: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every eleventh tensor of the real gradient: 34 tensors, kernels, weights and biases mixed."""
    return {name: real_gradient[name] for name in list(real_gradient)[::11]}


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Let torch work in one thread: where tensors are small, more only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def heavy_tail(rng: np.random.Generator) -> np.ndarray:
    """GenNorm entries (beta 0.5) at the size of a gradient, a tenth of them exactly zero."""
    return draw_gennorm(rng, 5_000, beta=0.5, alpha=1e-5, zero_fraction=0.1)


@pytest.fixture
def small_update(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Build a small network's update: two weights with own tables, the rest below min_numel."""
    return {
        "conv.weight": draw_gennorm(rng, 1_728, beta=0.7, alpha=1e-3).reshape(64, 3, 3, 3),
        "conv.bias": draw_gennorm(rng, 64, beta=1.5, alpha=1e-2),
        "fc.weight": draw_gennorm(rng, 2_560, beta=1.0, alpha=1e-4, zero_fraction=0.2).reshape(
            10, 256
        ),
        "fc.bias": draw_gennorm(rng, 10, beta=2.0, alpha=1e-2),
    }


@pytest.fixture
def edge_update(rng: np.random.Generator, heavy_tail: np.ndarray) -> dict[str, np.ndarray]:
    """Collect every awkward tensor in one update, integers and bools among them."""
    normal = rng.standard_normal(1_200).astype(np.float32)
    return {
        "zeros": np.zeros((40, 50), np.float32),
        "scalar": np.array(0.25, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "one": np.array([-3.0], np.float32),
        "constant": np.full(1_500, 0.37, np.float32),
        "heavy": heavy_tail.reshape(50, 100),
        "half": normal.astype(np.float16).reshape(30, 40),
        "double": normal.astype(np.float64)[:700] * 1e-3,
        "counter": np.array(7, np.int64),
        "indices": np.arange(-5, 6, dtype=np.int32),
        "mask": np.array([[True, False, True]]),
    }


def read_only(array: np.ndarray) -> np.ndarray:
    """Lock an array, so that a test fails where something writes to its inputs."""
    array.flags.writeable = False
    return array


def draw_gennorm(
    rng: np.random.Generator,
    size: int,
    *,
    beta: float,
    alpha: float = 1.0,
    zero_fraction: float = 0.0,
) -> np.ndarray:
    """Draw float32 [size] from zero_fraction * delta_0 + (1 - zero_fraction) * GenNorm."""
    magnitudes = alpha * rng.gamma(1.0 / beta, 1.0, size) ** (1.0 / beta)
    signs = rng.choice([-1.0, 1.0], size)
    kept = rng.random(size) >= zero_fraction
    return (magnitudes * signs * kept).astype(np.float32)


def run_without_jit(program: str, *arguments: str) -> list[str]:
    """Run a program in a process whose kernels are not compiled; returns the words it prints.

    It can import the tests' modules; overflow of integers, which is meant, brings no warning.
    """
    head = (
        "import sys, numba, numpy as np\n"
        "sys.path.insert(0, 'tests')\n"
        "assert numba.config.DISABLE_JIT\n"
        "np.seterr(all='ignore')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + program, *arguments],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()
