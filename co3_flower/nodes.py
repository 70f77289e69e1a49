"""Which clients take part: wait for nodes, learn their client-ids, sample by them.

Node ids are random in every run and nodes register while the ServerApp already runs, so a seeded
choice must wait first and then choose among client-ids.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from co3_flower.errors import Co3Error
from co3_flower.records import (
    CLIENT_ID,
    CO3,
    CONFIG,
    PREFIX,
    QUERY,
    ClientId,
    client_order,
    config_record,
)

logger = logging.getLogger("flwr.co3")

SETTLE_SECONDS = 3.0  # Flower's own poll of an idle node
POLL_SECONDS = 0.2
GET_PROPERTIES = "get_properties"  # Flower's message type for NumPyClients
# How Flower words what a client raised: <class 'ValueError'>:<'no data'>
_RAISED = re.compile(r"<class '(?:[^']*\.)?([^'.]*)'>:<'(.*)'>", re.DOTALL)
_CLIENT_APP_RAISED = "occurred. Message: "  # where the simulation's text comes to the point
MAX_REASON = 300  # characters of a failure; simulation sends whole tracebacks


class RoundError(Co3Error, RuntimeError):
    """A round cannot be finished; the run ends."""


def wait_for_nodes(grid: Grid, num_clients: int, timeout: float) -> list[int]:
    """Return the node ids once enough nodes are there.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    num_clients : int
        Nodes to wait for; 0 waits until there is one and their number has not changed for three
        seconds.
    timeout : float
        Seconds to wait at most.

    Raises
    ------
    RoundError
        When they are not there in time.
    """
    start = changed = time.monotonic()
    count = 0
    while True:
        nodes = list(grid.get_node_ids())
        now = time.monotonic()
        if len(nodes) != count:
            count, changed = len(nodes), now
            logger.info("%d nodes connected (waiting for %s)", count, num_clients or "more")
        if (num_clients and count >= num_clients) or (
            not num_clients and count and now - changed >= SETTLE_SECONDS
        ):
            return nodes
        if now - start >= timeout:
            needed = f"{num_clients} nodes" if num_clients else "a steady number of nodes"
            raise RoundError(
                f"{needed} must be connected within node_timeout {timeout:g} s, got {count}; start "
                "more SuperNodes"
            )
        time.sleep(min(POLL_SECONDS, timeout))


def learn_client_ids(grid: Grid, node_ids: Iterable[int], timeout: float) -> dict[int, ClientId]:
    """Ask nodes for their client-ids.

    A message-API app with a query function answers a query, a NumPyClient ``get_properties``; an
    app with neither is asked by a train message that ``co3_mod`` answers without training. Each
    costs a round trip, so a query function, which is not called, pays off.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    node_ids : iterable of int
        The nodes to ask.
    timeout : float
        Seconds to wait for the answers.

    Returns
    -------
    dict of int to (int or str)
        Client-id by node, for the nodes that answered.

    Raises
    ------
    RoundError
        When no node answers, or two give the same client-id.
    """
    ids: dict[int, ClientId] = {}
    reasons: dict[int, str] = {}
    unknown = list(node_ids)
    config = ConfigRecord({QUERY: CLIENT_ID})
    for message_type in (MessageType.QUERY, GET_PROPERTIES, MessageType.TRAIN):
        content = RecordDict({CONFIG: config, "getpropertiesins.config": config})
        messages = [
            Message(content, dst_node_id=node, message_type=message_type) for node in unknown
        ]
        for reply in grid.send_and_receive(messages, timeout=timeout) if messages else ():
            node = node_of(reply, messages)
            if (value := _answer(reply)) is not None:
                ids[node] = value
            else:
                reasons[node] = (
                    error_reason(reply) if reply.has_error() else "no client-id in its answer"
                )
        unknown = [node for node in unknown if node not in ids]
    if unknown:
        logger.warning(
            "%d nodes gave no client-id and are left out: %s",
            len(unknown),
            {n: reasons.get(n, "no answer") for n in unknown},
        )
    if unknown and not ids:
        raise RoundError(
            f"nodes must tell their client-id, got {reasons or 'no answer'}; the clients need "
            "co3_mod or CO3NumPyClient"
        )
    _check_unique(ids)
    return ids


def sample_nodes(
    client_ids: Mapping[int, ClientId], fraction: float, minimum: int, seed: tuple[int, ...]
) -> list[int]:
    """Return the nodes of a seeded sample of client-ids, in client-id order.

    Parameters
    ----------
    client_ids : mapping
        Client-id by node.
    fraction : float
        Share of the clients, rounded down as in stock FedAvg.
    minimum : int
        At least so many.
    seed : tuple of int
        For example (seed, round).
    """
    nodes = sorted(client_ids, key=lambda node: client_order(client_ids[node]))
    size = min(
        len(nodes), max(1, minimum, int(len(nodes) * fraction + 1e-9))
    )  # 1e-9: 0.29 * 100 is 28.999...
    chosen = np.random.default_rng(seed).choice(len(nodes), size, replace=False)
    return [nodes[i] for i in sorted(chosen)]


def node_of(reply: Message, messages: Iterable[Message]) -> int:
    """Return the node a reply belongs to; errors that Flower makes carry another node's id."""
    asked = {
        m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id
    }
    return asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)


def error_reason(reply: Message) -> str:
    """Return what a client's error says in one line: of a traceback, the error itself."""
    text = reply.error.reason or "no reason given"
    if raised := _RAISED.fullmatch(text):
        text = f"{raised[1]}: {raised[2]}"
    text = text.rpartition(_CLIENT_APP_RAISED)[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        lines = lines[-1:]
    return " ".join(lines)[:MAX_REASON]


def _answer(reply: Message) -> ClientId | None:
    if reply.has_error():
        return None
    properties = config_record(reply.content, "getpropertiesres.properties")
    value = config_record(reply.content, CO3).get(CLIENT_ID, properties.get(PREFIX + CLIENT_ID))
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def _check_unique(ids: Mapping[int, ClientId]) -> None:
    seen: dict[ClientId, int] = {}
    for node, value in ids.items():
        if value in seen:
            raise RoundError(
                f"client-id must be unique, got {value!r} from nodes {seen[value]} and {node}; set "
                "partition-id or client-id in node-config"
            )
        seen[value] = node
