"""What a server needs to go on after a crash, in one file that is whole or not there.

A checkpoint is nested plain Python (None, booleans, numbers, texts, dicts, lists, tuples), arrays
and ArrayRecords. On disk it is a .npz: member "tree" is JSON in which an array stands as the name
of the member that holds it. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from co3_flower.errors import ConfigError
from co3_flower.files import write_durably
from co3_flower.records import values_of

VERSION = 1
_TREE = "tree"

Content = dict[str, Any]


def write_checkpoint(path: Path, content: Content) -> None:
    """Replace a checkpoint by a new one, in one step and flushed to disk.

    Parameters
    ----------
    path : Path
        The file; its folder is made if need be.
    content : dict
        What to keep.

    Raises
    ------
    ConfigError
        When something in it cannot be kept.
    OSError
        When the disk is full or read-only; the last checkpoint is then as it was.
    """
    arrays: dict[str, NDArray[Any]] = {}
    tree = json.dumps(_pack({"version": VERSION, **content}, arrays)).encode()
    members = {_TREE: np.frombuffer(tree, np.uint8), **arrays}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, lambda file: np.savez(file, **members))  # type: ignore[arg-type]


def read_checkpoint(path: Path) -> Content:
    """Return what a checkpoint holds.

    Raises
    ------
    ConfigError
        When it is missing, damaged, or of another version.
    """
    try:
        with np.load(path, allow_pickle=False) as members:
            content = _unpack(json.loads(members[_TREE].tobytes()), members)
    except FileNotFoundError:
        raise ConfigError(f"checkpoint must exist, got no file {str(path)!r}") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"checkpoint must be readable, got {str(path)!r} ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ConfigError(f"checkpoint must be of version {VERSION}, got another in {str(path)!r}")
    return content


def strategy_state(strategy: Strategy) -> Content:
    """Return all that a stock strategy holds, moments and settings, without its functions.

    Raises
    ------
    ConfigError
        When it holds something else than numbers, texts, arrays and other strategies.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvgM
    >>> strategy_state(FedAvgM(server_momentum=0.5))["fields"]["server_momentum"]
    0.5
    """
    fields: Content = {}
    for key, value in vars(strategy).items():
        if isinstance(value, Strategy):
            fields[key] = strategy_state(value)
        elif not callable(value):
            try:
                _pack(value, {})
            except ConfigError as error:
                raise ConfigError(
                    f"inner must hold plain values and arrays where a run can be resumed, got "
                    f"{type(strategy).__name__}.{key}: {error}"
                ) from None
            fields[key] = value
    return {"class": _class_name(strategy), "fields": fields}


def restore_strategy(strategy: Strategy, state: Content) -> None:
    """Give a fresh strategy the state that `strategy_state` returned.

    Raises
    ------
    ConfigError
        When it is of another class.
    """
    if state["class"] != _class_name(strategy):
        raise ConfigError(
            f"inner must be the checkpoint's {state['class']}, got {_class_name(strategy)}"
        )
    for key, value in state["fields"].items():
        inside = getattr(strategy, key, None)
        if isinstance(inside, Strategy):
            restore_strategy(inside, value)
        else:
            setattr(strategy, key, value)


def _class_name(strategy: Strategy) -> str:
    return f"{type(strategy).__module__}.{type(strategy).__qualname__}"


def _pack(value: object, arrays: dict[str, NDArray[Any]]) -> object:
    """Return a value as JSON can hold it; its arrays are added to ``arrays``."""
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        name = f"array{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"array" if isinstance(value, np.ndarray) else "scalar": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, ArrayRecord):
        items = {name: values_of(array) for name, array in value.items()}
        return {"record": _pack(items, arrays)}
    if isinstance(value, Mapping):
        return {"dict": [[_pack(k, arrays), _pack(v, arrays)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_pack(item, arrays) for item in value]}
    raise ConfigError(f"checkpoint must hold plain values and arrays, got a {type(value).__name__}")


def _unpack(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "record":
        items = _unpack(content, arrays).items()
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in items})
    if kind == "dict":
        return {_unpack(k, arrays): _unpack(v, arrays) for k, v in content}
    if kind == "array":
        return arrays[content]
    if kind == "scalar":
        return arrays[content][()]
    if kind not in ("list", "tuple"):
        raise ValueError(f"tree must hold known kinds, got {kind!r}")
    items = [_unpack(item, arrays) for item in content]
    return items if kind == "list" else tuple(items)
