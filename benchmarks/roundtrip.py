"""The whole codec, encode_update and accumulate_update, against NumPy with zstd or zlib.

Run with ``python -m benchmarks.roundtrip``. Every case does the whole work of a client (compensate,
convert, keep the residual, compress) or of the server (decompress, look values up, add to a sum),
in one thread unless it says otherwise. The NumPy rivals get the product's scales for nothing; they
send no scales and no tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.data import Arrays, Update, load_updates
from benchmarks.harness import (
    Case,
    Row,
    Timing,
    add_timing_options,
    first_if_quick,
    measure,
    num_repeats,
    parser,
)
from benchmarks.report import Report
from benchmarks.rivals import (
    SLOW_REPEATS,
    Compress,
    Decompress,
    byte_compressors,
    numpy_accumulate,
    numpy_convert,
)
from co3_flower import (
    CodecConfig,
    EncodedUpdate,
    Layout,
    accumulate_update,
    decode_update,
    encode_update,
)

CONFIGS = {
    "e2m1": CodecConfig(format="e2m1", structure="none"),
    "e5m2, scale 1": CodecConfig(format="e5m2", scale="unit", structure="none"),
}
BASE_RIVAL = "NumPy + zstd -1"
WEIGHT = 32.0
RANS, STRUCTURED = "co3, rANS", "co3, rANS, structure auto"

# Millions of parameters per second to reach on one core.
ENCODE_REACH = {"e2m1": {"co3": 250, RANS: 200, STRUCTURED: 120}, "e5m2, scale 1": {}}
DECODE_REACH = {"e2m1": {"co3": 500, RANS: 400}, "e5m2, scale 1": {"co3": 350, RANS: 400}}


def encode_cases(update: Arrays, residual: Arrays, config: CodecConfig) -> list[Case]:
    """Return the client's work, done by the product and by its rivals."""
    n = sum(array.size for array in update.values())
    flat, out = np.zeros(n, np.float32), np.empty(n, np.float32)
    scales = _scales(update, residual, config)

    def product(**changes: object) -> Callable[[], EncodedUpdate]:
        changed = dataclasses.replace(config, **changes)
        return lambda: encode_update(update, residual, changed)

    def rival(compress: Compress) -> Callable[[], bytes]:
        def run() -> bytes:
            arrays = update.values(), residual.values()
            symbols, _ = numpy_convert(*arrays, scales, config.gamma, config.float_format)
            return compress(symbols)

        return run

    cases = [
        Case("co3", product(), n, _payload_bytes),
        Case("co3, 2 threads", product(num_threads=2), n, _payload_bytes),
        Case("co3, prior empirical", product(prior="empirical"), n, _payload_bytes),
        Case("co3, prior auto", product(prior="auto"), n, _payload_bytes),
        Case("co3, structure auto", product(structure="auto"), n, _payload_bytes),
        Case(RANS, product(coder="rans"), n, _payload_bytes),
        Case(STRUCTURED, product(coder="rans", structure="auto"), n, _payload_bytes),
        Case("memcpy", lambda: np.copyto(out, flat), n),
    ]
    for name, (compress, _) in byte_compressors().items():
        repeats = SLOW_REPEATS.get(name, 1_000_000)
        cases.append(Case(f"NumPy + {name}", rival(compress), n, len, repeats))
    return cases


def decode_cases(update: Arrays, residual: Arrays, config: CodecConfig) -> list[Case]:
    """Return the server's work for one reply, done by the product and by its rivals."""
    n = sum(array.size for array in update.values())
    flat, out = np.zeros(n, np.float32), np.empty(n, np.float32)
    sums = {name: np.zeros_like(array) for name, array in update.items()}
    scales, fmt = _scales(update, residual, config), config.float_format
    layout = Layout.of(update)
    symbols, _ = numpy_convert(update.values(), residual.values(), scales, config.gamma, fmt)
    payload = encode_update(update, residual, config).payload

    def adder(**changes: object) -> Callable[[], Arrays]:
        changed = dataclasses.replace(config, **changes)
        payload = encode_update(update, residual, changed).payload
        return lambda: accumulate_update(payload, sums, WEIGHT)

    def rival(compress: Compress, decompress: Decompress) -> Callable[[], None]:
        data = compress(symbols)

        def run() -> None:
            unpacked = np.frombuffer(decompress(data), np.uint8)
            numpy_accumulate(unpacked, sums.values(), scales, WEIGHT, fmt)

        return run

    cases = [
        Case("co3", adder(), n),
        Case("co3, 2 threads", lambda: accumulate_update(payload, sums, WEIGHT, None, 2), n),
        Case("co3, decode_update", lambda: decode_update(payload, layout), n),
        Case("co3, structure auto", adder(structure="auto"), n),
        Case(RANS, adder(coder="rans"), n),
        Case(STRUCTURED, adder(coder="rans", structure="auto"), n),
        Case("memcpy", lambda: np.copyto(out, flat), n),
    ]
    for name, (compress, decompress) in byte_compressors().items():
        if name != "zstd 19":  # unpacks like the other levels and takes seconds to prepare
            cases.append(Case(f"NumPy + {name}", rival(compress, decompress), n))
    return cases


def measure_update(
    report: Report, update: Update, label: str, config: CodecConfig, repeats: int
) -> None:
    """Measure both directions on one update, in the second round, where there is a residual."""
    residual = encode_update(update.arrays, None, config).residual
    where = f"{update.name}, {label}"
    timings = measure(encode_cases(update.arrays, residual, config), repeats)
    report.add_timings(f"{where}: encode", timings)
    _speed_targets(report, f"encode, {where}", timings, ENCODE_REACH[label])
    if ENCODE_REACH[label]:
        rival = next(timing for timing in timings if timing.case.name == BASE_RIVAL)
        times = rival.times(timings[0])
        report.at_least(f"encode against {BASE_RIVAL}, {where}", times, 5, "times as fast")
    timings = measure(decode_cases(update.arrays, residual, config), repeats)
    report.add_timings(f"{where}: decode and accumulate", timings)
    _speed_targets(report, f"decode and accumulate, {where}", timings, DECODE_REACH[label])


def _speed_targets(
    report: Report, what: str, timings: list[Timing], reach: dict[str, float]
) -> None:
    for timing in timings:
        name = timing.case.name
        if name in reach:
            speed = timing.best_speed / 1e6
            report.at_least(what + name.removeprefix("co3"), speed, reach[name], "M/s")


def _payload_bytes(encoded: EncodedUpdate) -> int:
    return len(encoded.payload)


def _scales(update: Arrays, residual: Arrays, config: CodecConfig) -> np.ndarray:
    """Return the scales that the product chooses, float32 [tensors], in the update's order."""
    stats = encode_update(update, residual, config).stats
    return np.array([tensor.scale for tensor in stats.tensors], np.float32)


def main(argv: Sequence[str] | None = None) -> Row:
    """Run the benchmark."""
    arguments = parser("Whole encode and decode of an update, against NumPy with zstd or zlib.")
    add_timing_options(arguments)
    options = arguments.parse_args(argv)
    report = Report("roundtrip", options)
    for update in load_updates(options):
        for label, config in first_if_quick(CONFIGS, options).items():
            measure_update(report, update, label, config, num_repeats(options))
    return report.finish()


if __name__ == "__main__":
    main()
