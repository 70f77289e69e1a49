"""Federated evaluation as in stock FedAvg, for both kinds of client: mean metrics by examples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from co3_flower.nodes import error_reason
from co3_flower.records import METRICS, NUM_EXAMPLES, ClientId, client_order
from co3_flower.replies import (
    MetricValues,
    ReplyError,
    common_metrics,
    parse_evaluate_reply,
    stock_reply,
)

logger = logging.getLogger("flwr.co3")


def aggregate_evaluation(
    server_round: int,
    replies: Iterable[Message],
    client_ids: Mapping[int, ClientId],
    inner: Strategy | None,
) -> MetricRecord | None:
    """Return the mean of the clients' metrics weighted by their examples, or what ``inner`` makes.

    Failing clients are logged and left out, and so are metrics that not all clients report.

    Parameters
    ----------
    server_round : int
        The round.
    replies : iterable of Message
        The evaluate replies, in any order.
    client_ids : mapping
        Client-ids by node, as far as they are known: the order of summation.
    inner : Strategy or None
        A stock strategy that is to aggregate them.
    """
    good: list[tuple[Message, MetricValues]] = []
    for reply in replies:
        try:
            if reply.has_error():
                raise ReplyError(error_reason(reply))
            good.append((reply, parse_evaluate_reply(reply)))
        except ReplyError as error:
            node = reply.metadata.src_node_id
            logger.warning("evaluate, round %d, node %d: %s", server_round, node, error)
    good.sort(key=lambda item: _order(item[0].metadata.src_node_id, client_ids))
    metrics = common_metrics([values for _, values in good])
    if inner is None:
        return mean_metrics(metrics, [_examples(values) for values in metrics])
    key = getattr(inner, "weighted_by_key", NUM_EXAMPLES)
    messages = [
        stock_reply(message, values | {key: values[NUM_EXAMPLES]})
        for (message, _), values in zip(good, metrics, strict=True)
    ]
    return inner.aggregate_evaluate(server_round, messages)


def mean_metrics(metrics: Sequence[MetricValues], weights: Sequence[int]) -> MetricRecord | None:
    """Return the weighted mean of each metric, None of no replies; all must have the same keys."""
    contents = [
        RecordDict({METRICS: MetricRecord(values | {NUM_EXAMPLES: weight})})
        for values, weight in zip(metrics, weights, strict=True)
    ]
    return aggregate_metricrecords(contents, NUM_EXAMPLES) if contents else None


def _examples(values: MetricValues) -> int:
    value = values[NUM_EXAMPLES]
    assert isinstance(value, int)
    return value


def _order(node: int, client_ids: Mapping[int, ClientId]) -> tuple[bool, tuple[bool, int, str]]:
    """Return a sort key: known clients by id, then the others by node."""
    return node not in client_ids, client_order(client_ids.get(node, node))
