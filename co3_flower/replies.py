"""The train reply: a client packs one payload, the server reads it from either kind of client.

A message-API reply holds ConfigRecord "co3" (payload, server-round, client-id, statistics) and the
app's MetricRecord; a NumPyClient returns the same keys with prefix "co3." in fit's metrics. A
payload above 4 MiB travels as one Array instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    ConfigRecordValues,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import make_message

from co3_flower.errors import Co3Error
from co3_flower.records import (
    ARRAYS,
    CLIENT_ID,
    CO3,
    METRICS,
    NUM_EXAMPLES,
    PAYLOAD,
    PREFIX,
    SERVER_ROUND,
    ClientId,
)
from co3_flower.stats import UpdateStats

PAYLOAD_STYPE = "co3.v1"
MAX_RECORD_BYTES = 4 * 2**20  # Flower cuts Arrays, but not ConfigRecords, into chunks of about 5 MB

SECAGG_RECORD = "secaggplus_configs"  # Flower's, in every message of its SecAgg+ workflow
SECAGG_REFUSED = (
    "SecAgg+ must not be combined with co3_flower, got secaggplus_mod or its workflow; it adds up "
    "masked integers of all clients, and an entropy-coded payload must be decoded before it can be "
    "added: leave one of the two out"
)

_STATS = (
    "code_bits",
    "side_info_bits",
    "structure_bits",
    "raw_bits",
    "entropy_bits",
    "sqnr_db",
    "residual_ratio",
)
_COUNTS = ("num_saturated", "num_underflowed")
STATS_KEYS = tuple(name.replace("_", "-") for name in (*_STATS, *_COUNTS, "encode_seconds"))

Scalars = dict[str, int | float]
MetricValues = dict[str, int | float | list[int] | list[float]]


class ReplyError(Co3Error, ValueError):
    """A reply does not have the form of a train reply, or does not belong to this round."""


@dataclasses.dataclass(frozen=True)
class TrainReply:
    """One well-formed train reply; whether its payload decodes is found out later.

    Parameters
    ----------
    node_id : int
        Flower's node.
    client_id : int or str
        Stable id of the client.
    payload : bytes
        All that counts into R.
    num_examples : int
        At least 1.
    metrics : dict
        The app's own metrics, numbers and lists of numbers.
    stats : dict of str to float
        Statistics of the encoder, by the keys ``STATS_KEYS``; as the client reports them.
    message : Message
        The reply itself.
    """

    node_id: int
    client_id: ClientId
    payload: bytes
    num_examples: int
    metrics: MetricValues
    stats: dict[str, float]
    message: Message


def co3_scalars(
    payload: bytes, server_round: int, client: ClientId, stats: UpdateStats, encode_seconds: float
) -> dict[str, ConfigRecordValues]:
    """Return what every train reply carries, the same keys in every round."""
    scalars: dict[str, ConfigRecordValues] = {
        PAYLOAD: payload,
        SERVER_ROUND: server_round,
        CLIENT_ID: client,
    }
    values = [float(getattr(stats, name)) for name in _STATS]
    values += [int(getattr(stats, name)) for name in _COUNTS]
    scalars.update(zip(STATS_KEYS, [*values, encode_seconds], strict=True))
    return scalars


def add_reply_records(content: RecordDict, scalars: Mapping[str, ConfigRecordValues]) -> None:
    """Put the payload and what describes it into a message-API reply, in place."""
    record = ConfigRecord(dict(scalars))
    payload = record[PAYLOAD]
    assert isinstance(payload, bytes)
    if len(payload) > MAX_RECORD_BYTES:
        del record[PAYLOAD]
        content[PREFIX + PAYLOAD] = ArrayRecord({PAYLOAD: payload_array(payload)})
    content[CO3] = record


def payload_array(payload: bytes) -> Array:
    """Return a payload as one Array, which Flower sends in chunks."""
    return Array(dtype="uint8", shape=(len(payload),), stype=PAYLOAD_STYPE, data=payload)


def count_payload_bytes(content: RecordDict) -> int:
    """Return the payload bytes of a reply, well-formed or not: what counts into R."""
    values = [
        record.get(key)
        for record in content.config_records.values()
        for key in (PAYLOAD, PREFIX + PAYLOAD)
    ]
    return sum(len(value) for value in values if isinstance(value, bytes)) + sum(
        len(array.data) for array in _payload_arrays(content)
    )


def parse_train_reply(
    message: Message, node_id: int, server_round: int, max_examples: int | None
) -> TrainReply:
    """Read a train reply of either kind of client.

    Parameters
    ----------
    message : Message
        A reply with content.
    node_id : int
        The node it came from.
    server_round : int
        The round it must belong to.
    max_examples : int or None
        Most examples a client may claim.

    Raises
    ------
    ReplyError
        Saying what the reply must hold and what was got.
    """
    content = message.content
    if "fitres.num_examples" in content:
        check_status(content, "fitres")
        fields = {
            k.removeprefix(PREFIX): v
            for k, v in _config(content, "fitres.metrics").items()
            if k.startswith(PREFIX)
        }
        metrics = _plain(_config(content, "fitres.metrics"))
        num_examples: object = _metric(content, "fitres.num_examples")
    else:
        fields = dict(_config(content, CO3))
        metrics = app_metrics(content)
        num_examples = metrics.pop(NUM_EXAMPLES, None)
    if fields.get(SERVER_ROUND) != server_round or isinstance(fields[SERVER_ROUND], bool):
        raise ReplyError(f"{SERVER_ROUND} must be {server_round}, got {fields.get(SERVER_ROUND)!r}")
    return TrainReply(
        node_id=node_id,
        client_id=_client_id(fields.get(CLIENT_ID)),
        payload=_payload(content, fields),
        num_examples=check_num_examples(num_examples, max_examples),
        metrics=metrics,
        stats={key: _number(fields.get(key)) for key in STATS_KEYS},
        message=message,
    )


def parse_evaluate_reply(message: Message) -> MetricValues:
    """Read an evaluate reply of either kind of client: its metrics, "num-examples" among them.

    Raises
    ------
    ReplyError
        Saying what the reply must hold and what was got.
    """
    content = message.content
    if "evaluateres.num_examples" in content:
        check_status(content, "evaluateres")
        metrics = _plain(_config(content, "evaluateres.metrics"))
        metrics["loss"] = _number(_metric(content, "evaluateres.loss"))
        num_examples: object = _metric(content, "evaluateres.num_examples")
    else:
        metrics = app_metrics(content)
        num_examples = metrics.get(NUM_EXAMPLES)
    metrics[NUM_EXAMPLES] = check_num_examples(num_examples, None)
    return metrics


def stock_reply(
    message: Message, metrics: MetricValues, arrays: ArrayRecord | None = None
) -> Message:
    """Return the reply a stock strategy expects: at most one ArrayRecord and one MetricRecord."""
    content = RecordDict({METRICS: MetricRecord(dict(metrics))})
    if arrays is not None:
        content[ARRAYS] = arrays
    return make_message(metadata=message.metadata, content=content)


def common_metrics(metrics: Sequence[MetricValues]) -> list[MetricValues]:
    """Return the metrics that all replies have in the same form; others cannot be averaged.

    Examples
    --------
    >>> common_metrics([{"loss": 1.0, "acc": 0.5}, {"loss": 2.0}])
    [{'loss': 1.0}, {'loss': 2.0}]
    """
    first = metrics[0] if metrics else {}
    keys = [k for k, v in first.items() if all(_form(m.get(k)) == _form(v) for m in metrics)]
    return [{key: reply[key] for key in keys} for reply in metrics]


def app_metrics(content: RecordDict) -> MetricValues:
    """Return a message-API reply's metrics: its one MetricRecord, or the one called "metrics"."""
    records = content.metric_records
    if METRICS in records:
        return dict(records[METRICS])
    if len(records) != 1:
        raise ReplyError(
            f"reply must hold one MetricRecord with '{NUM_EXAMPLES}', got {sorted(records)}"
        )
    return dict(next(iter(records.values())))


def check_num_examples(value: object, max_examples: int | None) -> int:
    """Return the number of examples, an integer of at least 1 and at most ``max_examples``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < 1
        or value > (max_examples or value)
    ):
        upper = f" and at most {max_examples}" if max_examples else ""
        raise ReplyError(f"{NUM_EXAMPLES} must be an integer of at least 1{upper}, got {value!r}")
    return value


def check_status(content: RecordDict, legacy: str) -> None:
    """Raise ReplyError unless a NumPyClient's reply says that the call worked."""
    status = _config(content, f"{legacy}.status")
    if status.get("code") != 0:
        raise ReplyError(f"status must be 0, got {status.get('code')!r}: {status.get('message')!r}")


def _config(content: RecordDict, name: str) -> Mapping[str, ConfigRecordValues]:
    if name not in content.config_records:
        raise ReplyError(
            f"reply must hold ConfigRecord '{name}', got {sorted(content)}; the client needs "
            "co3_mod or CO3NumPyClient"
        )
    return content.config_records[name]


def _metric(content: RecordDict, name: str) -> object:
    """Return the one number of a NumPyClient's MetricRecord, None where it is missing."""
    records = content.metric_records
    return records[name].get(name.partition(".")[2]) if name in records else None


def _payload_arrays(content: RecordDict) -> list[Array]:
    return [
        a
        for record in content.array_records.values()
        for a in record.values()
        if a.stype == PAYLOAD_STYPE
    ]


def _payload(content: RecordDict, fields: Mapping[str, ConfigRecordValues]) -> bytes:
    found = [array.data for array in _payload_arrays(content)]
    if isinstance(value := fields.get(PAYLOAD), bytes):
        found.append(value)
    if len(found) != 1:
        raise ReplyError(
            f"reply must hold one payload, got {len(found)}; the client needs co3_mod or "
            "CO3NumPyClient"
        )
    return found[0]


def _client_id(value: object) -> ClientId:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ReplyError(f"{CLIENT_ID} must be an integer or a string, got {value!r}")
    return value


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _plain(values: Mapping[str, ConfigRecordValues]) -> MetricValues:
    """Return a NumPyClient's own numbers, without the co3.* keys; others cannot be averaged."""
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(PREFIX)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


def _form(value: object) -> object:
    return (list, len(value)) if isinstance(value, list) else isinstance(value, (int, float))
