"""The client's side: local update in, one compressed payload out (convert, correct, compress).

``CO3NumPyClient`` is a NumPyClient whose subclass gives the local update; ``co3_mod`` gives the
same to a message-API ClientApp in one line. Both read the settings of the round from the train
message and keep the residual by ``memory``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    ConfigRecordValues,
    Context,
    Message,
    MessageType,
    RecordDict,
)
from flwr.app.message import make_message
from flwr.client import Client, NumPyClient
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import FitIns, FitRes, Parameters
from numpy.typing import NDArray

from co3_flower.codec import EncodedUpdate, encode_raw_update, encode_update
from co3_flower.compressors import Compressor, rival_stats, settings_of
from co3_flower.dense import Array, Dense, bring_to_host, dense_for
from co3_flower.device_array import held_values
from co3_flower.errors import ConfigError
from co3_flower.layout import Layout, as_arrays
from co3_flower.memory import ClientMemory, Origin, Recalled, client_memory
from co3_flower.records import (
    ARRAYS,
    CLIENT_ID,
    CO3,
    CONFIG,
    GRADIENT,
    PAYLOAD,
    PREFIX,
    QUERY,
    TrainSettings,
    client_id,
    config_record,
    derive_seed,
    values_of,
)
from co3_flower.replies import (
    MAX_RECORD_BYTES,
    PAYLOAD_STYPE,
    SECAGG_RECORD,
    SECAGG_REFUSED,
    add_reply_records,
    app_metrics,
    co3_scalars,
)
from co3_flower.roles import TensorRoles

Arrays = dict[str, Array]  # NumPy arrays, or torch tensors on a device


@dataclass(frozen=True)
class SentUpdate:
    """What one train reply was made of, for measurements at the client.

    Attributes
    ----------
    server_round : int
        From 1.
    update : dict of str to array
        What was to be sent, in layout order, before compensation: NumPy arrays, or torch tensors
        where the app gave such on a device.
    trainable : tuple of str
        Its tensors that are trained: floats that are no buffers.
    encoded : EncodedUpdate
        What became of it.
    """

    server_round: int
    update: Arrays
    trainable: tuple[str, ...]
    encoded: EncodedUpdate


Observer = Callable[[Context, SentUpdate], None]


class CO3NumPyClient(NumPyClient):
    """A NumPyClient that sends its update converted, corrected and compressed.

    A subclass gives ``local_update`` (and ``evaluate`` where wanted); Flower calls ``fit``.

    Parameters
    ----------
    context : Context
        The context that ``client_fn(context)`` gets; the residual lives in its state.

    Examples
    --------
    >>> class Client(CO3NumPyClient):
    ...     def local_update(self, parameters, config):
    ...         gradient = [np.ones_like(p) for p in parameters]
    ...         return gradient, 32, {"train-loss": 0.5}
    >>> def client_fn(context):
    ...     return Client(context).to_client()
    """

    def __init__(self, context: Context) -> None:
        if not isinstance(context, Context):
            raise TypeError(
                "context must be the Context that client_fn(context) gets, got "
                f"{type(context).__name__}"
            )
        self.context = context
        self.client_id = client_id(context)

    def local_update(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Train locally and return what is to be sent.

        Parameters
        ----------
        parameters : list of arrays
            The model as received.
        config : dict
            The server's scalars; "co3.payload-kind" says whether a gradient or a weight difference
            is wanted.

        Returns
        -------
        update : list of arrays
            NumPy arrays, or torch tensors, which are coded where they are, in the order of
            ``parameters``, with their shapes. Trainable entries: the gradient, or
            after minus before; float buffers: after minus before in both; integer and bool entries:
            the new value.
        num_examples : int
            Examples trained on.
        metrics : dict
            Scalars for the server.
        """
        raise NotImplementedError(
            "local_update(parameters, config) must be given by a subclass of CO3NumPyClient"
        )

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Run ``local_update``; its payload goes out among the metrics, as "co3.payload"."""
        self._check_init()
        settings = TrainSettings.from_scalars(config)
        received = {str(i): np.asarray(value) for i, value in enumerate(parameters)}
        roles = _roles(received, settings)
        values, num_examples, metrics = _check_result(self.local_update(parameters, config))
        if len(values) != len(parameters):
            raise ValueError(
                f"update must have {len(parameters)} arrays, one a parameter, got {len(values)}"
            )
        update = dict(zip(received, values, strict=True))
        sender = _Sender(self.context, settings, roles)
        reply = {PREFIX + key: value for key, value in sender.encode(update).items()}
        sender.save()
        return [], num_examples, {**metrics, **reply}

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the client-id, by which the server samples clients."""
        self._check_init()
        return {PREFIX + CLIENT_ID: self.client_id}

    def _check_init(self) -> None:
        if not hasattr(self, "client_id"):
            raise TypeError(
                f"{type(self).__name__}.__init__ must call super().__init__(context), got no "
                "context; it is the one that client_fn(context) gets"
            )

    def to_client(self) -> Client:
        """Return the Client that Flower runs; it sends a payload above 4 MiB as one Array."""
        client = super().to_client()
        fit = client.fit

        def fit_and_move_payload(ins: FitIns) -> FitRes:
            result = fit(ins)
            payload = result.metrics.get(PREFIX + PAYLOAD)
            if isinstance(payload, bytes) and len(payload) > MAX_RECORD_BYTES:
                del result.metrics[PREFIX + PAYLOAD]
                result.parameters = Parameters(tensors=[payload], tensor_type=PAYLOAD_STYPE)
            return result

        client.fit = fit_and_move_payload  # type: ignore[method-assign]
        return client


def co3_mod(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    *,
    observe: Observer | None = None,
) -> Message:
    """Compress a message-API app's train replies: ``ClientApp(mods=[co3_mod])``, first in line.

    The app trains as under stock FedAvg. In update mode it returns the new weights and the mod
    subtracts the received ones; in gradient mode it returns the gradient in ArrayRecord "gradient"
    and the new values of buffers, if the model has any, in "arrays". Evaluate and query messages
    pass through.

    Parameters
    ----------
    message : Message
        What the server sent.
    context : Context
        The client's context; the residual lives in its state.
    call_next : callable
        The next mod, or the app.
    observe : callable, optional
        Called as ``observe(context, sent)`` with a `SentUpdate` once its residual is kept, for
        measurements. Give it with ``functools.partial(co3_mod, observe=...)``.

    Returns
    -------
    Message
        The app's reply with its arrays replaced by ConfigRecord "co3".

    Raises
    ------
    ConfigError
        When the message does not come from a CO3Strategy, or a mod behind this one clips weights
        in gradient mode.
    ValueError
        When the reply's arrays do not fit the received ones.
    """
    config = config_record(message.content, CONFIG)
    if QUERY in config:
        return Message(
            RecordDict({CO3: ConfigRecord({CLIENT_ID: client_id(context)})}), reply_to=message
        )
    if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    if SECAGG_RECORD in message.content:
        raise ConfigError(SECAGG_REFUSED)
    settings = TrainSettings.from_scalars(config)
    if settings.payload_kind == "gradient":
        _refuse_clipping_mods(call_next)
    record = message.content.array_records[ARRAYS]
    received = {
        name: values_of(array) for name, array in record.items()
    }  # before the app may change the record
    stock = {k: v for k, v in message.content.items() if not k.startswith("fitins.")}
    reply = call_next(make_message(metadata=message.metadata, content=RecordDict(stock)), context)
    if reply.has_error():
        return reply
    roles = _roles(received, settings)
    app_metrics(reply.content)
    update, used = _update_of(reply.content, received, roles, settings)
    sender = _Sender(context, settings, roles)
    scalars = sender.encode(update)
    for name in used:
        del reply.content[name]
    add_reply_records(reply.content, scalars)
    encoded = sender.save()
    if observe is not None:
        ordered = {name: update[name] for name in roles.like.names}
        observe(context, SentUpdate(settings.server_round, ordered, roles.trainable, encoded))
    return reply


def _refuse_clipping_mods(call_next: ClientAppCallable) -> None:
    """Raise ConfigError where a mod behind this one would clip a gradient as if it were weights.

    Flower chains mods by closures over ``_mod`` and ``_ffn``; there is no other way to see them.
    """
    function: Any = call_next
    while cells := getattr(function, "__closure__", None):
        chained = dict(zip(function.__code__.co_freevars, cells, strict=True))
        if not {"_mod", "_ffn"} <= chained.keys():
            return
        mod, function = (chained[name].cell_contents for name in ("_mod", "_ffn"))
        if isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod):
            name = getattr(mod, "__name__", type(mod).__name__)
            raise ConfigError(
                f"payload must be 'update' with {name} behind co3_mod, got 'gradient'; it clips a "
                "difference of weights"
            )


class _Sender:
    """One reply: encode what is to be sent, then keep the residual as the very last step."""

    def __init__(self, context: Context, settings: TrainSettings, roles: TensorRoles) -> None:
        self._context, self._settings, self._roles = context, settings, roles
        self._memory: ClientMemory | None = None
        self._encoded: EncodedUpdate | None = None

    def encode(self, update: Mapping[str, Array]) -> dict[str, ConfigRecordValues]:
        """Return the scalars of the reply; nothing is stored yet."""
        start = time.perf_counter()
        roles = self._roles
        dense = dense_for(update, None, 1)
        arrays = dense.arrays({name: update[name] for name in roles.like.names})
        got = Layout.of(arrays)
        for name, shape, wanted in zip(got.names, got.shapes, roles.like.shapes, strict=True):
            if shape != wanted:
                raise ValueError(f"update must have shape {wanted}, got {shape} in tensor {name!r}")
        sent = {
            name: _as_sent(dense, name, arrays[name], dtype, wanted)
            for name, dtype, wanted in zip(got.names, got.dtypes, roles.like.dtypes, strict=True)
        }
        if self._settings.rival is not None:
            rival = roles.compressor(self._settings.rival)
            self._encoded = self._encode_by(rival, as_arrays(sent))
        elif self._settings.compressor == "none":
            self._encoded = encode_raw_update(sent)
        else:
            self._encoded = self._encode_by_codec(sent)
        seconds = time.perf_counter() - start
        encoded = self._encoded
        return co3_scalars(
            encoded.payload,
            self._settings.server_round,
            client_id(self._context),
            encoded.stats,
            seconds,
        )

    def _encode_by_codec(self, sent: Arrays) -> EncodedUpdate:
        config = self._roles.codec_config(self._settings.codec, _num_threads(self._context))
        origin = Origin(_residual_digest(self._roles), config.float_format.name, config.gamma)
        recalled = self._recall(origin, config.scale_refit_every)
        return encode_update(
            sent,
            recalled.residual,
            config,
            max_payload_bytes=self._settings.max_payload_bytes or None,
            scales=recalled.scales,
            unused_payload=recalled.unused_payload,
        )

    def _encode_by(self, compressor: Compressor, sent: Arrays) -> EncodedUpdate:
        name = f"{compressor.name} {settings_of(compressor)}"
        recalled = self._recall(Origin(_residual_digest(self._roles), name, 1.0))
        state = recalled.residual or {}
        if recalled.unused_payload is not None:
            seed = self._round_seed(recalled.server_round)
            state = compressor.take_back(state, recalled.unused_payload, sent, seed)
        seed = self._round_seed(self._settings.server_round)
        payload, state = compressor.encode(sent, state, seed)
        return EncodedUpdate(payload, state, rival_stats(payload, sent, state))

    def _recall(self, origin: Origin, scale_refit_every: int = 1) -> Recalled:
        self._memory = client_memory(self._context, self._settings, origin, scale_refit_every)
        return self._memory.recall()

    def _round_seed(self, server_round: int) -> int:
        return derive_seed(self._settings.seed, server_round, client_id(self._context))

    def save(self) -> EncodedUpdate:
        """Keep residual, payload and scales for the next round, and return what was encoded."""
        encoded = self._encoded
        assert encoded is not None
        if self._memory is not None and encoded.residual:
            scales = {
                row.name: row.scale
                for row in encoded.stats.tensors
                if row.name in self._roles.trainable and row.zero_fraction < 1
            }
            self._memory.save(bring_to_host(encoded.residual), encoded.payload, scales)
        return encoded


def _roles(received: Arrays, settings: TrainSettings) -> TensorRoles:
    return TensorRoles(Layout.of(received), settings.raw, settings.buffers, settings.buffers_kind)


def _check_result(result: object) -> tuple[Sequence[Any], int, Mapping[str, Any]]:
    """Return what ``local_update`` gave, once it has the form that is asked for."""
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(
            f"local_update must return a tuple (update, num_examples, metrics), got {got}"
        )
    values, num_examples, metrics = result
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"update must be a list of arrays, one a parameter, got {type(values).__name__}"
        )
    if isinstance(num_examples, bool) or not isinstance(num_examples, (int, np.integer)):
        raise ValueError(f"num_examples must be an integer, got {num_examples!r}")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of scalars, got {type(metrics).__name__}")
    return values, int(num_examples), metrics


def _update_of(
    content: RecordDict, received: Arrays, roles: TensorRoles, settings: TrainSettings
) -> tuple[Arrays, list[str]]:
    """Return what is to be sent, and the names of the ArrayRecords it was taken from."""
    records = content.array_records
    if settings.payload_kind == "update":
        if ARRAYS not in records and len(records) != 1:
            raise ValueError(
                f"reply must hold the new weights in ArrayRecord '{ARRAYS}', got {sorted(records)}"
            )
        name = ARRAYS if ARRAYS in records else next(iter(records))
        return _differences(records[name], received, list(roles.like.names), roles), [name]
    if GRADIENT not in records:
        raise ValueError(
            f"reply must hold ArrayRecord '{GRADIENT}' in gradient mode, got {sorted(records)}; "
            "return the gradient or use payload='update'"
        )
    gradient = _arrays_of(records[GRADIENT], GRADIENT, list(roles.trainable))
    buffers = [name for name in roles.buffer_names if name in roles.like.names]
    new = records[ARRAYS] if ARRAYS in records else ArrayRecord()
    used = [name for name in (GRADIENT, ARRAYS) if name in records]
    return gradient | _differences(new, received, buffers, roles), used


def _differences(
    record: ArrayRecord, received: Arrays, names: list[str], roles: TensorRoles
) -> Arrays:
    """Return after minus before for float tensors, and the new value for the others."""
    after = _arrays_of(record, ARRAYS, names)
    dense = dense_for(after, None, 1)
    for name in names:
        if tuple(after[name].shape) != received[name].shape:
            raise ValueError(
                f"reply must keep shape {received[name].shape}, got {tuple(after[name].shape)} in "
                f"{name!r}"
            )
        if name in roles.floats:
            after[name] = dense.difference(after[name], received[name])
    return after


def _arrays_of(record: ArrayRecord, what: str, names: list[str]) -> Arrays:
    missing = [name for name in names if name not in record]
    if missing:
        raise ValueError(f"ArrayRecord '{what}' of the reply must hold {names}, got no {missing}")
    return {name: held_values(record[name]) for name in names}


def _as_sent(
    dense: Dense, name: str, array: Array, dtype: np.dtype[Any], wanted: np.dtype[Any]
) -> Array:
    """Return float tensors as float32 and check that integer and bool tensors keep their dtype."""
    if wanted == np.float32:
        return dense.as_float32(array)
    if dtype != wanted:
        raise ValueError(f"update must have dtype {wanted}, got {dtype} in tensor {name!r}")
    return array


def _residual_digest(roles: TensorRoles) -> bytes:
    """Return 8 bytes over names, shapes and roles of the error-fed tensors."""
    raw, buffers = roles.kinds["raw"], roles.kinds["buffers"]
    rows = [
        (name, shape, name in buffers)
        for name, shape, dtype in zip(
            roles.like.names, roles.like.shapes, roles.like.dtypes, strict=True
        )
        if dtype == np.float32 and name not in raw
    ]
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).digest()


def _num_threads(context: Context) -> int:
    value = context.node_config.get("num-threads") or context.run_config.get("num-threads") or 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"num-threads must be an integer of at least 1, got {value!r}")
    return value
