"""Golden payloads: stored bytes decode to stored values, and today's encoder still writes them."""

from __future__ import annotations

import pytest
from golden.regenerate import CASES, FOLDER, as_bytes

from co3_flower.codec import decode_update


def test_golden_files_are_those_of_the_cases() -> None:
    stored = {path.name for path in FOLDER.glob("*.bin")}
    assert stored == {f"{name}{end}" for name in CASES for end in (".bin", ".decoded.bin")}


@pytest.mark.parametrize("name", CASES)
def test_golden_payload_decodes_to_the_stored_values(name: str) -> None:
    payload = (FOLDER / f"{name}.bin").read_bytes()
    decoded = decode_update(payload, CASES[name].update)
    assert as_bytes(decoded) == (FOLDER / f"{name}.decoded.bin").read_bytes()
    assert {k: a.shape for k, a in decoded.items()} == {
        k: a.shape for k, a in CASES[name].update.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_golden_payload_is_what_the_encoder_writes(name: str) -> None:
    encoded = CASES[name].encode(CASES[name].update)
    assert encoded.payload == (FOLDER / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_golden_payload_is_of_version_one(name: str) -> None:
    assert (FOLDER / f"{name}.bin").read_bytes()[:5] == b"CO3F\1"
