"""Flower without its engine: messages and replies in this process."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

FIRST_NODE = 1000


def take_identity() -> None:
    """Give this process the ids that a Message asks for; Flower's own processes have them."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class InProcessGrid(Grid):
    """A Grid whose nodes are contexts in this process; without an app they cannot answer."""

    def __init__(self, num_nodes: int, app: ClientApp | None = None) -> None:
        take_identity()
        self._app = app
        self._replies: dict[str, Message] = {}
        self._contexts = {
            FIRST_NODE + i: Context(
                run_id=1,
                node_id=FIRST_NODE + i,
                node_config={"partition-id": i, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config={},
            )
            for i in range(num_nodes)
        }

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """There is none to be told about."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Messages are made by their constructor."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let each node answer at once."""
        ids = []
        for message in messages:
            ids.append(identify(message))
            received = Message(
                RecordDict(dict(message.content)),
                message.metadata.dst_node_id,
                message.metadata.message_type,
            )
            received.__dict__["_metadata"] = message.metadata
            assert self._app is not None
            context = self._contexts[message.metadata.dst_node_id]
            self._replies[ids[-1]] = self._app(received, context)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answers."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the answers to some messages."""
        return self.pull_messages(self.push_messages(messages))


def identify(message: Message) -> str:
    """Give a message the id that Flower's engine would give it, and return it."""
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return message.metadata.message_id
