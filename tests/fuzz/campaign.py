"""Many cases: each a mutant of a sound payload, tried as it is and with the right checksum."""

from __future__ import annotations

import faulthandler
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from co3_flower import payload as payload_module
from co3_flower.codec import accumulate_update, decode_update
from co3_flower.errors import PayloadError
from co3_flower.layout import FLOAT_DTYPES, Layout
from co3_flower.limits import NormLimit

from . import mutations
from .bases import Base
from .container import HEADER, sealed

LONGEST_SECONDS = 1.0  # processor time of a decode
SLACK_BYTES = 4 << 20  # the most that look-up tables take, of 64 or 200 tables; and odds and ends
MEASURE_EVERY = 64  # cases whose allocations are traced
ADD_EVERY = 8  # cases that are accumulated too
KEPT_SEEDS = (1, 2, 3)


@dataclass
class Report:
    """What came of the cases."""

    cases: int = 0
    decoded: int = 0  # of the mutants with the right checksum
    refused: int = 0
    past_header: int = 0
    refused_unsealed: int = 0
    decoded_unsealed: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    most_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{self.cases} cases in {self.seconds:.0f} s; resealed: {self.past_header} past the "
            f"header, {self.decoded} decoded, {self.refused} refused; as they are: "
            f"{self.decoded_unsealed} decoded, {self.refused_unsealed} refused; longest "
            f"{self.longest_seconds:.3f} s; most memory beyond 4 x the layout {self.most_bytes} B"
        ]
        lines += [f"  {n:8} {reason}" for reason, n in self.reasons.most_common()]
        lines += [f"  {n:8} {outcome}" for outcome, n in sorted(self.outcomes.items())]
        return "\n".join(lines)


class Failure(AssertionError):
    """A mutant that got the better of the decoder."""


class Campaign:
    """Runs cases; every one is told by a seed and an index alone."""

    def __init__(
        self, bases: Sequence[Base], measure_every: int = MEASURE_EVERY, is_timed: bool = True
    ) -> None:
        self.bases = list(bases)
        self.measure_every = measure_every
        self.is_timed = is_timed
        self.report = Report()
        self._checked = 0
        for base in self.bases:  # the kernels are compiled and loaded before anything is timed
            sums = accumulator_of(base.layout)
            accumulate_update(base.payload, sums, 2, like=base.layout)

    def run(self, seed: int, indices: Iterable[int], log_every: int = 0) -> Report:
        """Run the cases of a seed with the given indices."""
        return self.run_cases((self.case(seed, index) for index in indices), log_every)

    def run_cases(
        self, cases: Iterable[tuple[Base, bytes, int, str]], log_every: int = 0
    ) -> Report:
        """Run cases that `case` drew, here or in another process."""
        start = time.perf_counter() - self.report.seconds
        check = payload_module._check_scales

        def counted(*args: Any) -> None:
            self._checked += 1
            check(*args)

        with mock.patch.object(payload_module, "_check_scales", counted):
            for n, case in enumerate(cases):
                if n % 1000 == 0:
                    faulthandler.dump_traceback_later(240, exit=True)  # what hangs in a kernel
                self.run_case(*case)
                if log_every and (n + 1) % log_every == 0:
                    self.report.seconds = time.perf_counter() - start
                    print(str(self.report).partition("\n")[0], flush=True)
        faulthandler.cancel_dump_traceback_later()
        self.report.seconds = time.perf_counter() - start
        return self.report

    def case(self, seed: int, index: int) -> tuple[Base, bytes, int, str]:
        """Return the base, the mutant's body, the index and the mutation's name."""
        rng = np.random.default_rng([seed, index])
        base = self.bases[rng.integers(len(self.bases))]
        mutation = mutations.pick(rng, mutations.MUTATIONS)
        return base, mutation(rng, base, self.bases), index, mutation.__name__

    def run_case(self, base: Base, body: bytes, index: int, name: str) -> None:
        """Try a mutant; say which one it was where it fails."""
        try:
            self.try_both(base, body, index, name)
        except Exception as error:
            raise Failure(
                f"case {index} ({name} of {base.label}): {type(error).__name__}: {error}"
            ) from error

    def try_both(self, base: Base, body: bytes, index: int = 1, name: str = "built") -> None:
        """Try a body as it is, with the old checksum, and with its own."""
        report = self.report
        report.cases += 1
        if self.decodes(body + base.payload[-4:], base.layout, index):
            report.decoded_unsealed += 1
        else:
            report.refused_unsealed += 1
        before = self._checked
        decoded = self.decodes(sealed(body), base.layout, index, count=True)
        report.decoded += decoded
        report.refused += not decoded
        past = self._checked > before
        report.past_header += past
        outcome = "decoded" if decoded else "refused" if past else "header refused"
        report.outcomes[f"{name}: {outcome}"] += 1

    def decodes(self, data: bytes, layout: Layout, index: int = 1, count: bool = False) -> bool:
        """Whether it decodes; if it does, to the exact layout with finite values, and quickly."""
        report = self.report
        measured = self.measure_every > 0 and index % self.measure_every == 0
        if measured:
            tracemalloc.start()
        start = time.process_time()
        try:
            decoded = decode_update(data, layout)
        except PayloadError as error:
            decoded = None
            if count:
                report.reasons[reason_of(error)] += 1
        finally:
            seconds = time.process_time() - start
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        if measured:
            beyond = peak - 4 * layout_bytes(layout)
            report.most_bytes = max(report.most_bytes, beyond)
            assert beyond <= SLACK_BYTES, f"{peak} bytes were allocated"
        elif self.is_timed:
            report.longest_seconds = max(report.longest_seconds, seconds)
            assert seconds <= LONGEST_SECONDS, f"it took {seconds} s"
        if decoded is not None:
            check_decoded(decoded, layout)
        if index % ADD_EVERY == 0:
            check_accumulation(data, layout, decoded)
            if decoded is not None:
                check_clip(data, layout)
        return decoded is not None


def reason_of(error: PayloadError) -> str:
    """The first words of an error: which check it was."""
    text = str(error)
    assert " must " in text and ", got " in text, f"an error without its rule: {text}"
    return text.partition(" must ")[0].partition(" '")[0]


def layout_bytes(layout: Layout) -> int:
    """Bytes of the arrays that a decoder returns, as float32 or as they are."""
    pairs = zip(layout.numels, layout.dtypes, strict=True)
    return sum(n * (4 if dtype in FLOAT_DTYPES else dtype.itemsize) for n, dtype in pairs)


def check_decoded(decoded: dict[str, np.ndarray], layout: Layout) -> None:
    """The exact layout with finite values."""
    assert tuple(decoded) == layout.names
    for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True):
        array = decoded[name]
        assert array.shape == shape, name
        assert array.dtype in (dtype, np.float32), name
        assert array.dtype not in FLOAT_DTYPES or np.isfinite(array).all(), name


def accumulator_of(layout: Layout) -> dict[str, np.ndarray]:
    """Sums that are not zero."""
    pairs = zip(layout.names, layout.shapes, strict=True)
    return {name: np.full(shape, 0.25, np.float32) for name, shape in pairs}


def check_accumulation(data: bytes, layout: Layout, decoded: dict[str, np.ndarray] | None) -> None:
    """Accumulating tells the same: the sum of what decodes, or a sum that is as it was."""
    sums = accumulator_of(layout)
    try:
        raw = accumulate_update(data, sums, 3, like=layout)
    except PayloadError:
        assert decoded is None, "accumulate_update alone refuses it"
        assert all((array == np.float32(0.25)).all() for array in sums.values())
        return
    assert decoded is not None, "decode_update alone refuses it"
    for name, array in decoded.items():
        if name in raw:
            assert np.array_equal(raw[name], array), name
        else:
            with np.errstate(over="ignore"):
                expected = np.float32(0.25) + np.float32(3) * array
            assert np.array_equal(sums[name], expected), name


def exhaust(campaign: Campaign, base: Base) -> None:
    """Every length of a payload, and every bit of its header flipped."""
    for length in range(len(base.payload)):
        assert not campaign.decodes(base.payload[:length], base.layout), length
        if length < len(base.payload) - 4:
            assert not campaign.decodes(sealed(base.payload[:length]), base.layout), length
    for bit in range(8 * HEADER.size):
        body = bytearray(base.payload[:-4])
        body[bit // 8] ^= 1 << bit % 8
        campaign.try_both(base, bytes(body))


def check_clip(data: bytes, layout: Layout) -> None:
    """Whatever decodes can be held to a norm."""
    names = [n for n, d in zip(layout.names, layout.dtypes, strict=True) if d in FLOAT_DTYPES]
    limit = NormLimit(1.0, frozenset(names), clip=True)
    clipped = decode_update(data, layout, norm_limit=limit)
    squares = [np.square(clipped[name], dtype=np.float64).sum() for name in names]
    assert np.sqrt(sum(squares)) <= 1.001  # raw tensors of float16 round to 2**-11
