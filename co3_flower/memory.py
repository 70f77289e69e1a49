"""Where a client's residual lives between rounds (the memory of the *correct* stage).

A store gives back what it was last given, or None where there is nothing that fits the present
layout: error feedback then starts from zero. A client saves as its very last step, because an
update that failed half way must not have changed it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import quote

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from co3_flower.errors import ConfigError
from co3_flower.records import ClientId, TrainSettings, client_id, values_of

logger = logging.getLogger("flwr.co3")

RESIDUAL = "co3.residual"  # ArrayRecord in context.state, keyed as the update
SCALES = "co3.scales"  # ConfigRecord in context.state: scales of an earlier round
STATE = "co3.state"  # ConfigRecord in context.state: round and layout digest
FILE_VERSION = 1
FILE_MAGIC = b"CO3M"

Residual = dict[str, NDArray[np.float32]]


class ResidualStore(Protocol):
    """Keeps one client's residual."""

    def load(self, digest: bytes) -> Residual | None:
        """Return the last round's residual, or None where none fits the layout of this digest."""

    def save(
        self, residual: Mapping[str, NDArray[np.float32]], server_round: int, digest: bytes
    ) -> None:
        """Replace what is kept by the residual of this round."""


def residual_store(context: Context, settings: TrainSettings) -> ResidualStore:
    """Return the client's store: files under a memory directory if one is set, else the context.

    The directory is the node-config or run-config key "memory-dir", else what the server sends; the
    name of the experiment likewise, "experiment-id", else the run's id.

    Parameters
    ----------
    context : Context
        The client's context.
    settings : TrainSettings
        The server's settings of this round.
    """
    directory = _setting(context, "memory-dir") or settings.memory_dir
    if not directory:
        return ContextStore(context)
    experiment_id = (
        _setting(context, "experiment-id") or settings.experiment_id or f"run-{context.run_id}"
    )
    return FileStore(Path(directory), experiment_id, client_id(context))


class ContextStore:
    """Residual in ``context.state``: kept by Flower between the rounds of one run.

    Parameters
    ----------
    context : Context
        The client's context; its state is changed by ``save`` only.
    """

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def load(self, digest: bytes) -> Residual | None:
        """Return the last round's residual, or None where none fits the layout of this digest."""
        if STATE not in self._state.config_records or RESIDUAL not in self._state.array_records:
            return None
        state = self._state.config_records[STATE]
        if state.get("digest") != digest:
            _warn_digest(
                f"context, round {state.get('server-round')!r}", state.get("digest"), digest
            )
            return None
        return {
            name: values_of(array) for name, array in self._state.array_records[RESIDUAL].items()
        }

    def save(
        self, residual: Mapping[str, NDArray[np.float32]], server_round: int, digest: bytes
    ) -> None:
        """Replace what is kept by the residual of this round."""
        record = ArrayRecord({name: Array(np.asarray(value)) for name, value in residual.items()})
        self._state[RESIDUAL] = record
        self._state[STATE] = ConfigRecord({"server-round": server_round, "digest": digest})


class ScaleStore:
    """Scales of an earlier round in ``context.state``, for `CodecConfig.scale_refit_every`.

    Rounds 1 to k have one fit, k + 1 to 2 k the next. A client that missed the first of them fits
    in the first one that it takes part in.

    Parameters
    ----------
    context : Context
        The client's context; its state is changed by ``save`` only.
    every : int
        k.
    """

    def __init__(self, context: Context, every: int) -> None:
        self._state = context.state
        self._every = every

    def load(self, server_round: int, digest: bytes) -> dict[str, float] | None:
        """Return the scales that hold in this round, or None where they are to be chosen."""
        if self._every == 1 or SCALES not in self._state.config_records:
            return None
        record = self._state.config_records[SCALES]
        if record["fit"] != self._fit(server_round) or record["digest"] != digest:
            return None
        names, scales = cast(list[str], record["names"]), cast(list[float], record["scales"])
        return dict(zip(names, scales, strict=True))

    def save(self, scales: Mapping[str, float], server_round: int, digest: bytes) -> None:
        """Keep the scales that this round has used."""
        if self._every > 1:
            self._state[SCALES] = ConfigRecord(
                {
                    "fit": self._fit(server_round),
                    "digest": digest,
                    "names": list(scales),
                    "scales": list(scales.values()),
                }
            )

    def _fit(self, server_round: int) -> int:
        return (server_round - 1) // self._every


class FileStore:
    """Residual in one file per experiment and client: it survives a restart of the node.

    A file is replaced in one step (written beside it, flushed to disk, renamed), so that a crash
    leaves the old one whole. A file that cannot be read, or fits another layout, is renamed to
    ``*.unusable`` with a warning and never used.

    Parameters
    ----------
    directory : Path
        Made when it is not there.
    experiment_id : str
        Name of the experiment.
    client : int or str
        Id of the client.
    """

    def __init__(self, directory: Path, experiment_id: str, client: ClientId) -> None:
        # repr tells the client-id 3 from '3'; quote leaves no path separator in a name
        name = f"{quote(experiment_id, safe='')}.{quote(repr(client), safe='')}.residual"
        self.path = directory / name

    def load(self, digest: bytes) -> Residual | None:
        """Return the last round's residual, or None where none fits the layout of this digest.

        Raises
        ------
        ConfigError
            When the disk does not let it.
        """
        with _named(self.path.parent):
            return self._load(digest)

    def _load(self, digest: bytes) -> Residual | None:
        if not self.path.exists():
            return None
        try:
            with self.path.open("rb") as file:
                header, residual = _read(file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._set_aside(f"it cannot be read ({type(error).__name__}: {error})")
            return None
        if header["digest"] != digest.hex():
            self._set_aside(f"its layout digest must be {digest.hex()}, got {header['digest']}")
            return None
        return residual

    def save(
        self, residual: Mapping[str, NDArray[np.float32]], server_round: int, digest: bytes
    ) -> None:
        """Replace what is kept by the residual of this round.

        Raises
        ------
        ConfigError
            When the disk is full or read-only; the last residual is then as it was.
        """
        head, flat = _pack(residual, server_round, digest)
        with _named(self.path.parent):
            self._write(head, flat)

    def _write(self, head: bytes, flat: NDArray[np.float32]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(
            prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent
        )
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(head)
                file.write(flat.data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except BaseException:
            temporary.unlink()
            raise
        _sync_directory(self.path.parent)

    def _set_aside(self, reason: str) -> None:
        aside = self.path.with_name(self.path.name + ".unusable")
        self.path.replace(aside)
        logger.warning(
            "residual file %s is not used: %s; kept as %s, error feedback starts from zero",
            self.path,
            reason,
            aside.name,
        )


def _pack(
    residual: Mapping[str, NDArray[np.float32]], server_round: int, digest: bytes
) -> tuple[bytes, NDArray[np.float32]]:
    """Return a file's head and its numbers: magic, length of the JSON header, header, padding.

    A residual fresh from the codec is one flat array in parts; it is written as it lies.
    """
    base = next((array.base for array in residual.values()), None)
    offsets = _offsets_within(base, residual) if isinstance(base, np.ndarray) else None
    if offsets is None:
        sizes = [array.size for array in residual.values()]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [np.ravel(array) for array in residual.values()]
        base = np.concatenate([np.empty(0, np.float32), *parts]).astype("<f4", copy=False)
    assert isinstance(base, np.ndarray)
    header = {
        "version": FILE_VERSION,
        "server_round": server_round,
        "digest": digest.hex(),
        "crc32": zlib.crc32(base.data),
        "tensors": [
            [name, list(array.shape), offset]
            for (name, array), offset in zip(residual.items(), offsets, strict=True)
        ],
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(FILE_MAGIC) + 4 + len(text)) % 64)
    return FILE_MAGIC + len(text).to_bytes(4, "little") + text, base


def _offsets_within(
    base: NDArray[Any], residual: Mapping[str, NDArray[np.float32]]
) -> list[int] | None:
    """Return where each array begins in a flat little-endian float32 base, if all lie in it."""
    if base.ndim != 1 or base.dtype != np.dtype("<f4") or not base.flags.c_contiguous:
        return None
    start = base.__array_interface__["data"][0]
    offsets = []
    for array in residual.values():
        if array.base is not base or not array.flags.c_contiguous:
            return None
        at = array.__array_interface__["data"][0] - start
        offsets.append(at // 4 if array.size else 0)
    return offsets


def _read(file: BinaryIO) -> tuple[dict[str, Any], Residual]:
    """Undo `_pack`; a damaged file raises ValueError, KeyError, TypeError or AttributeError."""
    magic = file.read(len(FILE_MAGIC))
    if magic != FILE_MAGIC:
        raise ValueError(f"file must start with {FILE_MAGIC!r}, got {magic!r}")
    header = json.loads(file.read(int.from_bytes(file.read(4), "little")))
    if header["version"] != FILE_VERSION:
        raise ValueError(f"version must be {FILE_VERSION}, got {header['version']}")
    flat = np.fromfile(file, "<f4").astype(np.float32, copy=False)
    if zlib.crc32(flat.data) != header["crc32"]:
        raise ValueError("numbers must have the header's checksum, got another")
    residual = {}
    for name, shape, offset in header["tensors"]:
        residual[name] = flat[offset : offset + math.prod(shape)].reshape(shape)
    return header, residual


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Turn what the disk refuses into one line that names the setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"memory-dir must be a folder that can be read and written, got {str(directory)!r} "
            f"({error.strerror or error})"
        ) from error


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


def _setting(context: Context, key: str) -> str:
    return str(context.node_config.get(key, "") or context.run_config.get(key, ""))


def _warn_digest(where: str, got: object, digest: bytes) -> None:
    text = got.hex() if isinstance(got, bytes) else repr(got)
    logger.warning(
        "residual (%s) is not used: its layout digest must be %s, got %s; error feedback starts "
        "from zero",
        where,
        digest.hex(),
        text,
    )
