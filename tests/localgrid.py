"""The in-process grid of sweeps, for tests: apps that differ, replies shuffled, changed or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp

from sim.grid import CLIENT_RAISED, FIRST_NODE, InProcessGrid, identify, make_context

__all__ = ["CLIENT_RAISED", "FIRST_NODE", "LocalGrid", "is_train"]


class LocalGrid(InProcessGrid):
    """Run each message's ClientApp at once; replies come back shuffled by ``shuffle_seed``.

    ``apps`` is one app for all nodes or one per node. ``tamper(node_id, reply)`` may change a
    train reply, replace it, or lose it by returning None. ``train_replies`` keeps what arrived.
    """

    def __init__(
        self,
        apps: ClientApp | Sequence[ClientApp],
        num_nodes: int,
        *,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        run_config: Mapping[str, Any] | None = None,
        shuffle_seed: int | None = None,
        tamper: Callable[[int, Message], Message | None] | None = None,
    ) -> None:
        super().__init__(0)
        configs = node_configs or [{"partition-id": i} for i in range(num_nodes)]
        self.contexts = {
            FIRST_NODE + i: make_context(FIRST_NODE + i, config, run_config or {})
            for i, config in enumerate(configs)
        }
        apps = [apps] * num_nodes if isinstance(apps, ClientApp) else list(apps)
        self.apps = dict(zip(self.contexts, apps, strict=True))
        self.rng = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
        self.tamper = tamper
        self.train_replies: list[Message] = []
        self.sent: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(identify(message))
            self.sent.append(message)
            reply: Message | None = self._answer(message)
            if self.tamper and is_train(message):
                reply = self.tamper(message.metadata.dst_node_id, reply)
            if reply is not None:
                self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = super().pull_messages(message_ids)
        if self.rng is not None:
            found = [found[i] for i in self.rng.permutation(len(found))]
        trained = {m.metadata.message_id for m in self.sent if is_train(m)}
        self.train_replies += [m for m in found if m.metadata.reply_to_message_id in trained]
        return found


def is_train(message: Message) -> bool:
    """Tell a message of a training round from a query that goes out as a train message."""
    config = message.content.config_records["config"]
    return message.metadata.message_type == "train" and "co3.query" not in config
