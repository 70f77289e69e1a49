"""The level compressors against slow twins, their papers' laws, and bytes that are no body."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from scipy import integrate, stats

from co3_flower.compressors import kernels_levels as kernels
from co3_flower.compressors.interface import Compressor, generator
from co3_flower.compressors.levels import (
    Qsgd,
    SignSgd,
    TernGrad,
    TinyScript,
    fit_weibull,
    lloyd_levels,
)
from co3_flower.compressors.packing import pack_codes
from co3_flower.errors import ConfigError, PayloadError
from co3_flower.layout import Layout
from conftest import draw_gennorm, run_without_jit

# Elias' recursive code, written out by hand: groups from the right, then a zero.
OMEGA = {
    1: "0",
    2: "10 0",
    3: "11 0",
    4: "10 100 0",
    5: "10 101 0",
    6: "10 110 0",
    7: "10 111 0",
    8: "11 1000 0",
    9: "11 1001 0",
    10: "11 1010 0",
    11: "11 1011 0",
    12: "11 1100 0",
    13: "11 1101 0",
    14: "11 1110 0",
    15: "11 1111 0",
    16: "10 100 10000 0",
    17: "10 100 10001 0",
}


def naive_omega(number: int) -> str:
    code = "0"
    while number > 1:
        code = f"{number:b}" + code
        number = len(f"{number:b}") - 1
    return code


def to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))


def body_of(compressor: Compressor, tensors: dict[str, np.ndarray], seed: int = 0) -> bytes:
    return compressor.compress(tensors, {}, seed)[0]


def decode_body(
    compressor: Compressor, body: bytes, tensors: dict[str, np.ndarray], seed: int = 0
) -> dict[str, np.ndarray]:
    return compressor.decompress(memoryview(body), Layout.of(tensors), seed)


@pytest.fixture
def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A matrix, a vector, a scalar and an empty tensor."""
    return {
        "w": draw_gennorm(rng, 700, beta=0.7, alpha=1e-3, zero_fraction=0.1).reshape(7, 100),
        "b": draw_gennorm(rng, 33, beta=2.0, alpha=1e-2),
        "gain": np.float32(-0.25).reshape(()),
        "none": np.zeros((0, 4), np.float32),
    }


EXTREMES = {
    "largest": np.full(1500, np.finfo(np.float32).max, np.float32),
    "smallest": np.float32([1e-45, -1e-45, 0.0]),
}


@pytest.mark.parametrize(
    "compressor", [Qsgd(), TernGrad(), SignSgd(), TinyScript()], ids=lambda c: c.name
)
def test_extreme_entries_are_coded_to_finite_ones(compressor: Compressor) -> None:
    payload, _ = compressor.encode(EXTREMES, None, 0)
    decoded = compressor.decode(payload, EXTREMES, 0)
    assert decoded["largest"].max() > 1e37


# --- Elias' code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", OMEGA)
def test_omega_is_the_code_written_by_hand(number: int) -> None:
    code, length = kernels.omega(number)
    assert f"{code:0{length}b}" == OMEGA[number].replace(" ", "")


@pytest.mark.parametrize("number", [255, 256, 257, 65535, 65536, 2**31, 2**32 - 1])
def test_omega_of_large_numbers_is_that_of_strings(number: int) -> None:
    code, length = kernels.omega(number)
    assert f"{code:0{length}b}" == naive_omega(number)
    data = np.frombuffer(to_bytes(naive_omega(number)), np.uint8).copy()
    assert kernels.read_omega(data, 0) == (number, length)


def test_omega_of_more_than_32_bits_is_refused_without_reading_it() -> None:
    data = np.frombuffer(to_bytes(naive_omega(2**32)), np.uint8).copy()
    assert kernels.read_omega(data, 0)[0] == -1
    assert kernels.read_omega(np.full(1000, 255, np.uint8), 0)[0] == -1


def test_omega_cut_short_is_refused() -> None:
    for number in (4, 17, 1000):
        bits = naive_omega(number)
        for length in range(0, len(bits) - 8, 8):
            data = np.frombuffer(to_bytes(bits[:length]), np.uint8).copy()
            assert kernels.read_omega(data, 0)[0] == -1


def test_kernels_run_alike_without_the_jit() -> None:
    program = (
        "from co3_flower.compressors.levels import Qsgd\n"
        "update = {'w': np.float32([0.5, 0, 0, -2, 1e-3, 0, 3, 4])}\n"
        "payload, _ = Qsgd(levels=300, bucket=5).encode(update, None, 3)\n"
        "print(payload.hex(), *Qsgd(levels=300, bucket=5).decode(payload, update, 3)['w'])\n"
    )
    update = {"w": np.float32([0.5, 0, 0, -2, 1e-3, 0, 3, 4])}
    compressor = Qsgd(levels=300, bucket=5)
    payload, _ = compressor.encode(update, None, 3)
    printed, *values = run_without_jit(program)
    assert printed == payload.hex()
    np.testing.assert_array_equal(
        np.float32(values), compressor.decode(payload, update, 3)["w"], strict=True
    )


# --- QSGD -----------------------------------------------------------------------------------------


def naive_qsgd(tensors: dict[str, np.ndarray], levels: int, bucket: int, seed: int) -> bytes:
    """Entry by entry, with strings of bits."""
    vector = np.concatenate([array.reshape(-1) for array in tensors.values()])
    random = generator(seed).random(vector.size, np.float32)
    norms, dense, sparse, num_nonzero, gap = [], "", "", 0, 0
    for i, x in enumerate(vector):
        if i % bucket == 0:
            part = vector[i : i + bucket].astype(np.float64)
            norms.append(np.float32(np.sqrt((part**2).sum())))
        share = abs(x) / norms[-1] * np.float32(levels) if norms[-1] > 0 else np.float32(0)
        level = int(share)
        level += int(random[i] < share - level)
        sign = "01"[int(x < 0)]
        dense += naive_omega(level + 1) + (sign if level else "")
        gap += 1
        if level:
            sparse += naive_omega(gap) + sign + naive_omega(level)
            num_nonzero, gap = num_nonzero + 1, 0
    scales = np.array(norms, "<f4").tobytes()
    if len(sparse) < len(dense):
        return struct.pack("<BQ", 1, num_nonzero) + scales + to_bytes(sparse)
    return b"\0" + scales + to_bytes(dense)


@pytest.mark.parametrize("levels", [1, 4, 16, 1000])
@pytest.mark.parametrize("bucket", [1, 64, 512, 10**9])
def test_qsgd_writes_what_its_twin_writes(
    tensors: dict[str, np.ndarray], levels: int, bucket: int
) -> None:
    body = body_of(Qsgd(levels=levels, bucket=bucket), tensors, 5)
    assert body == naive_qsgd(tensors, levels, bucket, 5)


def test_qsgd_body_by_hand_when_most_is_zero() -> None:
    tensors = {"w": np.float32([0.0, -4.0, 0.0])}
    # distance 2, minus, level 1
    expected = struct.pack("<BQf", 1, 1, 4.0) + to_bytes("100" + "1" + "0")
    assert body_of(Qsgd(levels=1), tensors) == expected


def test_qsgd_body_by_hand_when_nothing_is_zero() -> None:
    tensors = {"w": np.float32([2.0])}
    # level 2, written as 3, plus: shorter than distance 1, plus, level 2
    expected = struct.pack("<Bf", 0, 2.0) + to_bytes("110" + "0")
    assert body_of(Qsgd(levels=2), tensors) == expected
    assert decode_body(Qsgd(levels=2), expected, tensors)["w"].tolist() == [2.0]


def test_qsgd_entries_lie_within_one_level_of_theirs(tensors: dict[str, np.ndarray]) -> None:
    compressor = Qsgd(levels=8, bucket=10**6)
    decoded = decode_body(compressor, body_of(compressor, tensors), tensors)
    norm = np.sqrt(sum(float((array**2).sum()) for array in tensors.values()))
    for name, array in tensors.items():
        assert np.abs(decoded[name] - array).max(initial=0) < norm / 8 * 1.0001


HOSTILE_QSGD = {
    "unknown way": struct.pack("<Bf", 2, 1.0) + b"\0",
    "more nonzero entries than entries": struct.pack("<BQf", 1, 2**63, 1.0) + b"\0",
    "distance beyond the end": struct.pack("<BQf", 1, 1, 1.0) + to_bytes(naive_omega(9) + "00"),
    "level too high, sparse": struct.pack("<BQf", 1, 1, 1.0) + to_bytes("00" + naive_omega(3)),
    "level too high, dense": struct.pack("<Bf", 0, 1.0) + to_bytes(naive_omega(4) + "0000000000"),
    "endless number": struct.pack("<Bf", 0, 1.0) + b"\xff" * 1000,
    "stream too short": struct.pack("<Bf", 0, 1.0) + to_bytes("11001100"),
    "bytes left": struct.pack("<Bf", 0, 1.0) + bytes(2),
    "norm not a number": struct.pack("<Bf", 0, np.nan) + bytes(1),
    "nothing": b"",
}


@pytest.mark.parametrize("case", HOSTILE_QSGD)
def test_qsgd_refuses_what_is_no_body(case: str) -> None:
    with pytest.raises(PayloadError):
        decode_body(Qsgd(levels=2), HOSTILE_QSGD[case], {"w": np.zeros(8, np.float32)})


def test_qsgd_names_a_count_beyond_the_entries() -> None:
    body = HOSTILE_QSGD["more nonzero entries than entries"]
    with pytest.raises(PayloadError, match="nonzero entries must be at most 8, got 9223372036"):
        decode_body(Qsgd(levels=2), body, {"w": np.zeros(8, np.float32)})


def test_qsgd_decodes_a_sound_body_of_eight_entries() -> None:
    """What the hostile bodies above come from: eight zeros, one byte."""
    body = struct.pack("<Bf", 0, 1.0) + bytes(1)
    assert not decode_body(Qsgd(levels=2), body, {"w": np.zeros(8, np.float32)})["w"].any()


# --- TernGrad -------------------------------------------------------------------------------------


def naive_terngrad(tensors: dict[str, np.ndarray], clip: float, seed: int) -> bytes:
    rng = generator(seed)
    size = sum(array.size for array in tensors.values())
    random = iter(rng.random(size, np.float32))
    scalers, digits = [], []
    for array in tensors.values():
        part = array.reshape(-1)
        if clip and part.size:
            sigma = np.sqrt((part.astype(np.float64) ** 2).mean())
            part = np.clip(part, -np.float32(clip * sigma), np.float32(clip * sigma))
        scaler = np.abs(part).max(initial=np.float32(0))
        scalers.append(scaler)
        digits += [1 + int(np.sign(x)) * int(next(random) * scaler < abs(x)) for x in part]
    digits += [0] * (-len(digits) % 5)
    words = [int("".join(map(str, digits[i : i + 5])), 3) for i in range(0, len(digits), 5)]
    return np.array(scalers, "<f4").tobytes() + bytes(words)


@pytest.mark.parametrize("clip", [0.0, 1.0, 2.5])
def test_terngrad_writes_what_its_twin_writes(tensors: dict[str, np.ndarray], clip: float) -> None:
    assert body_of(TernGrad(clip=clip), tensors, 5) == naive_terngrad(tensors, clip, 5)


def test_terngrad_body_by_hand() -> None:
    tensors = {"w": np.float32([2, -2, 0, 2, -2, 2])}  # digits 20120, 2
    body = body_of(TernGrad(clip=0.0), tensors)
    assert body == struct.pack("<f", 2.0) + bytes([2 * 81 + 9 + 2 * 3, 2 * 81])
    assert decode_body(TernGrad(), body, tensors)["w"].tolist() == tensors["w"].tolist()


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_terngrad_is_unbiased_but_for_what_it_clips(rng: np.random.Generator, clip: float) -> None:
    x = rng.standard_normal(512).astype(np.float32)
    compressor, trials = TernGrad(clip=clip), 400
    decoded = np.stack(
        [
            decode_body(compressor, body_of(compressor, {"w": x}, seed), {"w": x})["w"]
            for seed in range(trials)
        ]
    )
    limit = clip * np.sqrt((x**2).mean()) if clip else np.inf
    distance = ((decoded.mean(axis=0) - np.clip(x, -limit, limit)) ** 2).sum()
    variance = decoded.var(axis=0, ddof=1).sum() / trials
    assert distance < variance * (1 + 5 * np.sqrt(2 / 512))  # five standard errors


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<f", 1.0) + bytes([243]),
        struct.pack("<f", 1.0) + bytes([255]),
        struct.pack("<f", 1.0),
        struct.pack("<f", 1.0) + bytes(2),
        struct.pack("<f", np.inf) + bytes(1),
    ],
)
def test_terngrad_refuses_what_is_no_body(body: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_body(TernGrad(), body, {"w": np.zeros(4, np.float32)})


# --- EF-signSGD -----------------------------------------------------------------------------------


def test_signsgd_follows_its_recursion(rng: np.random.Generator) -> None:
    """p = g + e; delta = |p|_1 / d * sign(p); e = p - delta (algorithm 1), and the sum law."""
    residual, sent, wanted = np.zeros(300, np.float32), 0.0, 0.0
    state: dict[str, np.ndarray] = {}
    for t in range(20):
        gradient = draw_gennorm(rng, 300, beta=0.8, alpha=1e-2)
        body, state = SignSgd().compress({"w": gradient}, state, t)
        p = gradient + residual
        scale = np.float32(np.abs(p.astype(np.float64)).sum() / 300)
        delta = np.where(p < 0, -scale, scale)
        residual = p - delta
        decoded = decode_body(SignSgd(), body, {"w": gradient}, t)["w"]
        np.testing.assert_array_equal(decoded, delta)
        np.testing.assert_array_equal(state["residual/w"], residual)
        sent, wanted = sent + decoded.astype(np.float64), wanted + gradient.astype(np.float64)
    np.testing.assert_allclose(sent + residual, wanted, atol=1e-6)  # float32 rounding


def test_signsgd_has_a_bit_an_entry_and_a_scale_a_tensor(tensors: dict[str, np.ndarray]) -> None:
    assert len(body_of(SignSgd(), tensors)) == 4 * 4 + (734 + 7) // 8


# --- TinyScript -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.5, 0.75, 1.0, 2.0])
def test_weibull_fit_finds_the_law_of_a_sample(rng: np.random.Generator, shape: float) -> None:
    sample = (1e-3 * rng.weibull(shape, 50_000)).astype(np.float32)
    found, scale = fit_weibull(sample)
    assert found == pytest.approx(shape, abs=1 / 16)  # the grid's step, and the sample's error
    assert scale == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("shape", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_levels_meet_lloyds_conditions(shape: float, count: int) -> None:
    """Each is its cell's centre of mass, by numerical integration of the density."""
    levels = lloyd_levels(shape, count)
    law = stats.weibull_min(shape)
    # in quantiles, where the integrand has no pole at 0
    ends = np.concatenate([[0.0], law.cdf((levels[1:] + levels[:-1]) / 2), [1.0]])
    centres = [
        integrate.quad(law.ppf, low, high, limit=200)[0] / (high - low)
        for low, high in zip(ends[:-1], ends[1:], strict=True)
    ]
    np.testing.assert_allclose(levels, centres, rtol=1e-3)


def test_levels_of_an_exponential_law_are_those_of_its_equations() -> None:
    """The mean beyond a point is 1 above it, so the last two levels lie 2 apart."""
    low, high = lloyd_levels(1.0, 2)
    assert high - low == pytest.approx(2.0, rel=1e-4)
    middle = low + 1
    assert low == pytest.approx(1 - middle / np.expm1(middle), rel=1e-4)  # mean below the middle


def naive_tinyscript(tensors: dict[str, np.ndarray], bits: int) -> bytes:
    levels, codes = [], []
    for array in tensors.values():
        shape, scale = fit_weibull(np.abs(array))
        positive = lloyd_levels(shape, 2 ** (bits - 1)).astype(np.float32) * scale
        levels += positive.tolist()
        for x in array.reshape(-1):
            nearest = np.abs(abs(float(x)) - positive.astype(np.float64)).argmin()
            codes.append(int(nearest) + (2 ** (bits - 1) if x < 0 else 0))
    planes = ["".join(str(code >> bit & 1) for code in codes) for bit in range(bits)]
    return np.array(levels, "<f4").tobytes() + b"".join(map(to_bytes, planes))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_tinyscript_writes_what_its_twin_writes(tensors: dict[str, np.ndarray], bits: int) -> None:
    assert body_of(TinyScript(bits=bits), tensors) == naive_tinyscript(tensors, bits)


def test_tinyscript_of_one_bit_is_the_scaled_sign(rng: np.random.Generator) -> None:
    """The one level above zero is the law's mean, which is the magnitudes' mean."""
    x = rng.standard_normal(1000).astype(np.float32)
    decoded = decode_body(TinyScript(bits=1), body_of(TinyScript(bits=1), {"w": x}), {"w": x})["w"]
    np.testing.assert_allclose(decoded, np.sign(x) * np.abs(x).mean(), rtol=1e-5)


def test_tinyscript_errs_less_than_uniform_levels_on_heavy_tails(heavy_tail: np.ndarray) -> None:
    decoded = decode_body(
        TinyScript(bits=4), body_of(TinyScript(bits=4), {"w": heavy_tail}), {"w": heavy_tail}
    )["w"]
    step = 2 * np.abs(heavy_tail).max() / 15
    uniform = np.round(heavy_tail / step - 0.5) * step + step / 2
    assert ((decoded - heavy_tail) ** 2).mean() < 0.5 * ((uniform - heavy_tail) ** 2).mean()


def test_tinyscript_refuses_bodies_of_another_size(tensors: dict[str, np.ndarray]) -> None:
    body = body_of(TinyScript(), tensors)
    for wrong in (b"", body[:-1], body + b"\0", body_of(TinyScript(bits=3), tensors)):
        with pytest.raises(PayloadError):
            decode_body(TinyScript(), wrong, tensors)


# --- packing and settings -------------------------------------------------------------------------


def test_codes_are_packed_in_planes() -> None:
    codes = np.array([5, 2, 7], np.uint8)  # 101, 010, 111: planes 101, 011, 101
    assert pack_codes(codes, 3) == bytes([0b10100000, 0b01100000, 0b10100000])


@pytest.mark.parametrize(
    ("make", "setting", "value"),
    [
        (Qsgd, "levels", 0),
        (Qsgd, "levels", 2**16),
        (Qsgd, "levels", 1.5),
        (Qsgd, "bucket", 0),
        (TernGrad, "clip", -1.0),
        (TernGrad, "clip", np.nan),
        (TernGrad, "clip", "2.5"),
        (TinyScript, "bits", 0),
        (TinyScript, "bits", 9),
        (TinyScript, "bits", True),
    ],
)
def test_impossible_setting_is_named(make: type[Compressor], setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} must be .*, got "):
        make(**{setting: value})
