"""The order of the stages: an update in, one payload out (convert, correct, compress), and back.

`encode_update` is what a client does, `decode_update` and `accumulate_update` what the parameter
server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower.bitstream import chunk_size, lanes
from co3_flower.config import CodecConfig
from co3_flower.dense import Dense, Flat, HostDense, dense_for, symbols_of_zero
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.feedback import check_residual
from co3_flower.layout import FLOAT_DTYPES, Kind, Layout, Plan, cut_flat
from co3_flower.limits import NormLimit, check_magnitudes, limit_norm
from co3_flower.payload import (
    BUFFER_FORMAT,
    SCHEME_CO3,
    SCHEME_NONE,
    Parts,
    num_raw_bytes,
    read_payload,
    scale_limits,
    write_payload,
)
from co3_flower.rate import Conversion, Measured, convert_to_size, least_bytes, measure_update
from co3_flower.stats import UpdateStats, count_parameters, update_stats
from co3_flower.tables import Converted, choose_tables, code_bits

_BUFFER_GAMMA = 1.0
_BUFFER_SCALE = "mse"
_SHARES = (0.985, 0.95)  # of the bytes allowed, aimed at one after the other


@dataclass(frozen=True)
class EncodedUpdate:
    """What `encode_update` returns.

    Attributes
    ----------
    payload : bytes
        All that goes up to the server.
    residual : dict of str to float32 array
        What the conversion lost of the coded tensors and buffers, for the next round: NumPy arrays,
        or torch tensors on the device where the work was done.
    stats : UpdateStats
        Sizes and errors.
    """

    payload: bytes
    residual: dict[str, Any]
    stats: UpdateStats


def encode_update(
    update: Mapping[str, Any],
    residual: Mapping[str, Any] | None,
    config: CodecConfig,
    max_payload_bytes: int | None = None,
    scales: Mapping[str, float] | None = None,
    unused_payload: bytes | memoryview | None = None,
    device: Any = None,
) -> EncodedUpdate:
    """Convert, correct and compress a client's update into one payload.

    Parameters
    ----------
    update : mapping of str to array
        Gradient or weight difference, tensor by tensor in a fixed order: NumPy arrays or torch
        tensors, floats to be coded, integers and booleans sent as they are. Not changed. Where a
        tensor lives on a device, all work with an entry per parameter is done there, by torch; the
        payload has the same bytes.
    residual : mapping of str to float32 array, or None
        The `residual` of the last round's result, or None in the first round. Not changed.
    config : CodecConfig
        How to encode.
    max_payload_bytes : int, optional
        A larger payload is made to fit by coarser cells, as for a target; where that cannot be, it
        becomes a zero update whose residual is the whole compensated update. A zero update has a
        size of its own, `least_payload_bytes`, which is not cut.
    scales : mapping of str to float, optional
        Scales of coded tensors by name, float32, to be used as they are; the other tensors get
        theirs from the rule. A payload that is made to fit has other ones.
    unused_payload : bytes-like, optional
        The `payload` of the last round's result, where the server did not use it. What it says of
        coded tensors and buffers, c, joins this update undecayed beside the residual m:
        ``v = f32(g + f32(f32(f32(gamma) * m) + c))``. Its raw tensors are not made up for.
    device : torch.device or str, optional
        Where torch is to do the work, the CPU too, wherever the tensors live.

    Returns
    -------
    EncodedUpdate
        Payload, next residual and statistics.

    Raises
    ------
    TypeError
        If an entry has a dtype that cannot travel, or `config` is no CodecConfig.
    PayloadError
        If `unused_payload` is no sound payload of this update's layout.
    ConfigError
        If the target leaves no room beside header, scales and raw tensors.
    ValueError
        If a float tensor (or its compensated form) holds NaN or infinity, a selected name is
        missing, the residual does not fit the update, or a scale is given that no payload may
        have, for a tensor that is not coded, or beside a target.

    Examples
    --------
    >>> update = {"w": np.float32([[0.5, -1.0], [0.25, 0.0]])}
    >>> encoded = encode_update(update, None, CodecConfig(format="e2m1", scale="unit"))
    >>> decode_update(encoded.payload, update)["w"].tolist()
    [[0.5, -1.0], [0.0, 0.0]]
    >>> encoded.residual["w"].tolist()
    [[0.0, 0.0], [0.25, 0.0]]

    References
    ----------
    arXiv 2203.09044 (CO3), the three operations of a user.
    """
    if not isinstance(config, CodecConfig):
        advice = f"; use CodecConfig(format={config!r})" if isinstance(config, str) else ""
        raise TypeError(f"config must be a CodecConfig, got {config!r}{advice}")
    dense = dense_for(update, device, config.num_threads)
    arrays = dense.arrays(update)
    layout = Layout.of(arrays)
    kinds = choose_kinds(layout, config)
    plan = layout.plan(kinds, layout.table_threshold(kinds, config.min_numel))
    raw = _raw_bytes(dense, arrays, layout, plan)
    given = _given_scales(scales, layout, plan, config)
    memory, gammas = _memory(dense, residual, unused_payload, layout, plan, config)
    whole = _Update(dense, arrays, memory, gammas, layout, plan, config, sum(map(len, raw)), given)
    if config.target_bits_per_parameter is None or plan.offsets[plan.num_coded] == 0:
        conversion = _convert(whole)
    else:
        conversion = convert_to_size(_measure(whole), whole.target_bytes, whole.raw_bytes)
    payload, stats = _compress(dense, layout, plan, config, conversion, raw)
    if max_payload_bytes is not None and len(payload) > max_payload_bytes:
        payload, stats, conversion = _fit(whole, raw, max_payload_bytes)
    return EncodedUpdate(payload, _unflatten(conversion.residual, layout, plan), stats)


def least_payload_bytes(like: Layout | Mapping[str, Any], config: CodecConfig) -> int:
    """Return the size of a payload that says zero for every coded tensor and buffer.

    It is what `encode_update` sends where nothing fits in its limit; raw tensors are included.

    Parameters
    ----------
    like : Layout or mapping of str to array
        Names, shapes and dtypes of an update.
    config : CodecConfig
        How it is encoded.

    Examples
    --------
    >>> least_payload_bytes({"w": np.ones(10_000, np.float32)}, CodecConfig())
    60
    """
    layout = Layout.of(like)
    zeros = {
        name: np.zeros(shape, dtype)
        for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True)
    }
    free = replace(config, target_bits_per_parameter=None)
    return len(encode_update(zeros, None, free).payload)


def encode_raw_update(update: Mapping[str, Any]) -> EncodedUpdate:
    """Put an update in a payload as it is (the compressor "none"): every tensor raw, no residual.

    Parameters
    ----------
    update : mapping of str to array
        As for `encode_update`; dtypes are kept.

    Raises
    ------
    TypeError, ValueError
        As for `encode_update`.

    Examples
    --------
    >>> encoded = encode_raw_update({"w": np.float32([0.1, 0.2])})
    >>> encoded.stats.raw_bits, encoded.residual
    (64, {})
    """
    config = CodecConfig()
    dense = HostDense(config.num_threads)
    arrays = dense.arrays(update)
    layout = Layout.of(arrays)
    kinds = (Kind.RAW,) * len(layout)
    plan = layout.plan(kinds, config.min_numel)
    raw = _raw_bytes(dense, arrays, layout, plan)
    given = _given_scales(None, layout, plan, config)
    memory, gammas = _memory(dense, None, None, layout, plan, config)
    nothing = _convert(
        _Update(dense, arrays, memory, gammas, layout, plan, config, sum(map(len, raw)), given)
    )
    payload, stats = _compress(dense, layout, plan, config, nothing, raw, SCHEME_NONE)
    return EncodedUpdate(payload, {}, stats)


def decode_update(
    payload: bytes | memoryview,
    like: Layout | Mapping[str, Any],
    num_threads: int = 1,
    max_magnitude: float | None = None,
    norm_limit: NormLimit | None = None,
    device: Any = None,
) -> dict[str, Any]:
    """Decode a payload.

    Parameters
    ----------
    payload : bytes-like
        What a client sent.
    like : Layout or mapping of str to array
        Names and shapes in order, and the dtypes of integer, bool and raw tensors.
    num_threads : int
        Threads that decode; the result does not depend on it.
    max_magnitude : float, optional
        A float entry beyond it makes the payload unsound.
    norm_limit : NormLimit, optional
        A longer update is unsound, or scaled down.
    device : torch.device or str, optional
        Where torch is to decode, the CPU too; by default where a tensor of `like` lives.

    Returns
    -------
    dict of str to array
        Float32 for coded tensors and buffers, raw tensors in their own dtype; new arrays in the
        layout's shapes. Coded tensors and buffers are torch tensors where torch decodes, raw
        tensors NumPy arrays.

    Raises
    ------
    PayloadError
        If the bytes are no sound payload of this layout.
    TypeError
        If the payload is no bytes-like object.
    """
    _check_bytes(payload)
    dense = dense_for(like, device, num_threads)
    layout = Layout.of(like)
    parts, plan = read_payload(payload, layout)
    raw = _read_raw(parts, layout, plan)
    symbols = dense.decode(parts, plan)
    values = _limited_values(dense, parts, layout, plan, symbols, raw, max_magnitude, norm_limit)
    shapes = [layout.shapes[i] for i in plan.order]
    decoded = dense.look_up(symbols, plan.offsets, values, shapes)
    by_position = dict(zip(plan.order, decoded, strict=True)) | raw
    return {name: by_position[i] for i, name in enumerate(layout.names)}


def accumulate_update(
    payload: bytes | memoryview,
    accumulator: Mapping[str, Any],
    weight: float,
    like: Layout | Mapping[str, Any] | None = None,
    num_threads: int = 1,
    max_magnitude: float | None = None,
    norm_limit: NormLimit | None = None,
    device: Any = None,
) -> dict[str, NDArray[Any]]:
    """Decode a payload straight into a weighted sum: ``acc = f32(acc + f32(f32(weight) * y))``.

    Parameters
    ----------
    payload : bytes-like
        What a client sent.
    accumulator : mapping of str to float32 array
        C-contiguous sums of the coded tensors and buffers, changed in place; entries of raw tensors
        are not touched. NumPy arrays, or torch tensors, which may live on a device.
    weight : float
        Weight of this client, such as its number of examples.
    like : Layout or mapping of str to array, optional
        The layout; by default that of the accumulator, which suffices where no tensor is raw.
    num_threads : int
        Threads that decode and add; the result does not depend on it.
    max_magnitude : float, optional
        A float entry beyond it, before it is weighted, makes the payload unsound.
    norm_limit : NormLimit, optional
        A longer update, before it is weighted, is unsound, or scaled down.
    device : torch.device or str, optional
        Where torch is to decode, the CPU too; by default where the accumulator's tensors live.

    Returns
    -------
    dict of str to array
        The raw tensors, not weighted.

    Raises
    ------
    PayloadError
        If the bytes are no sound payload of this layout; the accumulator is then as it was.
    TypeError
        If the payload is no bytes-like object.
    ValueError
        If the accumulator lacks a tensor or has another shape or dtype, or the weight is not
        finite.

    Examples
    --------
    >>> update = {"w": np.float32([0.5, -1.0])}
    >>> encoded = encode_update(update, None, CodecConfig(scale="unit"))
    >>> total = {"w": np.zeros(2, np.float32)}
    >>> accumulate_update(encoded.payload, total, weight=3)
    {}
    >>> total["w"].tolist()
    [1.5, -3.0]

    References
    ----------
    arXiv 2203.09044, the aggregation at the parameter server (eq. 4 with weights).
    """
    _check_bytes(payload)
    with np.errstate(over="ignore"):
        factor = np.float32(weight)
    if not np.isfinite(factor):
        raise ValueError(f"weight must be finite in float32, got {weight!r}")
    if like is None and num_raw_bytes(payload):
        raise PayloadError(
            f"payload must hold no raw tensors where `like` is not given, got "
            f"{num_raw_bytes(payload)} bytes of them; give the layout of the whole update"
        )
    dense = dense_for(accumulator, device, num_threads)
    layout = Layout.of(accumulator if like is None else like)
    parts, plan = read_payload(payload, layout)
    raw = _read_raw(parts, layout, plan)
    sums = [
        dense.accumulator(accumulator.get(name), layout.shapes[i], name)
        for i, name in ((i, layout.names[i]) for i in plan.order)
    ]
    symbols = dense.decode(parts, plan)
    values = _limited_values(dense, parts, layout, plan, symbols, raw, max_magnitude, norm_limit)
    with np.errstate(over="ignore"):  # the sum is checked by who owns it
        values *= factor
    dense.accumulate(sums, symbols, plan.offsets, values)
    return {layout.names[i]: array for i, array in raw.items()}


def _check_bytes(payload: object) -> None:
    try:
        memoryview(payload)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"payload must be bytes, got {type(payload).__name__}; give `EncodedUpdate.payload`, "
            "or what a file opened with 'rb' holds"
        ) from None


def choose_kinds(layout: Layout, config: CodecConfig) -> tuple[Kind, ...]:
    """Return each tensor's kind: raw where config or its dtype says so, else buffer or coded.

    Raises
    ------
    ConfigError
        When a tensor is chosen as raw and as a buffer.
    ValueError
        When a chosen one is not in the layout.
    """
    raw, buffers = layout.select(config.raw, "raw"), layout.select(config.buffers, "buffers")
    if raw & buffers:
        names = ", ".join(repr(layout.names[i]) for i in sorted(raw & buffers))
        raise ConfigError(f"raw and buffers must not share tensors, got {names} in both")
    return tuple(
        Kind.RAW
        if i in raw or dtype not in FLOAT_DTYPES
        else Kind.BUFFER
        if i in buffers
        else Kind.CODED
        for i, dtype in enumerate(layout.dtypes)
    )


def _raw_bytes(
    dense: Dense, arrays: Mapping[str, Any], layout: Layout, plan: Plan
) -> tuple[bytes, ...]:
    raw = []
    for i in plan.raw:
        array = dense.to_host(arrays[layout.names[i]])
        if array.dtype in FLOAT_DTYPES and not np.isfinite(array).all():
            bad = int((~np.isfinite(array)).sum())
            raise ValueError(
                f"update must be finite, got {bad} NaN or infinite entries in {layout.names[i]!r}"
            )
        raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return tuple(raw)


@dataclass(frozen=True)
class _Update:
    """What is to be encoded, where it lives, and how it is encoded."""

    dense: Dense
    arrays: Mapping[str, Any]
    memory: Flat  # float32, flat as the entries, or empty
    gammas: NDArray[np.float32]  # [tensors], what the memory is multiplied with
    layout: Layout
    plan: Plan
    config: CodecConfig
    raw_bytes: int
    given: NDArray[np.float32]  # minus the scale of each coded tensor; 1 where the rule chooses

    @property
    def target_bytes(self) -> float:
        """Bytes that the target allows; raises ConfigError where they are too few for anything."""
        num_parameters = count_parameters(self.layout, self.plan)
        target = self.config.target_bits_per_parameter or 0.0
        least = least_bytes(self.plan, self.raw_bytes)
        if num_parameters and target * num_parameters <= 8 * least:
            raise ConfigError(
                f"target_bits_per_parameter must be above {8 * least / num_parameters:.3g}, which "
                f"header, scales and raw tensors take in this update, got {target!r}"
            )
        return target * num_parameters / 8

    def flat(self) -> Flat:
        """Return the entries, to be overwritten."""
        names = [self.layout.names[i] for i in self.plan.order]
        return self.dense.flatten([self.arrays[name] for name in names], self.plan.num_symbols)

    def check_finite(self, coded: Converted, buffers: Converted) -> None:
        """Raise ValueError for entries that were counted as not finite."""
        bad = np.concatenate([coded.events[:, 2], buffers.events[:, 2]])
        if bad.any():
            first = int(np.argmax(bad > 0))
            name = self.layout.names[self.plan.order[first]]
            in_update = self.dense.count_not_finite(self.arrays[name])
            what = "update" if in_update else "update plus residual"
            raise ValueError(
                f"{what} must be finite, "
                f"got {in_update or bad[first]} NaN or infinite entries in {name!r}"
            )

    def conversion(
        self,
        rest: Flat,
        symbols: Flat,
        coded: Converted,
        buffers: Converted,
    ) -> Conversion:
        """Return what was converted, with its code tables."""
        choices = choose_tables(
            self.layout, self.plan, coded, buffers, symbols, rest, self.config,
            self.dense.choose_modes,
        )  # fmt: skip
        return Conversion(rest, symbols, coded, buffers, choices)


def _given_scales(
    scales: Mapping[str, float] | None, layout: Layout, plan: Plan, config: CodecConfig
) -> NDArray[np.float32]:
    """Check scales that are given, and return them as `_Update` holds them."""
    given = np.ones(plan.num_coded, np.float32)
    if not scales:
        return given
    if config.target_bits_per_parameter is not None:
        raise ValueError("scales must be None with a target, which finds them")
    position = {layout.names[i]: j for j, i in enumerate(plan.order[: plan.num_coded])}
    least, most = scale_limits(config.float_format)
    for name, scale in scales.items():
        if name not in position:
            raise ValueError(f"scales must be of coded tensors, got one of {name!r}")
        if not least <= scale <= most:
            raise ValueError(f"scale must be in [{least:g}, {most:g}], got {scale!r} of {name!r}")
        given[position[name]] = -np.float32(scale)
    return given


def _convert(update: _Update) -> Conversion:
    """Convert at the scales that the settings say."""
    dense, plan, config, v = update.dense, update.plan, update.config, update.flat()
    sizes = np.diff(plan.offsets)
    coded = Converted.empty(config.float_format, sizes[: plan.num_coded])
    buffers = Converted.empty(BUFFER_FORMAT, sizes[plan.num_coded :])
    coded.scales[:] = update.given
    symbols = dense.symbol_array(plan.num_symbols)
    for group, first, rule, multiplier in (
        (coded, 0, config.scale, config.scale_multiplier),
        (buffers, plan.num_coded, _BUFFER_SCALE, 1.0),
    ):
        last = first + group.sizes.size
        gammas, offsets = update.gammas[first:last], plan.offsets[first : last + 1]
        if group.sizes.size:
            dense.convert(v, update.memory, gammas, offsets, group, rule, multiplier, symbols)
    update.check_finite(coded, buffers)
    return update.conversion(v, symbols, coded, buffers)


def _measure(update: _Update) -> Measured:
    """Compensate and fit, and convert the buffers."""
    measured = measure_update(
        update.dense, update.flat(), update.memory, update.gammas, update.layout, update.plan,
        update.config, _BUFFER_SCALE,
    )  # fmt: skip
    update.check_finite(measured.coded, measured.buffers)
    return measured


def _fit(
    update: _Update, raw: tuple[bytes, ...], max_bytes: int
) -> tuple[bytes, UpdateStats, Conversion]:
    """Encode at the finest scales for which the payload fits, or send nothing where none does."""
    stages = update.dense, update.layout, update.plan, update.config
    measured = _measure(update)
    for share in _SHARES if max_bytes > least_bytes(update.plan, update.raw_bytes) else ():
        conversion = convert_to_size(measured, share * max_bytes, update.raw_bytes)
        payload, stats = _compress(*stages, conversion, raw)
        if len(payload) <= max_bytes:
            return payload, stats, conversion
    conversion = _withhold(update, measured)
    return *_compress(*stages, conversion, raw), conversion


def _withhold(update: _Update, measured: Measured) -> Conversion:
    """Return the conversion of an update of which nothing is sent: zeros, all of it residual."""
    dense, plan, v = update.dense, update.plan, update.flat()
    dense.compensate(v, update.memory, update.gammas, plan.offsets)
    groups = []
    for group in (measured.coded, measured.buffers):
        empty = Converted.empty(group.fmt, group.sizes)
        empty.counts[:, group.fmt.zero] = group.sizes
        empty.fits[:, 1:3] = 1.0
        empty.sums[:, :2] = group.sums[:, :2]
        empty.sums[:, 2] = group.sums[:, 1]
        groups.append(empty)
    sums, live = dense.measure_zeros(v, plan.offsets)
    for group, part in zip(
        groups, (slice(plan.num_coded), slice(plan.num_coded, None)), strict=True
    ):
        group.sums[:, 3], group.events[:, 1] = sums[part], live[part]
    symbols = symbols_of_zero(dense, plan, groups[0].fmt, BUFFER_FORMAT)
    return update.conversion(v, symbols, *groups)


def _compress(
    dense: Dense,
    layout: Layout,
    plan: Plan,
    config: CodecConfig,
    conversion: Conversion,
    raw: tuple[bytes, ...],
    scheme: int = SCHEME_CO3,
) -> tuple[bytes, UpdateStats]:
    payloads = []
    symbols, coded, buffers = conversion.symbols, conversion.coded, conversion.buffers
    for choice in conversion.choices:
        chunk_symbols = chunk_size(plan.num_symbols, choice.num_code_bits)
        words, sizes = dense.encode(choice, symbols, plan, chunk_symbols, config.num_streams)
        parts = Parts(
            coded.fmt,
            np.concatenate([coded.scales, buffers.scales]),
            choice.tables,
            choice.table_of,
            choice.structure,
            lanes(choice.tables, config.num_streams),
            chunk_symbols,
            sizes,
            words,
            raw,
            scheme,
        )
        payloads.append((write_payload(parts, layout, plan), words.nbytes))
    best = min(range(len(payloads)), key=lambda i: len(payloads[i][0]))
    (payload, code_bytes), choice = payloads[best], conversion.choices[best]
    stats = update_stats(
        layout,
        plan,
        coded,
        buffers,
        code_bits(choice, plan, coded, buffers),
        len(payload),
        code_bytes,
        len(choice.structure.packed) if choice.structure else 0,
        sum(map(len, raw)),
    )
    return payload, stats


def _memory(
    dense: Dense,
    residual: Mapping[str, Any] | None,
    unused_payload: bytes | memoryview | None,
    layout: Layout,
    plan: Plan,
    config: CodecConfig,
) -> tuple[Flat, NDArray[np.float32]]:
    """Return m, flat or empty, and each tensor's gamma; with c added, the carry and ones."""
    memory = _flatten_residual(dense, residual, layout, plan)
    gammas = np.full(len(plan.order), config.gamma, np.float32)
    gammas[plan.num_coded :] = _BUFFER_GAMMA
    if unused_payload is None:
        return memory, gammas
    has_memory = residual is not None and plan.num_symbols > 0
    carry = (
        dense.decay(memory, gammas, plan.offsets) if has_memory else dense.zeros(plan.num_symbols)
    )
    accumulate_update(
        unused_payload, _unflatten(carry, layout, plan), 1.0, layout, config.num_threads,
        device=dense.device,
    )  # fmt: skip
    return carry, np.ones_like(gammas)


def _flatten_residual(
    dense: Dense, residual: Mapping[str, Any] | None, layout: Layout, plan: Plan
) -> Flat:
    if residual is None:
        return dense.zeros(0)
    names = [layout.names[i] for i in plan.order]
    check_residual(residual, names, [layout.shapes[i] for i in plan.order])
    return dense.as_flat([residual[name] for name in names], plan.num_symbols)


def _unflatten(flat: Flat, layout: Layout, plan: Plan) -> dict[str, Any]:
    parts = cut_flat(flat, plan.offsets, [layout.shapes[i] for i in plan.order])
    by_position = dict(zip(plan.order, parts, strict=True))
    return {layout.names[i]: by_position[i] for i in sorted(plan.order)}


def _limited_values(
    dense: Dense,
    parts: Parts,
    layout: Layout,
    plan: Plan,
    symbols: Flat,
    raw: dict[int, NDArray[Any]],
    max_magnitude: float | None,
    norm_limit: NormLimit | None,
) -> NDArray[np.float32]:
    """Return what `_value_tables` does, held to the limits; raw tensors are scaled in place."""
    values = _value_tables(parts, plan)

    def count(j: int) -> NDArray[np.int64]:
        begin, end = int(plan.offsets[j]), int(plan.offsets[j + 1])
        return dense.count_symbols(symbols, begin, end, values.shape[1])

    if max_magnitude is not None:
        check_magnitudes(layout, plan, values, count, raw, max_magnitude)
    if norm_limit is not None:
        limit_norm(norm_limit, layout, plan, values, count, raw)
    return values


def _value_tables(parts: Parts, plan: Plan) -> NDArray[np.float32]:
    """Value / scale per tensor and symbol, rounded to float32."""
    groups = [(parts.fmt, slice(0, plan.num_coded))]
    if plan.num_buffers:
        groups.append((BUFFER_FORMAT, slice(plan.num_coded, None)))
    tables = np.zeros((len(plan.order), max(fmt.num_values for fmt, _ in groups)), np.float32)
    for fmt, group in groups:
        tables[group, : fmt.num_values] = fmt.values / parts.scales[group, None]
    return tables


def _read_raw(parts: Parts, layout: Layout, plan: Plan) -> dict[int, NDArray[Any]]:
    raw = {}
    for i, data in zip(plan.raw, parts.raw, strict=True):
        dtype = layout.dtypes[i]
        if dtype == np.bool_ and (np.frombuffer(data, np.uint8) > 1).any():
            raise PayloadError(
                f"bool entries must be bytes 0 or 1, got others in {layout.names[i]!r}"
            )
        array = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(layout.shapes[i])
        if dtype in FLOAT_DTYPES and not np.isfinite(array).all():
            bad = int((~np.isfinite(array)).sum())
            raise PayloadError(
                f"raw entries must be finite, got {bad} that are not in {layout.names[i]!r}"
            )
        raw[i] = array
    return raw
