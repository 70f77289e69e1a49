"""One client's rounds once more, from what it wanted to send and what the server used of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import naive
from co3_flower import CodecConfig, decode_update, encode_update

Arrays = dict[str, np.ndarray]


def check_nothing_is_lost(
    rounds: Iterable[tuple[Arrays, bytes, bool]], config: CodecConfig
) -> Arrays:
    """Hold a client to the law of acknowledged updates; return the residual that it must end with.

    Each round is the update before compensation, the payload that was made of it, and whether the
    server used that. Every payload must be that of the compensated update, byte for byte, and
    sum of used y + c + m + (1 - gamma) * sum of earlier m = sum of g, float32 rounding apart.
    """
    residual: Arrays | None = None
    unused: Arrays | None = None
    total: Arrays = {}  # of the law's two sides
    scale: Arrays = {}
    for update, payload, is_used in rounds:
        coded = [name for name, g in update.items() if g.dtype.kind == "f"]
        compensated = dict(update)
        for name in coded:
            g = update[name]
            decay = 1.0 if name in config.buffers else config.gamma
            left = None if residual is None else residual[name]
            again = None if unused is None else unused[name]
            compensated[name] = (g + naive.carry(left, decay, again)).astype(np.float32)
            rest = total.setdefault(name, np.zeros(g.shape))
            if left is not None:
                rest -= (1 - np.float64(np.float32(decay))) * left
            rest += g
            scale[name] = scale.get(name, np.zeros(g.shape)) + np.abs(compensated[name])
        assert payload == encode_update(compensated, None, config).payload
        decoded = decode_update(payload, update)
        residual = {name: naive.next_residual(compensated[name], decoded[name]) for name in coded}
        unused = None if is_used else {name: decoded[name] for name in coded}
        if is_used:
            for name in coded:
                total[name] -= decoded[name]
    assert residual is not None
    for name, m in residual.items():
        rest = total[name] - m - (0 if unused is None else unused[name])
        # 4 roundings to float32 a round, each of half an ulp of what is there
        assert (np.abs(rest) <= 4 * 2.0**-24 * scale[name] + 1e-30).all()
    return residual
