"""The fuzzer of tests/fuzz: what hostile bytes may do to a decoder, and that it really gets in."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fuzz import mutations
from fuzz.bases import CODERS, FORMATS, PRIORS, Base, base_of, draw, forced, make_bases
from fuzz.campaign import (
    KEPT_SEEDS,
    LONGEST_SECONDS,
    SLACK_BYTES,
    Campaign,
    exhaust,
    layout_bytes,
)
from fuzz.container import RANS, sealed

from co3_flower import CodecConfig, PayloadError, decode_update, encode_update
from co3_flower.bitstream import pack_tables
from co3_flower.huffman import HuffmanTables
from co3_flower.layout import Layout, max_tables
from co3_flower.rans import RansTables
from conftest import REPOSITORY

CASES = 20_000  # of all kept seeds together
CHECKED_CASES = 2_000  # with the JIT off, and with bounds checking


@pytest.fixture(scope="module")
def bases() -> list[Base]:
    return make_bases()


def test_bases_are_of_every_format_coder_prior_and_structure(bases: list[Base]) -> None:
    labels = {base.label for base in bases}
    for format in FORMATS:
        for coder in CODERS:
            for prior in (*PRIORS, "structure"):
                assert f"tiny {format} {coder} {prior}" in labels
    assert sum(base.sections.structure != b"" for base in bases) > 100
    assert any(len(base.sections.sizes) > 2 for base in bases)
    assert sum(base.layout.numels[i] for base in bases[:1] for i in range(len(base.layout))) < 300


@pytest.mark.parametrize("seed", KEPT_SEEDS)
def test_mutants_decode_soundly_or_are_refused(bases: list[Base], seed: int) -> None:
    report = Campaign(bases).run(seed, range(-(-CASES // len(KEPT_SEEDS))))
    assert report.decoded + report.refused == report.cases
    assert report.past_header >= report.cases / 2
    assert report.decoded > report.cases / 20


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("prior", ["auto", "structure"])
def test_every_length_and_every_header_bit(bases: list[Base], coder: str, prior: str) -> None:
    (base,) = (base for base in bases if base.label == f"tiny e2m1 {coder} {prior}")
    exhaust(Campaign([base]), base)


@pytest.mark.parametrize(
    "mutation", mutations.MUTATIONS, ids=[m.__name__ for m in mutations.MUTATIONS]
)
def test_every_mutation_changes_payloads(bases: list[Base], mutation: mutations.Mutation) -> None:
    rng = np.random.default_rng(5)
    changed = 0
    for base in bases[:400:4]:
        changed += mutation(rng, base, bases) != base.payload[:-4]
    assert changed > 40


# With every index checked


def run_checked(bases: list[Base], folder: Path, **variables: str) -> None:
    """Decode mutants in a process whose kernels raise IndexError where they look too far."""
    kept = [base for base in bases if sum(base.layout.numels) < 300]
    chosen = [kept[i] for i in np.random.default_rng(3).permutation(len(kept))[:100]]
    drawn = Campaign(chosen)
    cases = [drawn.case(4, index) for index in range(CHECKED_CASES)]
    (folder / "cases").write_bytes(pickle.dumps(cases))
    program = (
        "import pickle, sys, pathlib, numpy as np\n"
        "sys.path.insert(0, 'tests')\n"
        "from fuzz.campaign import Campaign\n"
        "np.seterr(all='ignore')\n"
        "cases = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "report = Campaign([], measure_every=0, is_timed=False).run_cases(cases)\n"
        "print(report)\n"
        "assert report.past_header >= report.cases / 2 and report.decoded >= report.cases / 20\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "cases")],
        env=os.environ | variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_kernels_that_are_not_compiled_look_nowhere_too_far(
    bases: list[Base], tmp_path: Path
) -> None:
    run_checked(bases, tmp_path, NUMBA_DISABLE_JIT="1")


def test_compiled_kernels_look_nowhere_too_far(bases: list[Base], tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")  # what is cached was compiled without the checks
    run_checked(bases, tmp_path, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=cache)


# Memory and time, on a layout of 16 MB: of which 4 x is more than any slack


def make_large(shapes: list[tuple[int, ...]], structured: bool, coder: str) -> Base:
    rng = np.random.default_rng(2)
    update = {f"w{i}": draw(rng, *shape) for i, shape in enumerate(shapes)}
    config = CodecConfig(scale_multiplier=1e-4, coder=coder, structure="none", min_numel=1)
    with forced(structured):
        payload = encode_update(update, None, config).payload
    return base_of("large", payload, Layout.of(update))


def lies_of(base: Base) -> dict[str, bytes]:
    """Bodies that claim as much of everything as they can."""
    rng = np.random.default_rng(3)
    sections, n = base.sections, sum(base.layout.numels)
    is_rans = sections.header["coder"] == RANS
    lies = {"sound": sections.joined()}
    for chunk in (1, 1023, 1024):
        for streams in (4,) if is_rans else (1, 2, 16):
            told = sections.telling(chunk_symbols=chunk, streams=streams)
            count = -(-n // chunk) * (1 if is_rans else streams)
            sizes = [8] * count if is_rans else [0] * count
            code = b"\0\x80\0\0" * 4 * count if is_rans else b""
            lies[f"{chunk} {streams}"] = replace(told, sizes=sizes, code=code).joined()
    lies["one chunk"] = sections.telling(chunk_symbols=2**32 - 1).joined()
    for count in (max_tables(n), 65_535):
        weights = np.zeros((min(count, 5_000), 11), np.int64)
        weights[:, 5] = 1
        tables = (RansTables if is_rans else HuffmanTables).from_weights(weights)
        packed = pack_tables(tables, np.zeros(len(base.layout), np.int64), len(weights))
        lies[f"{count} tables"] = replace(
            sections.telling(tables=count, min_numel=1), tables=packed
        ).joined()
    lies["structure"] = mutations.structure(rng, base, [base])
    lies["all ones"] = replace(sections, structure=b"\xff" * 10_000).joined()
    lies["other coder"] = mutations.other_coder(rng, base, [base])
    return lies


LARGE = {"matrices": [(1000, 400)] * 10, "small": [(1000,)] * 4000, "column": [(4_000_000, 1)]}


@pytest.mark.parametrize("shapes", LARGE)
@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("structured", [False, True])
def test_large_lies_take_little_memory_and_time(shapes: str, coder: str, structured: bool) -> None:
    base = make_large(LARGE[shapes], structured, coder)
    Campaign([make_large([(20, 30)], structured, coder)])  # loads what is loaded once
    untraced = 4 * sum(base.layout.numels) if structured else 0  # one number an entry, in a kernel
    for name, body in lies_of(base).items():
        data = sealed(body)
        start = time.process_time()
        tracemalloc.start()
        with contextlib.suppress(PayloadError):
            decode_update(data, base.layout)
        peak = tracemalloc.get_traced_memory()[1] + untraced
        tracemalloc.stop()
        assert time.process_time() - start <= LONGEST_SECONDS, name
        assert peak <= 4 * layout_bytes(base.layout) + SLACK_BYTES, (name, peak)
