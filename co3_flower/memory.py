"""What a client keeps between rounds (the memory of the *correct* stage), and what it makes of it.

After each round a client keeps one `Generation`: the round, the residual after it, the payload that
went up and, where they hold for several rounds, its scales; and the generation which that round was
built on. So it can make up for a payload that
the server did not use, and take back a round that the server repeats after a restart: the carry
before a round is made of the generation before it. A client saves as its very last step, because an
update that failed half way must not have changed anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast
from urllib.parse import quote

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, ConfigRecordValues, Context
from numpy.typing import NDArray

from co3_flower.errors import ConfigError
from co3_flower.files import write_durably
from co3_flower.records import ClientId, TrainSettings, client_id, values_of

logger = logging.getLogger("flwr.co3")

RESIDUAL = "co3.residual"  # ArrayRecord in context.state, keyed as the update
STATE = "co3.state"  # ConfigRecord in context.state: the generation and its payload
BEFORE = ".before"  # of both names: the same of the generation that round was built on
FILE_VERSION = 2
FILE_MAGIC = b"CO3M"
_HEAD = 12  # bytes: magic, length of the header, its checksum

Residual = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Origin:
    """What a residual was made with; one of another origin is not used.

    Attributes
    ----------
    digest : bytes
        Of names, shapes and roles of the error-fed tensors.
    format : str
        Number format of the codec.
    gamma : float
        Memory decay.
    """

    digest: bytes
    format: str
    gamma: float

    def difference(self, other: Origin) -> str:
        """Say what differs in another one; empty where nothing does."""
        if other.digest != self.digest:
            return f"its layout digest must be {self.digest.hex()}, got {other.digest.hex()}"
        if other.format != self.format:
            return f"its format must be {self.format!r}, got {other.format!r}"
        if other.gamma != self.gamma:
            return f"its gamma must be {self.gamma}, got {other.gamma}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One round's entry in a client's memory, without its arrays and its payload.

    Attributes
    ----------
    sequence : int
        From 1, in the order of saving; rounds that are repeated are saved again.
    server_round : int
        The round.
    base : int
        Sequence of the generation that its carry was made of, 0 for none.
    base_unused : bool
        Whether the carry held that generation's payload, too.
    origin : Origin
        What the residual was made with.
    scales : tuple of (str, float)
        Scales of its tensors, where the next rounds may use them, too.
    """

    sequence: int
    server_round: int
    base: int
    base_unused: bool
    origin: Origin
    scales: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Recalled:
    """What the next update is to be corrected with.

    Attributes
    ----------
    residual : dict of str to float32 array, or None
        Residual m of the last round; None at first.
    unused_payload : bytes or None
        Payload of the last round, where the server did not use it.
    server_round : int
        The last round; 0 at first.
    scales : dict of str to float, or None
        Scales of the last round, where they hold in this one; None where they are to be chosen.
    """

    residual: Residual | None = None
    unused_payload: bytes | None = None
    server_round: int = 0
    scales: dict[str, float] | None = None


class Store(Protocol):
    """Keeps a client's last generation and the one it was built on."""

    def generations(self) -> list[Generation]:
        """Return what is kept, the last one saved first."""

    def read(self, generation: Generation) -> tuple[Residual, bytes] | None:
        """Return residual and payload of a kept generation; None, with a warning, if damaged."""

    def set_aside(self, generation: Generation, reason: str) -> None:
        """Make sure that a kept generation is never used, and say why."""

    def save(
        self, generation: Generation, residual: Mapping[str, NDArray[np.float32]], payload: bytes
    ) -> None:
        """Keep a generation and its base, and nothing else."""


class ClientMemory:
    """One client's memory in one round: recall once, save at the very end.

    Parameters
    ----------
    store : Store
        Where it lies.
    origin : Origin
        What the present update is made with.
    server_round : int
        The present round.
    used_round : int or None
        Last round whose update from this client the server has used, 0 for none; None where that is
        not known, which is taken for the last one.
    scale_refit_every : int
        k: rounds 1 to k have one fit of the scales, k + 1 to 2 k the next. A client that missed the
        first of them fits in the first one that it takes part in.
    """

    def __init__(
        self,
        store: Store,
        origin: Origin,
        server_round: int,
        used_round: int | None,
        scale_refit_every: int = 1,
    ) -> None:
        self._store = store
        self._origin = origin
        self._server_round = server_round
        self._used_round = used_round
        self._every = scale_refit_every
        self._last = 0
        self._base: Generation | None = None
        self._base_unused = False

    def recall(self) -> Recalled:
        """Return residual, unused payload and scales; nothing where nothing sound fits.

        A round that was there before is being repeated by a server that was started again: what
        was kept of it is passed over, and its carry is made anew.
        """
        while True:
            kept = self._fitting()
            self._last = max((generation.sequence for generation in kept), default=0)
            self._base, self._base_unused = self._choose(kept)
            if self._base is None:
                return Recalled()
            if (found := self._store.read(self._base)) is not None:
                residual, payload = found
                return Recalled(
                    residual,
                    payload if self._base_unused else None,
                    self._base.server_round,
                    self._scales(self._base),
                )

    def save(
        self,
        residual: Mapping[str, NDArray[np.float32]],
        payload: bytes,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """Keep the round's residual, payload and scales, and what they were built on."""
        generation = Generation(
            sequence=self._last + 1,
            server_round=self._server_round,
            base=0 if self._base is None else self._base.sequence,
            base_unused=self._base_unused,
            origin=self._origin,
            scales=tuple(scales.items()) if scales and self._every > 1 else (),
        )
        self._store.save(generation, residual, payload)

    def _scales(self, base: Generation) -> dict[str, float] | None:
        fits = {(number - 1) // self._every for number in (base.server_round, self._server_round)}
        return dict(base.scales) if base.scales and len(fits) == 1 else None

    def _fitting(self) -> list[Generation]:
        kept = []
        for generation in self._store.generations():
            if reason := self._origin.difference(generation.origin):
                self._store.set_aside(generation, reason)
            else:
                kept.append(generation)
        return kept

    def _choose(self, kept: list[Generation]) -> tuple[Generation | None, bool]:
        """Return the generation to build on, and whether the server did not use its payload."""
        if self._server_round == 1:
            return None, False
        if not kept:
            if self._used_round:
                logger.warning(
                    "residual of round %d is not there; error feedback starts from zero",
                    self._used_round,
                )
            return None, False
        last = kept[0]
        if self._server_round > last.server_round:
            used = last.server_round if self._used_round is None else self._used_round
            if used <= last.server_round:
                return last, used < last.server_round
            rule = f"its round must be {used} or later, as the server has used that one"
        else:  # a round is repeated
            base = next((g for g in kept if g.sequence == last.base), None)
            if base is not None or not last.base:
                return base, last.base_unused
            rule = f"it must be what round {self._server_round} was built on, to repeat that"
        for generation in kept:
            self._store.set_aside(generation, f"{rule}, got round {generation.server_round}")
        return None, False


def client_memory(
    context: Context, settings: TrainSettings, origin: Origin, scale_refit_every: int = 1
) -> ClientMemory:
    """Return a client's memory in a round: in files if a memory directory is set, else the context.

    The directory is the node-config or run-config key "memory-dir", else what the server sends; the
    name of the experiment likewise, "experiment-id", else the run's id.

    Parameters
    ----------
    context : Context
        The client's context.
    settings : TrainSettings
        The server's settings of this round.
    origin : Origin
        What the present update is made with.
    scale_refit_every : int
        Rounds for which scales hold.
    """
    return ClientMemory(
        client_store(context, settings),
        origin,
        settings.server_round,
        settings.used_round,
        scale_refit_every,
    )


def client_store(context: Context, settings: TrainSettings) -> ContextStore | FileStore:
    """Return where `client_memory` keeps a client's generations."""
    directory = _setting(context, "memory-dir") or settings.memory_dir
    if not directory:
        return ContextStore(context)
    experiment_id = (
        _setting(context, "experiment-id") or settings.experiment_id or f"run-{context.run_id}"
    )
    return FileStore(Path(directory), experiment_id, client_id(context))


class ContextStore:
    """Generations in ``context.state``: kept by Flower between the rounds of one run.

    Parameters
    ----------
    context : Context
        The client's context.
    """

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def generations(self) -> list[Generation]:
        """Return what is kept, the last one saved first."""
        return [self._generation(suffix) for suffix in ("", BEFORE) if self._has(suffix)]

    def read(self, generation: Generation) -> tuple[Residual, bytes] | None:
        """Return residual and payload of a kept generation."""
        suffix = self._suffix(generation)
        record = self._state.array_records[RESIDUAL + suffix]
        payload = self._state.config_records[STATE + suffix]["payload"]
        return {name: values_of(array) for name, array in record.items()}, cast(bytes, payload)

    def set_aside(self, generation: Generation, reason: str) -> None:
        """Forget a generation, and say why."""
        self._drop(self._suffix(generation))
        logger.warning(
            "residual (context, round %d) is not used: %s; error feedback starts from zero",
            generation.server_round,
            reason,
        )

    def save(
        self, generation: Generation, residual: Mapping[str, NDArray[np.float32]], payload: bytes
    ) -> None:
        """Keep a generation and its base, and nothing else."""
        if self._has("") and self._generation("").sequence == generation.base:
            for name in (RESIDUAL, STATE):
                self._state[name + BEFORE] = self._state[name]
        elif not generation.base:
            self._drop(BEFORE)
        self._state[RESIDUAL] = ArrayRecord(
            {name: Array(np.asarray(value)) for name, value in residual.items()}
        )
        self._state[STATE] = ConfigRecord(
            {
                "sequence": generation.sequence,
                "server-round": generation.server_round,
                "base": generation.base,
                "base-unused": generation.base_unused,
                "digest": generation.origin.digest,
                "format": generation.origin.format,
                "gamma": generation.origin.gamma,
                "payload": payload,
                **_scale_lists(generation),
            }
        )

    def _has(self, suffix: str) -> bool:
        state = self._state
        return STATE + suffix in state.config_records and RESIDUAL + suffix in state.array_records

    def _generation(self, suffix: str) -> Generation:
        state: Mapping[str, Any] = self._state.config_records[STATE + suffix]
        return Generation(
            sequence=state["sequence"],
            server_round=state["server-round"],
            base=state["base"],
            base_unused=state["base-unused"],
            origin=Origin(state["digest"], state["format"], state["gamma"]),
            scales=tuple(zip(state.get("scale-names", ()), state.get("scales", ()), strict=True)),
        )

    def _suffix(self, generation: Generation) -> str:
        return next(s for s in ("", BEFORE) if self._has(s) and self._generation(s) == generation)

    def _drop(self, suffix: str) -> None:
        for name in (RESIDUAL + suffix, STATE + suffix):
            if name in self._state:
                del self._state[name]


def _scale_lists(generation: Generation) -> dict[str, ConfigRecordValues]:
    """Return the scales as lists; none where there are none, whose size Flower cannot count."""
    if not generation.scales:
        return {}
    names, scales = zip(*generation.scales, strict=True)
    return {"scale-names": list(names), "scales": list(scales)}


class FileStore:
    """Generations in two files per experiment and client: they survive a restart of the node.

    Each generation replaces the file that does not hold its base, in one step (written beside it,
    flushed to disk, renamed), so that a crash leaves the last one whole. A file that cannot be
    read, or must not be used, is renamed to ``*.unusable`` with a warning.

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
        name = f"{quote(experiment_id, safe='')}.{quote(repr(client), safe='')}"
        self.paths = tuple(directory / f"{name}.{slot}.residual" for slot in "ab")
        self._directory = directory

    def generations(self) -> list[Generation]:
        """Return what is kept, the last one saved first; unreadable files are set aside.

        Raises
        ------
        ConfigError
            When the disk does not let it.
        """
        return sorted(self._kept(), key=lambda generation: -generation.sequence)

    def read(self, generation: Generation) -> tuple[Residual, bytes] | None:
        """Return residual and payload of a kept generation; None, with a warning, if damaged.

        Raises
        ------
        ConfigError
            When the disk does not let it.
        """
        path = self._kept()[generation]
        with _named(self._directory):
            try:
                with path.open("rb") as file:
                    return _read_data(file, _read_header(file))
            except _DAMAGED as error:
                self._rename(path, _unreadable(error))
        return None

    def set_aside(self, generation: Generation, reason: str) -> None:
        """Rename a generation's file, and say why."""
        with _named(self._directory):
            self._rename(self._kept()[generation], reason)

    def save(
        self, generation: Generation, residual: Mapping[str, NDArray[np.float32]], payload: bytes
    ) -> None:
        """Keep a generation and its base.

        Raises
        ------
        ConfigError
            When the disk is full or read-only; what was kept is then as it was.
        """
        kept = self._kept()
        last = max(kept, key=lambda g: g.sequence, default=None)
        bases = [path for g, path in kept.items() if g.sequence == generation.base]
        if bases:
            path = next(path for path in self.paths if path not in bases)
        else:
            path = self.paths[0] if last is None else kept[last]
        head, numbers = _pack(generation, residual, payload)

        def write(file: IO[bytes]) -> None:
            file.write(head)
            file.write(numbers.data)
            file.write(payload)

        with _named(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            write_durably(path, write)
            if not bases:
                next(other for other in self.paths if other != path).unlink(missing_ok=True)

    def _kept(self) -> dict[Generation, Path]:
        found = {}
        with _named(self._directory):
            for path in self.paths:
                if not path.exists():
                    continue
                try:
                    with path.open("rb") as file:
                        found[_generation(_read_header(file))] = path
                except _DAMAGED as error:
                    self._rename(path, _unreadable(error))
        return found

    def _rename(self, path: Path, reason: str) -> None:
        aside = path.with_name(path.name + ".unusable")
        path.replace(aside)
        logger.warning(
            "residual file %s is not used: %s; kept as %s, error feedback starts from zero",
            path,
            reason,
            aside.name,
        )


def _pack(
    generation: Generation, residual: Mapping[str, NDArray[np.float32]], payload: bytes
) -> tuple[bytes, NDArray[np.float32]]:
    """Return a file's head and its numbers; magic, the header's length and checksum, header.

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
        "sequence": generation.sequence,
        "server_round": generation.server_round,
        "base": generation.base,
        "base_unused": generation.base_unused,
        "digest": generation.origin.digest.hex(),
        "format": generation.origin.format,
        "gamma": generation.origin.gamma,
        "scales": generation.scales,
        "numbers": base.size,
        "payload_bytes": len(payload),
        "crc32": zlib.crc32(payload, zlib.crc32(base.data)),
        "tensors": [
            [name, list(array.shape), offset]
            for (name, array), offset in zip(residual.items(), offsets, strict=True)
        ],
    }
    text = json.dumps(header).encode()
    text += b" " * (-(_HEAD + len(text)) % 64)
    head = FILE_MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
    return head + text, base


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


_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """Read the head that `_pack` made; a damaged one raises one of ``_DAMAGED``."""
    magic, length, crc32 = (file.read(4) for _ in range(3))
    if magic != FILE_MAGIC:
        raise ValueError(f"file must start with {FILE_MAGIC!r}, got {magic!r}")
    text = file.read(int.from_bytes(length, "little"))
    if zlib.crc32(text) != int.from_bytes(crc32, "little"):
        raise ValueError("header must have its checksum, got another")
    header: dict[str, Any] = json.loads(text)
    if header["version"] != FILE_VERSION:
        raise ValueError(f"version must be {FILE_VERSION}, got {header['version']}")
    return header


def _read_data(file: BinaryIO, header: dict[str, Any]) -> tuple[Residual, bytes]:
    """Read what follows a header; damaged data raise one of ``_DAMAGED``."""
    flat = np.fromfile(file, "<f4", header["numbers"]).astype(np.float32, copy=False)
    payload = file.read(header["payload_bytes"])
    if zlib.crc32(payload, zlib.crc32(flat.data)) != header["crc32"]:
        raise ValueError("numbers must have the header's checksum, got another")
    residual = {}
    for name, shape, offset in header["tensors"]:
        residual[name] = flat[offset : offset + math.prod(shape)].reshape(shape)
    return residual, payload


def _generation(header: dict[str, Any]) -> Generation:
    return Generation(
        sequence=header["sequence"],
        server_round=header["server_round"],
        base=header["base"],
        base_unused=header["base_unused"],
        origin=Origin(bytes.fromhex(header["digest"]), header["format"], header["gamma"]),
        scales=tuple((name, scale) for name, scale in header.get("scales", ())),
    )


def _unreadable(error: BaseException) -> str:
    return f"it cannot be read ({type(error).__name__}: {error})"


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


def _setting(context: Context, key: str) -> str:
    return str(context.node_config.get(key, "") or context.run_config.get(key, ""))
