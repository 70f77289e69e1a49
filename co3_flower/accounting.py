"""What a round cost and how well it was coded: one record a round, and the totals of a run.

R counts bytes that came in: 8 bits for each payload byte of every train reply, refused ones
included. Everything else in a message is overhead and stands beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import RecordDict

from co3_flower.records import ClientId, count_bytes
from co3_flower.replies import TrainReply, count_payload_bytes

_BITS = ("code_bits", "side_info_bits", "structure_bits", "raw_bits")  # whole numbers
_MEANS = ("sqnr_db", "residual_ratio")


@dataclasses.dataclass(frozen=True)
class Failure:
    """One client whose update was not used in a round.

    Parameters
    ----------
    server_round : int
        The round.
    node_id : int
        Flower's node.
    client_id : int, str or None
        None where the client is not known.
    reason : str
        One sentence.
    lost : bool
        True where no reply reached the server.

    Examples
    --------
    >>> print(Failure(3, 17, 0, "no reply came in", lost=True))
    node 17, client 0: no reply came in
    """

    server_round: int
    node_id: int
    client_id: ClientId | None
    reason: str
    lost: bool = False

    def __str__(self) -> str:
        client = "" if self.client_id is None else f", client {self.client_id}"
        return f"node {self.node_id}{client}: {self.reason}"


class Ledger:
    """The books of one run.

    Attributes
    ----------
    history : list of dict
        One record per round.
    failures : list of Failure
        Clients whose update was not used, round by round.
    uplink_bits, overhead_bits, downlink_bits : int
        Totals; ``uplink_bits`` is R.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.failures: list[Failure] = []
        self.uplink_bits = 0
        self.overhead_bits = 0
        self.downlink_bits = 0
        self._before = (0, 0, 0)

    def state(self) -> dict[str, Any]:
        """Return all of the books, for a checkpoint."""
        return {
            "history": self.history,
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "totals": (self.uplink_bits, self.overhead_bits, self.downlink_bits),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.history = state["history"]
        self.failures = [Failure(**failure) for failure in state["failures"]]
        self.uplink_bits, self.overhead_bits, self.downlink_bits = state["totals"]

    def open_round(self, contents: Sequence[RecordDict]) -> None:
        """Begin a round in which train messages of these contents go out, some of them the same."""
        self._before = (self.uplink_bits, self.overhead_bits, self.downlink_bits)
        times = Counter(map(id, contents))
        for content in {id(content): content for content in contents}.values():
            self.downlink_bits += 8 * count_bytes(content) * times[id(content)]

    def count_reply(self, content: RecordDict) -> None:
        """Count one train reply that came in, good or not."""
        payload_bits = 8 * count_payload_bytes(content)
        self.uplink_bits += payload_bits
        self.overhead_bits += 8 * count_bytes(content) - payload_bits

    def close_round(
        self,
        server_round: int,
        used: Sequence[TrainReply],
        failures: Sequence[Failure],
        num_parameters: int,
        decode_seconds: float,
    ) -> dict[str, Any]:
        """Append the record of a round to ``history`` and return it.

        Bits of the code and ``encode_seconds`` are sums over the replies used, ``sqnr_db`` and
        ``residual_ratio`` their means; they are what clients report. ``bits_per_parameter`` is
        counted from the payloads of the replies used. None stands where nothing is known.

        Parameters
        ----------
        server_round : int
            The round.
        used : sequence of TrainReply
            The good replies.
        failures : sequence of Failure
            The others, lost ones included.
        num_parameters : int
            Trainable entries of the model.
        decode_seconds : float
            Time the server spent on decoding.
        """
        uplink, overhead, downlink = self._before
        used_bytes = sum(len(reply.payload) for reply in used)
        num_entries = len(used) * num_parameters
        lost = sum(failure.lost for failure in failures)
        record: dict[str, Any] = {
            "server_round": server_round,
            "uplink_bits": self.uplink_bits - uplink,
            "R": self.uplink_bits,
            "bits_per_parameter": 8 * used_bytes / num_entries if num_entries else None,
            **{key: _bits(used, key) for key in _BITS},
            "entropy_bits": _total(used, "entropy_bits"),
            "overhead_bits": self.overhead_bits - overhead,
            "downlink_bits": self.downlink_bits - downlink,
            **{key: _mean(used, key) for key in _MEANS},
            "replies": len(used),
            "failures": len(failures) - lost,
            "lost": lost,
            "encode_seconds": _total(used, "encode_seconds"),
            "decode_seconds": decode_seconds,
            "num_sampled": len(used) + len(failures),
            "num_examples": sum(reply.num_examples for reply in used),
            "failure_reasons": [str(failure) for failure in failures],
        }
        self.failures += failures
        self.history.append(record)
        return record


def _bits(used: Sequence[TrainReply], key: str) -> int | None:
    total = _total(used, key)
    return None if total is None else int(total)


def _total(used: Sequence[TrainReply], key: str) -> float | None:
    values = _known(used, key)
    return math.fsum(values) if values else None


def _mean(used: Sequence[TrainReply], key: str) -> float | None:
    values = _known(used, key)
    return math.fsum(values) / len(values) if values else None


def _known(used: Sequence[TrainReply], key: str) -> list[float]:
    values = [reply.stats[key.replace("_", "-")] for reply in used]
    return [value for value in values if math.isfinite(value)]
