"""The figures of a report, each a matplotlib Figure; nothing here reads a file."""

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from co3_flower.analysis import TensorFit
from co3_flower.figures import density, load_matplotlib
from sim.report.runs import Setting, lower_envelope
from sim.report.saved import WHAT, SavedGradients

PANEL = (3.5, 2.7)  # inches
MAX_LABELS = 14  # in a legend; more settings are told apart by the table alone
LETTERS_PER_INCH = 14  # of a legend
HISTOGRAM_RANGE = 5.0  # standard deviations to either side
HISTOGRAM_BINS = 80
GREY = "#c3c8cf"
DARK = "#1f2937"
LAWS = {
    "gennorm": ("GenNorm", "#c2410c", "-"),
    "norm": ("Norm", "#1d4ed8", "--"),
    "laplace": ("Laplace", "#15803d", "-."),
}
CODES = {
    "lz78": ("LZ78", "#64748b", ":"),
    "huffman_gennorm": ("Huffman, GenNorm", "#c2410c", "-"),
    "huffman_norm": ("Huffman, Norm", "#1d4ed8", "--"),
}
COLORS = (
    "#1d4ed8", "#c2410c", "#15803d", "#7c3aed", "#0e7490", "#be185d", "#a16207", "#4d7c0f",
    "#9f1239", "#334155",
)  # fmt: skip


def draw_tradeoff(settings: Sequence[Setting]) -> Any:
    """Draw accuracy against R, and loss minus float32's loss against R with the envelope L_T(R).

    Lines are the evaluations of a training, means over seeds; a point is where it ended, its loss
    and accuracy the means of the last evaluations.
    """
    figure, (left, right) = _panels(1, 2, width=4.6, height=4.2)
    base = next((s.mean("loss") for s in settings if s.is_float32), None)
    ends = []
    for number, setting in enumerate(settings):
        style = _style(setting, number)
        bits, accuracy = setting.curve("R", "accuracy")
        left.plot(_positive(bits), _percent(accuracy), linewidth=0.8, alpha=0.55, **style)
        end, loss, score = (setting.mean(key) for key in ("R", "loss", "accuracy"))
        if end is None or loss is None or score is None:
            continue
        label = setting.label if number < MAX_LABELS else None
        marker = {"marker": "s" if setting.is_float32 else "o", "markersize": 5}
        spread, below = setting.spread("accuracy") or 0.0, loss - (base or 0.0)
        left.errorbar(end, 100 * score, 100 * spread, capsize=2, linewidth=0.9, **style, **marker)
        right.errorbar(
            end, below, setting.spread("loss") or 0.0,
            capsize=2, linewidth=0.9, linestyle="none", color=style["color"], label=label, **marker,
        )  # fmt: skip
        ends.append((end, below))
    steps = lower_envelope(ends)
    if steps:
        last = max(bits for bits, _ in ends)
        x = [bits for bits, _ in steps] + [last]
        y = [loss for _, loss in steps] + [steps[-1][1]]
        right.step(
            x, y, where="post", color=DARK, linewidth=1.3, label="L_T(R), least loss", zorder=1
        )
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel("R, bits of all uplink payloads")
    left.set_ylabel("accuracy on the test set, %")
    right.set_ylabel("test loss" if base is None else "test loss minus float32's")
    if base is not None:
        right.axhline(0.0, color=GREY, linewidth=0.8, zorder=0)
    _legend(figure, right)
    return figure


def draw_accuracy(settings: Sequence[Setting]) -> Any:
    """Draw accuracy over rounds: a panel per family, a line per setting, float32 in each."""
    coded = [s for s in settings if not s.is_float32]
    formats = list(dict.fromkeys(s.family for s in coded)) or [""]
    columns = min(3, len(formats))
    rows = math.ceil(len(formats) / columns)
    width = 4.0 if columns > 1 else 7.0
    figure, axes = _panels(rows, columns, width=width, height=3.4, sharey=True)
    for axis, fmt in zip(axes, formats, strict=False):
        shown = [s for s in coded if s.family == fmt]
        shown += [s for s in settings if s.is_float32]
        for number, setting in enumerate(shown):
            rounds, accuracy = setting.curve("server_round", "accuracy")
            label = setting.label.removeprefix(f"{fmt}, ") if number < MAX_LABELS else None
            axis.plot(
                rounds, _percent(accuracy), linewidth=1.2, label=label, **_style(setting, number)
            )
        axis.set_title(fmt, fontsize=10)
        axis.set_xlabel("round")
        axis.legend(fontsize=7, frameon=False, loc="lower right")
    axes[0].set_ylabel("accuracy on the test set, %")
    _hide(axes[len(formats) :])
    return figure


def draw_histograms(saved: SavedGradients, layer: str) -> Any:
    """Draw one layer's g (above) and v (below) at three means, with the three laws' densities."""
    rounds = saved.shown_rounds
    figure, axes = _panels(2, len(rounds))
    for row, (kind, symbol) in enumerate(WHAT.items()):
        for column, server_round in enumerate(rounds):
            axis = axes[row * len(rounds) + column]
            key = (server_round, kind, layer)
            _draw_histogram(axis, saved.entries[key], saved.fits[key])
            axis.set_title(f"{symbol}, round {server_round}", fontsize=9)
            if row == 1:
                axis.set_xlabel("entry / standard deviation", fontsize=8)
        axes[row * len(rounds)].set_ylabel("density", fontsize=8)
    _legend(figure, axes[0])
    return figure


def draw_w2(saved: SavedGradients) -> Any:
    """Draw the W2 distance of each law over the means: g above, v below, a column per layer."""
    return _over_rounds(
        saved,
        LAWS,
        lambda server_round, kind, layer: saved.fits[server_round, kind, layer].w2,
        "W2 distance",
    )


def draw_kurtosis(saved: SavedGradients) -> Any:
    """Draw the entries' kurtosis over the means, and that of the laws fitted to them."""

    def values(server_round: int, kind: str, layer: str) -> dict[str, float]:
        fit = saved.fits[server_round, kind, layer]
        return {**fit.law_kurtosis, "entries": fit.kurtosis}

    lines = {"entries": ("entries", DARK, "-"), **LAWS}
    return _over_rounds(saved, lines, values, "kurtosis", log=True)


def draw_kurtosis_of_layers(saved: SavedGradients) -> Any:
    """Draw the kurtosis of every tensor of the last gradient, in the network's order."""
    figure, (axis,) = _panels(1, 1, width=8.0, height=3.2)
    fits = saved.all_fits
    numbers = range(1, len(fits) + 1)
    kurtosis = [fit.kurtosis for fit in fits]
    axis.plot(numbers, kurtosis, ".", color=DARK, markersize=4, label="entries")
    law = [fit.law_kurtosis["gennorm"] for fit in fits]
    axis.plot(numbers, law, "x", color=LAWS["gennorm"][1], markersize=3, label="GenNorm")
    for name in ("norm", "laplace"):
        title, color, style = LAWS[name]
        level = 3.0 if name == "norm" else 6.0
        axis.axhline(
            level, color=color, linestyle=style, linewidth=0.9, label=f"{title} ({level:g})"
        )
    _set_log(axis)
    axis.set_xlabel("tensor, from the input to the output")
    axis.set_ylabel("kurtosis")
    _legend(figure, axis)
    return figure


def draw_sizes(saved: SavedGradients) -> Any:
    """Draw the size of the coded v over the means in paper accounting, a panel per layer."""
    figure, axes = _panels(1, len(saved.layers))
    for axis, layer in zip(axes, saved.layers, strict=True):
        rows = [saved.sizes[server_round, layer] for server_round in saved.rounds]
        for key, (title, color, style) in CODES.items():
            bits = [row.code_bits[key] / row.numel for row in rows]
            axis.plot(saved.rounds, bits, style, color=color, marker=".", label=title)
        axis.set_title(_short(layer), fontsize=9)
        axis.set_xlabel("round", fontsize=8)
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axes[0].set_ylabel("code bits per entry", fontsize=8)
    _legend(figure, axes[0])
    return figure


def draw_residual_ratios(saved: SavedGradients) -> Any:
    """Draw the L1 norm of the residual over the gradient's for every tensor, at three means."""
    figure, (axis,) = _panels(1, 1, width=8.0, height=3.2)
    for number, server_round in enumerate(saved.shown_rounds):
        ratios = saved.residual_ratios[server_round]
        axis.plot(
            range(1, len(ratios) + 1), ratios,
            ".-", color=COLORS[number], markersize=3, linewidth=0.6, label=f"round {server_round}",
        )  # fmt: skip
    axis.set_xlabel("tensor, from the input to the output")
    axis.set_ylabel("||residual||_1 / ||gradient||_1")
    _set_log(axis)
    _legend(figure, axis)
    return figure


def _over_rounds(
    saved: SavedGradients,
    lines: dict[str, tuple[str, str, str]],
    values: Callable[[int, str, str], dict[str, float]],
    ylabel: str,
    *,
    log: bool = False,
) -> Any:
    figure, axes = _panels(len(WHAT), len(saved.layers))
    for row, (kind, symbol) in enumerate(WHAT.items()):
        for column, layer in enumerate(saved.layers):
            axis = axes[row * len(saved.layers) + column]
            table = [values(server_round, kind, layer) for server_round in saved.rounds]
            for key, (title, color, style) in lines.items():
                y = [entry[key] for entry in table]
                axis.plot(saved.rounds, y, style, color=color, marker=".", label=title)
            axis.set_title(f"{symbol}, {_short(layer)}", fontsize=9)
            if log:
                _set_log(axis)
            else:
                axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
            if row == len(WHAT) - 1:
                axis.set_xlabel("round", fontsize=8)
        axes[row * len(saved.layers)].set_ylabel(ylabel, fontsize=8)
    _legend(figure, axes[0])
    return figure


def _draw_histogram(axis: Any, x: np.ndarray, fit: TensorFit) -> None:
    flat = x.reshape(-1).astype(np.float64)
    sigma = math.sqrt(float(np.mean(flat**2))) or 1.0
    edges = np.linspace(-HISTOGRAM_RANGE, HISTOGRAM_RANGE, HISTOGRAM_BINS + 1)
    counts, _ = np.histogram(flat[flat != 0] / sigma, edges)  # the atom at zero is no density
    heights = counts / (flat.size * np.diff(edges))
    axis.stairs(heights, edges, fill=True, color=GREY, label="entries that are not zero")
    grid = np.linspace(-HISTOGRAM_RANGE, HISTOGRAM_RANGE, 300)  # even: 0 may have endless density
    for key, (title, color, style) in LAWS.items():
        y = sigma * density(fit.laws[key], sigma * grid)
        axis.plot(grid, y, style, color=color, linewidth=1.2, label=title)
    shown = heights[heights > 0]
    if shown.size:
        axis.set_yscale("log")
        axis.set_ylim(0.5 * float(shown.min()), 3.0 * float(shown.max()))
    axis.set_xlim(-HISTOGRAM_RANGE, HISTOGRAM_RANGE)


def _panels(
    rows: int, columns: int, *, width: float = PANEL[0], height: float = PANEL[1], **more: Any
) -> tuple[Any, list[Any]]:
    figure = load_matplotlib()(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more).reshape(-1)
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#eceff3", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, list(axes)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    longest = max(map(len, labels), default=0) + 8  # the line beside a label counts
    columns = max(1, min(len(labels), int(LETTERS_PER_INCH * figure.get_figwidth()) // longest))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def _set_log(axis: Any) -> None:
    """Give an axis a logarithmic scale with plain numbers."""
    plain = import_module("matplotlib.ticker").LogFormatter
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(plain())
    axis.yaxis.set_minor_formatter(plain(minor_thresholds=(1.2, 0.4)))
    axis.tick_params(which="both", labelsize=7)


def _hide(axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.set_visible(False)


def _style(setting: Setting, number: int) -> dict[str, Any]:
    if setting.is_float32:
        return {"color": "#6b7280"}
    return {"color": COLORS[number % len(COLORS)]}


def _positive(bits: Sequence[float]) -> list[float]:
    return [
        value if value > 0 else math.nan for value in bits
    ]  # round 0 has no place on a log axis


def _percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def _short(layer: str, most: int = 34) -> str:
    return layer if len(layer) <= most else f"{layer.partition(':')[0]}: …{layer[-20:]}"
