"""What a run's saved gradients say: moments, laws, distances and sizes of its layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from co3_flower.analysis import Sizes, TensorFit, fit_tensor, measure_tensor
from co3_flower.config import CodecConfig
from co3_flower.files import read_tensors
from sim.capture import saved_rounds
from sim.models import figure_layers
from sim.report.runs import Run
from sim.settings import Settings

NORMAL_95 = 1.959964  # half width of a 95 % interval in standard deviations
BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
WHAT = {"gradient": "g", "compensated": "v"}

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a tensor's entries with half widths of their 95 % intervals.

    The intervals are those of independent entries and many of them: the variance of a sample's
    variance is (fourth moment - variance**2) / n, which holds for heavy tails too.
    """

    mean: float
    mean_half: float
    variance: float
    variance_half: float


class SavedGradients:
    """The means that one run has saved, and what was measured on its upper, middle, lower layer.

    Parameters
    ----------
    run : Run
        With at least one saved mean.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.bases = saved_rounds(run.folder)
        self.rounds = sorted(self.bases)
        shapes = {
            name: array.shape for name, array in self.load(self.rounds[0], "gradient").items()
        }
        self.layers = figure_layers(str(run.config["model"]), shapes)

    def load(self, server_round: int, kind: str) -> dict[str, Array]:
        """Return all tensors of one kind and mean."""
        base = self.bases[server_round]
        return read_tensors(base.with_name(f"{base.name}.{kind}.npz"))

    @property
    def shown_rounds(self) -> list[int]:
        """Three of the rounds: first, middle, last (fewer where there are fewer)."""
        last = len(self.rounds) - 1
        return [self.rounds[i] for i in sorted({0, last // 2, last})]

    @cached_property
    def entries(self) -> dict[tuple[int, str, str], Array]:
        """Entries of the layers, by round, kind ("gradient", "compensated") and layer's title."""
        found = {}
        for server_round in self.rounds:
            for kind in WHAT:
                tensors = self.load(server_round, kind)
                for title, name in self.layers.items():
                    found[server_round, kind, title] = tensors[name]
        return found

    @cached_property
    def fits(self) -> dict[tuple[int, str, str], TensorFit]:
        """The three laws, fitted to each of `entries`."""
        return {key: fit_tensor(key[2], x) for key, x in self.entries.items()}

    @cached_property
    def all_fits(self) -> list[TensorFit]:
        """The three laws, fitted to every tensor of the last gradient."""
        return [fit_tensor(n, x) for n, x in self.load(self.rounds[-1], "gradient").items()]

    @cached_property
    def sizes(self) -> dict[tuple[int, str], Sizes]:
        """Sizes of the compensated gradient's codes, by round and layer's title."""
        config = Settings.from_run_config({**self.run.config, "run-dir": ""}).codec_config()
        config = CodecConfig(
            format=config.format, scale=config.scale, scale_multiplier=config.scale_multiplier
        )
        return {
            (server_round, title): measure_tensor(title, x, config).sizes
            for (server_round, kind, title), x in self.entries.items()
            if kind == "compensated"
        }

    @cached_property
    def residual_ratios(self) -> dict[int, list[float]]:
        """L1 norm of the residual over that of the gradient, tensor by tensor, by round."""
        found = {}
        for server_round in self.rounds:
            gradient, residual = (self.load(server_round, k) for k in ("gradient", "residual"))
            norms = {name: float(np.abs(x).sum(dtype=np.float64)) for name, x in gradient.items()}
            found[server_round] = [
                float(np.abs(x).sum(dtype=np.float64)) / norms[name] if norms[name] else math.nan
                for name, x in residual.items()
            ]
        return found


def moments(x: Array) -> Moments:
    """Return mean and variance of a tensor's entries; see `Moments`.

    Examples
    --------
    >>> moments(np.array([-1.0, 1.0, -1.0, 1.0], np.float32))
    Moments(mean=0.0, mean_half=0.979982, variance=1.0, variance_half=0.0)
    """
    flat = x.astype(np.float64).ravel()
    mean, variance = float(flat.mean()), float(flat.var())
    fourth = float(np.mean((flat - mean) ** 4))
    return Moments(
        mean,
        NORMAL_95 * math.sqrt(variance / flat.size),
        variance,
        NORMAL_95 * math.sqrt(max(0.0, fourth - variance**2) / flat.size),
    )


@dataclass(frozen=True)
class LayerTable:
    """Layers and parameters of a network, as its stored state shows them."""

    num_convolutions: int
    num_linear: int
    num_tensors: int
    num_parameters: int
    num_trainable: int


def count_layers(model_file: Path) -> LayerTable:
    """Count layers and parameters of a run's model.npz; counters of minibatches are none."""
    with np.load(model_file) as members:
        shapes = {name: members[name].shape for name in members.files}
    kinds = {name: name.rpartition(".")[2] for name in shapes}
    trainable = [name for name in shapes if kinds[name] not in BUFFER_NAMES]
    counted = [name for name in shapes if kinds[name] != BUFFER_NAMES[2]]
    return LayerTable(
        num_convolutions=sum(len(shapes[name]) == 4 for name in trainable),
        num_linear=sum(len(shapes[name]) == 2 for name in trainable),
        num_tensors=len(trainable),
        num_parameters=_total(shapes[name] for name in counted),
        num_trainable=_total(shapes[name] for name in trainable),
    )


def runs_with_gradients(runs: Sequence[Run], most: int) -> list[SavedGradients]:
    """Return what was saved by the first runs that saved anything, `most` of them."""
    having = [run for run in runs if saved_rounds(run.folder)]
    return [SavedGradients(run) for run in having[:most]]


def _total(shapes: object) -> int:
    return sum(math.prod(shape) for shape in shapes)  # type: ignore[attr-defined]
