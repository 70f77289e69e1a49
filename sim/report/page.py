"""One HTML page with all figures and tables, which needs nothing but itself.

Figures are embedded as SVG; beside the page each lies as PNG and SVG as well.
"""

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

from co3_flower import ConfigError, __version__
from sim.report import figures
from sim.report.runs import Run, Setting, group_by_setting, load_runs
from sim.report.saved import (
    WHAT,
    SavedGradients,
    count_layers,
    moments,
    runs_with_gradients,
)

PAGE_NAME = "report.html"
FIGURES = "figures"
MAX_WITH_GRADIENTS = 3  # runs whose saved gradients are shown
PNG_DPI = 150
PIXELS_PER_INCH = 96  # of CSS
# Text as text, which is a third of the size; no random ids, so that equal runs give equal files.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "co3", "font.family": "sans-serif"}

STYLE = """
:root{color-scheme:light}
body{margin:0 auto;max-width:68rem;padding:1rem;font:16px/1.5 system-ui,sans-serif;color:#1f2937}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem}
figure{margin:1rem 0}figcaption{font-size:.9rem;color:#4b5563}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}
.wide img{display:block;max-width:100%;min-width:min(34rem,var(--natural));height:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #e5e7eb;white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:2px solid #9ca3af}
nav a{margin-right:1rem}a{color:#1d4ed8}
"""


@dataclass
class _Page:
    """The page's body as it grows, and the folder of its figures."""

    folder: Path
    parts: list[str] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)

    def head(self, title: str) -> None:
        anchor = f"s{len(self.sections) + 1}"
        self.sections.append((anchor, title))
        self.parts.append(f'<h2 id="{anchor}">{html.escape(title)}</h2>')

    def text(self, words: str) -> None:
        self.parts.append(f"<p>{html.escape(words)}</p>")

    def figure(self, drawn: Any, name: str, caption: str) -> None:
        """Save a figure as PNG and SVG, and embed the SVG."""
        svg = io.BytesIO()
        with matplotlib.rc_context(SVG):
            drawn.savefig(svg, format="svg", metadata={"Date": None})
        (self.folder / f"{name}.svg").write_bytes(svg.getvalue())
        drawn.savefig(self.folder / f"{name}.png", dpi=PNG_DPI)
        data = base64.b64encode(svg.getvalue()).decode("ascii")
        words = html.escape(caption)
        width = round(PIXELS_PER_INCH * drawn.get_figwidth())
        self.parts.append(
            f'<figure id="{name}"><div class="wide"><img alt="{words}" width="{width}"'
            f' style="--natural:{width}px"'
            f' src="data:image/svg+xml;base64,{data}"></div>'
            f"<figcaption>{words}</figcaption></figure>"
        )

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        def line(cells: Sequence[str], tag: str) -> str:
            inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{inner}</tr>"

        body = "".join(line(row, "td") for row in rows)
        self.parts.append(
            f'<div class="wide"><table><thead>{line(header, "th")}</thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def write(self, path: Path, title: str) -> None:
        links = "".join(f'<a href="#{a}">{html.escape(text)}</a>' for a, text in self.sections)
        path.write_text(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><nav>{links}</nav>"
            f"{''.join(self.parts)}<p><small>co3 {__version__}</small></p></body></html>\n",
            encoding="utf-8",
        )


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write the report of some runs.

    Parameters
    ----------
    folders : sequence of Path
        Run-dirs, or folders of sweeps.
    output : Path
        Folder of the report, made if need be; files of an earlier one are replaced.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ConfigError
        A folder without a completed run, or an output that cannot be written.
    """
    runs = load_runs(folders)
    settings = group_by_setting(runs)
    try:
        (output / FIGURES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output must be a folder that can be made, got {str(output)!r} ({error.strerror})"
        ) from None
    page = _Page(output / FIGURES)
    _add_runs(page, settings)
    _add_networks(page, runs)
    shown = runs_with_gradients(runs, MAX_WITH_GRADIENTS)
    for number, saved in enumerate(shown, start=1):
        _add_gradients(page, saved, f"gradients{number}")
    if not shown:
        page.text("No run here has saved gradients (save-gradients-every).")
    title = f"{_count(len(runs), 'run')} of {', '.join(_distinct(runs, 'model'))}"
    page.write(output / PAGE_NAME, f"{title} on {', '.join(_distinct(runs, 'dataset'))}")
    return output / PAGE_NAME


def _add_runs(page: _Page, settings: Sequence[Setting]) -> None:
    page.head("Accuracy against R")
    page.figure(
        figures.draw_tradeoff(settings),
        "tradeoff",
        "Left: test accuracy against R while training goes on (lines, means over seeds) and at its"
        " end (points; bars: standard deviation over seeds). Right: test loss at the end, minus"
        " float32's where there is such a run, and the lower envelope over all runs, L_T(R). R is"
        " 8 times the bytes of all payloads; round 0 has none and no place on the axis.",
    )
    rows = []
    for setting in settings:
        spread = setting.spread("accuracy")
        rate = setting.mean("bits_per_parameter")
        rows.append(
            [
                setting.label,
                str(len(setting.runs)),
                _number(setting.mean("accuracy"), 100, 2)
                + ("" if spread is None else f" ± {100 * spread:.2f}"),
                _number(setting.mean("loss"), 1, 4),
                _number(setting.mean("R"), 1 / 8e6, 3),
                _number(rate, 1, 3),
            ]
        )
    page.table(["setting", "seeds", "accuracy, %", "loss", "R, MB", "bits per parameter"], rows)
    page.text(
        "Accuracy and loss are means over the last evaluations of each run, then over seeds, with"
        " the sample standard deviation over seeds. A difference below the spread is none."
    )
    page.head("Accuracy over rounds")
    page.figure(
        figures.draw_accuracy(settings),
        "accuracy",
        "Test accuracy over rounds for each setting, means over seeds; a panel for each format, "
        "and one for other compressors.",
    )


def _add_networks(page: _Page, runs: Sequence[Run]) -> None:
    page.head("Networks")
    rows = []
    for model in _distinct(runs, "model"):
        run = next(run for run in runs if run.config["model"] == model)
        table = count_layers(run.folder / "model.npz")
        counts = (
            table.num_convolutions,
            table.num_linear,
            table.num_tensors,
            table.num_parameters,
            table.num_trainable,
        )
        rows.append([model, *(f"{count:,}" for count in counts)])
    header = ["network", "convolutions", "linear", "trained tensors", "parameters", "trainable"]
    page.table(header, rows)
    page.text(
        "Parameters that are not trainable are BatchNorm's running statistics. A separable"
        " convolution counts as two."
    )


def _add_gradients(page: _Page, saved: SavedGradients, name: str) -> None:
    config = saved.run.config
    what = "float32" if saved.run.is_float32 else f"{config['format']}, gamma {config['gamma']}"
    page.head(f"Gradients: {config['model']}, {what}")
    every = config["save-gradients-every"]
    page.text(
        f"Of client 0, means over {every} rounds each, numbered by the last. g is the gradient,"
        f" v = g + gamma * m what is converted. Run: {saved.run.folder.name}."
    )
    for number, layer in enumerate(saved.layers, start=1):
        page.figure(
            figures.draw_histograms(saved, layer),
            f"{name}-histograms{number}",
            f"{layer}: entries of g and v over their standard deviation, with the fitted laws.",
        )
    page.figure(
        figures.draw_w2(saved),
        f"{name}-w2",
        "W2 distance of the standardised entries from each fitted law.",
    )
    page.figure(
        figures.draw_kurtosis(saved),
        f"{name}-kurtosis",
        "Kurtosis of the entries and of the fitted laws.",
    )
    page.figure(
        figures.draw_kurtosis_of_layers(saved),
        f"{name}-kurtosis-layers",
        f"Kurtosis of every tensor of g, round {saved.rounds[-1]}.",
    )
    page.figure(
        figures.draw_sizes(saved),
        f"{name}-sizes",
        f"Size of v in {config['format']}: bits of the codes alone per entry (paper accounting).",
    )
    if not saved.run.is_float32:
        page.figure(
            figures.draw_residual_ratios(saved),
            f"{name}-residual",
            "L1 norm of the residual over that of the gradient, tensor by tensor.",
        )
    rows = []
    order = [(r, kind, layer) for kind in WHAT for layer in saved.layers for r in saved.rounds]
    for server_round, kind, layer in order:
        x = saved.entries[server_round, kind, layer]
        m = moments(x)
        rows.append(
            [
                f"{WHAT[kind]}, {layer}",
                str(server_round),
                f"{x.size:,}",
                f"{m.mean:.3e} ± {m.mean_half:.1e}",
                f"{m.variance:.3e} ± {m.variance_half:.1e}",
            ]
        )
    page.table(["layer", "round", "entries", "mean", "variance"], rows)
    page.text("± is the half width of a 95 % confidence interval for independent entries.")


def _distinct(runs: Sequence[Run], key: str) -> list[str]:
    return list(dict.fromkeys(Path(str(run.config[key])).name for run in runs))


def _number(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{factor * value:,.{digits}f}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
