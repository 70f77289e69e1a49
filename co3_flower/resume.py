"""A strategy's rounds from a later one on, in Flower's own loop, which counts from 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


def start_from(
    strategy: Strategy,
    first_round: int,
    grid: Grid,
    arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    evaluate_fn: EvaluateFn | None,
) -> Result:
    """Run rounds ``first_round`` to ``num_rounds``; the model to begin with is not evaluated.

    Parameters
    ----------
    strategy : Strategy
        Its state is that before ``first_round``.
    first_round, num_rounds : int
        First and last round.
    grid, arrays, timeout, train_config, evaluate_config, evaluate_fn
        As in Flower's ``start``.

    Returns
    -------
    Result
        With the numbers that the rounds have in the whole training.
    """
    offset = first_round - 1

    def evaluate(server_round: int, model: ArrayRecord) -> MetricRecord | None:
        if server_round == 0 or evaluate_fn is None:
            return None
        return evaluate_fn(server_round + offset, model)

    result = _LaterRounds(strategy, offset).start(
        grid, arrays, num_rounds - offset, timeout, train_config, evaluate_config, evaluate
    )
    for field in dataclasses.fields(result):
        if isinstance(metrics := getattr(result, field.name), dict):
            setattr(result, field.name, {n + offset: record for n, record in metrics.items()})
    return result


class _LaterRounds(Strategy):
    """Passes everything on to a strategy, with later round numbers."""

    def __init__(self, strategy: Strategy, offset: int) -> None:
        self._strategy = strategy
        self._offset = offset

    def summary(self) -> None:
        self._strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._strategy.configure_train(server_round + self._offset, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._strategy.aggregate_train(server_round + self._offset, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._strategy.configure_evaluate(server_round + self._offset, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self._strategy.aggregate_evaluate(server_round + self._offset, replies)
