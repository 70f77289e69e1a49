"""Figures of an analysis, drawn with matplotlib, which is imported here and only on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from co3_flower.analysis import Sizes, TensorFit
from co3_flower.analysis_report import Analysis
from co3_flower.analysis_tables import CODE_TITLES, LAW_TITLES
from co3_flower.errors import ConfigError
from co3_flower.gennorm import GenNorm

_RANGE = 5.0  # standard deviations to either side of the histograms
_MAX_BINS = 120
_GREY = "#b8bec7"
_COLORS = {"gennorm": "#c2410c", "norm": "#1d4ed8", "laplace": "#15803d"}
_STYLES = {"gennorm": "-", "norm": "--", "laplace": "-."}
_BAR_COLORS = {"huffman": "#c2410c", "rans": "#7c3aed", "lz78": "#64748b", "zstd": "#0f766e"}


def load_matplotlib() -> Any:
    """Return matplotlib's Figure class, which needs no display.

    Raises
    ------
    ConfigError
        If matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError(
            "figures must be drawn with matplotlib, got none installed; "
            "`pip install matplotlib` or leave out --output"
        ) from None


def draw_histograms(
    tensors: Mapping[str, NDArray[Any]], analysis: Analysis, titles: Mapping[str, str], path: Path
) -> None:
    """Draw each tensor's entries, standardised, with the densities of the three fitted laws.

    Entries that are exactly zero are left out of the bars, as their atom is of the densities; both
    integrate to 1 - zero_fraction.

    Parameters
    ----------
    tensors : mapping of str to array
        All tensors by name.
    analysis : Analysis
        Their fits.
    titles : mapping of str to str
        The tensors to draw, and the title of each.
    path : Path
        Where the PNG or SVG file goes.
    """
    fits = {fit.name: fit for fit in analysis.fits}
    columns = min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure = load_matplotlib()(figsize=(4.4 * columns, 3.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axis, (name, title) in zip(axes, titles.items(), strict=False):
        _draw_histogram(axis, tensors[name], fits[name], title)
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)


def draw_sizes(analysis: Analysis, path: Path) -> None:
    """Draw bars of the whole gradient's sizes: a row per format, paper accounting and true bits.

    The two accounts have an axis each; the line is the entropy.

    Parameters
    ----------
    analysis : Analysis
        What `analyze` returned.
    path : Path
        Where the PNG or SVG file goes.
    """
    count = len(analysis.formats)
    figure = load_matplotlib()(figsize=(11.0, 1.2 + 2.5 * count), layout="constrained")
    axes = figure.subplots(count, 2, squeeze=False)
    for (left, right), sizes in zip(axes, analysis.formats, strict=True):
        whole, name = sizes.whole, sizes.config.float_format.name.upper()
        _draw_bars(left, whole, whole.code_bits, f"{name}: paper accounting, code bits alone")
        _draw_bars(right, whole, whole.payload_bits, f"{name}: true bits, 8 * len(payload)")
    figure.suptitle(f"{analysis.numel:,} entries in {len(analysis.fits)} tensors", fontsize=11)
    figure.savefig(path, dpi=150)


def density(law: GenNorm, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density of a law at x, without its atom: it integrates to 1 - zero_fraction.

    Examples
    --------
    >>> density(GenNorm(1.0, 1.0, 0.5), np.array([0.0, math.log(2.0)])).round(6).tolist()
    [0.25, 0.125]
    """
    if law.alpha <= 0.0:
        return np.zeros_like(x)
    peak = (1.0 - law.zero_fraction) * law.beta / (2.0 * law.alpha * special.gamma(1.0 / law.beta))
    values: NDArray[np.float64] = peak * np.exp(-((np.abs(x) / law.alpha) ** law.beta))
    return values


def _draw_histogram(axis: Any, x: NDArray[Any], fit: TensorFit, title: str) -> None:
    flat = x.reshape(-1).astype(np.float64)
    sigma = math.sqrt(float(np.mean(flat**2))) or 1.0
    num_bins = min(_MAX_BINS, max(16, int(2.0 * flat.size ** (1.0 / 3.0))))
    edges = np.linspace(-_RANGE, _RANGE, num_bins + 1)
    counts, _ = np.histogram(flat[flat != 0] / sigma, edges)
    heights = counts / (flat.size * np.diff(edges))
    axis.stairs(heights, edges, fill=True, color=_GREY, label="entries that are not zero")
    grid = np.linspace(-_RANGE, _RANGE, 1000)  # even number: no point at 0, where it may be endless
    for key, law in fit.laws.items():
        axis.plot(
            grid, sigma * density(law, sigma * grid),
            _STYLES[key], color=_COLORS[key], linewidth=1.4, label=LAW_TITLES[key],
        )  # fmt: skip
    shown = heights[heights > 0]
    if shown.size:
        axis.set_yscale("log")
        axis.set_ylim(0.5 * float(shown.min()), 3.0 * float(shown.max()))
    axis.set_xlim(-_RANGE, _RANGE)
    axis.set_xlabel("entry / standard deviation")
    axis.set_ylabel("density")
    law = fit.laws["gennorm"]
    distances = ", ".join(f"{LAW_TITLES[key]} {value:.3f}" for key, value in fit.w2.items())
    axis.set_title(
        f"{title}\n{fit.numel:,} entries, {law.zero_fraction:.1%} zero, beta {law.beta:.2f}\n"
        f"W2: {distances}",
        fontsize=8,
    )


def _draw_bars(axis: Any, row: Sizes, bits: Mapping[str, int], title: str) -> None:
    keys: Sequence[str] = [key for key in CODE_TITLES if key in bits]
    values = [bits[key] / row.numel for key in keys]
    colors = [_BAR_COLORS[key.partition("_")[0]] for key in keys]
    bars = axis.bar(range(len(keys)), values, color=colors, width=0.68)
    axis.bar_label(bars, fmt="%.3f", fontsize=7, padding=1)
    entropy = row.entropy_bits / row.numel
    axis.axhline(entropy, color="black", linewidth=0.9, linestyle=":")
    axis.set_xticks(range(len(keys)), [CODE_TITLES[key] for key in keys], fontsize=7)
    axis.set_ylabel("bits per entry", fontsize=8)
    axis.set_ylim(0.0, 1.15 * max(values) or 1.0)
    axis.set_title(f"{title}; dotted: entropy {entropy:.3f}", fontsize=9)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
