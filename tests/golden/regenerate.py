"""Golden payloads: stored bytes of every kind of payload, and what they decode to.

    python tests/golden/regenerate.py

writes `<case>.bin` (the payload) and `<case>.decoded.bin` (bytes of the decoded arrays, in layout
order, little-endian) beside this file, for every case that has none. Payloads of version 1 stay
readable and decode to the same arrays: their files stay as they are, whatever an encoder would
write today.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))

from co3_flower.codec import EncodedUpdate, decode_update, encode_raw_update, encode_update  # noqa: E402
from co3_flower.config import CodecConfig  # noqa: E402

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One golden payload: what is encoded, and how."""

    update: Arrays
    encode: Callable[[Arrays], EncodedUpdate]


def make_array(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Heavy-tailed float32 [shape], one entry in eight zero, from integers: the same everywhere."""
    size = int(np.prod(shape))
    state, numbers = seed, []
    for _ in range(size):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32  # Knuth's and Lewis's generator
        top = state >> 16
        numbers.append(0 if top % 8 == 0 else (top - 2**15) ** 3)
    return (np.array(numbers, np.float64) / 2.0**50).astype(np.float32).reshape(shape)


UPDATE: Arrays = {
    "conv.weight": make_array((16, 9, 9), 1),
    "conv.bias": make_array((16,), 2),
    "norm.mean": make_array((16,), 3),
    "norm.tracked": np.array(41, np.int64),
    "fc.weight": make_array((10, 120), 4),
    "fc.bias": make_array((10,), 5),
    "scalar": np.array(-0.75, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "half": make_array((7,), 6).astype(np.float16),
    "mask": np.array([True, False, True]),
}
LARGE: Arrays = {
    f"layer{i}.weight": make_array((48, 12, 3, 3), 10 + i)
    * (np.float32(2.0) ** (np.arange(48) % (3 + i))).reshape(-1, 1, 1, 1).astype(np.float32)
    for i in range(2)
} | {"head.bias": make_array((300,), 20)}
RESIDUAL: Arrays = {
    name: make_array(array.shape, 100 + i)
    for i, (name, array) in enumerate(UPDATE.items())
    if array.dtype.kind == "f" and name != "half"
}


def with_settings(**settings: object) -> Callable[[Arrays], EncodedUpdate]:
    """Encode with a residual, one buffer and one raw tensor."""
    config = CodecConfig(buffers=("norm.mean",), raw=("half",), **settings)  # type: ignore[arg-type]
    return lambda update: encode_update(update, RESIDUAL, config)


CASES = {
    "e2m1": Case(UPDATE, with_settings()),
    "e2m1-std-coarse": Case(UPDATE, with_settings(scale="std", scale_multiplier=0.05)),
    "e5m2-unit-auto": Case(UPDATE, with_settings(format="e5m2", scale="unit", prior="auto")),
    "e4m3fn-absmax-empirical": Case(
        UPDATE, with_settings(format="e4m3fn", scale="absmax", prior="empirical")
    ),
    "e3m0-laplace-pooled": Case(
        UPDATE, with_settings(format="e3m0", prior="laplace", min_numel=5000)
    ),
    "e2m1fn-norm-own": Case(UPDATE, with_settings(format="e2m1fn", prior="norm", min_numel=1)),
    "withheld": Case(
        UPDATE, lambda update: encode_update(update, None, CodecConfig(), max_payload_bytes=1)
    ),
    "no-tensors": Case({}, lambda update: encode_update(update, None, CodecConfig())),
    "none": Case(UPDATE, encode_raw_update),
    "rans": Case(UPDATE, with_settings(coder="rans")),
    "rans-e5m2-by-law": Case(
        UPDATE, with_settings(coder="rans", format="e5m2", scale="unit", min_numel=5)
    ),
    "structure": Case(LARGE, lambda update: encode_update(update, None, CodecConfig())),
    "structure-rans": Case(
        LARGE, lambda update: encode_update(update, None, CodecConfig(coder="rans", format="e3m2"))
    ),
    "structure-rans-coarse": Case(
        LARGE,
        lambda update: encode_update(
            update, None, CodecConfig(coder="rans", scale="std", scale_multiplier=0.1)
        ),
    ),
}


def as_bytes(decoded: Arrays) -> bytes:
    """Bytes of all arrays one after the other, little-endian."""
    return b"".join(
        array.astype(array.dtype.newbyteorder("<")).tobytes() for array in decoded.values()
    )


def main() -> None:
    """Write the files of every case that has none."""
    for name, case in CASES.items():
        if (FOLDER / f"{name}.bin").exists():
            continue
        payload = case.encode(case.update).payload
        (FOLDER / f"{name}.bin").write_bytes(payload)
        decoded = decode_update(payload, case.update)
        (FOLDER / f"{name}.decoded.bin").write_bytes(as_bytes(decoded))
        print(f"{name}: {len(payload)} bytes")


if __name__ == "__main__":
    main()
