"""Code tables by law: integers that both ends derive, close to the laws they stand for."""

from __future__ import annotations

import itertools
from fractions import Fraction

import make_law_table
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive
from co3_flower import CodecConfig, FloatFormat, decode_update, encode_update
from co3_flower.bitstream import pack_tables, unpack_huffman_tables, unpack_rans_tables
from co3_flower.errors import PayloadError
from co3_flower.huffman import HuffmanTables
from co3_flower.kernels_side import LAW_ATOMS, LAW_BETAS, LAW_MEANS, MAX_RATIO
from co3_flower.laws import edges_of, fit_law, law_weights, log2_edges, no_laws
from co3_flower.layout import Layout
from co3_flower.payload import read_payload
from co3_flower.rans import RansTables
from conftest import draw_gennorm, run_without_jit

CODERS = {"huffman": HuffmanTables, "rans": RansTables}
FORMATS = ("e2m1", "e5m2", "e1m2", "e3m0", "e4m3fn")

law_rows = st.tuples(
    st.integers(0, LAW_BETAS.size - 1),
    st.integers(-MAX_RATIO, MAX_RATIO - 1),
    st.integers(0, LAW_ATOMS.size - 1),
    st.integers(0, 10**6),
)


def as_laws(rows: list[tuple[int, int, int, int]], fmt: FloatFormat) -> np.ndarray:
    """Laws whose last magnitude the format has."""
    laws = np.array(rows, np.int64).reshape(-1, 4)
    laws[:, 3] %= fmt.zero + 1
    return laws


def test_shipped_table_is_that_of_scipy() -> None:
    assert make_law_table.MODULE.read_text() == make_law_table.source()


@pytest.mark.parametrize("name", naive.ALL_FORMATS)
def test_borders_are_logarithms_of_the_exact_ones(name: str) -> None:
    magnitudes = naive.magnitudes(name)
    exact = [(a + b) / 2 for a, b in itertools.pairwise(magnitudes)]
    logs = log2_edges(FloatFormat.parse(name)).tolist()
    assert len(logs) == len(exact)
    for log, edge in zip(logs, exact, strict=True):
        assert 2.0 ** (log / 65536) <= float(edge) * (1 + 1e-12)
        assert float(edge) < 2.0 ** ((log + 1.001) / 65536)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("beta", range(0, 30, 3))
@pytest.mark.parametrize("eighths", [-24, -9, 0, 5])
@pytest.mark.parametrize("atom", [0, 7, 25])
def test_weights_are_the_probabilities_of_the_law(
    name: str, beta: int, eighths: int, atom: int
) -> None:
    fmt = FloatFormat.parse(name)
    shape = 2.0 ** ((beta - 13) / 4)
    alpha = 2.0 ** (eighths / 8 - LAW_MEANS[beta] / 65536)
    zero_fraction = LAW_ATOMS[atom] / 65536
    pmf = naive.gennorm_pmf(name, 1.0, alpha, shape, zero_fraction)
    law = np.array([[beta, eighths, atom, fmt.zero]], np.int64)
    weights = law_weights(law, fmt)[0]
    shares = weights / weights.sum()
    assert np.abs(shares - pmf).max() < 2.5e-3
    lost = np.sum(pmf[pmf > 0] * np.log2(pmf[pmf > 0] / shares[pmf > 0]))
    assert lost < 3e-3  # bits a symbol; the most where the table is coarse for small shapes


@pytest.mark.parametrize("name", FORMATS)
@given(rows=st.lists(law_rows, min_size=1, max_size=3))
def test_weights_cover_all_symbols_up_to_the_last_and_no_other(
    name: str, rows: list[tuple[int, int, int, int]]
) -> None:
    fmt = FloatFormat.parse(name)
    laws = as_laws(rows, fmt)
    positions = np.abs(np.arange(fmt.num_values) - fmt.zero)
    for law, weights in zip(laws, law_weights(laws, fmt), strict=True):
        assert np.array_equal(weights > 0, positions <= law[3])
        assert np.array_equal(weights, weights[::-1])
        assert int(weights.sum()) < 2**48


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", ["e2m1", "e5m2"])
@given(
    rows=st.lists(law_rows, min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 99), min_size=247, max_size=247).filter(lambda c: any(c[:11])),
)
def test_laws_survive_packing_beside_explicit_tables(
    coder: str, name: str, rows: list[tuple[int, int, int, int]], counts: list[int]
) -> None:
    fmt = FloatFormat.parse(name)
    laws = as_laws(rows, fmt)
    make = CODERS[coder]
    explicit = make.from_weights(np.array([counts[: fmt.num_values]], np.int64))
    tables = make.joined([explicit, make.from_weights(law_weights(laws, fmt), laws), explicit])
    num, edges = tables.alphabets.size, edges_of((fmt,))
    packed = np.frombuffer(pack_tables(tables, np.zeros(0, np.int64), num), np.uint8)
    first = np.zeros(num, np.int64)
    if coder == "huffman":
        read, _ = unpack_huffman_tables(packed, tables.alphabets, edges, first, 0, num)
        assert np.array_equal(read.lengths, tables.lengths)
    else:
        read = unpack_rans_tables(packed, tables.alphabets, edges, first)
        assert np.array_equal(read.frequencies, tables.frequencies)
    assert np.array_equal(read.laws[1:-1], laws)
    assert (read.laws[[0, -1], 0] == -1).all()


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("bad", [(30, 0, 0, 5), (31, 0, 0, 0), (13, 0, 0, 6), (13, 0, 0, 7)])
def test_law_out_of_range_is_refused(coder: str, bad: tuple[int, ...]) -> None:
    fmt = FloatFormat.parse("e2m1")
    weights = np.ones((1, fmt.num_values), np.int64)
    tables = CODERS[coder].from_weights(weights, np.array([bad], np.int64))
    packed = np.frombuffer(pack_tables(tables, np.zeros(0, np.int64), 1), np.uint8)
    first, edges = np.zeros(1, np.int64), edges_of((fmt,))
    with pytest.raises(PayloadError, match=r"laws .* table 0"):
        if coder == "huffman":
            unpack_huffman_tables(packed, tables.alphabets, edges, first, 0, 1)
        else:
            unpack_rans_tables(packed, tables.alphabets, edges, first)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, 6.0])
def test_searched_law_codes_as_well_as_the_counts_do(
    rng: np.random.Generator, name: str, beta: float
) -> None:
    fmt = FloatFormat.parse(name)
    x = draw_gennorm(rng, 40_000, beta=beta, zero_fraction=0.1)
    symbols = naive.quantize(x, 1.5 / float(np.abs(x).mean()), name)
    counts = np.bincount(symbols, minlength=fmt.num_values).astype(np.int64)
    law = fit_law("gennorm", counts, fmt)
    weights = law_weights(law, fmt)[0].astype(float)
    ideal = -(counts[counts > 0] * np.log2(weights[counts > 0] / weights.sum())).sum()
    assert ideal <= 1.012 * naive.entropy_bits(counts)
    assert fit_law("laplace", counts, fmt)[0, 0] == 13
    assert fit_law("norm", counts, fmt)[0, 0] == 17


def num_laws(payload: bytes, update: dict[str, np.ndarray]) -> int:
    parts, _ = read_payload(payload, Layout.of(update))
    return int((parts.tables.laws[:, 0] >= 0).sum())


def small_update(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Tensors of a few hundred entries, each with a table of its own, and a pool."""
    return {
        **{f"w{i}": draw_gennorm(rng, 300, beta=1.2, zero_fraction=0.05) for i in range(4)},
        **{f"b{i}": draw_gennorm(rng, 20, beta=1.5) for i in range(3)},
    }


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("prior", ["gennorm", "norm", "laplace", "auto"])
def test_small_tensors_of_a_wide_format_are_sent_as_laws(
    rng: np.random.Generator, coder: str, prior: str
) -> None:
    update = small_update(rng)
    config = CodecConfig(format="e5m2", prior=prior, coder=coder, min_numel=100)
    encoded = encode_update(update, None, config)
    empirical = encode_update(
        update, None, CodecConfig(format="e5m2", prior="empirical", coder=coder, min_numel=100)
    )
    assert num_laws(encoded.payload, update) > 0
    assert num_laws(empirical.payload, update) == 0
    assert len(encoded.payload) < 0.97 * len(empirical.payload)
    decoded = decode_update(encoded.payload, update)
    for name, array in update.items():
        assert np.array_equal(decoded[name] + encoded.residual[name], array)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", FORMATS)
def test_tables_of_the_least_bits_are_taken(
    rng: np.random.Generator, coder: str, name: str
) -> None:
    """A prior "auto" is never larger than any fixed one, whatever their tables are sent as."""
    update = small_update(rng) | {"large": draw_gennorm(rng, 9_000, beta=0.8)}
    sizes = {
        prior: len(
            encode_update(
                update, None, CodecConfig(format=name, prior=prior, coder=coder, min_numel=100)
            ).payload
        )
        for prior in ("empirical", "gennorm", "norm", "laplace", "auto")
    }
    assert sizes["auto"] == min(sizes.values())


def payload_with_laws(coder: str) -> bytes:
    update = small_update(np.random.default_rng(5))
    return encode_update(
        update, None, CodecConfig(format="e4m2", scale="std", coder=coder, min_numel=100)
    ).payload


def test_kernels_that_are_not_compiled_read_the_same_tables() -> None:
    printed = run_without_jit(
        "import test_laws\n"
        "print(*(test_laws.payload_with_laws(coder).hex() for coder in test_laws.CODERS))\n"
    )
    expected = [payload_with_laws(coder) for coder in CODERS]
    assert printed == [payload.hex() for payload in expected]
    update = small_update(np.random.default_rng(5))
    assert all(num_laws(payload, update) > 0 for payload in expected)


def test_no_laws_say_explicit() -> None:
    assert no_laws(2).tolist() == [[-1, 0, 0, 0]] * 2
    assert Fraction(int(LAW_BETAS[13]), 65536) == 1
    assert Fraction(int(LAW_BETAS[17]), 65536) == 2
