"""The valid payloads that the fuzzer starts from: every format, coder, prior and structure."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from co3_flower import codec, structure, tables
from co3_flower.codec import decode_update, encode_raw_update, encode_update
from co3_flower.config import CodecConfig
from co3_flower.layout import Layout

from .container import Sections, take_apart

Arrays = dict[str, np.ndarray]

FORMATS = tuple(f"e{e}m{m}" for e in range(1, 8) for m in range(8 - e) if (e, m) != (1, 0)) + (
    "e2m1fn", "e3m2fn", "e2m3fn", "e4m3fn",
)  # fmt: skip
PRIORS = ("gennorm", "norm", "laplace", "empirical", "auto")
CODERS = ("huffman", "rans")
SHORT_CHUNK = 1024  # symbols, so that small updates have several


@dataclass(frozen=True)
class Base:
    """A sound payload and its layout."""

    label: str
    payload: bytes
    layout: Layout
    sections: Sections


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Heavy-tailed entries whose spread follows rows and columns, some of which are dead."""
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape)) * 1e-3
    if len(shape) > 1:
        rows, cols = shape[0], int(np.prod(shape[1:]))
        flat = x.reshape(rows, cols)
        flat *= np.exp2(rng.normal(0, 2, rows))[:, None] * np.exp2(rng.normal(0, 1, cols))
        flat[rng.random(rows) < 0.15] = 0
        flat[:, rng.random(cols) < 0.15] = 0
    return x.astype(np.float32)


def make_updates() -> dict[str, Arrays]:
    """Updates by the name of their layout."""
    rng = np.random.default_rng(11)
    odd = {
        "scalar": np.array(0.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "dead": np.zeros((3, 4), np.float32),
        "mean": rng.standard_normal(12).astype(np.float32),
        "steps": np.array(11, np.int64),
        "mask": rng.random(6) > 0.5,
        "exact": rng.standard_normal(3),
    }
    return {
        "tiny": {  # fewer than 300 entries, for runs without the JIT
            "conv": draw(rng, 4, 3, 3, 3),
            "fc": draw(rng, 8, 10),
            "bias": draw(rng, 12),
            "row": draw(rng, 1, 9),
            "column": draw(rng, 7, 1),
        }
        | odd,
        "net": {
            "conv": draw(rng, 16, 8, 3, 3),
            "bias": draw(rng, 16),
            "fc": draw(rng, 40, 45),
            "last": draw(rng, 10, 40),
        }
        | odd,
        "vectors": {"a": draw(rng, 700), "b": draw(rng, 90), "c": draw(rng, 5)},
        "raw": {"steps": np.arange(7), "mask": rng.random(9) > 0.5, "half": np.ones(3, np.float16)},
        "nothing": {},
    }


@contextlib.contextmanager
def forced(structured: bool) -> Iterator[None]:
    """Structure whatever the size and whether it pays or not; and chunks that are short."""

    def choose(*args: Any) -> list[tables.CodeTables]:
        with mock.patch.object(structure, "MIN_NUMEL", 1):
            layout, plan, coded, buffers, symbols, residual, config, _ = args
            classes, counts = structure.choose_structure(
                layout, plan, coded.fmt, symbols, residual, coded.scales, coded.fits[:, 3]
            )
            return [tables._structured_tables(classes, counts, buffers, config.coder)]

    with contextlib.ExitStack() as stack:
        if structured:
            stack.enter_context(mock.patch.object(codec, "choose_tables", choose))
        short = mock.patch.object(codec, "chunk_size", lambda n, _: max(1, min(n, SHORT_CHUNK)))
        stack.enter_context(short)
        yield


def make_bases(names: tuple[str, ...] = ("tiny", "net", "vectors", "raw", "nothing")) -> list[Base]:
    """All of them, in a fixed order."""
    updates, rng = make_updates(), np.random.default_rng(12)
    bases = []
    for name in names:
        update = updates[name]
        layout = Layout.of(update)
        bases.append(base_of(f"{name} raw", encode_raw_update(update).payload, layout))
        for format, coder in itertools.product(FORMATS, CODERS):
            if name != "tiny" and rng.random() < 0.6:
                continue
            for prior in (*PRIORS, "structure"):
                config = CodecConfig(
                    format=format,
                    coder=coder,
                    prior="empirical" if prior == "structure" else prior,
                    structure="none",
                    scale=str(rng.choice(["mse", "std", "absmax", "unit"])),
                    scale_multiplier=float(rng.choice([1.0, 0.3, 0.05])),
                    min_numel=int(rng.choice([1, 20, 100, 1024])),
                    buffers=("mean",) if "mean" in update and rng.random() < 0.8 else (),
                    raw=("exact",) if "exact" in update and rng.random() < 0.5 else (),
                )
                with forced(prior == "structure"):
                    payload = encode_update(update, None, config).payload
                bases.append(base_of(f"{name} {format} {coder} {prior}", payload, layout))
    return bases


def base_of(label: str, payload: bytes, layout: Layout) -> Base:
    """A base, checked: it decodes, and its sections make it up."""
    decode_update(payload, layout)
    sections = take_apart(payload, layout.numels)
    assert sections.joined() == payload[:-4], label
    return Base(label, payload, layout, sections)
