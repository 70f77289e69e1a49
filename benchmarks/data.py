"""The updates that are measured: a real gradient where it lies, and a synthetic one."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GRADIENT_FILE = Path("gradients") / "densenet121_step40.npz"
QUICK_PARAMETERS = 70_000
ZERO_FRACTION = 0.08  # what DenseNet121's gradient has at 32x32

# A block of the synthetic network, as in a DenseNet: two convolutions and two vectors.
BLOCK_SHAPES = ((128, 256, 1, 1), (32, 128, 3, 3), (256,), (128,))

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Update:
    """A named update: float32 arrays by tensor name."""

    name: str
    arrays: Arrays

    @property
    def num_parameters(self) -> int:
        """Entries of all tensors."""
        return sum(array.size for array in self.arrays.values())

    def flat(self) -> np.ndarray:
        """Return all entries, float32 [n]."""
        return np.concatenate([array.reshape(-1) for array in self.arrays.values()])


def load_updates(options: argparse.Namespace) -> list[Update]:
    """Return the updates that the options ask for, the real one first.

    Where the real gradient is missing, a line on the screen says so.
    """
    if options.quick:
        return [synthetic_update(QUICK_PARAMETERS, options.seed)]
    found = []
    if options.data != "synthetic":
        real = load_gradient()
        if real is None and options.data == "densenet121":
            sys.exit(f"the gradient must be at {gradient_path()}; set CO3_DATA to its folder")
        if real is None:
            print(f"(no gradient at {gradient_path()}: set CO3_DATA; synthetic data only)")
        else:
            found.append(real)
    if options.data != "densenet121":
        found.append(synthetic_update(options.num_parameters, options.seed))
    return found


def gradient_path() -> Path:
    """Return where the real gradient is looked for: $CO3_DATA, else ../shared/data."""
    named = os.environ.get("CO3_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return (Path(named) if named else beside) / GRADIENT_FILE


def load_gradient() -> Update | None:
    """Return DenseNet121's gradient (7 M entries, 364 tensors in model order), or None."""
    path = gradient_path()
    if not path.is_file():
        return None
    with np.load(path) as members:
        arrays = {name.partition("__")[2]: members[name] for name in sorted(members.files)}
    return Update("DenseNet121", arrays)


def synthetic_update(num_parameters: int, seed: int) -> Update:
    """Draw an update of at least so many entries from generalized normal laws with a zero atom.

    Each tensor has a shape beta in [0.5, 2] and a scale between 1e-5 and 1e-2 of its own.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    total = 0
    while total < num_parameters:
        for shape in BLOCK_SHAPES:
            arrays[f"tensor{len(arrays):04d}"] = draw_gennorm(rng, shape)
            total += int(np.prod(shape))
    return Update("synthetic GenNorm", arrays)


def draw_gennorm(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a float32 tensor: |x| = alpha * Gamma(1 / beta)**(1 / beta), some entries zero."""
    beta, alpha = rng.uniform(0.5, 2.0), 10.0 ** rng.uniform(-5.0, -2.0)
    x = alpha * rng.standard_gamma(1.0 / beta, shape) ** (1.0 / beta)
    x *= rng.choice((-1.0, 1.0), shape) * (rng.random(shape) >= ZERO_FRACTION)
    return x.astype(np.float32)
