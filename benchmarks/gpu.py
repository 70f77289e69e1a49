"""The codec on a GPU, in GB/s of float32, beside a copy, a cast to float8 and the numba path.

Run with ``python -m benchmarks.gpu``. Without a GPU it says so and measures nothing. The update is
synthetic and lives on the device; encoding ends with the payload on the host, decoding adds to a
sum on the device. What more streams in a chunk take in bits, and give in speed, has a table of its
own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.data import QUICK_PARAMETERS, Update, synthetic_update
from benchmarks.harness import Case, Row, Timing, measure, num_repeats, parser
from benchmarks.report import Report
from co3_flower import CodecConfig, accumulate_update, decode_update, encode_update

SIZES = (1_000_000, 7_000_000, 25_000_000)
STREAMS = (2, 8, 32, 64, 128, 255)
REACH = 40.0  # GB/s of float32 on an H200-class card, for the largest update


class Device:
    """A device of torch, and how to wait for it."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(name)

    def describe(self) -> dict[str, str]:
        """Return what the device is and what drives it."""
        torch, kind = self.torch, self.device.type
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        return {"device": name, "torch": torch.__version__, "CUDA": str(torch.version.cuda)}

    def up(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return arrays as tensors on the device."""
        return {name: self.torch.tensor(x, device=self.device) for name, x in arrays.items()}

    def waiting(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return work that ends when the device has done it."""

        def run() -> Any:
            result = work()
            if self.device.type == "cuda":
                self.torch.cuda.synchronize(self.device)
            return result

        return run


def encode_cases(update: Update, device: Device, config: CodecConfig) -> list[Case]:
    """Return all ways to make an update small or move it, the product first."""
    n, torch = update.num_parameters, device.torch
    tensors = device.up(update.arrays)
    source = torch.cat([x.reshape(-1) for x in tensors.values()])
    target = torch.empty_like(source)
    residual = encode_update(tensors, None, config, device=device.device).residual
    on_host = encode_update(update.arrays, None, config).residual

    def encode() -> Any:
        return encode_update(tensors, residual, config, device=device.device)

    def encode_on_host() -> Any:
        return encode_update(update.arrays, on_host, config)

    def size(encoded: Any) -> int:
        return len(encoded.payload)

    return [
        Case("co3 on the device", device.waiting(encode), n, size),
        Case("memcpy on the device", device.waiting(lambda: target.copy_(source)), n),
        Case("cast to float8", device.waiting(lambda: source.to(torch.float8_e5m2)), n, _size_of),
        Case("co3 with numba", encode_on_host, n, size, max_repeats=3),
    ]


def decode_cases(update: Update, device: Device, config: CodecConfig) -> list[Case]:
    """Return the ways to add a payload to a sum, the product first."""
    n = update.num_parameters
    payload = encode_update(update.arrays, None, config).payload
    total = decode_update(payload, update.arrays)
    on_device = device.up(total)

    def add_on_device() -> Any:
        return accumulate_update(payload, on_device, 1.0, device=device.device)

    return [
        Case("co3 on the device", device.waiting(add_on_device), n),
        Case("co3 with numba", lambda: accumulate_update(payload, total, 1.0), n, max_repeats=3),
    ]


def stream_rows(update: Update, device: Device, options: argparse.Namespace) -> list[Row]:
    """Return what payloads of several numbers of streams take, and how fast they are."""
    rows: list[Row] = []
    for coder, streams in [*(("huffman", number) for number in STREAMS), ("rans", 2)]:
        config = CodecConfig(coder=coder, structure=options.structure, num_streams=streams)
        encode, decode = (
            measure(make(update, device, config)[:1], num_repeats(options))[0]
            for make in (encode_cases, decode_cases)
        )
        bits = encode.bits_per_item or 0.0
        rows.append(
            {
                "coder": coder,
                "streams": streams if coder == "huffman" else "4 states",
                "bits/parameter": bits,
                "more than with 2": bits / rows[0]["bits/parameter"] - 1.0 if rows else 0.0,
                "encode GB/s": gigabytes(encode),
                "decode GB/s": gigabytes(decode),
            }
        )
    return rows


def gigabytes(timing: Timing) -> float:
    """GB of float32 a second in the best repetition."""
    return 4e-9 * timing.best_speed


def _size_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _rows(timings: Sequence[Timing]) -> list[Row]:
    return [
        {
            "": timing.case.name,
            "GB/s of float32": gigabytes(timing),
            "bits/parameter": timing.bits_per_item,
            "x product's time": timing.times(timings[0]),
        }
        for timing in timings
    ]


def _missing(name: str) -> str | None:
    """Return why a device cannot be measured, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if name.startswith("cuda") and not torch.cuda.is_available():
        return "torch sees no GPU"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 0, without a GPU too."""
    arguments = parser("Time the codec on a GPU.")
    arguments.add_argument("--repeats", type=int, default=None, help="9, with --quick 2")
    arguments.add_argument("--device", default="cuda", help="as torch names it; cpu for a trial")
    arguments.add_argument("--num-streams", type=int, default=64, help="of a chunk, 1 to 255")
    arguments.add_argument("--structure", choices=("auto", "none"), default="none")
    options = arguments.parse_args(argv)
    reason = _missing(options.device)
    if reason is not None:
        print(f"no GPU to measure: {reason}; nothing was done")
        return 0
    device = Device(options.device)
    report = Report("gpu", options)
    for name, value in device.describe().items():
        report.environment[name] = value
        print(f"{name:<14}{value}")
    config = CodecConfig(structure=options.structure, num_streams=options.num_streams)
    for size in (QUICK_PARAMETERS,) if options.quick else SIZES:
        update = synthetic_update(size, options.seed)
        label = f"{update.num_parameters / 1e6:.1f} M parameters"
        encode = measure(encode_cases(update, device, config), num_repeats(options))
        report.add_table(f"encode, {label}", _rows(encode))
        decode = measure(decode_cases(update, device, config), num_repeats(options))
        report.add_table(f"decode and accumulate, {label}", _rows(decode))
    report.at_least(f"encode, {label}", gigabytes(encode[0]), REACH, "GB/s")
    report.at_least(f"decode, {label}", gigabytes(decode[0]), REACH, "GB/s")
    report.add_table(f"streams, {label}", stream_rows(update, device, options))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
