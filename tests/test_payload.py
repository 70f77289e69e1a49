"""Payload: hostile bytes. Anything wrong raises PayloadError; nothing crashes or hangs."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from co3_flower import kernels_side
from co3_flower.codec import accumulate_update, decode_update, encode_raw_update, encode_update
from co3_flower.config import CodecConfig
from co3_flower.errors import Co3Error, PayloadError
from co3_flower.laws import no_laws
from conftest import draw_gennorm, run_without_jit

VERSION_AT = 4  # after the magic
CRC_BYTES = 4

Arrays = dict[str, np.ndarray]


def make_update(seed: int = 0) -> Arrays:
    """A small update with all a payload can hold: own and pooled tables, buffers, raw tensors."""
    rng = np.random.default_rng(seed)
    return {
        "weight": draw_gennorm(rng, 1_500, beta=0.8, zero_fraction=0.1).reshape(50, 30),
        "second": draw_gennorm(rng, 200, beta=1.5),
        "bias": draw_gennorm(rng, 20, beta=2.0),
        "scalar": np.array(0.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "constant": np.full(150, 0.25, np.float32),
        "mean": rng.standard_normal(20).astype(np.float32),
        "steps": np.array(11, np.int64),
        "mask": rng.random(6) > 0.5,
        "exact": rng.standard_normal(3),
    }


UPDATE = make_update()
CONFIGS = {
    "e2m1": CodecConfig(min_numel=100, raw=("exact",), buffers=("mean",)),
    "e5m2": CodecConfig(
        format="e5m2", scale="unit", prior="auto", min_numel=100, raw=("exact",), buffers=("mean",)
    ),
    "coarse": CodecConfig(scale_multiplier=0.01, min_numel=100, raw=("exact",), buffers=("mean",)),
}


def make_payload(kind: str) -> bytes:
    if kind == "none":
        return encode_raw_update(UPDATE).payload
    return encode_update(UPDATE, None, CONFIGS[kind]).payload


KINDS = [*CONFIGS, "none"]


@pytest.fixture(scope="module", params=KINDS)
def payload(request: pytest.FixtureRequest) -> bytes:
    return make_payload(request.param)


def reseal(body: bytes) -> bytes:
    """Put the right checksum behind the bytes, as an attacker would."""
    return body + struct.pack("<I", zlib.crc32(body))


def decodes_soundly_or_not_at_all(payload: bytes) -> bool:
    """Whether it decodes; if it does, to the exact layout with finite values."""
    try:
        decoded = decode_update(payload, UPDATE)
    except PayloadError:
        return False
    assert list(decoded) == list(UPDATE)
    for name, array in decoded.items():
        assert array.shape == UPDATE[name].shape, name
        assert array.dtype in (np.float32, UPDATE[name].dtype), name
        assert np.all(np.isfinite(array)), name
    return True


# Damage that the checksum finds


def test_payload_is_sound_to_begin_with(payload: bytes) -> None:
    assert decodes_soundly_or_not_at_all(payload)
    assert reseal(payload[:-CRC_BYTES]) == payload


def test_payload_cut_at_any_length_is_refused(payload: bytes) -> None:
    for length in range(len(payload)):
        with pytest.raises(PayloadError):
            decode_update(payload[:length], UPDATE)


def test_payload_with_any_one_byte_changed_is_refused(payload: bytes) -> None:
    damaged = bytearray(payload)
    for position in range(len(payload)):
        for flip in (0x01, 0x80, 0xFF):
            damaged[position] ^= flip
            with pytest.raises(PayloadError):
                decode_update(bytes(damaged), UPDATE)
            damaged[position] ^= flip


@pytest.mark.parametrize("tail", [b"\0", b"\0\0\0\0", b"x" * 100])
def test_payload_with_bytes_behind_it_is_refused(payload: bytes, tail: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_update(payload + tail, UPDATE)


@pytest.mark.parametrize(
    "nonsense", [b"", b"\0", b"CO3", b"\0" * 64, b"\xff" * 1000, b"PK\x03\x04" * 50]
)
def test_bytes_that_are_no_payload_are_refused(nonsense: bytes) -> None:
    with pytest.raises(PayloadError, match=r"payload must .*got "):
        decode_update(nonsense, UPDATE)


@given(nonsense=st.binary(max_size=200))
def test_any_short_bytes_are_refused(nonsense: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_update(nonsense, UPDATE)


# Damage with the checksum put right


def test_resealed_payload_cut_at_any_length_is_refused(payload: bytes) -> None:
    for length in range(len(payload) - CRC_BYTES):
        with pytest.raises(PayloadError):
            decode_update(reseal(payload[:length]), UPDATE)


@pytest.mark.parametrize("tail", [b"\0", b"\0\0\0\0", b"x" * 100])
def test_resealed_payload_with_bytes_before_its_checksum_is_refused(
    payload: bytes, tail: bytes
) -> None:
    with pytest.raises(PayloadError):
        decode_update(reseal(payload[:-CRC_BYTES] + tail), UPDATE)


def test_resealed_change_of_any_byte_decodes_soundly_or_is_refused(payload: bytes) -> None:
    body = bytearray(payload[:-CRC_BYTES])
    # All of the header, tables and first code words; of the monotonous rest every seventh byte.
    for position in (*range(min(400, len(body))), *range(400, len(body), 7)):
        old = body[position]
        for new in {0x00, 0x01, 0x7F, 0x80, 0xFF, old ^ 0x01, old ^ 0x10, (old + 1) % 256} - {old}:
            body[position] = new
            decodes_soundly_or_not_at_all(reseal(bytes(body)))
        body[position] = old


def test_resealed_random_changes_decode_soundly_or_are_refused(
    rng: np.random.Generator, payload: bytes
) -> None:
    for _ in range(1_500):
        body = bytearray(payload[:-CRC_BYTES])
        for position in rng.integers(0, len(body), rng.integers(1, 9)):
            body[position] = rng.integers(0, 256)
        decodes_soundly_or_not_at_all(reseal(bytes(body)))


def test_resealed_insertions_and_deletions_decode_soundly_or_are_refused(
    rng: np.random.Generator, payload: bytes
) -> None:
    for _ in range(500):
        body = payload[:-CRC_BYTES]
        start, end = sorted(rng.integers(0, len(body), 2))
        if rng.random() < 0.5:
            body = body[:start] + body[end:]
        else:
            body = body[:end] + body[start:end] + body[end:]
        decodes_soundly_or_not_at_all(reseal(body))


def test_resealed_header_fields_of_any_size_decode_soundly_or_are_refused(payload: bytes) -> None:
    # Every field of the first 64 bytes, aligned or not, set to numbers that break size checks.
    body = bytearray(payload[:-CRC_BYTES])
    for width in (2, 4, 8):
        for position in range(VERSION_AT, 64 - width):
            old = bytes(body[position : position + width])
            top = 256**width
            for number in (
                0,
                1,
                2,
                top // 2 - 1,
                top // 2,
                top - 1,
                int.from_bytes(old, "little") + 1,
            ):
                body[position : position + width] = (number % top).to_bytes(width, "little")
                decodes_soundly_or_not_at_all(reseal(bytes(body)))
            body[position : position + width] = old


def spliced(first: bytes, second: bytes) -> Iterator[bytes]:
    """Heads of one payload on tails of another."""
    for cut in range(8, min(len(first), len(second)) - CRC_BYTES, 5):
        yield reseal(first[:cut] + second[cut:-CRC_BYTES])


@pytest.mark.parametrize(("head", "tail"), [("e2m1", "e5m2"), ("e5m2", "e2m1"), ("e2m1", "none")])
def test_resealed_splice_of_two_payloads_decodes_soundly_or_is_refused(
    head: str, tail: str
) -> None:
    for body in spliced(make_payload(head), make_payload(tail)):
        decodes_soundly_or_not_at_all(body)


def test_hostile_payload_leaves_the_accumulator_as_it_was(rng: np.random.Generator) -> None:
    sound = make_payload("e2m1")
    accumulator = {
        name: np.ones(array.shape, np.float32)
        for name, array in UPDATE.items()
        if name not in ("steps", "mask", "exact")
    }
    refused = 0
    for _ in range(1_500):
        body = bytearray(sound[:-CRC_BYTES])
        for position in rng.integers(0, len(body), 3):
            body[position] = rng.integers(0, 256)
        mine = {name: array.copy() for name, array in accumulator.items()}
        try:
            accumulate_update(reseal(bytes(body)), mine, 2, like=UPDATE)
        except PayloadError:
            refused += 1
            assert all(np.array_equal(mine[name], accumulator[name]) for name in mine)
    assert refused > 100


def test_hostile_header_does_not_make_the_decoder_allocate_much(payload: bytes) -> None:
    body = bytearray(payload[:-CRC_BYTES])
    tracemalloc.start()
    try:
        for position in range(VERSION_AT, 64):
            old = body[position]
            for new in (0x00, 0x01, 0x7F, 0xFF):
                body[position] = new
                decodes_soundly_or_not_at_all(reseal(bytes(body)))
            body[position] = old
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The layout takes 8 kB and its decoding tables some 40 kB each, for at most ten tensors.
    assert peak < 2_000_000


def decode_changed_code_of(update: Arrays, config: CodecConfig, num_changes: int) -> None:
    """Decode payloads whose tail, a quarter at most and all of it code, is overwritten."""
    rng = np.random.default_rng(7)
    body = encode_update(update, None, config).payload[:-CRC_BYTES]
    decode_update(reseal(body), update)
    for _ in range(num_changes):
        size = rng.integers(1, len(body) // 4)
        # Ones are the longest codes: the stream ends long before its symbols do.
        for tail in (b"\xff" * size, rng.bytes(size)):
            with contextlib.suppress(PayloadError):
                decode_update(reseal(body[:-size] + tail), update)


def test_hostile_code_is_never_read_beyond_its_end() -> None:
    # Kernels that are not compiled check every index: a look too far raises IndexError. At one
    # bit a symbol most look-ups are the fast ones, of six symbols.
    run_without_jit(
        "from test_payload import CodecConfig, decode_changed_code_of\n"
        "v = np.random.default_rng(3).standard_normal(700).astype(np.float32)\n"
        "config = CodecConfig(scale='std', scale_multiplier=0.2, min_numel=100)\n"
        "decode_changed_code_of({'w': v}, config, 10)\n"
    )


def test_hostile_scales_are_refused_by_name() -> None:
    sound = make_payload("e2m1")
    scale = encode_update(UPDATE, None, CONFIGS["e2m1"]).stats.tensors[0].scale
    at = sound.index(struct.pack("<f", scale))
    for bad in (0.0, -1.0, float("nan"), float("inf"), 2.0**-121, 2.0**121, 1e-45):
        body = sound[:at] + struct.pack("<f", bad) + sound[at + 4 : -CRC_BYTES]
        with pytest.raises(PayloadError, match=r"scale must .*'weight'"):
            decode_update(reseal(body), UPDATE)


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**120])
def test_scale_at_either_limit_is_accepted(scale: float) -> None:
    sound = make_payload("e2m1")
    old = encode_update(UPDATE, None, CONFIGS["e2m1"]).stats.tensors[0].scale
    at = sound.index(struct.pack("<f", old))
    body = sound[:at] + struct.pack("<f", scale) + sound[at + 4 : -CRC_BYTES]
    assert decodes_soundly_or_not_at_all(reseal(body))


# Code tables that are no code


def unsound_table_found(lengths: list[int]) -> int:
    """Send the code lengths of one table, whatever they are, and read them; -1 if sound."""
    sizes, none = np.array([len(lengths)], np.int64), np.zeros(0, np.int64)
    data = np.zeros(1_000, np.uint8)
    laws, edges = no_laws(1), np.zeros((1, len(lengths) // 2), np.int64)
    used = kernels_side.encode_tables(np.array([lengths], np.uint8), laws, sizes, none, 1, data)
    read, first = np.zeros((1, len(lengths)), np.uint8), np.zeros(1, np.int64)
    found = int(kernels_side.decode_tables(data[:used], sizes, edges, first, 1, read, laws, none))
    assert found >= 0 or read[0].tolist() == lengths
    return found


@pytest.mark.parametrize(
    "lengths",
    [
        [0, 2, 1, 2, 0],
        [3, 3, 1, 3, 3],
        [1, 0, 0, 0, 1],
        [0, 0, 1, 0, 0],  # a lone symbol, which takes no bits
        [12, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1],  # the longest codes
    ],
)
def test_code_table_comes_back_as_it_was_sent(lengths: list[int]) -> None:
    assert unsound_table_found(lengths) == -1


@pytest.mark.parametrize(
    "lengths",
    [
        [0, 0, 0, 0, 0],  # no code at all
        [0, 2, 0, 2, 0],  # incomplete: Kraft sum 1/2
        [0, 2, 1, 3, 0],  # 7/8
        [1, 1, 1, 0, 0],  # too full: 3/2
        [0, 0, 2, 0, 0],  # a lone symbol of another length than 1
        [13, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0],  # longer than the decoder's window
        [13, 13, 1, 1, 0],
    ],
)
def test_code_table_that_is_no_complete_code_is_refused(lengths: list[int]) -> None:
    assert unsound_table_found(lengths) == 0


# What a decoder must hold


@pytest.mark.parametrize(
    "change",
    [
        {"weight": np.zeros((30, 50), np.float32)},
        {"bias": np.zeros(21, np.float32)},
        {"steps": np.array(0, np.int32)},
        {"mask": np.zeros(6, np.uint8)},
        {"steps": np.array(0.0, np.float32)},
        {"exact": np.zeros(3, np.float32)},
        {"more": np.zeros(1, np.float32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_payload_of_another_layout_is_refused(payload: bytes, change: Arrays) -> None:
    with pytest.raises(PayloadError, match="must"):
        decode_update(payload, UPDATE | change)


def test_payload_of_fewer_tensors_is_refused(payload: bytes) -> None:
    fewer = {name: array for name, array in UPDATE.items() if name != "bias"}
    with pytest.raises(PayloadError, match="must"):
        decode_update(payload, fewer)


def test_payload_of_another_layout_is_not_accumulated() -> None:
    update = {"w": np.ones((4, 5), np.float32)}
    accumulator = {"w": np.zeros((5, 4), np.float32)}
    with pytest.raises(PayloadError, match="must"):
        accumulate_update(encode_update(update, None, CodecConfig()).payload, accumulator, 1)
    assert not accumulator["w"].any()


@pytest.mark.parametrize("version", [0, 2, 255])
def test_payload_of_a_future_version_is_refused_with_its_number(
    payload: bytes, version: int
) -> None:
    body = bytearray(payload[:-CRC_BYTES])
    assert body[VERSION_AT] == 1
    body[VERSION_AT] = version
    with pytest.raises(PayloadError, match=rf"version .*got {version}\b"):
        decode_update(reseal(bytes(body)), UPDATE)


def test_payload_begins_with_its_magic(payload: bytes) -> None:
    assert payload[:3] == b"CO3"


def test_payload_ends_with_the_checksum_of_all_before(payload: bytes) -> None:
    assert payload[-CRC_BYTES:] == struct.pack("<I", zlib.crc32(payload[:-CRC_BYTES]))


def test_payload_names_no_tensor(payload: bytes) -> None:
    assert not any(name.encode() in payload for name in UPDATE)


def test_payload_error_is_ours_and_a_value_error() -> None:
    assert issubclass(PayloadError, Co3Error)
    assert issubclass(PayloadError, ValueError)


@pytest.mark.parametrize("thing", [None, "payload", 5, [1, 2]])
def test_payload_that_is_no_bytes_is_refused(thing: object) -> None:
    with pytest.raises((TypeError, PayloadError)):
        decode_update(thing, UPDATE)  # type: ignore[arg-type]
