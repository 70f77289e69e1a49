"""A given total of uplink bytes, shared out over the rounds and clients of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from co3_flower.accounting import Failure
from co3_flower.errors import ConfigError
from co3_flower.nodes import RoundError
from co3_flower.replies import TrainReply


@dataclass
class UplinkBudget:
    """What the clients of a run may send up together, and what of it may be gone.

    Each client of a round may use an equal share of what is left for the rounds to come, so that
    what one round leaves is there for the next. A lost reply counts with its whole share: whether
    it was sent is not known.

    Attributes
    ----------
    max_bytes : int
        Payload bytes of the whole run.
    num_rounds : int
        Rounds of the run.
    least_bytes : int
        Size of a payload of zeros, below which no client can go.
    share : int
        Bytes that each client of the present round may use.
    lost_bytes : int
        Shares of the replies that were lost.

    Examples
    --------
    >>> budget = UplinkBudget(max_bytes=1000, num_rounds=2, least_bytes=60)
    >>> budget.share_out(1, num_clients=5, used_bytes=0)
    100
    >>> budget.share_out(2, num_clients=5, used_bytes=350)
    130
    """

    max_bytes: int
    num_rounds: int
    least_bytes: int
    share: int = 0
    lost_bytes: int = 0

    def check(self, num_clients: int) -> None:
        """Raise ConfigError where not even zeros fit in every round."""
        least = self.num_rounds * num_clients * self.least_bytes
        if least > self.max_bytes:
            raise ConfigError(
                f"uplink budget must be at least {least} bytes, {self.num_rounds} rounds of "
                f"{num_clients} clients with {self.least_bytes} bytes each for an update of "
                f"zeros, got {self.max_bytes}"
            )

    def share_out(self, server_round: int, num_clients: int, used_bytes: int) -> int:
        """Set and return the share of each client in a round.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        num_clients : int
            Clients that are asked.
        used_bytes : int
            Payload bytes that came in so far.

        Raises
        ------
        ConfigError
            In the first round, where the budget is below that of zeros.
        RoundError
            Later, where what is left is: clients joined, or sent more than their share.
        """
        if server_round == 1:
            self.check(num_clients)
        left = self.max_bytes - used_bytes - self.lost_bytes
        rounds = self.num_rounds - server_round + 1
        self.share = max(0, left) // max(1, rounds * num_clients)
        if self.share < self.least_bytes:
            raise RoundError(
                f"uplink budget must leave {self.least_bytes} bytes to each of {num_clients} "
                f"clients in {rounds} more rounds, got {left} of {self.max_bytes} bytes left"
            )
        return self.share

    def settle(
        self, server_round: int, good: Sequence[TrainReply], failures: Sequence[Failure]
    ) -> tuple[list[TrainReply], list[Failure]]:
        """Return the replies within the share, and all failures; lost ones are charged."""
        self.lost_bytes += self.share * sum(failure.lost for failure in failures)
        kept = [reply for reply in good if len(reply.payload) <= self.share]
        too_large = [
            Failure(
                server_round,
                reply.node_id,
                reply.client_id,
                f"payload must be at most {self.share} bytes, the client's share of the uplink "
                f"budget, got {len(reply.payload)}",
            )
            for reply in good
            if len(reply.payload) > self.share
        ]
        return kept, [*failures, *too_large]
