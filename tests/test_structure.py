"""Row x column structure: slow twins, and what it may and may not change."""

from __future__ import annotations

import dataclasses
import itertools

import naive_structure as naive
import numpy as np
import pytest
import zstandard
from fuzz.bases import CODERS, FORMATS, PRIORS, draw, forced
from fuzz.mutations import hostile_structure

from co3_flower import CodecConfig, PayloadError, accumulate_update, decode_update, encode_update
from co3_flower import kernels_structure as kernels
from co3_flower import structure as structure_module
from co3_flower.codec import EncodedUpdate, least_payload_bytes
from co3_flower.dense import HostDense
from co3_flower.huffman import HuffmanTables
from co3_flower.layout import Kind, Layout
from co3_flower.payload import read_payload
from co3_flower.structure import read_structure
from conftest import run_without_jit

Arrays = dict[str, np.ndarray]


def make_update(rng: np.random.Generator) -> Arrays:
    """All that a structure meets: matrices, kernels, dead parts, tiny tensors, the rest beside."""
    dead_tap = draw(rng, 9, 7, 3, 3)
    dead_tap[:, :, 1, 2] = 0
    dead_tap[:, 4] = 0
    dead_tap[3] = 0
    return {
        "matrix": draw(rng, 40, 33),
        "conv": draw(rng, 12, 6, 3, 3),
        "dead parts": dead_tap,
        "three axes": draw(rng, 5, 4, 6),
        "vector": draw(rng, 300),
        "dead": np.zeros((20, 20), np.float32),
        "tiny": draw(rng, 2, 2),
        "row": draw(rng, 1, 90),
        "column": draw(rng, 90, 1),
        "scalar": np.array(0.25, np.float32),
        "empty": np.zeros((3, 0, 2), np.float32),
        "no rows": np.zeros((0, 4), np.float32),
        "mean": rng.standard_normal(30).astype(np.float32),
        "exact": rng.standard_normal(3),
        "steps": np.array(3),
    }


BESIDE = {"buffers": ("mean",), "raw": ("exact",)}


def structured(update: Arrays, config: CodecConfig) -> EncodedUpdate:
    """Encode with a structure, whether it pays or not."""
    with forced(True):
        encoded = encode_update(update, None, config)
    assert encoded.stats.structure_bits > 0
    return encoded


def assert_same(a: Arrays, b: Arrays) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name


# Slow twins


@pytest.mark.parametrize("multiplier", [1.0, 0.5])
@pytest.mark.parametrize("format", ["e2m1", "e5m2"])
def test_classes_are_those_of_the_slow_twin(
    rng: np.random.Generator, format: str, multiplier: float
) -> None:
    update = make_update(rng)
    config = CodecConfig(
        format=format, scale="std", scale_multiplier=multiplier, min_numel=1, **BESIDE
    )
    parts, plan = read_payload(structured(update, config).payload, Layout.of(update))
    read = parts.structure
    assert read is not None
    layout = Layout.of(update)
    shapes = [layout.shapes[i] for i in plan.order[: plan.num_coded]]
    classes, class_map = naive.read_structure(read.packed, shapes)
    assert read.class_map.tolist() == class_map
    offsets, num_coded, *rest = read.kernel_layout
    n = int(offsets[num_coded])
    keys = np.zeros(n, np.uint32)
    kernels.fill_keys(0, n, offsets, num_coded, *rest, read.sum_map(250), 0, 1, keys)
    expected = naive.table_of_entries(classes, class_map, 0)
    assert keys.tolist() == [250 if table is None else table for table in expected]
    assert len(set(read.modes.tolist())) > 2


def test_any_factors_are_read_as_the_slow_twin_reads_them(rng: np.random.Generator) -> None:
    layout = Layout.of({name: g for name, g in make_update(rng).items() if g.dtype == np.float32})
    plan = layout.plan((Kind.CODED,) * len(layout), 1)
    shapes = [layout.shapes[i] for i in plan.order]
    modes, refused = set(), 0
    for _ in range(60):
        packed, num_tables = hostile_structure(rng, layout)
        try:
            read = read_structure(packed, layout, plan)
        except PayloadError:
            refused += 1
            with pytest.raises(AssertionError):
                assert num_tables <= kernels.MAX_TABLES
                naive.read_structure(packed, shapes)
            continue
        classes, class_map = naive.read_structure(packed, shapes)
        assert read.class_map.tolist() == class_map
        keys = np.zeros(plan.num_symbols, np.uint32)
        kernels.fill_keys(0, keys.size, *read.kernel_layout, read.sum_map(250), 0, 1, keys)
        flat = [c for of_tensor in classes for c in of_tensor]
        expected = [250 if c is None else class_map[min(c, 382)] for c in flat]
        assert keys.tolist() == expected
        modes |= set(read.modes.tolist())
    assert modes == {0, 1, 2, 3, 4}
    assert 0 < refused < 60


def test_classes_are_read_as_they_were_chosen(rng: np.random.Generator) -> None:
    update = make_update(rng)
    chosen = []
    choose = structure_module.choose_structure

    def remember(*args: object) -> object:
        chosen.append(choose(*args))  # type: ignore[arg-type]
        return chosen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure_module, "choose_structure", remember)
        structured(update, CodecConfig())
    ((sent, _),) = chosen
    read = read_structure(sent.packed, Layout.of(update), sent.plan)
    for field in ("modes", "cols", "row_at", "col_at", "class_map"):
        assert np.array_equal(getattr(read, field), getattr(sent, field)), field
    assert read.num_tables == sent.num_tables
    dead = (
        np.full(int(sent.plan.offsets[-1]), 0, np.uint32),
        np.full(int(sent.plan.offsets[-1]), 0, np.uint32),
    )
    for each, keys in zip((sent, read), dead, strict=True):
        offsets, num_coded, *rest = each.kernel_layout
        kernels.fill_keys(
            0, keys.size, offsets, num_coded, *rest, np.arange(kernels.NUM_SUMS), 0, 1, keys
        )
    assert np.array_equal(np.minimum(dead[0], kernels.DEAD), np.minimum(dead[1], kernels.DEAD))


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("format", ["e2m1", "e4m3fn"])
def test_symbols_are_those_of_the_slow_decoder(
    rng: np.random.Generator, coder: str, format: str
) -> None:
    update = make_update(rng)
    config = CodecConfig(format=format, coder=coder, min_numel=200, **BESIDE)
    layout = Layout.of(update)
    parts, plan = read_payload(structured(update, config).payload, layout)
    read = parts.structure
    assert read is not None
    shapes = [layout.shapes[i] for i in plan.order[: plan.num_coded]]
    classes, class_map = naive.read_structure(read.packed, shapes)
    buffered = plan.num_symbols - int(plan.offsets[plan.num_coded])
    tables = naive.table_of_entries(classes, class_map, buffered)
    zero = parts.fmt.num_values // 2
    words, at, symbols = parts.words.tolist(), 0, []
    is_huffman = isinstance(parts.tables, HuffmanTables)
    streams = parts.num_streams if is_huffman else 1
    sizes = iter(parts.sizes.tolist())
    for begin in range(0, plan.num_symbols, parts.chunk_symbols):
        chunk = tables[begin : begin + parts.chunk_symbols]
        for k in range(streams):
            part = chunk[len(chunk) * k // streams : len(chunk) * (k + 1) // streams]
            size = next(sizes)
            stream = words[at : at + size]
            if is_huffman:
                symbols += naive.decode_huffman(stream, part, zero, parts.tables.lengths.tolist())
            else:
                symbols += naive.decode_rans(stream, part, zero, parts.tables.frequencies.tolist())
            at += size
    assert parts.sizes.size > streams
    assert symbols == HostDense(1).decode(parts, plan).tolist()


# Laws


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("format", FORMATS)
def test_structure_does_not_change_what_is_decoded(
    rng: np.random.Generator, format: str, coder: str
) -> None:
    update = make_update(rng)
    for prior in PRIORS:
        config = CodecConfig(format=format, coder=coder, prior=prior, min_numel=100, **BESIDE)
        plain = encode_update(update, None, dataclasses.replace(config, structure="none"))
        with_structure = structured(update, config)
        assert_same(with_structure.residual, plain.residual)
        decoded = decode_update(plain.payload, update)
        assert_same(decode_update(with_structure.payload, update), decoded)
        assert_same(decode_update(encode_update(update, None, config).payload, update), decoded)


@pytest.mark.parametrize("coder", CODERS)
def test_update_of_vectors_alone_survives_a_structure(rng: np.random.Generator, coder: str) -> None:
    update = {"a": draw(rng, 500), "b": draw(rng, 3), "c": np.zeros(4, np.float32)}
    config = CodecConfig(coder=coder)
    plain = encode_update(update, None, config)
    assert plain.stats.structure_bits == 0
    assert_same(
        decode_update(structured(update, config).payload, update),
        decode_update(plain.payload, update),
    )


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("coder", CODERS)
def test_threads_change_neither_bytes_nor_sums(
    rng: np.random.Generator, coder: str, num_threads: int
) -> None:
    update = {"w": draw(rng, 300, 200), "v": draw(rng, 64, 32, 3, 3), "b": draw(rng, 300)}
    config = CodecConfig(coder=coder)
    payload = structured(update, config).payload
    assert structured(update, dataclasses.replace(config, num_threads=num_threads)).payload == (
        payload
    )
    one, many = ({n: np.ones(a.shape, np.float32) for n, a in update.items()} for _ in range(2))
    accumulate_update(payload, one, 3)
    accumulate_update(payload, many, 3, num_threads=num_threads)
    assert_same(one, many)


def random_update(rng: np.random.Generator) -> Arrays:
    """One to four tensors of any shape, with or without spread over rows and columns."""
    update = {}
    for i in range(rng.integers(1, 5)):
        shape = tuple(rng.integers(1, [90, 90, 4, 4][: rng.integers(1, 5)]).tolist())
        x = draw(rng, *shape) if rng.random() < 0.6 else rng.standard_normal(shape)
        update[f"w{i}"] = np.asarray(x, np.float32)
    return update


@pytest.mark.parametrize("coder", CODERS)
def test_structure_auto_is_never_larger_than_none(rng: np.random.Generator, coder: str) -> None:
    used = 0
    for _ in range(100):
        update = random_update(rng)
        config = CodecConfig(
            format=str(rng.choice(["e2m1", "e1m2", "e5m2", "e3m0"])),
            scale_multiplier=float(rng.choice([1, 0.3, 0.1, 0.01])),
            prior=str(rng.choice(PRIORS)),
            coder=coder,
        )
        auto = encode_update(update, None, config)
        none = encode_update(update, None, dataclasses.replace(config, structure="none"))
        assert len(auto.payload) <= len(none.payload)
        used += auto.stats.structure_bits > 0
    assert 10 < used < 140


@pytest.mark.parametrize("coder", CODERS)
def test_stats_add_up_to_the_payload(rng: np.random.Generator, coder: str) -> None:
    update = make_update(rng)
    encoded = structured(update, CodecConfig(coder=coder, **BESIDE))
    stats = encoded.stats
    parts, _ = read_payload(encoded.payload, Layout.of(update))
    assert stats.payload_bits == 8 * len(encoded.payload)
    assert stats.structure_bits == 8 * len(parts.structure.packed)  # type: ignore[union-attr]
    assert stats.payload_bits == (
        stats.code_bits + stats.side_info_bits + stats.structure_bits + stats.raw_bits
    )
    of_tensors = sum(row.code_bits for row in stats.tensors)
    if coder == "huffman":  # whole bits, each stream filled up to a word
        assert of_tensors <= stats.code_bits <= of_tensors + 31 * parts.sizes.size
    else:  # the ideal, rounded by tensor; states and their last words come on top
        slack = len(stats.tensors) + 16 * 12 * parts.sizes.size
        assert of_tensors - len(stats.tensors) <= stats.code_bits <= 1.001 * of_tensors + slack


@pytest.mark.parametrize("coder", CODERS)
def test_update_beyond_its_limit_becomes_zeros(rng: np.random.Generator, coder: str) -> None:
    spread = np.exp2(rng.normal(0, 2, 100))[:, None]
    update = {
        "w": (rng.standard_normal((100, 90)) * spread).astype(np.float32),
        "b": rng.standard_normal(90).astype(np.float32),
    }
    config = CodecConfig(coder=coder, scale="std")
    assert encode_update(update, None, config).stats.structure_bits > 0
    encoded = encode_update(update, None, config, max_payload_bytes=1)
    assert len(encoded.payload) == least_payload_bytes(update, config) <= 150
    decoded = decode_update(encoded.payload, update)
    assert not any(array.any() for array in decoded.values())
    assert_same(encoded.residual, update)


# A real gradient

REACHED = [  # bits per entry, all counted, of the trials that the design names
    ("e2m1", "std", 0.92, 2.58),
    ("e2m1", "std", 0.3, 1.26),
    ("e2m1", "std", 0.1, 0.150),
    ("e2m1", "std", 0.05, 0.0096),
    ("e5m2", "unit", 1.0, 5.04),
]


def large_tensors(gradient: Arrays) -> Arrays:
    return {name: g for name, g in gradient.items() if g.size >= 4096}


def zstd_bytes(payload: bytes, update: Arrays) -> int:
    """What zstd -19 makes of the same symbols, a byte each."""
    parts, plan = read_payload(payload, Layout.of(update))
    symbols = HostDense(1).decode(parts, plan)
    return len(zstandard.ZstdCompressor(level=19).compress(symbols.tobytes()))


@pytest.mark.parametrize(("format", "scale", "multiplier", "bits"), REACHED)
def test_payload_of_a_real_gradient_is_as_small_as_the_trials(
    real_gradient: Arrays, format: str, scale: str, multiplier: float, bits: float
) -> None:
    update = large_tensors(real_gradient)
    config = CodecConfig(format=format, scale=scale, scale_multiplier=multiplier, coder="rans")
    payload = encode_update(update, None, config).payload
    entries = sum(g.size for g in update.values())
    assert 8 * len(payload) <= 1.01 * bits * entries + 8 * 128


ZSTD = [("rans", "std", m) for m in (1.0, 0.3, 0.1, 0.05)] + [
    ("huffman", "mse", m) for m in (1.0, 0.3)
]


@pytest.mark.parametrize(("coder", "scale", "multiplier"), ZSTD)
def test_payload_of_a_real_gradient_is_smaller_than_zstd(
    small_real_gradient: Arrays, coder: str, scale: str, multiplier: float
) -> None:
    config = CodecConfig(coder=coder, scale=scale, scale_multiplier=multiplier)
    payload = encode_update(small_real_gradient, None, config).payload
    assert len(payload) < zstd_bytes(payload, small_real_gradient)


# Without the JIT


def tiny_payloads() -> list[bytes]:
    """A few structured payloads; the same in every process."""
    rng = np.random.default_rng(8)
    update = {"conv": draw(rng, 3, 2, 2, 2), "fc": draw(rng, 17, 16), "b": draw(rng, 5)}
    payloads = []
    for coder, multiplier in itertools.product(CODERS, (1.0, 0.2)):
        config = CodecConfig(coder=coder, scale_multiplier=multiplier, format="e2m1")
        with forced(True):
            payloads.append(encode_update(update, None, config).payload)
        decode_update(payloads[-1], update)
    return payloads


def test_kernels_that_are_not_compiled_give_the_same_bytes() -> None:
    printed = run_without_jit(
        "import test_structure\nprint(*(p.hex() for p in test_structure.tiny_payloads()))\n"
    )
    assert printed == [payload.hex() for payload in tiny_payloads()]
