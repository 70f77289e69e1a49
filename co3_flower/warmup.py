"""Compile the codec's kernels ahead of time: ``python -m co3_flower.warmup``.

Compiled code is cached on disk beside the package; a set-up or an image build that runs this spares
the first client of a run some twenty seconds.
"""

from __future__ import annotations

import time

import numpy as np

from co3_flower.codec import accumulate_update, decode_update, encode_update
from co3_flower.config import CODERS, STRUCTURES, CodecConfig


def warm_up() -> float:
    """Encode and decode a small update in every way that needs a kernel of its own.

    Returns
    -------
    float
        Seconds that it took: nearly all of it compilation, or next to nothing.
    """
    start = time.perf_counter()
    rng = np.random.default_rng(0)
    update = {
        "weight": rng.standard_t(3, (64, 128)).astype(np.float32),
        "bias": rng.standard_normal(64).astype(np.float32),
        "running_mean": rng.standard_normal(64).astype(np.float32),
    }
    total = {name: np.zeros_like(array) for name, array in update.items()}
    for coder in CODERS:
        for structure in STRUCTURES:
            config = CodecConfig(coder=coder, structure=structure, buffers=("running_mean",))
            first = encode_update(update, None, config)
            second = encode_update(update, first.residual, config)
            decode_update(second.payload, update)
            accumulate_update(second.payload, total, 1)
    encode_update(update, None, CodecConfig(scale="std", prior="auto"))
    encode_update(update, None, CodecConfig(target_bits_per_parameter=2.0))
    return time.perf_counter() - start


if __name__ == "__main__":
    print(f"kernels ready after {warm_up():.1f} s")
