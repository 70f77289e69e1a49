"""The compress stage: symbols to bits and back, against constriction, bitarray, zlib and zstd.

Run with ``python -m benchmarks.coder``. All get the same symbols: those that the codec makes of an
update, tensor after tensor. Rivals with a Python call per symbol get a sample of them. The
product's size is that of the whole payload, scales, tables, lengths and checksum included; the
rivals' models and tables are not counted against them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import Update, load_updates
from benchmarks.harness import (
    Case,
    Row,
    add_timing_options,
    first_if_quick,
    measure,
    num_repeats,
    parser,
)
from benchmarks.report import Report
from benchmarks.rivals import (
    SLOW_REPEATS,
    BitarrayHuffman,
    ConstrictionAns,
    ConstrictionHuffman,
    byte_compressors,
)
from co3_flower import CodecConfig, decode_update, dense, encode_update

CONFIGS = {
    "e2m1": CodecConfig(format="e2m1", structure="none"),
    "e2m1, multiplier 0.3": CodecConfig(format="e2m1", scale_multiplier=0.3, structure="none"),
    "e5m2, scale 1": CodecConfig(format="e5m2", scale="unit", structure="none"),
}
BITARRAY_SAMPLE, CALL_SAMPLE = 400_000, 40_000  # entries that take about 20 ms


@dataclass(frozen=True)
class Stage:
    """The coder stage of one call of the codec, to be repeated alone."""

    call: Callable[[], Any]
    result: Any


@dataclass(frozen=True)
class Coded:
    """What the product does to an update: its payload, and the coder's stage both ways."""

    payload: bytes
    encode: Stage
    decode: Stage

    def cases(self, name: str, num_items: int) -> tuple[Case, Case]:
        """Return the cases of encoding and decoding."""
        return (
            Case(name, self.encode.call, num_items, lambda _: len(self.payload)),
            Case(name, self.decode.call, num_items),
        )


def record_stage(name: str, work: Callable[[], Any]) -> tuple[Any, Stage]:
    """Do some work with the codec; return its result and its last call of a coder's function."""
    function, seen = getattr(dense, name), []

    def spy(*arguments: Any, **named: Any) -> Any:
        stage = partial(function, *arguments, **named)
        seen.append(Stage(stage, stage()))
        return seen[-1].result

    with mock.patch.object(dense, name, spy):
        result = work()
    return result, seen[-1]


def code_update(update: Update, config: CodecConfig) -> Coded:
    """Encode and decode an update, and keep the calls of the coder."""
    encoded, encode = record_stage(
        "encode_symbols", lambda: encode_update(update.arrays, None, config)
    )
    payload = encoded.payload
    _, decode = record_stage("decode_symbols", lambda: decode_update(payload, update.arrays))
    return Coded(payload, encode, decode)


def table_bounds(update: Update, min_numel: int) -> np.ndarray:
    """Return where the tensors with an own table begin in the codec's order, then the rest, end."""
    sizes = [array.size for array in update.arrays.values()]
    own = [size for size in sizes if size >= min_numel]
    return np.unique(np.cumsum([0, *own, sum(sizes) - sum(own)]))


def coder_cases(update: Update, config: CodecConfig) -> tuple[list[Case], list[Case]]:
    """Return all ways to encode the symbols, and all to decode them, the product first."""
    coded = code_update(update, config)
    symbols: np.ndarray = coded.decode.result
    n, num_values = symbols.size, config.float_format.num_values
    source, out = np.zeros(n, np.float32), np.empty(n, np.float32)
    memcpy = Case("memcpy of float32", lambda: np.copyto(out, source), n)
    rans = code_update(update, dataclasses.replace(config, coder="rans"))
    pairs = [coded.cases("co3 Huffman", n), rans.cases("co3 rANS", n), (memcpy, memcpy)]
    ans = ConstrictionAns(symbols, table_bounds(update, config.min_numel), num_values)
    bits = BitarrayHuffman(_sample(symbols, BITARRAY_SAMPLE))
    calls = ConstrictionHuffman(_sample(symbols, CALL_SAMPLE), num_values)
    for name, coder, size in (
        ("constriction ANS, table per tensor", ans, n),
        ("bitarray Huffman, sample", bits, len(bits.symbols)),
        ("constriction Huffman, sample", calls, len(calls.symbols)),
    ):
        encode = Case(name, coder.encode, size, lambda code: code.nbytes)
        pairs.append((encode, Case(name, _bind(coder.decode, coder.encode()), size)))
    for name, (compress, decompress) in byte_compressors().items():
        repeats = SLOW_REPEATS.get(name, 1_000_000)
        compressed = _CompressOnce(compress, symbols)
        encode = Case(name, compressed.again, n, len, repeats)
        pairs.append((encode, Case(name, _unpack(decompress, compressed), n)))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _sample(symbols: np.ndarray, size: int) -> np.ndarray:
    """Return about `size` symbols, evenly spread."""
    return np.ascontiguousarray(symbols[:: max(1, symbols.size // size)])


class _CompressOnce:
    """Compresses, and keeps the result for the decompressor (the slow ones take seconds)."""

    def __init__(self, compress: Callable[[np.ndarray], bytes], symbols: np.ndarray) -> None:
        self._compress, self._symbols = compress, symbols
        self._kept: bytes | None = None

    def again(self) -> bytes:
        self._kept = self._compress(self._symbols)
        return self._kept

    def kept(self) -> bytes:
        return self.again() if self._kept is None else self._kept


def _unpack(decompress: Callable[[bytes], bytes], compressed: _CompressOnce) -> Callable[[], bytes]:
    return lambda: decompress(compressed.kept())


def _bind(function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    return lambda: function(argument)


def measure_update(
    report: Report, update: Update, label: str, config: CodecConfig, repeats: int
) -> None:
    """Measure both directions on an update's symbols."""
    encode, decode = coder_cases(update, config)
    where = f"{update.name}, {label}"
    timings = measure(encode, repeats)
    report.add_timings(f"{where}: symbols -> bits", timings, "symbols")
    report.add_timings(f"{where}: bits -> symbols", measure(decode, repeats), "symbols")


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("Entropy coding of an update's symbols, against other coders.")
    add_timing_options(arguments)
    options = arguments.parse_args(argv)
    report = Report("coder", options)
    for update in load_updates(options):
        for label, config in first_if_quick(CONFIGS, options).items():
            measure_update(report, update, label, config, num_repeats(options))
    return report.finish()


if __name__ == "__main__":
    main()
