"""Every compressor: one interface, one frame, sound or refused."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from co3_flower.codec import decode_update, encode_update
from co3_flower.compressors import (
    COMPRESSORS,
    Compressor,
    make_compressor,
    rival_stats,
    settings_of,
)
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.layout import Layout, sub_layout

NAMES = tuple(COMPRESSORS)
RIVALS = tuple(name for name in NAMES if name not in ("co3", "none"))
UNBIASED = ("qsgd", "onebit", "eden")  # E[decode(encode(x))] = x over round seeds
FED_BACK = ("signsgd", "topk", "sidco", "stc", "powersgd")
SKETCHES = tuple(name for name in NAMES if COMPRESSORS[name].is_sketch)


def update_of(seed: int = 0) -> dict[str, np.ndarray]:
    """A heavy-tailed update of a small net: matrices, a vector, a scalar and an empty tensor."""
    rng = np.random.default_rng(seed)
    shapes = {"conv": (16, 8, 3, 3), "bias": (16,), "fc": (10, 300), "gain": (), "none": (0, 4)}
    return {
        name: (1e-2 * rng.standard_t(3, shape)).astype(np.float32) for name, shape in shapes.items()
    }


def with_buffers() -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """An update with everything beside parameters, and the settings that say so."""
    rng = np.random.default_rng(1)
    update: dict[str, np.ndarray] = update_of()
    update["bn.running_mean"] = rng.normal(size=16).astype(np.float32)
    update["bn.num_batches_tracked"] = np.array(7, np.int64)
    update["kept"] = rng.normal(size=5).astype(np.float32)
    return update, {"raw": ("kept",), "buffers": ("bn.running_mean",)}


def reseal(payload: bytes) -> bytes:
    """A payload with the checksum of what it now holds."""
    return payload[:-4] + struct.pack("<I", zlib.crc32(payload[:-4]))


def decoded_tensors(
    compressor: Compressor, payload: bytes, update: dict[str, np.ndarray], seed: int
) -> dict[str, np.ndarray]:
    """What the server makes of one client's payload, the work after summing included."""
    decoded = compressor.decode(payload, update, seed)
    if compressor.name in SKETCHES:
        decoded, _ = compressor.finish(decoded, {}, Layout.of(update))
    return decoded


@pytest.mark.parametrize("name", NAMES)
def test_decoded_update_has_the_layout_and_is_finite(name: str) -> None:
    update = update_of()
    payload, state = COMPRESSORS[name].encode(update, None, 3)
    decoded = decoded_tensors(COMPRESSORS[name], payload, update, 3)
    assert list(decoded) == list(update)
    for key, value in update.items():
        assert decoded[key].shape == value.shape
        assert decoded[key].dtype == np.float32
        assert np.isfinite(decoded[key]).all()
    assert all(array.dtype == np.float32 for array in state.values())


@pytest.mark.parametrize("name", NAMES)
def test_payload_points_where_the_update_points(name: str) -> None:
    """No code may turn the update round: the inner product with what it decodes to is positive."""
    update = update_of()
    payload, _ = COMPRESSORS[name].encode(update, None, 3)
    decoded = decoded_tensors(COMPRESSORS[name], payload, update, 3)
    assert sum(float((update[key] * decoded[key]).sum()) for key in update) > 0


@pytest.mark.parametrize("name", NAMES)
def test_same_inputs_give_the_same_bytes_and_state(name: str) -> None:
    compressor, update = COMPRESSORS[name], update_of()
    before = {key: value.copy() for key, value in update.items()}
    _, state = compressor.encode(update, None, 3)
    kept = {key: value.copy() for key, value in state.items()}
    first = compressor.encode(update, state, 4)
    second = compressor.encode(update, state, 4)
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys() == state.keys()
    for key, value in first[1].items():
        np.testing.assert_array_equal(value, second[1][key])
        np.testing.assert_array_equal(state[key], kept[key])
    for key, value in update.items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_decode_to_zeros(name: str) -> None:
    update = {key: np.zeros_like(value) for key, value in update_of().items()}
    payload, _ = COMPRESSORS[name].encode(update, None, 3)
    for value in decoded_tensors(COMPRESSORS[name], payload, update, 3).values():
        assert not value.any()


@pytest.mark.parametrize("name", NAMES)
def test_update_without_a_tensor_travels(name: str) -> None:
    payload, state = COMPRESSORS[name].encode({}, None, 3)
    assert decoded_tensors(COMPRESSORS[name], payload, {}, 3) == {}
    assert COMPRESSORS[name].encode({}, state, 4)[1].keys() == state.keys()


@pytest.mark.parametrize("name", RIVALS)
def test_buffers_and_raw_tensors_travel_as_in_co3(name: str) -> None:
    update, roles = with_buffers()
    compressor = make_compressor(name, {})
    compressor = type(compressor)(**settings_of(compressor), **roles)
    payload, state = compressor.encode(update, None, 3)
    decoded = compressor.decode(payload, update, 3)
    config = CodecConfig(raw=("kept",), buffers=("bn.running_mean",))
    rest = {key: update[key] for key in ("bn.running_mean", "bn.num_batches_tracked", "kept")}
    expected = encode_update(rest, None, config)
    for key, value in decode_update(expected.payload, rest).items():
        np.testing.assert_array_equal(decoded[key], value)
        assert decoded[key].dtype == update[key].dtype
    np.testing.assert_array_equal(
        state["rest/bn.running_mean"], expected.residual["bn.running_mean"]
    )


@pytest.mark.parametrize("name", RIVALS)
def test_error_feedback_keeps_what_was_not_sent(name: str) -> None:
    """With a residual, decoded + residual = update + last residual, but for float32 rounding."""
    compressor, update = COMPRESSORS[name], update_of()
    _, state = compressor.encode(update, None, 3)
    residuals = {key for key in state if key.startswith("residual/")}
    if not residuals:
        pytest.skip(f"{name} has no error feedback at the client")
    assert residuals == {f"residual/{key}" for key in update}
    payload, after = compressor.encode(update, state, 4)
    decoded = decoded_tensors(compressor, payload, update, 4)
    for key, value in update.items():
        whole = value + state[f"residual/{key}"]
        limit = 1e-6 * max(1.0, np.abs(decoded[key]).max(initial=0), np.abs(whole).max(initial=0))
        np.testing.assert_allclose(decoded[key] + after[f"residual/{key}"], whole, atol=limit)


@pytest.mark.parametrize("name", RIVALS)
def test_unused_payload_is_taken_back_into_the_residual(name: str) -> None:
    compressor, update = COMPRESSORS[name], update_of()
    payload, state = compressor.encode(update, None, 3)
    taken = compressor.take_back(state, payload, update, 3)
    assert taken.keys() == state.keys()
    if not any(key.startswith("residual/") for key in state):
        return
    for key, value in update.items():
        np.testing.assert_allclose(taken[f"residual/{key}"], value, atol=1e-6)


@pytest.mark.parametrize("name", UNBIASED)
def test_mean_over_seeds_is_the_update(name: str) -> None:
    """Within five standard errors, in one number: the squared distance of the mean."""
    rng = np.random.default_rng(5)
    update = {"w": rng.standard_normal(512).astype(np.float32)}
    compressor, trials = COMPRESSORS[name], 400
    decoded = np.stack(
        [
            compressor.decode(compressor.encode(update, None, seed)[0], update, seed)["w"]
            for seed in range(trials)
        ]
    )
    variance = decoded.var(axis=0, ddof=1).sum() / trials
    distance = ((decoded.mean(axis=0) - update["w"]) ** 2).sum()
    assert distance < variance * (1 + 5 * np.sqrt(2 / 512))


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_update_that_is_not_finite_is_named(name: str, bad: float) -> None:
    update = update_of()
    update["fc"][3, 4] = bad
    with pytest.raises(ValueError, match=r"must be finite, got 1 .* in 'fc'"):
        COMPRESSORS[name].encode(update, None, 3)


@pytest.mark.parametrize("name", FED_BACK)
def test_state_of_another_update_is_refused(name: str) -> None:
    update, compressor = update_of(), COMPRESSORS[name]
    _, state = compressor.encode(update, None, 3)
    residual = {key: array for key, array in state.items() if key.startswith("residual/")}
    fewer = {key: array for key, array in residual.items() if key != "residual/bias"}
    single = residual | {"residual/bias": np.ones(1, np.float32)}  # would fit by broadcasting
    double = residual | {"residual/bias": np.zeros(16)}
    for wrong, message in [
        (fewer, r"missing \['bias'\]"),
        ({"residual/other": np.ones(3, np.float32)}, r"extra \['other'\]"),
        (single, r"must be float32 \(16,\), got float32 \(1,\) in 'bias'"),
        (double, r"got float64 \(16,\) in 'bias'"),
    ]:
        with pytest.raises(ValueError, match=message):
            compressor.encode(update, wrong, 3)


@pytest.mark.parametrize("name", FED_BACK)
def test_update_plus_residual_beyond_float32_is_refused(name: str) -> None:
    update = {"w": np.full((30, 40), 3e38, np.float32)}
    with pytest.raises(ValueError, match="update plus residual must be finite, got 1200 NaN or in"):
        COMPRESSORS[name].encode(update, {"residual/w": update["w"]}, 3)


def test_residual_beyond_float32_is_refused(rng: np.random.Generator) -> None:
    update = {"w": (3.4e38 * rng.choice([-1, 1], (30, 40))).astype(np.float32)}
    with pytest.raises(ValueError, match="residual must be finite, got .* in 'w'"):
        COMPRESSORS["powersgd"].encode(update, None, 3)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("seed", [None, -1, 1.5, True, "1"])
def test_seed_that_is_no_count_is_refused(name: str, seed: object) -> None:
    update, compressor = update_of(), COMPRESSORS[name]
    payload, _ = compressor.encode(update, None, np.int64(3))
    message = "round_seed must be an integer of at least 0"
    with pytest.raises(ValueError, match=message):
        compressor.encode(update, None, seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        compressor.decode(payload, update, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"raw": "w"}, "raw must be a sequence of tensor names"),
        ({"buffers": "w"}, "buffers must be a sequence of tensor names"),
        ({"raw": ["w"], "buffers": ["w"]}, "must not share tensors, got 'w' in both"),
    ],
)
def test_impossible_choice_of_tensors_is_refused_as_by_co3(
    name: str, chosen: dict[str, Any], message: str
) -> None:
    update = {"w": np.ones(3, np.float32)}
    with pytest.raises(ConfigError, match=message):
        replace(COMPRESSORS[name], **chosen).encode(update, None, 3)


def test_stats_of_torch_tensors_are_those_of_arrays() -> None:
    torch = pytest.importorskip("torch")
    update = update_of()
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in update.items()}
    payload, state = COMPRESSORS["topk"].encode(tensors, None, 3)
    found, expected = (rival_stats(payload, u, state) for u in (tensors, update))
    assert found.num_parameters == expected.num_parameters == 4169
    assert found.residual_ratio == expected.residual_ratio


@pytest.mark.parametrize("name", RIVALS)
def test_truncated_payload_is_refused(name: str) -> None:
    update, compressor = update_of(), COMPRESSORS[name]
    payload, _ = compressor.encode(update, None, 3)
    for length in [*range(min(len(payload), 60)), len(payload) - 5, len(payload) - 1]:
        with pytest.raises(PayloadError):
            compressor.decode(payload[:length], update, 3)
        with pytest.raises(PayloadError):
            compressor.decode(reseal(payload[:length]) if length > 4 else b"", update, 3)


@pytest.mark.parametrize("name", RIVALS)
def test_damaged_payload_decodes_soundly_or_is_refused(name: str) -> None:
    """Bytes changed under a good checksum: a PayloadError, or finite tensors of the layout."""
    rng = np.random.default_rng(7)
    update, compressor = update_of(), COMPRESSORS[name]
    payload, _ = compressor.encode(update, None, 3)
    for _ in range(150):
        damaged = bytearray(payload)
        for position in rng.integers(0, len(payload) - 4, rng.integers(1, 4)).tolist():
            damaged[position] = int(rng.integers(0, 256))
        try:
            decoded = compressor.decode(reseal(bytes(damaged)), update, 3)
        except PayloadError:
            continue
        if name not in SKETCHES:
            assert [(k, v.shape) for k, v in decoded.items()] == [
                (k, v.shape) for k, v in update.items()
            ]
        assert all(np.isfinite(value).all() for value in decoded.values())


@pytest.mark.parametrize("name", RIVALS)
def test_payload_of_another_scheme_or_layout_is_refused(name: str) -> None:
    update, compressor = update_of(), COMPRESSORS[name]
    payload, _ = compressor.encode(update, None, 3)
    other = COMPRESSORS["fp16" if name != "fp16" else "bf16"].encode(update, None, 3)[0]
    with pytest.raises(PayloadError, match="scheme"):
        compressor.decode(other, update, 3)
    with pytest.raises(PayloadError, match="layout"):
        compressor.decode(payload, {"w": np.zeros(7, np.float32)}, 3)


def test_schemes_and_names_are_unique() -> None:
    assert len({compressor.scheme for compressor in COMPRESSORS.values()}) == len(COMPRESSORS)
    assert all(name == compressor.name for name, compressor in COMPRESSORS.items())


def test_unknown_compressor_and_setting_are_named() -> None:
    with pytest.raises(ConfigError, match="compressor must be one of 'co3', 'none'"):
        make_compressor("no-such")
    with pytest.raises(ConfigError, match="settings of fp16 must be among: none, got 'ratio'"):
        make_compressor("fp16", {"ratio": 0.1})


def test_half_formats_agree_with_their_reference() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(2)
    values = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-9, 4, 10_000)).astype(np.float32)
    references = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e5m2}
    for name, dtype in references.items():
        update = {"w": values}
        payload, _ = COMPRESSORS[name].encode(update, None, 0)
        np.testing.assert_array_equal(
            COMPRESSORS[name].decode(payload, update, 0)["w"], values.astype(dtype).astype("f4")
        )
        assert len(payload) == 36 + values.size * np.dtype(dtype).itemsize


def test_co3_is_the_codec() -> None:
    update = update_of()
    payload, state = COMPRESSORS["co3"].encode(update, None, 0)
    encoded = encode_update(update, None, CodecConfig())
    assert payload == encoded.payload
    second, _ = COMPRESSORS["co3"].encode(update, state, 1)
    assert second == encode_update(update, encoded.residual, CodecConfig()).payload


def test_sub_layout_keeps_names_and_shapes() -> None:
    layout = Layout.of(update_of())
    assert sub_layout(layout, [2, 0]).names == ("fc", "conv")
