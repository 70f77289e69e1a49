"""Tell the good train replies of a round, in client-id order, from the named failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flwr.app import Message

from co3_flower.accounting import Failure, Ledger
from co3_flower.nodes import error_reason, node_of
from co3_flower.records import ClientId, client_order
from co3_flower.replies import (
    SECAGG_RECORD,
    SECAGG_REFUSED,
    ReplyError,
    TrainReply,
    parse_train_reply,
)

_UNAVAILABLE = (3, 4, 5)  # Flower's codes for a message, reply or node that is gone: none came in


def sort_replies(
    server_round: int,
    replies: Sequence[Message],
    sent: Sequence[Message],
    client_ids: Mapping[int, ClientId],
    max_examples: int | None,
    ledger: Ledger,
) -> tuple[list[TrainReply], list[Failure]]:
    """Return the well-formed replies in client-id order, and a failure for every other client.

    Two replies under one client-id are both refused: which of them is right cannot be told, and
    the first to arrive would make the result a matter of chance.

    Parameters
    ----------
    server_round : int
        The round.
    replies : sequence of Message
        All train replies that came in, in any order.
    sent : sequence of Message
        The train messages of the round.
    client_ids : mapping
        Client-ids by node, as far as they are known; a reply may not contradict them.
    max_examples : int or None
        Most examples a client may claim.
    ledger : Ledger
        Counts every reply that has content.

    Returns
    -------
    good : list of TrainReply
        Their payloads are not decoded yet.
    failures : list of Failure
        Sorted by node.
    """
    waiting = {message.metadata.dst_node_id for message in sent}
    good: list[TrainReply] = []
    failures: list[Failure] = []
    for message in replies:
        node = node_of(message, sent)
        lost = message.has_error() and message.error.code in _UNAVAILABLE
        try:
            if message.has_error():
                reason = error_reason(message)
                raise ReplyError(SECAGG_REFUSED if SECAGG_RECORD in reason else reason)
            ledger.count_reply(message.content)
            if node not in waiting:
                raise ReplyError("reply must answer a train message of this round, got one more")
            reply = parse_train_reply(message, node, server_round, max_examples)
            if (known := client_ids.get(node, reply.client_id)) != reply.client_id:
                raise ReplyError(f"client-id must stay {known!r}, got {reply.client_id!r}")
            good.append(reply)
        except ReplyError as error:
            failures.append(Failure(server_round, node, client_ids.get(node), str(error), lost))
        waiting.discard(node)
    failures += [
        Failure(server_round, node, client_ids.get(node), "no reply came in", lost=True)
        for node in waiting
    ]
    times = Counter(reply.client_id for reply in good)
    failures += [
        Failure(
            server_round,
            reply.node_id,
            reply.client_id,
            f"client-id must be unique in a round, got {reply.client_id!r} from "
            f"{times[reply.client_id]} nodes; set partition-id or client-id in node-config",
        )
        for reply in good
        if times[reply.client_id] > 1
    ]
    good = [reply for reply in good if times[reply.client_id] == 1]
    good.sort(key=lambda reply: client_order(reply.client_id))
    return good, sorted(failures, key=lambda failure: failure.node_id)
