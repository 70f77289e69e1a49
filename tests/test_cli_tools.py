"""`co3 analyze`, `compress` and `decompress`: what they print and write, and how they complain."""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rich.console import Console
from typer.testing import CliRunner

from co3_flower import CodecConfig, Layout, PayloadError, container, decode_update, encode_update
from co3_flower.analysis_report import analyze
from co3_flower.analysis_tables import Table, make_summary
from co3_flower.cli import main, make_app
from co3_flower.cli_tools import strip_prefixes
from co3_flower.container import decode_file, pack_file, unpack_file
from co3_flower.files import DTYPES, FileError, read_tensors, write_tensors


def call(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(
        make_app(None), [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str]:
    """Exit code and the one line that the command prints when something is wrong."""
    monkeypatch.setattr(sys, "argv", ["co3", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1, text
    return int(str(caught.value.code)), text.removeprefix("error: ")


@pytest.fixture
def gradient_file(tmp_path: Path, small_update: dict[str, np.ndarray]) -> Path:
    path = tmp_path / "gradient.npz"
    write_tensors(path, {f"g{i:04}__{k}": x for i, (k, x) in enumerate(small_update.items())})
    return path


# --- analyze --------------------------------------------------------------------------------------


def test_analyze_prints_both_accounts_in_tables_of_their_own(gradient_file: Path) -> None:
    text = call("analyze", gradient_file, "--format", "e2m1,e5m2", "--largest", 2)
    for part in (
        "4 tensors, 4,362 entries",
        "Laws: W2 distance and kurtosis",
        "E2M1, scale mse: paper accounting, code bits per entry",
        "E2M1, scale mse: true bits per entry, 8 * len(payload)",
        "E5M2, scale mse: Kullback-Leibler divergence",
        "upper conv: conv.weight",
        "all tensors",
        "GenNorm-Huffman is within 1% of empirical Huffman in",
    ):
        assert part in text
    assert "…" not in text


def test_analyze_prints_json_that_adds_up(gradient_file: Path) -> None:
    result = json.loads(call("analyze", gradient_file, "--json", "--format", "e3m2"))
    (sizes,) = result["formats"]
    assert (sizes["format"], result["numel"]) == ("e3m2", 4_362)
    assert [row["name"] for row in sizes["tensors"]] == [fit["name"] for fit in result["fits"]]
    assert sizes["all"]["code_bits"]["huffman_norm"] == sum(
        row["code_bits"]["huffman_norm"] for row in sizes["tensors"]
    )


def test_analyze_takes_groups_by_parts_of_names(gradient_file: Path) -> None:
    text = call("analyze", gradient_file, "--json", "--layers", "conv,fc.w", "--layers", "bias")
    assert json.loads(text)["groups"] == {
        "conv": ["conv.weight", "conv.bias"],
        "fc.w": ["fc.weight"],
        "bias": ["conv.bias", "fc.bias"],
    }


def test_analyze_does_not_split_a_triple_at_its_commas(gradient_file: Path) -> None:
    text = call("analyze", gradient_file, "--format", "sgn-exp-mant:1,2,1", "--scale", "std")
    assert "E2M1, scale std: paper accounting" in text


def test_analyze_writes_figures_tables_and_json(gradient_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "report"
    call("analyze", gradient_file, "--output", folder, "--layers", "weight")
    assert {path.name for path in folder.iterdir()} == {
        "analysis.json",
        "tables.md",
        "histograms.png",
        "sizes.png",
    }
    for name in ("histograms.png", "sizes.png"):
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| all tensors | 4,362 |" in (folder / "tables.md").read_text()
    assert json.loads((folder / "analysis.json").read_text())["num_tensors"] == 4


def test_analyze_of_a_network_without_convolutions_draws_its_largest_tensors(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    pytest.importorskip("matplotlib")
    write_tensors(tmp_path / "a.npz", {"fc": rng.laplace(size=900), "zeros": np.zeros(50)})
    call("analyze", tmp_path / "a.npz", "--output", tmp_path / "out")
    assert (tmp_path / "out" / "histograms.png").stat().st_size > 10_000


def test_analyze_without_matplotlib_says_so_before_the_work(
    gradient_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text = complaint(
        monkeypatch, capsys, "analyze", gradient_file, "--output", tmp_path / "out"
    )
    assert code == 2
    assert text.startswith("figures must be drawn with matplotlib, got none installed")
    assert not (tmp_path / "out").exists()


def test_tables_keep_their_numbers_and_shorten_names_on_narrow_terminals() -> None:
    name = "features.denseblock4.denselayer16.conv1.weight"
    table = Table("T", ("tensor", "a\nlong header"), (((name, "1.234"),), ((name, "5.678"),)))
    for width in (30, 60, 120):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(table.to_rich(width))
        text = capture.get()
        assert "1.234" in text and "5.678" in text and "long header" in text
        assert (name in text) == (width >= 60 + 6)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_members_that_are_not_all_prefixed_keep_their_names() -> None:
    tensors = {"g0000__a": np.zeros(1), "b": np.zeros(1)}
    assert list(strip_prefixes(tensors)) == ["g0000__a", "b"]
    twice = {"g0000__a": np.zeros(1), "g0001__a": np.zeros(1)}
    assert list(strip_prefixes(twice)) == ["g0000__a", "g0001__a"]


def test_summary_has_a_row_for_each_file_and_format(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        conv = rng.laplace(size=(8, 8, 3, 3)).astype(np.float32)
        np.savez(tmp_path / folder / "g.npz", **{"conv.weight": conv, "b": conv[0, 0, 0]})
    files = [tmp_path / folder / "g.npz" for folder in ("one", "two")]
    text = call("analyze", *files, "--format", "e2m1,e3m2", "--summary")
    for label in ("one-g: E2M1", "one-g: E3M2", "two-g: E2M1", "two-g: E3M2"):
        rows = re.findall(rf"^ {label}, scale mse +\d", text, re.MULTILINE)
        assert len(rows) == 2  # in paper accounting and in true bits
    assert "GenNorm\n" not in text
    assert "Laws:" not in text


def test_summary_counts_payloads(tmp_path: Path) -> None:
    conv = np.random.default_rng(3).laplace(size=(8, 8, 3, 3)).astype(np.float32)
    analysis = analyze({"conv.weight": conv}, [CodecConfig(format="e2m1")])
    table = make_summary({"g": analysis})[1]
    config = CodecConfig(format="e2m1", coder="rans", prior="empirical", structure="none")
    bits = 8 * len(encode_update({"conv.weight": conv}, None, config).payload) / conv.size
    assert table.sections[0][0][table.headers.index("rANS")] == f"{bits:.3f}"


def test_same_file_twice_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, w=np.ones(9, np.float32))
    code, text = complaint(monkeypatch, capsys, "analyze", path, path)
    assert code == 2
    assert "files must differ" in text


# --- compress and decompress ----------------------------------------------------------------------


def test_compress_and_decompress_give_what_the_codec_gives(
    tmp_path: Path, edge_update: dict[str, np.ndarray]
) -> None:
    write_tensors(tmp_path / "in.npz", edge_update)
    text = call("compress", tmp_path / "in.npz", tmp_path / "a.co3", "--format", "e5m2")
    call("decompress", tmp_path / "a.co3", tmp_path / "out.npz")
    restored = read_tensors(tmp_path / "out.npz")
    encoded = encode_update(edge_update, None, CodecConfig(format="e5m2", prior="auto"))
    expected = decode_update(encoded.payload, edge_update)
    assert list(restored) == list(edge_update)
    for name, x in edge_update.items():
        assert restored[name].dtype == x.dtype
        np.testing.assert_array_equal(restored[name], expected[name].astype(x.dtype))
    assert f"bits per parameter  {encoded.stats.bits_per_parameter:.3f}" in text
    assert f"SQNR                {encoded.stats.sqnr_db:.2f} dB" in text


def test_compress_takes_a_target_and_a_structure(tmp_path: Path, rng: np.random.Generator) -> None:
    update = {"w": rng.standard_normal((100, 200)).astype(np.float32)}
    write_tensors(tmp_path / "in.npz", update)
    options = ("--coder", "rans", "--structure", "none", "--target-bits", "0.7")
    call("compress", tmp_path / "in.npz", tmp_path / "a.co3", *options)
    config = CodecConfig(
        coder="rans", structure="none", prior="auto", target_bits_per_parameter=0.7
    )
    encoded = encode_update(update, None, config)
    decoded = decode_file((tmp_path / "a.co3").read_bytes())
    np.testing.assert_array_equal(decoded["w"], decode_update(encoded.payload, update)["w"])


def test_compress_keeps_raw_tensors_exactly(
    tmp_path: Path, small_update: dict[str, np.ndarray]
) -> None:
    write_tensors(tmp_path / "in.npz", small_update)
    call("compress", tmp_path / "in.npz", tmp_path / "a.co3", "--raw", "fc.bias,conv.bias")
    restored = decode_file((tmp_path / "a.co3").read_bytes())
    for name, x in small_update.items():
        assert np.array_equal(restored[name], x) == name.endswith("bias")


def test_safetensors_files_go_in_and_out(
    tmp_path: Path, small_update: dict[str, np.ndarray]
) -> None:
    pytest.importorskip("safetensors")
    write_tensors(tmp_path / "in.safetensors", small_update)
    call("compress", tmp_path / "in.safetensors", tmp_path / "a.co3", "--scale", "std")
    call("decompress", tmp_path / "a.co3", tmp_path / "out.safetensors")
    restored = read_tensors(tmp_path / "out.safetensors")
    assert {k: x.shape for k, x in restored.items()} == {
        k: x.shape for k, x in small_update.items()
    }


def test_safetensors_without_the_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    code, text = complaint(
        monkeypatch, capsys, "compress", tmp_path / "in.safetensors", tmp_path / "a.co3"
    )
    assert code == 1
    assert "must be read with the package safetensors, got none installed" in text


def test_float16_entries_stay_finite(tmp_path: Path) -> None:
    x = np.full(40, 65504.0, np.float16)
    x[1::2] = 1.0
    encoded = encode_update({"x": x}, None, CodecConfig(format="e5m2", scale="std"))
    restored = decode_file(pack_file(Layout.of({"x": x}), encoded.payload))["x"]
    assert restored.dtype == np.float16 and np.isfinite(restored).all()


@pytest.mark.parametrize("command", ["analyze", "compress", "decompress"])
def test_help_explains_every_option(command: str) -> None:
    options = {
        "analyze": ("GRADIENTS.npz", "--format", "--scale", "--layers", "--output", "--json"),
        "compress": (
            "IN.(npz|safetensors)",
            "OUT.co3",
            "--format",
            "--prior",
            "--coder",
            "--structure",
            "--target-bits",
            "--raw",
        ),
        "decompress": ("IN.co3", "OUT.(npz|safetensors)"),
    }
    text = call(command, "--help")
    for option in options[command]:
        assert option in text


def test_wrong_arguments_are_one_line(
    gradient_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    np.savez(tmp_path / "object.npz", x=np.array([None, "a"], object))
    np.savez(tmp_path / "text.npz", x=np.array(["a"]))
    np.savez(tmp_path / "nan.npz", w=np.array([1.0, np.nan]))
    np.savez(tmp_path / "empty.npz", n=np.arange(3))
    (tmp_path / "bad.co3").write_bytes(b"CO3A")
    out = tmp_path / "a.co3"
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("analyze", tmp_path / "none.npz"), 1, "file must exist"),
        (("analyze", tmp_path / "x.txt"), 1, "tensors must be in a .npz or .safetensors file"),
        (("analyze", tmp_path / "bad.npz"), 1, "file must be a .npz of plain arrays"),
        (("analyze", tmp_path / "object.npz"), 1, "file must be a .npz of plain arrays"),
        (("analyze", tmp_path / "text.npz"), 1, "tensors must be of float16, float32"),
        (
            ("analyze", tmp_path / "nan.npz"),
            1,
            "gradient must be finite, got 1 NaN or infinite entries in 'w' of",
        ),
        (("analyze", tmp_path / "empty.npz"), 1, "a gradient must have float entries"),
        (("analyze", gradient_file, "--format", "fp4"), 2, "format must be"),
        (("analyze", gradient_file, "--layers", "x"), 2, "layers must be parts of tensors' names"),
        (("analyze", gradient_file, "--output", gradient_file), 1, "--output must be a folder"),
        (("compress", tmp_path / "nan.npz", out), 1, "update must be finite, got 1 NaN"),
        (("compress", gradient_file, tmp_path / "a.zip"), 1, "output must end in .co3"),
        (("compress", gradient_file, tmp_path / "no" / "a.co3"), 1, "output must be in a folder"),
        (("compress", gradient_file, out, "--raw", "x"), 1, "raw must name tensors"),
        (("decompress", tmp_path / "none.co3", tmp_path / "a.npz"), 1, "file must exist"),
        (("decompress", tmp_path / "bad.co3", tmp_path / "a.npz"), 1, "a .co3 file must start"),
        (("decompress", out, tmp_path / "a.txt"), 1, "output must end in .npz or .safetensors"),
    ]
    for arguments, exit_code, message in cases:
        code, text = complaint(monkeypatch, capsys, *arguments)
        assert (code, text[: len(message)]) == (exit_code, message)
    assert not out.exists()


# --- the .co3 file --------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: hnp.arrays(
                dtype,
                hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
                elements={"min_value": -8, "max_value": 8} if dtype.kind == "f" else None,
            )
        ),
        max_size=5,
    )
)
def test_file_round_trip_keeps_names_order_shapes_and_dtypes(
    tensors: dict[str, np.ndarray],
) -> None:
    layout = Layout.of(tensors)
    encoded = encode_update(tensors, None, CodecConfig())
    data = pack_file(layout, encoded.payload)
    unpacked, payload = unpack_file(data)
    assert (unpacked, bytes(payload)) == (layout, encoded.payload)
    for name, x in decode_file(data).items():
        assert (x.dtype, x.shape) == (tensors[name].dtype, tensors[name].shape)
        if x.dtype.kind != "f":
            np.testing.assert_array_equal(x, tensors[name])


def test_file_layout_is_as_documented() -> None:
    data = pack_file(Layout.of({"é": np.zeros((2, 3), np.float64)}), b"PAY")
    head = struct.pack("<4sHHIIQ", b"CO3A", 0, 0, 1, 22, 3)
    head += struct.pack("<BBHQQ", 2, 2, 2, 2, 3) + "é".encode()
    assert data == head + struct.pack("<I", zlib.crc32(head)) + b"PAY"


def test_every_truncation_of_a_file_is_refused(small_update: dict[str, np.ndarray]) -> None:
    one = {"fc.bias": small_update["fc.bias"]}
    data = pack_file(Layout.of(one), encode_update(one, None, CodecConfig()).payload)
    for size in range(len(data)):
        with pytest.raises(PayloadError):
            decode_file(data[:size])


def test_every_flipped_bit_of_a_file_is_refused(small_update: dict[str, np.ndarray]) -> None:
    one = {"fc.bias": small_update["fc.bias"]}
    data = pack_file(Layout.of(one), encode_update(one, None, CodecConfig()).payload)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            decode_file(bytes(damaged))


def craft(section: bytes, count: int, payload: bytes = b"") -> bytes:
    """Frame a layout section of any content, checksum right."""
    head = struct.pack("<4sHHIIQ", b"CO3A", 0, 0, count, len(section), len(payload)) + section
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def tensor(code: int, shape: tuple[int, ...], name: bytes) -> bytes:
    return struct.pack(f"<BBH{len(shape)}Q", code, len(shape), len(name), *shape) + name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (craft(b"", 2**32 - 1), "must describe 4294967295 tensors, got 0"),
        (craft(tensor(99, (), b"w"), 1), "known dtype"),
        (craft(tensor(1, (1,) * 33, b"w"), 1), "at most 32 axes"),
        (craft(tensor(1, (), b"w")[:-1], 1), "a whole name"),
        (craft(tensor(1, (), b"\xff"), 1), "names must be UTF-8"),
        (craft(tensor(1, (2**40, 2**40), b"w"), 1), r"at most 2\*\*40 entries"),
        (craft(tensor(1, (2**63, 0), b"w"), 1), r"at most 2\*\*40 entries"),
        (craft(2 * tensor(1, (), b"w"), 2), "names must differ"),
        (craft(tensor(1, (), b"w") + b"x", 1), "must end with its last tensor"),
        (craft(tensor(1, (2**39,), b"w"), 1, b"x" * 60), "payload must"),
        (craft(b"", 0)[:4] + b"\x01" + craft(b"", 0)[5:], "must be of version 0, got 1"),
    ],
)
def test_hostile_files_are_refused_with_a_reason(data: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_file(data)


def test_tensors_that_do_not_fit_into_memory_are_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(container, "decode_update", exhausted)
    with pytest.raises(PayloadError, match="tensors must fit into memory, got 4,000 bytes"):
        decode_file(craft(tensor(1, (1000,), b"w"), 1))


def test_names_that_a_file_cannot_hold_are_refused() -> None:
    with pytest.raises(FileError, match="a name of at most 65535 bytes"):
        pack_file(Layout.of({"n" * 65536: np.zeros(1, np.float32)}), b"")


@pytest.mark.parametrize("name", ["file", "a/b", "arr_0", "x.npy", ""])
def test_npz_files_take_any_name(tmp_path: Path, name: str) -> None:
    write_tensors(tmp_path / "a.npz", {name: np.float32([1, 2])})
    assert list(read_tensors(tmp_path / "a.npz")) == [name]


# --- the real gradient ----------------------------------------------------------------------------


def test_real_gradient_shrinks_to_three_bits_per_parameter(
    tmp_path: Path, real_gradient: dict[str, np.ndarray]
) -> None:
    write_tensors(tmp_path / "g.npz", real_gradient)
    call("compress", tmp_path / "g.npz", tmp_path / "g.co3")
    numel = sum(x.size for x in real_gradient.values())
    assert 8 * (tmp_path / "g.co3").stat().st_size < 3.0 * numel
    restored = decode_file((tmp_path / "g.co3").read_bytes())
    error = sum(
        float(np.sum((restored[k] - x).astype(np.float64) ** 2)) for k, x in real_gradient.items()
    )
    power = sum(float(np.sum(x.astype(np.float64) ** 2)) for x in real_gradient.values())
    assert 10 * np.log10(power / error) > 10.0
