"""A stock strategy inside CO3Strategy: it sees dense trainable weights and chooses no nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy
from numpy.typing import NDArray

from co3_flower.errors import ConfigError
from co3_flower.nodes import RoundError
from co3_flower.records import NUM_EXAMPLES, values_of
from co3_flower.replies import TrainReply, common_metrics, stock_reply
from co3_flower.roles import TensorRoles


def check_inner(inner: object) -> None:
    """Raise ConfigError unless ``inner`` is None or a strategy that aggregates dense weights.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> check_inner(FedAvg())
    """
    if isinstance(inner, (FedXgbBagging, FedXgbCyclic)):
        raise ConfigError(
            f"inner must aggregate weights, got {type(inner).__name__}; trees cannot be averaged"
        )
    if inner is not None and not isinstance(inner, Strategy):
        kind = inner if isinstance(inner, type) else type(inner)
        what = "the class" if isinstance(inner, type) else "an instance of"
        raise ConfigError(
            "inner must be an instance of a strategy of flwr.serverapp.strategy, such as FedAdam(),"
            f" got {what} {kind.__module__}.{kind.__qualname__}"
        )


class FixedNodes(Grid):
    """A grid that knows some node ids and sends nothing; an inner strategy samples from it.

    Parameters
    ----------
    grid : Grid
        The real grid, for the run's information.
    node_ids : sequence of int
        The nodes that CO3Strategy chose.
    minimum : int
        Ids are made up to this number, or a strategy that wants more nodes than are chosen would
        wait for ever.
    """

    def __init__(self, grid: Grid, node_ids: Sequence[int], minimum: int) -> None:
        self._grid = grid
        self._ids = [*node_ids, *range(1, 1 + max(0, minimum - len(node_ids)))]

    def set_run(self, run: Any) -> None:
        """Refuse: the run is the real grid's."""
        raise NotImplementedError("an inner strategy cannot set the run")

    @property
    def run(self) -> Any:
        """The real grid's run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the chosen nodes, filled up to the minimum."""
        return list(self._ids)

    def push_messages(self, messages: Any) -> list[str]:
        """Refuse: CO3Strategy sends the messages."""
        raise NotImplementedError("an inner strategy cannot send messages of its own")

    def pull_messages(self, message_ids: Any) -> list[Message]:
        """Refuse: CO3Strategy receives the replies."""
        raise NotImplementedError("an inner strategy cannot receive messages of its own")

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        """Refuse: CO3Strategy sends the messages."""
        raise NotImplementedError("an inner strategy cannot send messages of its own")


def configure_inner(
    inner: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
    node_ids: Sequence[int],
) -> ConfigRecord:
    """Let the inner prepare a round; return the config it wants (FedProx adds "proximal-mu").

    Parameters
    ----------
    inner : Strategy
        The inner strategy.
    server_round : int
        The round.
    arrays : ArrayRecord
        The trainable tensors.
    config : ConfigRecord
        The user's config; the inner may change it.
    grid : Grid
        The real grid.
    node_ids : sequence of int
        The chosen nodes.
    """
    minimum = max(_setting(inner, "min_available_nodes"), _setting(inner, "min_train_nodes"))
    messages = inner.configure_train(
        server_round, arrays, config, FixedNodes(grid, node_ids, minimum)
    )
    for message in messages:
        for record in message.content.config_records.values():
            return record
    return config


def aggregate_inner(
    inner: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    roles: TensorRoles,
    replies: Sequence[TrainReply],
    updates: list[dict[str, NDArray[np.float32]]],
    weights: Sequence[int],
    step: np.float32,
) -> tuple[dict[str, NDArray[Any]], MetricRecord | None]:
    """Let the inner strategy aggregate the clients' weights.

    Parameters
    ----------
    inner : Strategy
        The inner strategy.
    server_round : int
        The round.
    arrays : ArrayRecord
        The model that was sent out.
    roles : TensorRoles
        The model's roles.
    replies : sequence of TrainReply
        The good replies.
    updates : list of dict
        Their trainable tensors; each is turned into the client's weights ``f32(w + f32(step * y))``
        in place.
    weights : sequence of int
        What the inner is told as num-examples.
    step : float32
        1 in update mode, minus server_lr in gradient mode.

    Returns
    -------
    trained : dict
        New values of the trainable tensors, in whatever dtype the inner uses.
    metrics : MetricRecord or None
        The inner's.

    Raises
    ------
    RoundError
        When the inner raises, or returns something else than the trainable tensors.
    """
    before = {
        name: values_of(arrays[name]).astype(np.float32, copy=False) for name in roles.trainable
    }
    name = type(inner).__name__
    messages = []
    for reply, update, weight, metrics in zip(
        replies, updates, weights, common_metrics([reply.metrics for reply in replies]), strict=True
    ):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            dense = {
                key: Array(np.asarray(before[key] + step * value)) for key, value in update.items()
            }
        update.clear()
        key = getattr(inner, "weighted_by_key", NUM_EXAMPLES)
        messages.append(stock_reply(reply.message, metrics | {key: weight}, ArrayRecord(dense)))
    try:
        # Krum's squared distances overflow where one client is far off; the result is checked
        with np.errstate(over="ignore", invalid="ignore"):
            result, metric_record = inner.aggregate_train(server_round, messages)
    except Exception as error:
        raise RoundError(
            f"inner strategy {name} must aggregate round {server_round}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if result is None or set(result) != set(roles.trainable):
        got = None if result is None else sorted(result)
        raise RoundError(
            f"inner strategy {name} must return {sorted(roles.trainable)}, got {got} in round "
            f"{server_round} of {len(messages)} replies; its own log says what it lacks"
        )
    trained = {key: values_of(array) for key, array in result.items()}
    for key, value in trained.items():
        if value.shape != before[key].shape:
            raise RoundError(
                f"inner strategy {name} must keep shape {before[key].shape}, got {value.shape} in "
                f"{key!r}"
            )
    return trained, metric_record


def _setting(strategy: object, key: str) -> int:
    """Return an integer setting of a strategy or of the one it wraps, else 0."""
    while strategy is not None:
        if isinstance(value := getattr(strategy, key, None), int):
            return value
        strategy = getattr(strategy, "strategy", None)
    return 0
