"""CO3 and the compressors that a user would compare it with, behind one interface.

``COMPRESSORS`` maps each name to a compressor with its paper's usual settings; others are had with
``dataclasses.replace`` or by `make_compressor`.

Examples
--------
>>> import numpy as np
>>> update = {"w": np.float32([[0.5, -1.0], [0.25, 0.0]])}
>>> payload, state = COMPRESSORS["fp16"].encode(update, None, round_seed=0)
>>> COMPRESSORS["fp16"].decode(payload, update, round_seed=0)["w"].tolist()
[[0.5, -1.0], [0.25, 0.0]]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from co3_flower.compressors.casts import Bf16, Fp8, Fp16
from co3_flower.compressors.co3 import Co3, Float32
from co3_flower.compressors.interface import Compressor, rival_stats, settings_of
from co3_flower.compressors.levels import Qsgd, SignSgd, TernGrad, TinyScript
from co3_flower.compressors.lowrank import PowerSgd
from co3_flower.compressors.rotations import Eden, OneBit
from co3_flower.compressors.sketches import CountSketch
from co3_flower.compressors.sparse import Sidco, Stc, TopK
from co3_flower.errors import ConfigError

COMPRESSORS: dict[str, Compressor] = {
    compressor.name: compressor
    for compressor in (
        Co3(),
        Float32(),
        Fp16(),
        Bf16(),
        Fp8(),
        Qsgd(),
        TernGrad(),
        SignSgd(),
        OneBit(),
        TopK(),
        Sidco(),
        Stc(),
        PowerSgd(),
        Eden(),
        CountSketch(),
        TinyScript(),
    )
}

__all__ = [
    "COMPRESSORS",
    "Co3",
    "Compressor",
    "is_rival",
    "make_compressor",
    "rival_stats",
    "settings_of",
]


def is_rival(name: str) -> bool:
    """Tell whether a compressor frames and reads its payload by itself, not by the codec.

    Examples
    --------
    >>> [name for name in ("co3", "none", "fp16") if is_rival(name)]
    ['fp16']
    """
    return name not in (Co3.name, Float32.name)


def make_compressor(name: str, settings: Mapping[str, Any] | None = None) -> Compressor:
    """Return the compressor of a name with some of its settings changed.

    Raises
    ------
    ConfigError
        When there is no such compressor or setting, or a value is impossible.

    Examples
    --------
    >>> make_compressor("fp16").name
    'fp16'
    """
    if not isinstance(name, str) or name not in COMPRESSORS:
        listed = ", ".join(map(repr, COMPRESSORS))
        raise ConfigError(f"compressor must be one of {listed}, got {name!r}")
    compressor = COMPRESSORS[name]
    known = settings_of(compressor)
    for key in settings or {}:
        if key not in known:
            choices = ", ".join(known) or "none"
            raise ConfigError(f"settings of {name} must be among: {choices}, got {key!r}")
    return replace(compressor, **(settings or {}))
