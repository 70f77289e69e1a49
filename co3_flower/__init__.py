"""co3_flower: communication-efficient federated learning for Flower (convert, correct, compress).

The codec needs NumPy and numba only; Flower's parts are imported when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from co3_flower.codec import (
    EncodedUpdate,
    accumulate_update,
    decode_update,
    encode_raw_update,
    encode_update,
)
from co3_flower.config import CodecConfig
from co3_flower.errors import Co3Error, ConfigError, PayloadError
from co3_flower.formats import FloatFormat
from co3_flower.gennorm import GenNorm, fit_gennorm
from co3_flower.layout import Layout
from co3_flower.stats import TensorStats, UpdateStats

if TYPE_CHECKING:
    from co3_flower.client import CO3NumPyClient, co3_mod
    from co3_flower.device_array import device_record
    from co3_flower.strategy import CO3Strategy

__version__ = "0.1.0"

__all__ = [
    "CO3NumPyClient",
    "CO3Strategy",
    "Co3Error",
    "CodecConfig",
    "ConfigError",
    "EncodedUpdate",
    "FloatFormat",
    "GenNorm",
    "Layout",
    "PayloadError",
    "TensorStats",
    "UpdateStats",
    "accumulate_update",
    "co3_mod",
    "decode_update",
    "device_record",
    "encode_raw_update",
    "encode_update",
    "fit_gennorm",
]

_FLOWER = {
    "CO3NumPyClient": "co3_flower.client",
    "co3_mod": "co3_flower.client",
    "device_record": "co3_flower.device_array",
    "CO3Strategy": "co3_flower.strategy",
}


def __getattr__(name: str) -> Any:
    """Import Flower's parts on demand."""
    if name in _FLOWER:
        return getattr(import_module(_FLOWER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
