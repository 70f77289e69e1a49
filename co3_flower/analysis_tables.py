"""Tables of an analysis, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from co3_flower.analysis import LAWS, Sizes, TensorFit
from co3_flower.analysis_report import ALL, Analysis, FormatSizes

LAW_TITLES = {"gennorm": "GenNorm", "norm": "Norm", "laplace": "Laplace"}
CODE_TITLES = {
    "huffman_gennorm": "Huffman\nGenNorm",
    "huffman_norm": "Huffman\nNorm",
    "huffman_laplace": "Huffman\nLaplace",
    "huffman_empirical": "Huffman\nempirical",
    "rans": "rANS",
    "huffman_structure": "Huffman\nstruct.",
    "rans_structure": "rANS\nstruct.",
    "lz78": "LZ78",
    "lz78_bit_string": "LZ78\nof bits",
    "zstd": "zstd\n-19",
}
_WITHIN = 0.01  # what counts as close to the empirical Huffman code
_MIN_NAME = 14  # characters of a name on a narrow terminal
_WORST = 3  # tensors that the note below a table names


@dataclass(frozen=True)
class Table:
    """A table of texts: rows in sections, numbers right of the first column, notes below."""

    title: str
    headers: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], ...], ...]
    notes: tuple[str, ...] = ()

    def to_rich(self, width: int) -> RenderableType:
        """Return the table for a terminal of the given width; long names lose their beginnings."""
        rows = [row for section in self.sections for row in section]
        numbers = sum(
            max(len(text) for text in (*self.headers[i].split("\n"), *(row[i] for row in rows)))
            for i in range(1, len(self.headers))
        )
        gaps = len(self.headers) + 1
        gap = 1 if numbers + 2 * gaps + _MIN_NAME <= width else 0  # beside the box's own
        room = max(_MIN_NAME, width - numbers - (1 + gap) * gaps)
        table = RichTable(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), header_style="bold")
        for i, header in enumerate(self.headers):
            side: JustifyMethod = "right" if i else "left"
            table.add_column(header, justify=side, vertical="bottom", no_wrap=True)
        for section in self.sections:
            for row in section:
                table.add_row(_short(row[0], room), *row[1:])
            table.add_section()
        return Group(
            Text(self.title, style="bold"), table, Text("".join(f"{note}\n" for note in self.notes))
        )

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.headers, ("---",) + ("---:",) * (len(self.headers) - 1)]
        lines += [row for section in self.sections for row in section]
        body = "\n".join(
            "| " + " | ".join(c.replace("\n", " ") for c in row) + " |" for row in lines
        )
        return "\n\n".join([f"**{self.title}**", body, *self.notes]) + "\n"


def make_tables(analysis: Analysis, largest: int = 5) -> list[Table]:
    """Return the tables of an analysis: the laws, then three for each format.

    Parameters
    ----------
    analysis : Analysis
        What `analyze` returned.
    largest : int
        How many of the largest tensors get a row, beside the groups and the whole.
    """
    by_size = sorted(analysis.fits, key=lambda fit: -fit.numel)[:largest]
    shown = {fit.name for fit in by_size}
    tables = [_fit_table(analysis, by_size)]
    for sizes in analysis.formats:
        rows = {row.name: row for row in sizes.tensors if row.name in shown}
        sections = (sizes.groups, tuple(rows[fit.name] for fit in by_size), (sizes.whole,))
        tables += [
            _code_table(sizes, sections),
            _payload_table(sizes, sections),
            _divergence_table(sizes, sections),
        ]
    return tables


def make_summary(analyses: Mapping[str, Analysis]) -> list[Table]:
    """Return two tables with a row for each gradient and format: all tensors, code by code.

    Parameters
    ----------
    analyses : mapping of str to Analysis
        Gradients by name, analysed in the same formats.
    """
    wholes = {
        name: {_title(sizes): sizes for sizes in analysis.formats}
        for name, analysis in analyses.items()
    }
    first = next(iter(wholes.values()))
    coded = [key for key in CODE_TITLES if key in next(iter(first.values())).whole.code_bits]
    paid = [key for key in CODE_TITLES if key in next(iter(first.values())).whole.payload_bits]
    codes, payloads, notes = [], [], []
    for name, formats in wholes.items():
        code_rows, payload_rows = [], []
        for title, sizes in formats.items():
            whole, label = sizes.whole, f"{name}: {title}"
            code_values = [whole.entropy_bits, *(whole.code_bits[key] for key in coded)]
            code_rows.append((label, *(f"{bits / whole.numel:.3f}" for bits in code_values)))
            payload_values = _per_entry(whole, whole.payload_bits, paid)
            payload_rows.append(
                (label, *(f"{bits:.3f}" for bits in payload_values), _percent(_excess(whole)))
            )
            if _excess(whole) > _WITHIN:
                notes += [f"{label}: {line}" for line in _where_the_law_costs(sizes)]
        codes.append(tuple(code_rows))
        payloads.append(tuple(payload_rows))
    return [
        Table(
            "Paper accounting, code bits per entry",
            ("gradient: format", "entropy", *(CODE_TITLES[key] for key in coded)),
            tuple(codes),
            ("Bits of the codes alone: no code table, scale or header is counted.",),
        ),
        Table(
            "True bits per entry, 8 * len(payload)",
            ("gradient: format", *(CODE_TITLES[key] for key in paid), "GenNorm\n/ empirical"),
            tuple(payloads),
            ("One payload of all tensors, all counted (zstd: frame and scales).", *notes),
        ),
    ]


def _fit_table(analysis: Analysis, by_size: Sequence[TensorFit]) -> Table:
    by_name = {fit.name: fit for fit in analysis.fits}
    groups = [
        _fit_row(title, [by_name[name] for name in names])
        for title, names in analysis.groups.items()
    ]
    headers = ("tensor", "entries", "zeros", "beta", *(f"W2\n{t}" for t in LAW_TITLES.values()))
    notes = [
        "Entries divided by their standard deviation; rows of several tensors: means by entries."
    ]
    notes += [f"{title}: {_listed(names)}" for title, names in analysis.groups.items()]
    if analysis.skipped:
        notes.append(f"Without float entries, left out: {_listed(analysis.skipped)}")
    return Table(
        "Laws: W2 distance and kurtosis",
        (*headers, "kurtosis", "kurtosis\nGenNorm"),
        (
            tuple(groups),
            tuple(_fit_row(fit.name, [fit]) for fit in by_size),
            (_fit_row(ALL, analysis.fits),),
        ),
        tuple(notes),
    )


def _fit_row(title: str, fits: Sequence[TensorFit]) -> tuple[str, ...]:
    def mean(value: Callable[[TensorFit], float]) -> float:
        pairs = [(fit.numel, value(fit)) for fit in fits if math.isfinite(value(fit))]
        total = sum(n for n, _ in pairs)
        return sum(n * v for n, v in pairs) / total if total else math.nan

    return (
        title,
        f"{sum(fit.numel for fit in fits):,}",
        f"{100 * mean(lambda fit: fit.laws['gennorm'].zero_fraction):.1f} %",
        _number(mean(lambda fit: fit.laws["gennorm"].beta), 2),
        *(_number(mean(lambda fit, law=law: fit.w2[law]), 4) for law in LAWS),  # type: ignore[misc]
        _number(mean(lambda fit: fit.kurtosis), 2),
        _number(mean(lambda fit: fit.law_kurtosis["gennorm"]), 2),
    )


def _code_table(sizes: FormatSizes, sections: tuple[tuple[Sizes, ...], ...]) -> Table:
    keys = [key for key in CODE_TITLES if key in sizes.whole.code_bits]
    notes = ["Bits of the codes alone: no code table, scale or header is counted."]
    if "zstd" not in keys:
        notes.append("No column zstd -19: the package zstandard is not installed.")
    return Table(
        f"{_title(sizes)}: paper accounting, code bits per entry",
        ("tensor", "entropy", *(CODE_TITLES[key] for key in keys)),
        _rows(
            sections,
            lambda row: [
                row.entropy_bits / row.numel,
                *(row.code_bits[k] / row.numel for k in keys),
            ],
        ),
        tuple(notes),
    )


def _payload_table(sizes: FormatSizes, sections: tuple[tuple[Sizes, ...], ...]) -> Table:
    keys = [key for key in CODE_TITLES if key in sizes.whole.payload_bits]
    return Table(
        f"{_title(sizes)}: true bits per entry, 8 * len(payload)",
        ("tensor", *(CODE_TITLES[key] for key in keys), "GenNorm\n/ empirical"),
        tuple(
            tuple((*row, _percent(_excess(size))) for row, size in zip(rows, section, strict=True))
            for rows, section in zip(
                _rows(sections, lambda row: _per_entry(row, row.payload_bits, keys)),
                sections,
                strict=True,
            )
        ),
        (
            "Each row is one payload of its own, all counted"
            + (" (zstd: frame and scales)." if "zstd" in keys else "."),
            *_where_the_law_costs(sizes),
        ),
    )


def _where_the_law_costs(sizes: FormatSizes) -> tuple[str, ...]:
    """Say where GenNorm-Huffman is not within 1 % of empirical Huffman, and why."""
    over = sorted((r for r in sizes.tensors if _excess(r) > _WITHIN), key=_excess, reverse=True)
    count = f"{len(sizes.tensors) - len(over)} of {len(sizes.tensors)} tensors"
    share = sum(row.numel for row in over) / sizes.whole.numel
    lines = [
        f"GenNorm-Huffman is within {_WITHIN:.0%} of empirical Huffman in {count} taken alone"
        f" (the others hold {share:.2%} of the entries)."
    ]
    least = sizes.config.min_numel
    large = [row for row in over if row.numel >= least]
    if len(large) < len(over):
        lines.append(
            f"{len(over) - len(large)} of those have fewer than {least:,} entries: chance and"
            " padding decide there, and in an update they share one code table."
        )
    if large:
        worst = ", ".join(
            f"{row.name} {_percent(_excess(row))} ({row.numel:,} entries, "
            f"{row.divergence_bits['gennorm'] / row.numel:.3f})"
            for row in large[:_WORST]
        )
        lines.append(
            f"Larger ones ({len(large)}): the law misses the symbols' frequencies, and code lengths"
            f" move by whole bits; the worst, with KL divergence in bits per entry: {worst}."
        )
    return tuple(lines)


def _divergence_table(sizes: FormatSizes, sections: tuple[tuple[Sizes, ...], ...]) -> Table:
    return Table(
        f"{_title(sizes)}: Kullback-Leibler divergence of symbols from laws, bits per entry",
        ("tensor", *LAW_TITLES.values()),
        _rows(sections, lambda row: _per_entry(row, row.divergence_bits, list(LAWS)), 5),
    )


def _rows(
    sections: tuple[tuple[Sizes, ...], ...],
    values: Callable[[Sizes], Sequence[float]],
    digits: int = 3,
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(
        tuple((row.name, *(f"{value:.{digits}f}" for value in values(row))) for row in section)
        for section in sections
    )


def _per_entry(row: Sizes, bits: Mapping[str, float], keys: Sequence[str]) -> list[float]:
    return [bits[key] / row.numel for key in keys]


def _excess(row: Sizes) -> float:
    return row.payload_bits["huffman_gennorm"] / row.payload_bits["huffman_empirical"] - 1.0


def _title(sizes: FormatSizes) -> str:
    config = sizes.config
    factor = "" if config.scale_multiplier == 1.0 else f" x {config.scale_multiplier:g}"
    return f"{config.float_format.name.upper()}, scale {config.scale}{factor}"


def _percent(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]
