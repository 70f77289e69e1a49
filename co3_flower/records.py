"""Flower record keys and the train message: first module that imports flwr.

In comes what the server decided for a round, out go records that both kinds of client read: a
message-API ClientApp finds "arrays" and "config", a NumPyClient finds the same two objects as
"fitins.parameters" and "fitins.config".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    ConfigRecordValues,
    Context,
    MetricRecord,
    RecordDict,
)
from numpy.typing import NDArray

from co3_flower.compressors import (
    COMPRESSORS,
    Compressor,
    is_rival,
    make_compressor,
    settings_of,
)
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError

ARRAYS = "arrays"  # ArrayRecord: the model, in messages and in replies of a message-API app
CONFIG = "config"  # ConfigRecord of a message: the user's scalars and the co3.* settings
METRICS = "metrics"  # MetricRecord of a reply
NUM_EXAMPLES = "num-examples"
GRADIENT = "gradient"  # ArrayRecord of a gradient-mode reply, before the mod
CO3 = "co3"  # ConfigRecord of a reply: payload, server-round, client-id and statistics
PREFIX = "co3."  # the same keys inside a NumPyClient's metrics, and the settings inside "config"
PAYLOAD = "payload"
SERVER_ROUND = "server-round"
CLIENT_ID = "client-id"
MAX_PAYLOAD_BYTES = "max-payload-bytes"
USED_ROUND = "used-round"
QUERY = "co3.query"  # in a message's config: tell the client-id, do not train

_NPY_HEADER = 10  # bytes before the text of an .npy header: magic, version, length

PAYLOAD_KINDS = ("update", "gradient")
BUFFER_KINDS = ("coded", "raw", "local")

ClientId = int | str

# CodecConfig field -> key; raw and buffers travel as positions, num_threads is the client's own
_CODEC_SCALARS = {
    field.name: PREFIX + field.name.replace("_", "-")
    for field in dataclasses.fields(CodecConfig)
    if field.name not in ("raw", "buffers", "num_threads")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What the server asks of every client in a round: co3.* scalars in ConfigRecord "config".

    Parameters
    ----------
    server_round : int
        Round of the message; the reply repeats it.
    payload_kind : str
        "update" or "gradient".
    compressor : str
        A name in `COMPRESSORS`.
    rival : Compressor or None
        The compressor with its settings, where it is neither "co3" nor "none".
    seed : int
        The server's; with a rival, clients draw by it.
    codec : CodecConfig
        Codec settings; its ``raw``, ``buffers`` and ``num_threads`` are not used.
    raw : tuple of int
        Positions of the float tensors that travel losslessly.
    buffers : tuple of int
        Positions of the buffers, integer and bool tensors included.
    buffers_kind : str
        "coded", "raw" or "local".
    max_payload_bytes : int
        Most bytes of the round's payload; 0 for no limit.
    memory_dir, experiment_id : str
        Where clients keep residuals in files, and under which name; empty for the context.
    used_round : int or None
        Last round whose update from this client the server has used, 0 for none; the one setting
        that differs between the clients of a round. None where the server does not know the client,
        which then takes its last update for used.
    """

    server_round: int
    payload_kind: str = "update"
    compressor: str = "co3"
    rival: Compressor | None = None
    seed: int = 0
    codec: CodecConfig = dataclasses.field(default_factory=CodecConfig)
    raw: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    buffers_kind: str = "coded"
    max_payload_bytes: int = 0
    memory_dir: str = ""
    experiment_id: str = ""
    used_round: int | None = None

    def to_scalars(self) -> dict[str, ConfigRecordValues]:
        """Return the settings as record scalars, keys "co3.format", "co3.gamma" and so on."""
        scalars: dict[str, ConfigRecordValues] = {
            key: value
            for name, key in _CODEC_SCALARS.items()
            if (value := getattr(self.codec, name)) is not None
        }
        scalars |= {
            PREFIX + SERVER_ROUND: self.server_round,
            PREFIX + "payload-kind": self.payload_kind,
            PREFIX + "compressor": self.compressor,
            PREFIX + "buffers-kind": self.buffers_kind,
        }
        if self.rival is not None:
            scalars[PREFIX + "compressor-settings"] = json.dumps(settings_of(self.rival))
            scalars[PREFIX + "seed"] = self.seed
        if self.used_round is not None:
            scalars[PREFIX + USED_ROUND] = self.used_round
        if self.max_payload_bytes:
            scalars[PREFIX + MAX_PAYLOAD_BYTES] = self.max_payload_bytes
        texts = {
            "raw": _join(self.raw),
            "buffers": _join(self.buffers),
            "memory-dir": self.memory_dir,
            "experiment-id": self.experiment_id,
        }
        # Flower's own counting of a message's size fails on empty texts: absent means empty
        return scalars | {PREFIX + key: text for key, text in texts.items() if text}

    @classmethod
    def from_scalars(cls, config: Mapping[str, ConfigRecordValues]) -> TrainSettings:
        """Read the settings out of a train message's config, the user's own keys ignored.

        Raises
        ------
        ConfigError
            When the settings are missing or one of them is not available here.
        """
        if PREFIX + SERVER_ROUND not in config:
            raise ConfigError(
                f"train message must hold '{PREFIX + SERVER_ROUND}' and the like, got keys "
                f"{sorted(config)}; give the ServerApp a CO3Strategy"
            )
        used_round = config.get(PREFIX + USED_ROUND)
        codec: dict[str, Any] = {
            name: config[key] for name, key in _CODEC_SCALARS.items() if key in config
        }
        compressor = _choice(config, "compressor", tuple(COMPRESSORS))
        return cls(
            server_round=int(cast(int, config[PREFIX + SERVER_ROUND])),
            payload_kind=_choice(config, "payload-kind", PAYLOAD_KINDS),
            compressor=compressor,
            rival=_rival(compressor, config.get(PREFIX + "compressor-settings", "{}")),
            seed=int(cast(int, config.get(PREFIX + "seed", 0))),
            codec=CodecConfig(**codec),
            raw=_split(config, "raw"),
            buffers=_split(config, "buffers"),
            buffers_kind=_choice(config, "buffers-kind", BUFFER_KINDS),
            max_payload_bytes=int(cast(int, config.get(PREFIX + MAX_PAYLOAD_BYTES, 0))),
            memory_dir=str(config.get(PREFIX + "memory-dir", "")),
            experiment_id=str(config.get(PREFIX + "experiment-id", "")),
            used_round=None if used_round is None else int(cast(int, used_round)),
        )


def message_content(arrays: ArrayRecord, config: ConfigRecord, legacy: str) -> RecordDict:
    """Return a message content that both kinds of client can read.

    Parameters
    ----------
    arrays : ArrayRecord
        The whole model.
    config : ConfigRecord
        Scalars only: a NumPyClient refuses lists.
    legacy : str
        "fitins" for a train message, "evaluateins" for an evaluate message.

    Returns
    -------
    RecordDict
        The two objects under both pairs of names; Flower sends equal objects once.
    """
    return RecordDict(
        {ARRAYS: arrays, CONFIG: config, f"{legacy}.parameters": arrays, f"{legacy}.config": config}
    )


def values_of(array: Array) -> NDArray[Any]:
    """Return an Array's values, without a copy and read-only where its bytes are as NumPy's are.

    ``Array.numpy()`` parses a header and copies; a model of hundreds of small tensors spends more
    time on that than on being coded.

    Examples
    --------
    >>> values_of(Array(np.arange(3))).tolist()
    [0, 1, 2]
    """
    data, dtype, shape = array.data, np.dtype(array.dtype or "O"), tuple(array.shape)
    written = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    begin = _NPY_HEADER + int.from_bytes(data[8:_NPY_HEADER], "little")
    if (
        array.stype == "numpy.ndarray"
        and data[:8] == b"\x93NUMPY\x01\x00"
        and data[_NPY_HEADER:begin].rstrip() == written
        and len(data) - begin == math.prod(shape) * dtype.itemsize
    ):
        return np.frombuffer(data, dtype, offset=begin).reshape(shape)
    return np.asarray(array.numpy())


def config_record(content: RecordDict, name: str) -> Mapping[str, ConfigRecordValues]:
    """Return a ConfigRecord of a message, or an empty one where there is none of that name."""
    records = content.config_records
    return records[name] if name in records else ConfigRecord()


def client_id(context: Context) -> ClientId:
    """Return node-config "partition-id", else node-config "client-id", else the node id.

    Raises
    ------
    ConfigError
        When the configured id is neither an integer nor a string.
    """
    config = context.node_config
    value = config.get("partition-id", config.get(CLIENT_ID, context.node_id))
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise ConfigError(f"client-id must be an integer or a non-empty string, got {value!r}")
    return value


def client_order(value: ClientId) -> tuple[bool, int, str]:
    """Return the sort key of a client-id: integers by value, then strings."""
    return (True, 0, value) if isinstance(value, str) else (False, value, "")


def derive_seed(seed: int, server_round: int, client: ClientId) -> int:
    """Return the 63-bit seed of one client in one round, equal on every machine.

    Examples
    --------
    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2) != derive_seed(0, 2, 2)
    True
    """
    text = repr((int(seed), int(server_round), client)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def count_bytes(content: RecordDict) -> int:
    """Return the bytes a message carries: names, keys and values, each record object once.

    Numbers count 8 bytes and booleans 1, as in Flower's ``count_bytes``; Flower's framing and HTTP
    headers come on top.
    """
    seen: set[int] = set()
    total = 0
    for name, record in content.items():
        total += len(name.encode())
        if id(record) not in seen:
            seen.add(id(record))
            total += _record_bytes(record)
    return total


def _record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    if isinstance(record, ArrayRecord):
        return sum(
            len(key.encode()) + len(a.data) + len(a.dtype) + len(a.stype) + 8 * len(a.shape)
            for key, a in record.items()
        )
    return sum(len(key.encode()) + _value_bytes(value) for key, value in record.items())


def _value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(_value_bytes(item) for item in value)
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8


def _join(positions: Iterable[int]) -> str:
    return ",".join(str(position) for position in positions)


def _split(config: Mapping[str, ConfigRecordValues], key: str) -> tuple[int, ...]:
    text = config.get(PREFIX + key, "")
    try:
        return tuple(int(part) for part in str(text).split(",") if part)
    except ValueError:
        raise ConfigError(f"{PREFIX + key} must be comma-joined positions, got {text!r}") from None


def _rival(compressor: str, settings: object) -> Compressor | None:
    if not is_rival(compressor):
        return None
    try:
        return make_compressor(compressor, json.loads(str(settings)))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{PREFIX}compressor-settings must fit {compressor!r}, got {settings!r}: {error}"
        ) from None


def _choice(config: Mapping[str, ConfigRecordValues], key: str, choices: tuple[str, ...]) -> str:
    value = config.get(PREFIX + key, choices[0])
    if value not in choices:
        raise ConfigError(
            f"{PREFIX + key} must be one of {choices}, got {value!r}; update co3_flower here"
        )
    assert isinstance(value, str)
    return value
