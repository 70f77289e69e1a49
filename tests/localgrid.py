"""A Grid that calls ClientApps in this process, one Context per node: rounds in milliseconds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

FIRST_NODE = 1000  # node ids are large in Flower; client-ids here are 0, 1, ...
CLIENT_RAISED = 2  # Flower's error code


class LocalGrid(Grid):
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
        # a Message asks the running task for its ids; outside Flower's processes there is none
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        configs = node_configs or [{"partition-id": i} for i in range(num_nodes)]
        self.contexts = {
            FIRST_NODE + i: Context(
                run_id=1,
                node_id=FIRST_NODE + i,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i, config in enumerate(configs)
        }
        apps = [apps] * num_nodes if isinstance(apps, ClientApp) else list(apps)
        self.apps = dict(zip(self.contexts, apps, strict=True))
        self.rng = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
        self.tamper = tamper
        self.train_replies: list[Message] = []
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            if (reply := self._answer(message)) is not None:
                self._replies[message.metadata.message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self._replies.pop(i) for i in message_ids if i in self._replies]
        if self.rng is not None:
            found = [found[i] for i in self.rng.permutation(len(found))]
        trained = {m.metadata.message_id for m in self.sent if is_train(m)}
        self.train_replies += [m for m in found if m.metadata.reply_to_message_id in trained]
        return found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        received = Message(  # a copy with its own RecordDict: apps may take records out
            RecordDict(dict(message.content)), node, message.metadata.message_type
        )
        received.__dict__["_metadata"] = message.metadata
        try:
            reply = self.apps[node](received, self.contexts[node])
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(CLIENT_RAISED, reason), reply_to=message)
        return self.tamper(node, reply) if self.tamper and is_train(message) else reply


def is_train(message: Message) -> bool:
    """Tell a message of a training round from a query that goes out as a train message."""
    config = message.content.config_records["config"]
    return message.metadata.message_type == "train" and "co3.query" not in config
