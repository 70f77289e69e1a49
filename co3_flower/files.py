"""Tensors in .npz and .safetensors files, in and out."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from co3_flower.errors import Co3Error

DTYPES = tuple(
    map(
        np.dtype,
        (
            "float16", "float32", "float64", "bool",
            "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        ),
    )
)  # fmt: skip


class FileError(Co3Error, ValueError):
    """A file cannot be read, or does not hold what it must."""


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read all tensors of a .npz or .safetensors file, in the order of the file.

    Parameters
    ----------
    path : Path
        The file; its suffix says which.

    Raises
    ------
    FileError
        If it is not there, is damaged, holds anything but numbers, or needs a package that is not
        installed.
    """
    suffix = _check_suffix(path)
    if not path.is_file():
        raise FileError(f"file must exist, got {str(path)!r}")
    if suffix == ".safetensors":
        tensors = _read_safetensors(path)
    else:
        try:
            with np.load(path, allow_pickle=False) as members:
                tensors = {name: members[name] for name in members.files}
        except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as e:
            raise FileError(
                f"file must be a .npz of plain arrays, got {str(path)!r} ({_first_line(e)})"
            ) from None
    for name, array in tensors.items():
        if array.dtype.newbyteorder("=") not in DTYPES:
            raise FileError(
                f"tensors must be of {', '.join(d.name for d in DTYPES)}, "
                f"got {array.dtype} in {name!r} of {str(path)!r}"
            )
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors to a .npz or .safetensors file; the file appears when it is complete.

    Parameters
    ----------
    path : Path
        The file; its suffix says which.
    tensors : mapping of str to array
        What it shall hold.

    Raises
    ------
    FileError
        If the suffix is another, or a package is missing.
    """
    part = path.with_name(path.name + ".part")
    if _check_suffix(path) == ".safetensors":
        package = _safetensors()
        package.save_file({k: np.ascontiguousarray(x) for k, x in tensors.items()}, part)
    else:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for name, array in tensors.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    part.replace(path)


def write_durably(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file that replaces another in one step, flushed to disk before that.

    Parameters
    ----------
    path : Path
        The file, in a folder that exists.
    write : callable
        Gets a file to write to. If it raises, the old file stays and nothing is left beside it.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make a rename durable; not every platform can open a directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Check before the work that a file can be written: its suffix and its folder.

    Raises
    ------
    FileError
        If it cannot.
    """
    if path.suffix not in suffixes:
        raise FileError(f"output must end in {' or '.join(suffixes)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise FileError(f"output must be in a folder that exists, got {str(path)!r}")
    if path.suffix == ".safetensors":
        _safetensors()


def _check_suffix(path: Path) -> str:
    if path.suffix not in (".npz", ".safetensors"):
        raise FileError(f"tensors must be in a .npz or .safetensors file, got {str(path)!r}")
    return path.suffix


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    package = _safetensors()
    try:
        tensors: dict[str, NDArray[Any]] = package.load_file(path)
    except Exception as e:  # its own error class, and TypeError for dtypes that NumPy lacks
        raise FileError(
            f"file must be a .safetensors of dtypes that NumPy has (bfloat16 is none), "
            f"got {str(path)!r} ({_first_line(e)})"
        ) from None
    return tensors


def _safetensors() -> Any:
    try:
        return import_module("safetensors.numpy")
    except ImportError:
        raise FileError(
            ".safetensors files must be read with the package safetensors, got none installed; "
            "`pip install safetensors` or use .npz"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
