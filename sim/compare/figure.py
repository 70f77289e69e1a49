"""The figure of a comparison: accuracy against R, a panel a stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from co3_flower.compressors import is_rival
from co3_flower.figures import load_matplotlib
from sim.compare.results import Score, best_by_label

FIGURE_NAME = "accuracy-against-R"
GREY, DARK, CO3_COLOR = "#6b7280", "#1f2937", "#c2410c"
COLORS = (
    "#1d4ed8", "#15803d", "#7c3aed", "#0e7490", "#be185d", "#a16207", "#4d7c0f", "#9f1239",
    "#334155", "#0369a1", "#6d28d9", "#047857", "#b45309", "#db2777",
)  # fmt: skip
MARKERS = "svD^<>pPXh*d8H"


def draw_comparison(stages: Mapping[str, Sequence[Score]]) -> Any:
    """Draw where every entry ended, at its best step size; strengths of one compressor are joined.

    Parameters
    ----------
    stages : mapping of str to sequence of Score
        By the stage's name.

    Returns
    -------
    matplotlib Figure
    """
    columns = min(2, len(stages))
    rows = -(-len(stages) // columns)
    figure = load_matplotlib()(figsize=(5.2 * columns, 4.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    names = list(dict.fromkeys(s.compressor for found in stages.values() for s in found))
    rivals = [name for name in names if is_rival(name)]
    for axis, (title, found) in zip(axes, stages.items(), strict=False):
        for name in names:
            line = [s for s in best_by_label(found).values() if s.compressor == name]
            if line:
                _draw_line(axis, sorted(line, key=lambda s: s.mean("R")), name, rivals)
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log")
        axis.set_xlabel("R, MB of all uplink payloads")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#eceff3", linewidth=0.7)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("accuracy on the test set, %")
    for axis in axes[len(stages) :]:
        axis.set_visible(False)
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=3 * columns + 1,
        frameon=False, fontsize=8,
    )  # fmt: skip
    return figure


def save_figure(stages: Mapping[str, Sequence[Score]], folder: Path) -> None:
    """Write the figure as PNG and SVG."""
    figure = draw_comparison(stages)
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{FIGURE_NAME}.{suffix}", dpi=150)


def _draw_line(axis: Any, line: Sequence[Score], name: str, rivals: Sequence[str]) -> None:
    if name in rivals:
        number = rivals.index(name)
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        style |= {"linewidth": 0.8, "markersize": 5}
    else:
        style = {"color": CO3_COLOR if name == "co3" else DARK, "marker": "o"}
        style |= {"linewidth": 1.8, "markersize": 6, "zorder": 3}
    label = {"co3": "CO3", "none": "float32"}.get(name, name)
    axis.errorbar(
        [score.mean("R") / 8e6 for score in line],
        [100 * score.mean("accuracy") for score in line],
        [100 * (score.spread or 0) for score in line],
        label=label, capsize=2, **style,
    )  # fmt: skip
