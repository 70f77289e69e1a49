"""CO3 itself, and float32 as it is, behind the interface of their rivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.codec import decode_update, encode_raw_update, encode_update
from co3_flower.compressors.interface import RESIDUAL, Compressor, State, Tensors
from co3_flower.config import CodecConfig
from co3_flower.layout import Layout
from co3_flower.payload import SCHEME_CO3, SCHEME_NONE


class _OwnPayload(Compressor):
    """A compressor whose payload is the codec's own, without a body in a frame."""

    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return the payload of the tensors and their residual."""
        return self.encode(tensors, state, round_seed)

    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the tensors of a payload."""
        return self.decode(body, layout, round_seed)

    def decode(
        self, payload: bytes | memoryview, layout: Layout | Mapping[str, Any], round_seed: int
    ) -> dict[str, NDArray[Any]]:
        """Decode a payload; see `decode_update`."""
        return decode_update(payload, layout)


@dataclass(frozen=True, kw_only=True)
class Co3(_OwnPayload):
    """Convert, correct, compress: `encode_update` with a `CodecConfig`.

    Parameters
    ----------
    config : CodecConfig
        Settings; its ``raw`` and ``buffers`` give way to the compressor's.
    """

    name: ClassVar[str] = "co3"
    scheme: ClassVar[int] = SCHEME_CO3
    config: CodecConfig = CodecConfig()

    def encode(
        self, update: Mapping[str, Any], state: State | None, round_seed: int
    ) -> tuple[bytes, Tensors]:
        """Return the payload, and the residual as the state."""
        config = self.config
        if self.raw or self.buffers:
            config = replace(config, raw=self.raw, buffers=self.buffers)
        encoded = encode_update(update, _residual(state), config)
        return encoded.payload, {RESIDUAL + k: v for k, v in encoded.residual.items()}


@dataclass(frozen=True, kw_only=True)
class Float32(_OwnPayload):
    """The update as it is: 32 bits an entry."""

    name: ClassVar[str] = "none"
    scheme: ClassVar[int] = SCHEME_NONE

    def encode(
        self, update: Mapping[str, Any], state: State | None, round_seed: int
    ) -> tuple[bytes, Tensors]:
        """Return the payload; there is no state."""
        return encode_raw_update(update).payload, {}


def _residual(state: State | None) -> Tensors | None:
    if not state:
        return None
    return {key.removeprefix(RESIDUAL): np.asarray(array) for key, array in state.items()}
