"""What every compressor does, and the payload that all rivals of CO3 share.

A rival compresses the trainable float tensors by its paper's rule into a body. Buffers, and tensors
that travel raw, are coded as CO3 codes them, the same for all, in a small CO3 payload behind it. So
a comparison is one of the rules alone, and all bytes count.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from co3_flower.codec import choose_kinds, decode_update, encode_update
from co3_flower.config import CodecConfig
from co3_flower.errors import PayloadError
from co3_flower.feedback import check_residual
from co3_flower.layout import FLOAT_DTYPES, Kind, Layout, as_arrays, cut_flat, sub_layout
from co3_flower.payload import (
    MAGIC,
    NUM_CRC_BYTES,
    VERSION,
    check_kinds,
    kinds_bytes,
    num_raw_bytes,
    open_frame,
    pack_kinds,
    seal_frame,
    unpack_kinds,
)
from co3_flower.stats import UpdateStats, count_parameters

Tensors = dict[str, NDArray[np.float32]]
State = Mapping[str, NDArray[np.float32]]

# magic, version, scheme, whether kinds follow, layout digest, bytes of body, bytes of the rest
_HEADER = struct.Struct("<4sBBH8sQQ")
_SCHEME_AT = 5
_FLOAT32 = np.dtype(np.float32)
RESIDUAL = "residual/"  # of a compressor's error feedback, by tensor
_REST = "rest/"  # residual of the buffers


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """A lossy code for updates; its fields are its settings, named as its paper names them.

    A subclass gives ``name`` and ``scheme`` (the payload's byte), `compress` and `decompress`, and
    where the server has work of its own to do after summing, `finish`.

    Parameters
    ----------
    raw : sequence of str or int
        Names or positions of tensors that travel as they are.
    buffers : sequence of str or int
        Names or positions of float tensors that are no parameters (BatchNorm's statistics).
    """

    raw: Sequence[str | int] = ()
    buffers: Sequence[str | int] = ()

    name: ClassVar[str]
    scheme: ClassVar[int]
    is_sketch: ClassVar[bool] = False  # decodes to what is no update before it is summed

    @abstractmethod
    def compress(self, tensors: Tensors, state: State, round_seed: int) -> tuple[bytes, Tensors]:
        """Return the body for the trainable tensors, and the state for the next round.

        Parameters
        ----------
        tensors : dict of str to float32 array
            Finite; not changed.
        state : mapping of str to float32 array
            What the last call returned; empty at first. Keys "residual/<tensor>" hold what is still
            to be sent.
        round_seed : int
            Non-negative; the server decodes with the same one.
        """

    @abstractmethod
    def decompress(self, body: memoryview, layout: Layout, round_seed: int) -> Tensors:
        """Return the tensors of the layout (all float32) that a body stands for, or a sketch.

        Raises
        ------
        PayloadError
            If it is no sound body; nothing may be allocated beyond a small multiple of the layout.
        """

    def finish(
        self, total: Tensors, server_state: State, layout: Layout
    ) -> tuple[Tensors, Tensors]:
        """Return the update that a weighted mean of decoded bodies stands for.

        Parameters
        ----------
        total : dict of str to float32 array
            Weighted mean of what `decompress` returned, over the clients of a round.
        server_state : mapping of str to float32 array
            What the last call returned; empty at first.
        layout : Layout
            Of the trainable tensors, all float32.

        Returns
        -------
        update : dict of str to float32 array
            One array a tensor of the layout.
        server_state : dict of str to float32 array
            For the next round.
        """
        return total, dict(server_state)

    def encode(
        self, update: Mapping[str, Any], state: State | None, round_seed: int
    ) -> tuple[bytes, Tensors]:
        """Compress an update into one payload.

        Parameters
        ----------
        update : mapping of str to array
            Gradient or weight difference, as for `encode_update`. Not changed.
        state : mapping of str to float32 array, or None
            What the last call returned, None at first. Not changed.
        round_seed : int
            Seed of this client and round, for compressors that draw.

        Returns
        -------
        payload : bytes
            All that goes up to the server.
        state : dict of str to float32 array
            What the next call needs; the same keys in every round.

        Raises
        ------
        ValueError
            If a float tensor, alone or with its residual, holds NaN or infinity, a selected name
            is missing, the state is that of other tensors, or round_seed is no such integer.
        """
        _check_seed(round_seed)
        arrays = as_arrays(update)
        layout = Layout.of(arrays)
        kinds = self._kinds(layout)
        state = state or {}
        tensors = {}
        for i in _positions(kinds, Kind.CODED):
            name = layout.names[i]
            with np.errstate(over="ignore"):
                tensors[name] = np.ascontiguousarray(arrays[name], np.float32).reshape(
                    layout.shapes[i]
                )
            _check_finite("update", name, tensors[name])
        own = {k: v for k, v in state.items() if not k.startswith(_REST)}
        body, new_state = self.compress(tensors, own, round_seed)
        others = [i for i, kind in enumerate(kinds) if kind != Kind.CODED]
        rest = b""
        if others:
            encoded = encode_update(
                {layout.names[i]: arrays[layout.names[i]] for i in others},
                _strip(state, _REST) or None,
                _rest_config(layout, kinds),
            )
            rest = encoded.payload
            new_state = {**new_state, **_prefix(encoded.residual, _REST)}
        return self._frame(layout, kinds, body, rest), new_state

    def decode(
        self, payload: bytes | memoryview, layout: Layout | Mapping[str, Any], round_seed: int
    ) -> dict[str, NDArray[Any]]:
        """Decode a payload.

        Parameters
        ----------
        payload : bytes-like
            What a client sent.
        layout : Layout or mapping of str to array
            Names, shapes and dtypes of the update.
        round_seed : int
            That of `encode`.

        Returns
        -------
        dict of str to array
            Float32 arrays in the layout's shapes (or a sketch in their place), buffers too; raw
            tensors in their own dtype.

        Raises
        ------
        PayloadError
            If the bytes are no sound payload of this compressor and layout.
        """
        _check_seed(round_seed)
        layout = Layout.of(layout)
        kinds, body, rest = self._unframe(payload, layout)
        coded = sub_layout(layout, _positions(kinds, Kind.CODED), _FLOAT32)
        decoded: dict[str, NDArray[Any]] = dict(self.decompress(body, coded, round_seed))
        for name, array in decoded.items():
            if not np.isfinite(array).all():
                raise PayloadError(f"decoded entries must be finite, got others in {name!r}")
        others = [i for i, kind in enumerate(kinds) if kind != Kind.CODED]
        if others:
            decoded |= decode_update(rest, sub_layout(layout, others))
        elif len(rest):
            raise PayloadError(f"payload must end with its body, got {len(rest)} bytes more")
        return decoded if self.is_sketch else {name: decoded[name] for name in layout.names}

    def take_back(
        self,
        state: State,
        payload: bytes | memoryview,
        layout: Layout | Mapping[str, Any],
        round_seed: int,
    ) -> Tensors:
        """Return the state with an update added that the server did not use, where it is kept.

        That is so for tensors with a residual; a compressor without error feedback has no place for
        what was lost. ``round_seed`` is that of the lost round.
        """
        result = {name: np.asarray(array) for name, array in state.items()}
        keys = (RESIDUAL, _REST)
        if any(key.startswith(keys) for key in result):
            for name, lost in self.decode(payload, layout, round_seed).items():
                for key in (RESIDUAL + name, _REST + name):
                    if key in result:
                        result[key] = np.asarray(result[key] + np.asarray(lost, np.float32))
        return result

    def _kinds(self, layout: Layout) -> tuple[Kind, ...]:
        return choose_kinds(layout, CodecConfig(raw=self.raw, buffers=self.buffers))

    def _frame(self, layout: Layout, kinds: tuple[Kind, ...], body: bytes, rest: bytes) -> bytes:
        raw = _positions(kinds, Kind.RAW)
        has_kinds = any(kinds)
        header = _HEADER.pack(
            MAGIC, VERSION, self.scheme, has_kinds, layout.digest(raw), len(body), len(rest)
        )
        return seal_frame([header, pack_kinds(kinds) if has_kinds else b"", body, rest])

    def _unframe(
        self, payload: bytes | memoryview, layout: Layout
    ) -> tuple[tuple[Kind, ...], memoryview, memoryview]:
        try:
            data = memoryview(payload).cast("B")
        except TypeError:
            raise TypeError(
                f"payload must be a bytes-like object, got {type(payload).__name__}"
            ) from None
        content = open_frame(data, _HEADER.size)
        if (scheme := data[_SCHEME_AT]) != self.scheme:
            raise PayloadError(
                f"payload must be of scheme {self.scheme} ({self.name}), got {scheme}"
            )
        return _sections(content, layout)


def _sections(
    content: memoryview, layout: Layout
) -> tuple[tuple[Kind, ...], memoryview, memoryview]:
    """Return the kinds, the body and the rest of a payload without its checksum."""
    *_, has_kinds, digest, body_bytes, rest_bytes = _HEADER.unpack_from(content)
    if has_kinds > 1:
        raise PayloadError(f"flags must be 0 or 1, got {has_kinds}")
    body_at = _HEADER.size + (kinds_bytes(layout) if has_kinds else 0)
    rest_at = body_at + body_bytes
    if rest_at + rest_bytes != len(content):
        raise PayloadError(
            f"payload must hold {rest_at + rest_bytes} bytes before its checksum, "
            f"got {len(content)}"
        )
    kinds = (Kind.CODED,) * len(layout)
    if has_kinds:
        kinds = unpack_kinds(content[_HEADER.size : body_at], layout)
    check_kinds(kinds, layout, digest)
    return kinds, content[body_at:rest_at], content[rest_at:]


class BodyReader:
    r"""A position in a body; `take` never goes beyond its end.

    Examples
    --------
    >>> reader = BodyReader(memoryview(b"\x01\x00\x00\x00ab"))
    >>> reader.unpack("<I"), bytes(reader.take(2, "text"))
    ((1,), b'ab')
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._position = 0

    def take(self, size: int, what: str) -> memoryview:
        """Return the next bytes; PayloadError where there are fewer."""
        left = len(self._body) - self._position
        if not 0 <= size <= left:
            raise PayloadError(f"payload must hold {size} bytes of {what}, got {left}")
        self._position += size
        return self._body[self._position - size : self._position]

    def unpack(self, format: str) -> tuple[Any, ...]:
        """Return the next numbers, by a format of the struct module."""
        return struct.unpack(format, self.take(struct.calcsize(format), "numbers"))

    def floats(self, count: int, what: str) -> NDArray[np.float32]:
        """Return the next float32 numbers, all finite; a new array."""
        values = np.frombuffer(self.take(4 * count, what), "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise PayloadError(f"{what} must be finite, got NaN or infinity")
        return values

    def rest(self) -> memoryview:
        """Return all that is left."""
        return self.take(len(self._body) - self._position, "rest")

    def end(self) -> None:
        """Raise PayloadError where something is left."""
        if self._position != len(self._body):
            raise PayloadError(f"body must end after {self._position} bytes, got {len(self._body)}")


def flatten(tensors: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return all entries in order, as one new vector."""
    parts = [array.reshape(-1) for array in tensors.values()]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def unflatten(vector: NDArray[np.float32], layout: Layout) -> Tensors:
    """Return the tensors whose entries lie one after the other in a vector, as views."""
    offsets = np.cumsum([0, *layout.numels])
    return dict(zip(layout.names, cut_flat(vector, offsets, layout.shapes), strict=True))


def compensate(tensors: Tensors, state: State) -> Tensors:
    """Return each tensor plus its residual (error feedback, arXiv 1901.09847).

    Raises
    ------
    ValueError
        If the residuals are not those of these tensors, or a sum is beyond float32.
    """
    residual = _strip(state, RESIDUAL)
    if not residual:
        return tensors
    check_residual(residual, list(tensors), [array.shape for array in tensors.values()])
    with np.errstate(over="ignore"):
        whole = {name: np.asarray(array + residual[name]) for name, array in tensors.items()}
    for name, array in whole.items():
        _check_finite("update plus residual", name, array)
    return whole


def residual_state(compensated: Tensors, decoded: Mapping[str, NDArray[np.float32]]) -> Tensors:
    """Return the state that keeps what a payload left out of the compensated tensors.

    Raises
    ------
    ValueError
        If a difference is beyond float32.
    """
    with np.errstate(over="ignore"):
        left = {name: np.asarray(array - decoded[name]) for name, array in compensated.items()}
    for name, array in left.items():
        _check_finite("residual", name, array)
    return _prefix(left, RESIDUAL)


def generator(round_seed: int) -> np.random.Generator:
    """Return the random numbers of a client and round, the same on every machine."""
    return np.random.Generator(np.random.PCG64(round_seed))


def settings_of(compressor: Compressor) -> dict[str, Any]:
    """Return a compressor's own settings, without its choice of tensors."""
    return {
        field.name: getattr(compressor, field.name)
        for field in fields(compressor)
        if field.name not in ("raw", "buffers")
    }


def rival_stats(payload: bytes, update: Mapping[str, Any], state: State) -> UpdateStats:
    """Return what a rival's payload cost; what its rule lost is known where it has a residual.

    ``code_bits`` are those of the body and ``raw_bits`` those of raw tensors. ``residual_ratio`` is
    NaN without error feedback, ``entropy_bits`` and ``sqnr_db`` always.

    Parameters
    ----------
    payload : bytes
        From `Compressor.encode`.
    update : mapping of str to array
        What was encoded.
    state : mapping of str to float32 array
        What it returned.
    """
    arrays = as_arrays(update)
    layout = Layout.of(arrays)
    kinds, body, rest = _sections(memoryview(payload)[:-NUM_CRC_BYTES], layout)
    raw_bytes = num_raw_bytes(rest)
    coded = [layout.names[i] for i in _positions(kinds, Kind.CODED)]
    parameters = count_parameters(layout, layout.plan(kinds, 1))
    residuals = [state[RESIDUAL + name] for name in coded if RESIDUAL + name in state]
    sent = sum(float(np.abs(arrays[name], dtype=np.float64).sum()) for name in coded)
    kept = sum(float(np.abs(array, dtype=np.float64).sum()) for array in residuals)
    bits = 8 * len(payload)
    return UpdateStats(
        num_parameters=parameters,
        bits_per_parameter=bits / parameters if parameters else math.nan,
        payload_bits=bits,
        code_bits=8 * len(body),
        side_info_bits=bits - 8 * (len(body) + raw_bytes),
        structure_bits=0,
        raw_bits=8 * raw_bytes,
        entropy_bits=math.nan,
        sqnr_db=math.nan,
        residual_ratio=kept / sent if residuals and sent else math.nan,
        num_saturated=0,
        num_underflowed=0,
        _make_tensors=tuple,
    )


def _positions(kinds: Sequence[Kind], kind: Kind) -> list[int]:
    return [i for i, other in enumerate(kinds) if other == kind]


def _rest_config(layout: Layout, kinds: Sequence[Kind]) -> CodecConfig:
    return CodecConfig(
        raw=tuple(
            layout.names[i] for i in _positions(kinds, Kind.RAW) if layout.dtypes[i] in FLOAT_DTYPES
        ),
        buffers=tuple(layout.names[i] for i in _positions(kinds, Kind.BUFFER)),
    )


def _check_finite(what: str, name: str, array: NDArray[np.float32]) -> None:
    if bad := int(np.count_nonzero(~np.isfinite(array))):
        raise ValueError(f"{what} must be finite, got {bad} NaN or infinite entries in {name!r}")


def _check_seed(round_seed: object) -> None:
    if isinstance(round_seed, bool) or not isinstance(round_seed, Integral) or round_seed < 0:
        raise ValueError(f"round_seed must be an integer of at least 0, got {round_seed!r}")


def _strip(state: State, prefix: str) -> Tensors:
    return {
        key.removeprefix(prefix): np.asarray(value)
        for key, value in state.items()
        if key.startswith(prefix)
    }


def _prefix(arrays: Mapping[str, NDArray[np.float32]], prefix: str) -> Tensors:
    return {prefix + key: value for key, value in arrays.items()}
