"""The torch path gives the numba path's bytes: here on the CPU, where a test can hold both.

``device="cpu"`` has torch do the work; without it the same calls go through the numba loops.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from co3_flower import (
    CodecConfig,
    PayloadError,
    accumulate_update,
    decode_update,
    encode_update,
)
from co3_flower import structure as structure_module
from co3_flower.codec import EncodedUpdate
from co3_flower.config import CODERS, PRIORS, SCALES, STRUCTURES
from co3_flower.dense import HostDense, dense_for
from co3_flower.errors import ConfigError
from co3_flower.limits import NormLimit
from conftest import draw_gennorm

torch = pytest.importorskip("torch")

Arrays = dict[str, np.ndarray]
FORMATS = ("e2m1", "e1m2", "e3m0", "e2m1fn", "e4m3fn", "e5m2")
FEW_STEPS = {"num_streams": 32}  # a torch decoder takes as many steps as a stream has symbols


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def make_update(rng: np.random.Generator, shape: tuple[int, int], numel: int) -> Arrays:
    """Build a small network's update whose kernel has rows and columns of unlike spread."""
    rows, cols = (np.exp(1.5 * rng.standard_normal(n)) for n in shape)
    kernel = rng.standard_normal((*shape, 3, 3)) * rows[:, None, None, None] * 1e-3
    kernel *= cols[:, None, None]
    kernel[3] = 0.0
    return {
        "kernel": kernel.astype(np.float32),
        "bias": draw_gennorm(rng, 24, beta=1.5, alpha=1e-2),
        "heavy": draw_gennorm(rng, numel, beta=0.6, alpha=1e-4, zero_fraction=0.2).reshape(10, -1),
        "flat": rng.uniform(-1, 1, numel).astype(np.float32),  # fitted to its fine histogram
        "mean": rng.standard_normal(24).astype(np.float32),
    }


@pytest.fixture
def update(rng: np.random.Generator) -> Arrays:
    """Build an update that is large enough for row and column factors."""
    return make_update(rng, (24, 20), 1_100)


def as_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(array) for name, array in arrays.items()}


def as_bytes(arrays: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def both(
    update: Arrays, residual: dict[str, Any] | None, config: CodecConfig, **more: Any
) -> tuple[EncodedUpdate, EncodedUpdate]:
    """Encode by numba and by torch."""
    tensors = None if residual is None else as_torch(residual)
    return (
        encode_update(update, residual, config, **more),
        encode_update(as_torch(update), tensors, config, device="cpu", **more),
    )


def check_same(host: EncodedUpdate, device: EncodedUpdate) -> None:
    assert device.payload == host.payload
    assert all(isinstance(m, torch.Tensor) for m in device.residual.values())
    assert as_bytes(device.residual) == as_bytes(host.residual)
    assert {k: tuple(m.shape) for k, m in device.residual.items()} == {
        k: m.shape for k, m in host.residual.items()
    }


# The matrix


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("format", FORMATS)
def test_payload_and_residual_are_those_of_numba(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, format: str, coder: str
) -> None:
    monkeypatch.setattr(structure_module, "MIN_NUMEL", 1)  # structure is tried all the same
    update = make_update(rng, (16, 12), 300)
    residual = {name: np.float32(0.3) * array[..., ::-1] for name, array in update.items()}
    structured = 0
    for scale, prior, structure in itertools.product(SCALES, PRIORS, STRUCTURES):
        if scale == "paper" and format != "e2m1":
            continue
        config = CodecConfig(
            format=format, coder=coder, scale=scale, prior=prior, structure=structure,
            buffers=("mean",), min_numel=200, **FEW_STEPS,
        )  # fmt: skip
        host, device = both(update, residual, config)
        check_same(host, device)
        structured += host.stats.structure_bits > 0
    assert structured


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("format", ["e2m1", "e4m3fn"])
def test_payload_of_a_larger_kernel_is_that_of_numba(
    update: Arrays, format: str, coder: str
) -> None:
    structured = 0
    for multiplier in (1.0, 0.2, 0.05):
        config = CodecConfig(format=format, coder=coder, scale_multiplier=multiplier, **FEW_STEPS)
        host, device = both(update, None, config)
        check_same(host, device)
        structured += host.stats.structure_bits > 0
    assert structured


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("format", ["e2m1", "e5m2"])
def test_decoded_values_are_those_of_numba(
    update: Arrays, format: str, coder: str, structure: str
) -> None:
    for multiplier, streams in ((1.0, 32), (0.05, 7)):
        config = CodecConfig(
            format=format, coder=coder, structure=structure, scale="std", num_streams=streams,
            scale_multiplier=multiplier, buffers=("mean",), raw=("bias",),
        )  # fmt: skip
        payload = encode_update(update, None, config).payload
        decoded = decode_update(payload, update, device="cpu")
        assert as_bytes(decoded) == as_bytes(decode_update(payload, update))
        assert {k: tuple(y.shape) for k, y in decoded.items()} == {
            k: g.shape for k, g in update.items()
        }
        assert isinstance(decoded["kernel"], torch.Tensor)


def test_sums_of_replies_are_those_of_numba(update: Arrays) -> None:
    host = {name: np.full(g.shape, 0.1, np.float32) for name, g in update.items()}
    device = as_torch(host)
    kernel = device["kernel"]
    for coder, weight in (("huffman", 3), ("rans", 0.7)):
        payload = encode_update(update, None, CodecConfig(coder=coder, **FEW_STEPS)).payload
        accumulate_update(payload, host, weight)
        assert accumulate_update(payload, device, weight, device="cpu") == {}
    assert as_bytes(device) == as_bytes(host)
    assert device["kernel"] is kernel


def test_sums_may_be_torch_tensors_on_the_host(update: Arrays) -> None:
    host = {name: np.zeros(g.shape, np.float32) for name, g in update.items()}
    tensors = as_torch(host)
    payload = encode_update(update, None, CodecConfig()).payload
    accumulate_update(payload, host, 2)
    accumulate_update(payload, tensors, 2)
    assert as_bytes(tensors) == as_bytes(host)


# Sizes


@pytest.mark.parametrize("coder", CODERS)
def test_awkward_tensors_are_encoded_as_by_numba(edge_update: Arrays, coder: str) -> None:
    for scale in SCALES:
        config = CodecConfig(coder=coder, scale=scale, buffers=("one",), raw=("double",))
        host, device = both(edge_update, None, config)
        check_same(host, device)
    config = CodecConfig(coder=coder, **FEW_STEPS)
    host, device = both(
        edge_update, host.residual | {"double": edge_update["double"].astype("f4")}, config
    )
    check_same(host, device)
    decoded = decode_update(host.payload, edge_update, device="cpu")
    assert as_bytes(decoded) == as_bytes(decode_update(host.payload, edge_update))


@pytest.mark.parametrize(
    "shapes", [{}, {"a": ()}, {"a": (0,)}, {"a": (0, 3), "b": (2,)}, {"a": (1, 1)}], ids=str
)
def test_small_updates_are_encoded_as_by_numba(
    rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]
) -> None:
    update = {k: np.asarray(rng.standard_normal(shape), np.float32) for k, shape in shapes.items()}
    for coder in CODERS:
        host, device = both(update, None, CodecConfig(coder=coder))
        check_same(host, device)
        decoded = decode_update(host.payload, update, device="cpu")
        assert as_bytes(decoded) == as_bytes(decode_update(host.payload, update))


@pytest.mark.parametrize("coder", CODERS)
def test_zeros_are_encoded_as_by_numba(coder: str) -> None:
    update = {"w": np.zeros((70, 60), np.float32), "tiny": np.full(3, 1e-40, np.float32)}
    host, device = both(update, None, CodecConfig(coder=coder))
    check_same(host, device)
    assert not np.asarray(decode_update(host.payload, update, device="cpu")["w"]).any()


def test_64_ki_entries_of_a_real_size_are_encoded_as_by_numba(rng: np.random.Generator) -> None:
    spread = np.exp(rng.standard_normal((256, 1)))
    update = {"w": (rng.standard_normal((256, 256)) * spread).astype(np.float32)}
    for coder in CODERS:
        config = CodecConfig(
            format="e3m2", coder=coder, structure="auto", prior="auto", num_streams=255
        )
        host, device = both(update, None, config)
        check_same(host, device)
        assert len(host.payload) > 2 * 16384  # more than one chunk
        decoded = decode_update(host.payload, update, device="cpu")
        assert as_bytes(decoded) == as_bytes(decode_update(host.payload, update))


@pytest.mark.parametrize("num_streams", [1, 2, 3, 255])
def test_any_number_of_streams_gives_the_same_bytes(update: Arrays, num_streams: int) -> None:
    for structure in STRUCTURES:
        config = CodecConfig(num_streams=num_streams, structure=structure)
        host, device = both(update, None, config)
        check_same(host, device)
        decoded = decode_update(host.payload, update, device="cpu")
        assert as_bytes(decoded) == as_bytes(decode_update(host.payload, update))


# The rate, and what a round may bring


@pytest.mark.parametrize(("coder", "target"), [("huffman", 2.0), ("rans", 0.3)])
def test_target_finds_the_same_scales(update: Arrays, coder: str, target: float) -> None:
    config = CodecConfig(
        coder=coder, target_bits_per_parameter=target, buffers=("mean",), prior="empirical"
    )
    host, device = both(update, None, config)
    check_same(host, device)
    check_same(*both(update, host.residual, config))


@pytest.mark.parametrize("max_payload_bytes", [900, 150, 20])
def test_limit_of_bytes_gives_the_same_payload(update: Arrays, max_payload_bytes: int) -> None:
    config = CodecConfig(buffers=("mean",), gamma=0.5)
    residual = encode_update(update, None, config).residual
    check_same(*both(update, residual, config, max_payload_bytes=max_payload_bytes))


def test_unused_payload_and_given_scales_give_the_same_payload(update: Arrays) -> None:
    config = CodecConfig(buffers=("mean",), **FEW_STEPS)
    last = encode_update(update, None, config)
    for residual in (last.residual, None):
        more: dict[str, Any] = {"unused_payload": last.payload, "scales": {"heavy": 3e3}}
        check_same(*both(update, residual, config, **more))


def test_statistics_are_those_of_numba_but_for_the_order_of_sums(update: Arrays) -> None:
    host, device = both(update, None, CodecConfig(buffers=("mean",)))
    assert device.stats.tensors == host.stats.tensors
    for field in (
        "payload_bits",
        "code_bits",
        "structure_bits",
        "num_saturated",
        "num_underflowed",
    ):
        assert getattr(device.stats, field) == getattr(host.stats, field), field
    # float64 sums in another order
    assert device.stats.sqnr_db == pytest.approx(host.stats.sqnr_db, rel=1e-12)
    assert device.stats.residual_ratio == pytest.approx(host.stats.residual_ratio, rel=1e-12)


# What is refused


@pytest.mark.parametrize(
    ("bad", "in_residual"), [(np.nan, False), (np.inf, False), (np.inf, True)], ids=str
)
def test_entries_that_are_not_finite_are_named_alike(
    update: Arrays, bad: float, in_residual: bool
) -> None:
    residual = {name: np.zeros_like(g) for name, g in update.items()}
    (residual if in_residual else update)["heavy"][1, 2] = bad
    messages = []
    for arguments in ((update, residual), (as_torch(update), as_torch(residual))):
        with pytest.raises(ValueError, match="must be finite, got 1 NaN or infinite") as caught:
            encode_update(*arguments, CodecConfig(), device="cpu" if messages else None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("coder", CODERS)
def test_damaged_code_is_refused_as_by_numba(
    rng: np.random.Generator, update: Arrays, coder: str, structure: str
) -> None:
    from co3_flower.layout import Layout
    from co3_flower.payload import read_payload

    config = CodecConfig(coder=coder, structure=structure, num_streams=16)
    parts, plan = read_payload(encode_update(update, None, config).payload, Layout.of(update))
    num_words = int(parts.sizes.sum())
    refused = 0
    for _ in range(6):
        words = parts.words.copy()
        at = rng.integers(num_words)
        words[at : at + 40] = rng.integers(0, np.iinfo(words.dtype).max, words[at : at + 40].size)
        parts.words.flags.writeable = False
        damaged = type(parts)(**{**vars(parts), "words": words})
        found = []
        for dense in (HostDense(1), dense_for({}, "cpu", 1)):
            try:
                found.append(np.asarray(dense.decode(damaged, plan)).tobytes())
            except PayloadError as error:
                found.append(str(error))
                refused += 1
        assert found[0] == found[1]
    assert refused


def test_limits_hold_on_a_device(update: Arrays) -> None:
    payload = encode_update(update, None, CodecConfig(**FEW_STEPS)).payload
    limit = NormLimit(0.5, frozenset({"kernel", "flat"}), clip=True)
    decoded = [decode_update(payload, update, norm_limit=limit, device=d) for d in (None, "cpu")]
    assert as_bytes(decoded[0]) == as_bytes(decoded[1])
    for device in (None, "cpu"):
        with pytest.raises(PayloadError, match="at most 0.5 in magnitude, got .* in 'flat'"):
            decode_update(payload, {k: update[k] for k in update}, max_magnitude=0.5, device=device)


def test_accumulator_of_another_dtype_is_refused(update: Arrays) -> None:
    payload = encode_update(update, None, CodecConfig()).payload
    sums = {name: torch.zeros(g.shape, dtype=torch.float64) for name, g in update.items()}
    with pytest.raises(ValueError, match=r"torch.float32 tensor of shape .*, got torch.float64"):
        accumulate_update(payload, sums, 1, like=update, device="cpu")
    sums = {
        name: torch.zeros(*g.shape[::-1]).permute(*range(g.ndim)[::-1])
        for name, g in update.items()
    }
    with pytest.raises(
        ValueError, match="must be contiguous, got a tensor that is not in 'kernel'"
    ):
        accumulate_update(payload, sums, 1, like=update, device="cpu")


# Where the work is done


def test_residual_is_not_copied_when_it_comes_back(update: Arrays) -> None:
    encoded = encode_update(as_torch(update), None, CodecConfig(), device="cpu")
    dense = dense_for({}, "cpu", 1)
    parts = list(encoded.residual.values())
    flat = dense.as_flat(
        sorted(parts, key=lambda m: m.storage_offset()), sum(m.numel() for m in parts)
    )
    assert flat.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()


def test_inputs_stay_as_they_are(update: Arrays) -> None:
    tensors, residual = as_torch(update), as_torch(update)
    encode_update(tensors, residual, CodecConfig(), device="cpu")
    assert as_bytes(tensors) == as_bytes(residual) == as_bytes(update)


def test_parameters_and_odd_tensors_are_taken(rng: np.random.Generator) -> None:
    weight = torch.nn.Parameter(torch.tensor(rng.standard_normal((40, 30)), dtype=torch.float32))
    brain = torch.tensor(rng.standard_normal(50)).bfloat16()
    sparse = torch.eye(6).to_sparse()
    tensors = {"w": weight, "b": brain, "s": sparse, "n": torch.tensor(3), "a": np.float64([0.5])}
    host = encode_update(tensors, None, CodecConfig())
    check_same(host, encode_update(tensors, None, CodecConfig(), device="cpu"))


def test_host_tensors_are_left_to_numba_unless_a_device_is_named(update: Arrays) -> None:
    encoded = encode_update(as_torch(update), None, CodecConfig())
    assert all(isinstance(m, np.ndarray) for m in encoded.residual.values())
    assert isinstance(dense_for(as_torch(update), None, 1), HostDense)


def test_update_that_is_no_mapping_is_refused_alike() -> None:
    for device in (None, "cpu"):
        with pytest.raises(
            TypeError, match="update must be a mapping of names to arrays, got list"
        ):
            encode_update([np.ones(3)], None, CodecConfig(), device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["gpu", "", "CPU", 1.5])
def test_device_that_torch_does_not_know_is_named(update: Arrays, device: object) -> None:
    payload = encode_update(update, None, CodecConfig()).payload
    sums = {name: np.zeros(g.shape, np.float32) for name, g in update.items()}
    for call in (
        lambda: encode_update(update, None, CodecConfig(), device=device),
        lambda: decode_update(payload, update, device=device),
        lambda: accumulate_update(payload, sums, 1, like=update, device=device),
    ):
        with pytest.raises(ConfigError, match=f"device must be one that torch .* got {device!r}"):
            call()
