"""The commands on files: `co3 analyze`, `co3 compress` and `co3 decompress`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from co3_flower.analysis_report import Analysis, analyze, to_json
from co3_flower.analysis_tables import Table, make_summary, make_tables
from co3_flower.codec import EncodedUpdate, encode_update
from co3_flower.config import CodecConfig
from co3_flower.container import decode_file, pack_file
from co3_flower.errors import ConfigError
from co3_flower.files import FileError, check_output, read_tensors, write_tensors
from co3_flower.layout import Layout

_PIPE_WIDTH = 120  # characters of a line where there is no terminal
_MIN_WIDTH = 100  # a narrower terminal wraps the lines of tables
_MAX_HISTOGRAMS = 9
_PREFIX = re.compile(r"g\d+__")  # of the members that the app saves: order in the model

FormatOption = Annotated[
    str,
    typer.Option("--format", metavar="NAME", help="e<E>m<M>, e2m1fn, e3m2fn, e2m3fn or e4m3fn."),
]
ScaleOption = Annotated[str, typer.Option("--scale", help="mse, std, absmax, unit or paper.")]
MultiplierOption = Annotated[
    float, typer.Option("--scale-multiplier", help="Factor on the scale; below 1: fewer bits.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line.

    Parameters
    ----------
    app : typer.Typer
        The command line.
    """
    app.command("analyze")(analyze_command)
    app.command("compress")(compress_command)
    app.command("decompress")(decompress_command)


def analyze_command(
    gradients: Annotated[
        list[Path],
        typer.Argument(
            metavar="GRADIENTS.npz...",
            help="Gradients, one member per tensor, named gKKKK__<name> or <name>"
            " (or .safetensors files).",
        ),
    ],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME[,NAME...]",
            help="Formats to convert to; may be repeated. Default: e2m1.",
        ),
    ] = None,
    scale: ScaleOption = "mse",
    scale_multiplier: MultiplierOption = 1.0,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            metavar="TEXT[,TEXT...]",
            help="Groups: the tensors whose names contain TEXT; may be repeated. Default: an upper,"
            " a middle and a lower convolution layer.",
        ),
    ] = None,
    largest: Annotated[
        int, typer.Option("--largest", min=0, help="Rows for the largest tensors.")
    ] = 5,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Write analysis.json, tables.md, histograms.png and sizes.png there"
            " (needs matplotlib).",
        ),
    ] = None,
    summary: Annotated[
        bool,
        typer.Option("--summary", help="Print one row for each file and format, nothing else."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, all tensors included, instead of tables.")
    ] = False,
) -> None:
    """Compare laws and codes on gradients, as the papers do, tensor by tensor.

    GRADIENTS.npz holds a member per tensor, named as the parameter or gKKKK__<parameter>, as
    co3 run saves them; a .safetensors file will do as well.

    Laws: W2 distance and kurtosis of GenNorm, Norm and Laplace. Codes: Huffman under each law and
    under the counts, rANS, LZ78 in two variants, zstd -19 (where zstandard is installed). Paper
    accounting (code bits alone) and true bits (whole payloads) stand in tables of their own.
    """
    configs = [
        CodecConfig(format=name, scale=scale, scale_multiplier=scale_multiplier)
        for name in _split(formats) or ["e2m1"]
    ]
    if output is not None:
        _figures()  # before the work, not after it
    if as_json and summary:
        raise ConfigError("--json must come without --summary, got both")
    names = _distinct_names(gradients)
    loaded = [strip_prefixes(read_tensors(path)) for path in gradients]
    analyses = {}
    for name, path, tensors in zip(names, gradients, loaded, strict=True):
        with _one_line_errors(path), _progress(tensors, len(configs)) as progress:
            analysis = analyses[name] = analyze(tensors, configs, _split(layers), progress)
        tables = make_tables(analysis, largest)
        if not (as_json or summary):
            _print_tables(f"{path}: {_extent(analysis)}", tables)
        if output is not None:
            folder = output if len(names) == 1 else output / name
            _write_report(folder, path, tensors, analysis, tables)
    if as_json:
        found = [to_json(analysis) for analysis in analyses.values()]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    if summary:
        extents = [f"{name}: {_extent(analysis)}" for name, analysis in analyses.items()]
        _print_tables("\n".join(extents), make_summary(analyses))
    if output is not None:
        typer.echo(f"written to {output}", err=as_json)


def compress_command(
    source: Annotated[
        Path, typer.Argument(metavar="IN.(npz|safetensors)", help="Tensors to compress.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT.co3", help="The compressed file.")],
    format_name: FormatOption = "e2m1",
    scale: ScaleOption = "mse",
    scale_multiplier: MultiplierOption = 1.0,
    prior: Annotated[
        str, typer.Option("--prior", help="gennorm, norm, laplace, empirical or auto.")
    ] = "auto",
    coder: Annotated[str, typer.Option("--coder", help="huffman or rans.")] = "huffman",
    structure: Annotated[
        str, typer.Option("--structure", help="auto (row x column classes) or none.")
    ] = "auto",
    target_bits: Annotated[
        float | None,
        typer.Option(
            "--target-bits", metavar="BITS", help="Bits per parameter that the payload is to take."
        ),
    ] = None,
    raw: Annotated[
        list[str] | None,
        typer.Option(
            "--raw", metavar="NAME[,NAME...]", help="Tensors to keep as they are; may be repeated."
        ),
    ] = None,
) -> None:
    """Compress the tensors of a file; float tensors lose what the format cannot say.

    IN holds the tensors (.npz or .safetensors), OUT.co3 is the compressed file.
    Integer and bool tensors are kept as they are. The file describes itself: names, shapes, dtypes
    and one payload. Prints its size, bits per parameter (of the payload) and the signal to
    quantization noise ratio of all coded tensors.
    """
    config = CodecConfig(
        format=format_name, scale=scale, scale_multiplier=scale_multiplier,
        prior=prior, coder=coder, structure=structure, target_bits_per_parameter=target_bits,
        raw=_split(raw),
    )  # fmt: skip
    check_output(target, (".co3",))
    tensors = read_tensors(source)
    with _one_line_errors(source):
        encoded = encode_update(tensors, None, config)
    data = pack_file(Layout.of(tensors), encoded.payload)
    part = target.with_name(target.name + ".part")
    part.write_bytes(data)
    part.replace(target)
    _print_sizes(tensors, encoded, len(data))


def decompress_command(
    source: Annotated[Path, typer.Argument(metavar="IN.co3", help="A compressed file.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.(npz|safetensors)", help="The tensors, same names.")
    ],
) -> None:
    """Write the tensors of a compressed file to a .npz or .safetensors file.

    IN.co3 is what co3 compress wrote. The tensors have the names, shapes and dtypes that they had.
    """
    check_output(target, (".npz", ".safetensors"))
    if not source.is_file():
        raise FileError(f"file must exist, got {str(source)!r}")
    tensors = decode_file(source.read_bytes())
    write_tensors(target, tensors)
    entries = sum(x.size for x in tensors.values())
    typer.echo(f"{len(tensors)} tensors, {entries:,} entries written to {target}")


def strip_prefixes(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return tensors in model order under their parameters' names, where members are gKKKK__name.

    Parameters
    ----------
    tensors : mapping of str to array
        As they stand in the file.

    Examples
    --------
    >>> list(strip_prefixes({"g0001__fc.bias": np.zeros(1), "g0000__fc.weight": np.ones(1)}))
    ['fc.weight', 'fc.bias']
    """
    if not all(_PREFIX.match(name) for name in tensors):
        return dict(tensors)
    ordered = sorted(tensors, key=lambda name: int(name[1:].partition("__")[0]))
    short = {name.partition("__")[2]: tensors[name] for name in ordered}
    return short if len(short) == len(tensors) else dict(tensors)


def _split(texts: Sequence[str] | None) -> list[str]:
    """Split at commas, but not within `sgn-exp-mant:1,5,2`."""
    return [
        part
        for text in texts or ()
        for part in ([text] if ":" in text else text.split(","))
        if part
    ]


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn what the codec says about bad values into an error of ours, with the file's name."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise FileError(f"{error} of {str(path)!r}") from None


@contextmanager
def _progress(
    tensors: Mapping[str, NDArray[Any]], num_formats: int
) -> Iterator[Callable[[str, int], None]]:
    entries = sum(x.size for x in tensors.values() if np.issubdtype(x.dtype, np.floating))
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("laws", total=entries * (1 + 2 * num_formats))

        def advance(what: str, count: int) -> None:
            bar.update(task, advance=count, description=what[-48:])

        yield advance


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return names for files: their stems where these differ, else the paths' last parts that do.

    Examples
    --------
    >>> _distinct_names([Path("a/x.npz"), Path("b/x.npz")])
    ['a-x', 'b-x']
    """
    parts = [(*path.parts[:-1], path.stem) for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["-".join(part[-count:]).replace("/", "") for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("files must differ, got one of them twice")


def _extent(analysis: Analysis) -> str:
    return f"{len(analysis.fits)} tensors, {analysis.numel:,} entries"


def _print_tables(head: str, tables: Sequence[Table]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _MIN_WIDTH) if console.is_terminal else _PIPE_WIDTH
    console.print(f"{head}\n", markup=False)
    for table in tables:
        console.print(table.to_rich(console.width))


def _write_report(
    folder: Path,
    source: Path,
    tensors: Mapping[str, NDArray[Any]],
    analysis: Analysis,
    tables: Sequence[Table],
) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"--output must be a folder, got {str(folder)!r} ({error.strerror})"
        ) from None
    (folder / "analysis.json").write_text(json.dumps(to_json(analysis), indent=2) + "\n")
    head = f"{source.name}: {_extent(analysis)}\n\n"
    (folder / "tables.md").write_text(
        head + "\n".join(table.to_markdown() for table in tables), encoding="utf-8"
    )
    titles = {
        name: f"{group}: {name}" if len(names) == 1 else name
        for group, names in analysis.groups.items()
        for name in names
    }
    if not titles:
        by_size = sorted(analysis.fits, key=lambda fit: -fit.numel)[:3]
        titles = {fit.name: fit.name for fit in by_size}
    figures = _figures()
    figures.draw_histograms(
        tensors, analysis, dict(list(titles.items())[:_MAX_HISTOGRAMS]), folder / "histograms.png"
    )
    figures.draw_sizes(analysis, folder / "sizes.png")


def _figures() -> Any:
    from co3_flower import figures

    figures.load_matplotlib()
    return figures


def _print_sizes(
    tensors: Mapping[str, NDArray[Any]], encoded: EncodedUpdate, num_bytes: int
) -> None:
    stats = encoded.stats
    before = sum(x.nbytes for x in tensors.values())
    typer.echo(
        f"{len(tensors)} tensors, {before:,} bytes -> {num_bytes:,} bytes in the file, "
        f"{len(encoded.payload):,} in its payload\n"
        f"bits per parameter  {stats.bits_per_parameter:.3f}\n"
        f"SQNR                {stats.sqnr_db:.2f} dB"
    )
