"""Layout: names, shapes and dtypes of an update, its digest, arrays out of what a user holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from co3_flower.layout import Layout, as_arrays

UPDATE = {
    "conv.weight": np.zeros((4, 3, 2), np.float32),
    "scale": np.array(1.0, np.float16),
    "steps": np.array([1, 2], np.int64),
    "none": np.zeros((0, 5), np.float64),
}


def test_layout_keeps_names_shapes_and_dtypes_in_order() -> None:
    layout = Layout.of(UPDATE)
    assert layout.names == ("conv.weight", "scale", "steps", "none")
    assert layout.shapes == ((4, 3, 2), (), (2,), (0, 5))
    assert layout.dtypes == tuple(np.dtype(name) for name in ("f4", "f2", "i8", "f8"))


def test_layout_counts_entries_and_tensors() -> None:
    layout = Layout.of(UPDATE)
    assert layout.numels == (24, 1, 2, 0)
    assert len(layout) == 4


def test_layout_of_a_layout_is_itself() -> None:
    layout = Layout.of(UPDATE)
    assert Layout.of(layout) == layout


def test_layout_of_nothing_is_empty() -> None:
    layout = Layout.of({})
    assert (len(layout), layout.names, layout.numels) == (0, (), ())


def test_layout_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Layout.of(UPDATE).names = ()  # type: ignore[misc]


def test_layout_reads_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    layout = Layout.of({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)})
    assert layout.shapes == ((2, 3), (4,))
    assert layout.dtypes == (np.dtype("f4"), np.dtype("i8"))


# Digest


def test_digest_is_eight_bytes_and_repeatable() -> None:
    digest = Layout.of(UPDATE).digest([2])
    assert isinstance(digest, bytes)
    assert len(digest) == 8
    assert Layout.of(UPDATE).digest([2]) == digest


def test_digest_ignores_names() -> None:
    # A NumPyClient knows no names.
    numbered = {str(i): array for i, array in enumerate(UPDATE.values())}
    assert Layout.of(numbered).digest([2]) == Layout.of(UPDATE).digest([2])


def test_digest_ignores_the_dtype_of_coded_tensors() -> None:
    # They decode to float32, whatever they were.
    double = UPDATE | {"conv.weight": np.zeros((4, 3, 2), np.float64)}
    assert Layout.of(double).digest([2]) == Layout.of(UPDATE).digest([2])


def test_digest_changes_with_the_dtype_of_a_raw_tensor() -> None:
    narrow = UPDATE | {"steps": np.array([1, 2], np.int32)}
    assert Layout.of(narrow).digest([2]) != Layout.of(UPDATE).digest([2])


@pytest.mark.parametrize("shape", [(3, 4, 2), (24,), (4, 3, 2, 1), (4, 3), (4, 6)])
def test_digest_changes_with_a_shape(shape: tuple[int, ...]) -> None:
    other = UPDATE | {"conv.weight": np.zeros(shape, np.float32)}
    assert Layout.of(other).digest([2]) != Layout.of(UPDATE).digest([2])


def test_digest_changes_with_what_is_raw() -> None:
    layout = Layout.of(UPDATE)
    digests = {layout.digest(raw) for raw in ([2], [1, 2], [0, 2], [2, 3], [0, 1, 2, 3])}
    assert len(digests) == 5


def test_digest_does_not_depend_on_how_the_positions_are_listed() -> None:
    layout = Layout.of(UPDATE)
    assert layout.digest([2, 1]) == layout.digest((1, 2)) == layout.digest({1, 2})


def test_digest_changes_with_the_order_of_the_tensors() -> None:
    backwards = dict(reversed(UPDATE.items()))
    assert Layout.of(backwards).digest([1]) != Layout.of(UPDATE).digest([2])


def test_digest_tells_where_one_shape_ends_and_the_next_begins() -> None:
    first = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4,), np.float32)}
    second = {"a": np.zeros((2,), np.float32), "b": np.zeros((3, 4), np.float32)}
    assert Layout.of(first).digest([]) != Layout.of(second).digest([])


# Arrays


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4", "u8", "?"])
def test_as_arrays_keeps_every_real_dtype(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    kept = as_arrays({"a": array})["a"]
    assert kept.dtype == array.dtype
    assert np.array_equal(kept, array)


def test_as_arrays_keeps_the_order_of_the_names() -> None:
    assert list(as_arrays(UPDATE)) == list(UPDATE)


def test_as_arrays_takes_what_numpy_takes() -> None:
    arrays = as_arrays({"list": [1.0, 2.0], "number": 0.5})
    assert arrays["list"].tolist() == [1.0, 2.0]
    assert arrays["number"].shape == ()


def test_as_arrays_turns_bfloat16_tensors_into_the_same_float32() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, -2.5, 3e-30], dtype=torch.bfloat16)
    array = as_arrays({"a": tensor})["a"]
    assert array.dtype == np.float32
    assert array.tolist() == tensor.to(torch.float32).tolist()


def test_as_arrays_takes_tensors_that_require_grad() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, requires_grad=True)
    assert as_arrays({"a": tensor})["a"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "thing",
    [
        np.zeros(2, np.complex64),
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, "M8[s]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]),
        "text",
    ],
    ids=["complex", "text array", "object", "time", "record", "text"],
)
def test_as_arrays_names_the_tensor_that_holds_no_numbers(thing: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"must .*got .*'bad\.weight'"):
        as_arrays({"good": np.zeros(2, np.float32), "bad.weight": thing})


@pytest.mark.parametrize("like", [None, [np.ones(2)], "weight"])
def test_layout_of_what_is_no_mapping_is_refused(like: object) -> None:
    with pytest.raises(TypeError, match="layout must be a Layout or a mapping of names to arrays"):
        Layout.of(like)  # type: ignore[arg-type]
