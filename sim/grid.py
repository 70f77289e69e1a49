"""Flower without its engine: the simulated clients of a run answer in this process, in turn.

A point of a sweep runs on it: no SuperLink and no Ray to start, and the same bytes as on them,
because nothing that a client does depends on the process it is in.
"""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from sim.settings import Value

FIRST_NODE = 1000  # node ids are large in Flower; client-ids are 0, 1, ...
CLIENT_RAISED = 2  # Flower's error code


def take_identity() -> None:
    """Give this process the ids that a Message asks for; Flower's own processes have them."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def make_context(
    node_id: int, node_config: Mapping[str, Value], run_config: Mapping[str, Value]
) -> Context:
    """Return the context of a node, or of the PS, with an empty state."""
    return Context(
        run_id=1,
        node_id=node_id,
        node_config=dict(node_config),
        state=RecordDict(),
        run_config=dict(run_config),
    )


class InProcessGrid(Grid):
    """A Grid whose nodes are contexts in this process.

    Parameters
    ----------
    num_nodes : int
        Node i has partition-id i and node id 1000 + i.
    app : ClientApp or None
        Answers for every node; without one they cannot answer. What it raises becomes an error
        reply, as in Flower's engine.
    run_config : Mapping
        What each client's context holds.
    """

    def __init__(
        self,
        num_nodes: int,
        app: ClientApp | None = None,
        run_config: Mapping[str, Value] | None = None,
    ) -> None:
        take_identity()
        self._replies: dict[str, Message] = {}
        self.contexts = {
            FIRST_NODE + i: make_context(
                FIRST_NODE + i, {"partition-id": i, "num-partitions": num_nodes}, run_config or {}
            )
            for i in range(num_nodes)
        }
        self.apps = dict.fromkeys(self.contexts, app)

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
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let each node answer at once."""
        ids = []
        for message in messages:
            ids.append(identify(message))
            self._replies[ids[-1]] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answers."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the answers to some messages."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        app = self.apps[node]
        assert app is not None
        received = Message(  # its own RecordDict: an app may take records out
            RecordDict(dict(message.content)), node, message.metadata.message_type
        )
        received.__dict__["_metadata"] = message.metadata
        try:
            return app(received, self.contexts[node])
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(CLIENT_RAISED, reason), reply_to=message)


def identify(message: Message) -> str:
    """Give a message the id that Flower's engine would give it, and return it."""
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return message.metadata.message_id
