"""CO3Strategy, the parameter server: chooses clients, averages their updates, steps, counts R."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
from flwr.app import DEFAULT_TTL, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from co3_flower.accounting import Failure, Ledger
from co3_flower.aggregation import (
    Decoder,
    UpdateSum,
    decode_replies,
    find_nonnegative,
    next_model,
    sum_updates,
)
from co3_flower.budget import UplinkBudget
from co3_flower.checkpoint import (
    read_checkpoint,
    restore_strategy,
    strategy_state,
    write_checkpoint,
)
from co3_flower.checks import (
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_positive,
    resolve_server_lr,
)
from co3_flower.codec import least_payload_bytes
from co3_flower.compressors import Co3, Compressor, is_rival, make_compressor, settings_of
from co3_flower.config import CodecConfig
from co3_flower.dense import dense_for
from co3_flower.errors import ConfigError
from co3_flower.evaluation import aggregate_evaluation, mean_metrics
from co3_flower.inner import aggregate_inner, check_inner, configure_inner
from co3_flower.intake import sort_replies
from co3_flower.layout import Layout
from co3_flower.limits import NormLimit
from co3_flower.nodes import RoundError, learn_client_ids, sample_nodes, wait_for_nodes
from co3_flower.privacy import (
    CLIPPING_NORM,
    check_client_clipping,
    client_clipping_norm,
    is_private,
    refuse_wrappers,
)
from co3_flower.records import (
    BUFFER_KINDS,
    PAYLOAD_KINDS,
    SERVER_ROUND,
    ClientId,
    TrainSettings,
    message_content,
    values_of,
)
from co3_flower.replies import SECAGG_REFUSED, TrainReply, common_metrics
from co3_flower.resume import start_from
from co3_flower.roles import TensorRoles, find_roles

logger = logging.getLogger("flwr.co3")

WEIGHTINGS = ("examples", "uniform")
_TRAIN, _EVALUATE = 0, 1  # streams of the sampling seed
_CLOCK_SECONDS = 60.0  # by which a client's clock, which counts down a lifetime, may be ahead
_REPORTED = ("uplink_bits", "R", "bits_per_parameter", "sqnr_db", "residual_ratio")


class CO3Strategy(Strategy):
    """Federated averaging over compressed updates, for message-API apps and NumPyClients at once.

    Alone it is FedAvg over decoded updates: each reply is decoded into one float32 accumulator, in
    client-id order. With ``inner`` each reply becomes the client's dense weights, and a stock
    strategy aggregates those.

    Parameters
    ----------
    config : CodecConfig, Compressor or str
        Settings of the codec, sent to the clients with every train message; or another compressor,
        or its name in ``co3_flower.compressors.COMPRESSORS`` ("none" is float32).
    inner : Strategy, optional
        A stock strategy; it sees the trainable float tensors only and chooses no nodes.
    payload : str
        "update" (weight difference after local training) or "gradient".
    server_lr : float, optional
        Step size of the server; required for "gradient", 1 for "update".
    weighting : str
        "examples", or "uniform" for weight 1 each.
    buffers : str
        "coded", "raw" or "local" (not sent; the server can then not evaluate the model).
    buffer_keys : iterable of str, optional
        Names of float buffers, whole or from a dot on; default: names ending in running_mean,
        running_var or num_batches_tracked. Integer and bool tensors are buffers in any case.
    num_clients : int
        Nodes to wait for before the first round; 0 waits until their number has not changed for
        three seconds.
    fraction_train, fraction_evaluate : float
        Share of the clients per round, a seeded choice among client-ids. With fraction_evaluate 0
        no client evaluates.
    min_replies : int
        The run fails when a round has fewer good replies.
    node_timeout : float
        Seconds to wait for nodes at most.
    seed : int
        Seed of the choice of clients.
    max_examples : int, optional
        A reply that claims more examples is refused; None or 0 sets no limit.
    max_update_norm : float, optional
        Bound on the L2 norm of what a client sends, over all trainable tensors as one vector, as
        decoded and before ``server_lr``. A longer update is refused, or with ``reclip`` scaled
        down to the bound. Buffers do not count and are not scaled. None sets no limit.
    reclip : bool
        Scale a longer update down instead of refusing it. Required where an inner wrapper lets
        clients clip, and then to their norm; what is cut off does not join the client's residual.
    uplink_budget_bytes : int, optional
        Bound on R in bytes. Each train message carries its client's share of what is left for the
        rounds to come; a client whose payload does not fit makes its cells coarser, and where that
        does not do sends zeros and keeps all in its residual. A reply above its share is refused,
        but counts; a lost one counts here with its share. None sets no limit.
    memory_dir, experiment_id : str, optional
        Directory on the clients for residuals in files (empty: Flower's context), and the name
        that the files carry (empty: the run's id).
    device : str, optional
        Where replies are decoded and added up, as torch names it ("cuda"), by torch; None for the
        host. The sums are the same. With ``inner``, and for other compressors, it is the host in
        any case.
    checkpoint_path : str or Path, optional
        File that `start` replaces before each round's messages go out: all that it needs to go on
        from there, an inner strategy's state included. Without an ``experiment_id`` it makes one,
        so that the clients' files are found again, too.

    Attributes
    ----------
    history : list of dict
        One record per round, appended before the server evaluates the round.
    R : int
        Bits of all payloads that came in, refused ones included.
    overhead_bits, downlink_bits : int
        Bits of the rest of those replies; of the train messages.
    failures : list of Failure
        Clients whose update was not used, round by round.
    num_parameters : int or None
        Trainable entries of the model, known from the first round on.

    Raises
    ------
    ConfigError
        When a setting is impossible; the message lists the choices.

    Examples
    --------
    >>> from co3_flower import CodecConfig
    >>> config = CodecConfig(format="e2m1", gamma=0.9)
    >>> strategy = CO3Strategy(config, payload="gradient", server_lr=0.1, num_clients=4)
    >>> strategy.R
    0
    """

    def __init__(
        self,
        config: CodecConfig | Compressor | str,
        inner: Strategy | None = None,
        *,
        payload: str = "update",
        server_lr: float | None = None,
        weighting: str = "examples",
        buffers: str = "coded",
        buffer_keys: Iterable[str] | None = None,
        num_clients: int = 0,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_replies: int = 1,
        node_timeout: float = 600.0,
        seed: int = 0,
        max_examples: int | None = None,
        max_update_norm: float | None = None,
        reclip: bool = False,
        uplink_budget_bytes: int | None = None,
        memory_dir: str | None = None,
        experiment_id: str = "",
        device: str | None = None,
        checkpoint_path: str | Path | None = None,
    ) -> None:
        self.compressor, self.codec, self._rival = _compressor(config)
        check_inner(inner)
        if isinstance(inner, CO3Strategy):
            raise ConfigError("inner must aggregate dense weights, got another CO3Strategy")
        check_choice("payload", payload, PAYLOAD_KINDS)
        check_choice("weighting", weighting, WEIGHTINGS)
        check_choice("buffers", buffers, BUFFER_KINDS)
        if isinstance(buffer_keys, str):
            raise ConfigError(f"buffer_keys must be a sequence of names, got {buffer_keys!r}")
        check_number("fraction_train", fraction_train, 0, 1, open_below=True)
        check_number("fraction_evaluate", fraction_evaluate, 0, 1)
        check_number("node_timeout", node_timeout, 0, float("inf"))
        check_integer("num_clients", num_clients, 0)
        check_integer("min_replies", min_replies, 1)
        check_integer("seed", seed, 0)
        check_integer("max_examples", max_examples or 0, 0)
        if max_update_norm is not None:
            check_positive("max_update_norm", max_update_norm)
        check_bool("reclip", reclip)
        clipping_norm = client_clipping_norm(inner)
        if reclip and max_update_norm is None and clipping_norm is None:
            raise ConfigError("max_update_norm must be set with reclip, got None")
        check_client_clipping(clipping_norm, payload, reclip, max_update_norm)
        check_integer("uplink_budget_bytes", uplink_budget_bytes or 0, 0)
        if uplink_budget_bytes and self.compressor != "co3":
            raise ConfigError(
                f"uplink_budget_bytes must be None with compressor {self.compressor!r}, whose "
                f"payloads have a size of their own, got {uplink_budget_bytes}"
            )
        if self._rival is not None and self._rival.is_sketch:
            for setting, value in (("inner", inner), ("max_update_norm", max_update_norm)):
                if value is not None:
                    raise ConfigError(
                        f"{setting} must be None with compressor {self.compressor!r}, which gives "
                        f"no client's own update, got {value!r}"
                    )
        if num_clients and min_replies > num_clients:
            raise ConfigError(f"min_replies must be at most {num_clients}, got {min_replies}")
        self.inner = inner
        self.payload = payload
        self.server_lr = resolve_server_lr(server_lr, payload, has_inner=inner is not None)
        self.weighting = weighting
        self.buffers = buffers
        self.buffer_keys = None if buffer_keys is None else tuple(buffer_keys)
        self.num_clients = num_clients
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_replies = min_replies
        self.node_timeout = node_timeout
        self.seed = seed
        self.max_examples = max_examples or None
        self.max_update_norm = max_update_norm
        self.reclip = reclip
        self.uplink_budget_bytes = uplink_budget_bytes or None
        self.memory_dir = memory_dir or ""
        self.device = device
        if device is not None:
            dense_for({}, device, 1)  # refuses what torch does not know
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        if self.checkpoint_path is not None and inner is not None:
            strategy_state(inner)  # refuses what could not be restored
        self.experiment_id = experiment_id or ("" if checkpoint_path is None else str(uuid4()))
        self._reset()

    def _reset(self) -> None:
        self._ledger = Ledger()
        self._budget: UplinkBudget | None = None
        self._client_ids: dict[int, ClientId] = {}
        self._used_rounds: dict[ClientId, int] = {}
        self._met: set[int] = set()  # nodes that train messages went to
        self._strangers: set[int] = set()  # nodes that were asked for their client-id
        self._roles: TensorRoles | None = None
        self._nonnegative: frozenset[str] = frozenset()
        self._arrays = ArrayRecord()
        self._sent: list[Message] = []
        self._server_state: dict[str, np.ndarray] = {}  # of a compressor that sums sketches
        self._lifetime: float = DEFAULT_TTL  # of train messages, in seconds

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per round, appended before the server evaluates the round."""
        return self._ledger.history

    @property
    def failures(self) -> list[Failure]:
        """Clients whose update was not used, round by round."""
        return self._ledger.failures

    @property
    def R(self) -> int:
        """Bits of all payloads that came in, refused ones included."""
        return self._ledger.uplink_bits

    @property
    def overhead_bits(self) -> int:
        """Bits of the train replies that are not payload."""
        return self._ledger.overhead_bits

    @property
    def downlink_bits(self) -> int:
        """Bits of the train messages."""
        return self._ledger.downlink_bits

    @property
    def num_parameters(self) -> int | None:
        """Trainable entries of the model, known from the first round on."""
        return None if self._roles is None else self._roles.num_parameters

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        resume: bool = False,
    ) -> Result:
        """Run all rounds as Flower's own ``start`` does, with all counters set back to zero first.

        With ``resume`` the rounds go on where the checkpoint was written, up to ``num_rounds`` in
        all, as if nothing had happened: books, budget and moments too. The result holds the rounds
        from there on. Clients that keep their residuals in files go on with them.

        Train messages live a minute longer than ``timeout``: a client that comes to one later does
        not get it, and a reply that comes later does not go up.

        Raises
        ------
        ConfigError
            When the server is to evaluate a model whose buffers it never gets, or the uplink budget
            or the target is below what zeros take, or the checkpoint is not one of this training.
        RoundError
            When a round cannot be finished.
        """
        self._reset()
        self._lifetime = min(timeout + _CLOCK_SECONDS, DEFAULT_TTL)
        evaluates = evaluate_fn is not None
        if evaluates and self.buffers == "local" and self._find_roles(initial_arrays).buffers:
            raise ConfigError(
                "buffers must be 'coded' or 'raw' where the server evaluates, got 'local'; the "
                "server's copy of the running statistics would never change"
            )
        self._plan_uplink(initial_arrays, num_rounds)
        configs = (timeout, train_config, evaluate_config)
        if not resume:
            return super().start(grid, initial_arrays, num_rounds, *configs, evaluate_fn)
        first_round, arrays = self._restore(initial_arrays, num_rounds)
        return start_from(self, first_round, grid, arrays, num_rounds, *configs, evaluate_fn)

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Refuse Flower's legacy workflows, which begin with this call; SecAgg+ is one of them.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(
            "CO3Strategy must be run by its own start(grid, arrays), got a legacy workflow; "
            f"{SECAGG_REFUSED}"
        )

    def summary(self) -> None:
        """Log the settings."""
        codec = repr(self.codec) if self.compressor == "co3" else self.compressor
        if self._rival is not None:
            codec += "".join(f", {key} {value}" for key, value in settings_of(self._rival).items())
        inner = "FedAvg, streaming" if self.inner is None else type(self.inner).__name__
        clients = self.num_clients or "as many as connect"
        lines = [
            f"Codec: {codec}",
            f"Payload: {self.payload}, server_lr {self.server_lr:g}, buffers {self.buffers}",
            f"Aggregation: {inner}, weighting {self.weighting}",
            f"Clients: {clients}, fraction train {self.fraction_train:g}, evaluate "
            f"{self.fraction_evaluate:g}, at least {self.min_replies} good replies a round",
        ]
        for line in lines:
            logger.info("\t├──> %s", line)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose the clients of a round and return one train message for each.

        Raises
        ------
        ConfigError
            When a differential-privacy wrapper stands around this strategy, or clients are to clip
            and the server does not.
        RoundError
            When too few nodes are there in time, or the uplink budget is spent.
        """
        refuse_wrappers()
        if self.checkpoint_path is not None:
            self._write_checkpoint(server_round, arrays)
        if self.uplink_budget_bytes and self._budget is None:
            raise RoundError("start must run the rounds of an uplink budget, got a single one")
        if self._roles is None or tuple(arrays) != self._roles.layout.names:
            self._roles = self._find_roles(arrays)
            self._nonnegative = find_nonnegative(arrays, self._roles)
            self._warn_of_open_buffers(self._roles)
        nodes = self._choose(grid, self.fraction_train, self.min_replies, server_round, _TRAIN)
        config = ConfigRecord(dict(config))
        if self.inner is not None:
            trainable = ArrayRecord({name: arrays[name] for name in self._roles.trainable})
            config = configure_inner(self.inner, server_round, trainable, config, grid, nodes)
        by_hand = config.get(CLIPPING_NORM) if client_clipping_norm(self.inner) is None else None
        if isinstance(by_hand, (int, float)):
            check_client_clipping(by_hand, self.payload, self.reclip, self.max_update_norm)
        config[SERVER_ROUND] = server_round
        share = 0
        if self._budget is not None:
            share = self._budget.share_out(server_round, len(nodes), self.R // 8)
        settings = self._settings(server_round, self._roles, share)
        used_rounds = self._used_rounds_of(nodes, grid)
        contents = {}  # one for all nodes that are told the same
        for used_round in set(used_rounds.values()):
            scalars = dataclasses.replace(settings, used_round=used_round).to_scalars()
            whole = ConfigRecord({**config, **scalars})
            contents[used_round] = message_content(arrays, whole, "fitins")
        self._arrays = arrays
        self._sent = [
            Message(contents[used_rounds[node]], node, MessageType.TRAIN, ttl=self._lifetime)
            for node in nodes
        ]
        self._ledger.open_round([message.content for message in self._sent])
        logger.info("configure_train: %d clients chosen", len(nodes))
        return list(self._sent)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the good replies, step, and append the record of the round to ``history``.

        Raises
        ------
        RoundError
            When fewer than ``min_replies`` replies are good, an inner strategy fails, or a value
            of the new model is not finite.
        """
        start = time.perf_counter()
        roles = self._roles
        if roles is None:
            raise RoundError("configure_train must come before aggregate_train")
        good, failures = sort_replies(
            server_round,
            list(replies),
            self._sent,
            self._client_ids,
            self.max_examples,
            self._ledger,
        )
        self._client_ids |= {reply.node_id: reply.client_id for reply in good}
        if self._budget is not None:
            good, failures = self._budget.settle(server_round, good, failures)
        updates: list[dict[str, np.ndarray]] = []
        decoder = Decoder(
            roles=roles,
            server_round=server_round,
            seed=self.seed,
            rival=self._rival,
            num_threads=self.codec.num_threads,
            norm_limit=self._norm_limit(roles),
            device=self.device if self.inner is None else None,
        )
        if self.inner is None:
            total = sum_updates(decoder, good, self._weights(good))
        else:
            total, updates = decode_replies(decoder, good, self._weights(good))
        failures += [
            Failure(server_round, reply.node_id, reply.client_id, reason)
            for reply, reason in total.refused
        ]
        record = self._ledger.close_round(
            server_round, total.used, failures, roles.num_parameters, total.decode_seconds
        )
        self._check_round(server_round, len(total.used), failures)
        if self._rival is not None and self._rival.is_sketch:
            self._server_state = total.finish(self._server_state)
        arrays, metrics = self._step(server_round, roles, total, updates)
        metrics.update({k.replace("_", "-"): record[k] for k in _REPORTED if record[k] is not None})
        self._used_rounds |= {reply.client_id: server_round for reply in total.used}
        record["aggregate_seconds"] = time.perf_counter() - start
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return one evaluate message for each chosen client; none when fraction_evaluate is 0."""
        if self.fraction_evaluate == 0:
            return []
        nodes = self._choose(grid, self.fraction_evaluate, 1, server_round, _EVALUATE)
        config = ConfigRecord(dict(config))
        config[SERVER_ROUND] = server_round
        content = message_content(arrays, config, "evaluateins")
        return [Message(content, node, MessageType.EVALUATE) for node in nodes]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the clients' metrics, weighted by examples; failures are logged."""
        return aggregate_evaluation(server_round, replies, self._client_ids, self.inner)

    def _write_checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        """Write down all that is needed to begin this round again."""
        assert self.checkpoint_path is not None
        content = {
            "server_round": server_round,
            "arrays": arrays,
            "experiment_id": self.experiment_id,
            "ledger": self._ledger.state(),
            "used_rounds": self._used_rounds,
            "nonnegative": sorted(self._nonnegative),
            "server_state": self._server_state,
            "lost_bytes": 0 if self._budget is None else self._budget.lost_bytes,
            "inner": None if self.inner is None else strategy_state(self.inner),
        }
        try:
            write_checkpoint(self.checkpoint_path, content)
        except OSError as error:
            raise RoundError(
                f"checkpoint must be written before round {server_round}, got "
                f"{str(self.checkpoint_path)!r} ({error.strerror or error})"
            ) from error

    def _restore(self, initial_arrays: ArrayRecord, num_rounds: int) -> tuple[int, ArrayRecord]:
        """Take over the checkpoint; return the round to begin with, and its model."""
        if self.checkpoint_path is None:
            raise ConfigError("checkpoint_path must be set with resume, got None")
        state = read_checkpoint(self.checkpoint_path)
        server_round, arrays = state["server_round"], state["arrays"]
        if server_round > num_rounds:
            raise ConfigError(
                f"num_rounds must be at least {server_round}, the round to go on with, got "
                f"{num_rounds}"
            )
        layouts = [
            Layout.of({n: values_of(a) for n, a in r.items()}) for r in (arrays, initial_arrays)
        ]
        if layouts[0] != layouts[1]:
            raise ConfigError(
                f"initial arrays must have the names, shapes and dtypes of the checkpoint "
                f"{str(self.checkpoint_path)!r}, got others"
            )
        if (self.inner is None) != (state["inner"] is None):
            raise ConfigError(f"inner must be None or not as in {str(self.checkpoint_path)!r}")
        if self.inner is not None:
            restore_strategy(self.inner, state["inner"])
        self.experiment_id = state["experiment_id"]
        self._ledger.restore(state["ledger"])
        self._used_rounds = state["used_rounds"]
        self._roles = self._find_roles(arrays)
        self._nonnegative = frozenset(state["nonnegative"])
        self._server_state = state["server_state"]
        if self._budget is not None:
            self._budget.lost_bytes = state["lost_bytes"]
        return server_round, arrays

    def _find_roles(self, arrays: ArrayRecord) -> TensorRoles:
        layout = Layout.of({name: values_of(array) for name, array in arrays.items()})
        if self.buffer_keys is None and all(name.isdigit() for name in layout.names):
            logger.warning(
                "arrays must have names for BatchNorm's statistics to be found, got '0', '1', ...; "
                "if the model has any, give buffer_keys (() if not)"
            )
        return find_roles(layout, self.codec, self.buffers, self.buffer_keys)

    def _warn_of_open_buffers(self, roles: TensorRoles) -> None:
        if is_private(self.inner) and self.buffers != "local" and roles.buffers:
            logger.warning(
                "%s protects trainable tensors only: %d buffers, such as %r, are averaged as they "
                "are; use buffers='local' or a network without BatchNorm",
                type(self.inner).__name__,
                len(roles.buffers),
                roles.buffer_names[0],
            )

    def _plan_uplink(self, arrays: ArrayRecord, num_rounds: int) -> None:
        """Make the budget of the run; raise ConfigError where zeros alone are too much for it."""
        target = self.codec.target_bits_per_parameter
        if self.compressor != "co3" or (target is None and self.uplink_budget_bytes is None):
            return
        roles = self._find_roles(arrays)
        least = least_payload_bytes(roles.like, roles.codec_config(self.codec, 1))
        zeros = 8 * least / max(1, roles.num_parameters)
        if target is not None and target <= zeros:
            raise ConfigError(
                f"target_bits_per_parameter must be above {zeros:.3g}, which an update of zeros "
                f"takes in this model, got {target!r}"
            )
        if self.uplink_budget_bytes is not None:
            self._budget = UplinkBudget(self.uplink_budget_bytes, num_rounds, least)
            fewest = int(self.num_clients * self.fraction_train + 1e-9)
            self._budget.check(max(1, self.min_replies, fewest))

    def _settings(self, server_round: int, roles: TensorRoles, share: int) -> TrainSettings:
        return TrainSettings(
            server_round=server_round,
            payload_kind=self.payload,
            compressor=self.compressor,
            rival=self._rival,
            seed=self.seed,
            codec=self.codec,
            raw=roles.raw,
            buffers=roles.buffers,
            buffers_kind=self.buffers,
            max_payload_bytes=share,
            memory_dir=self.memory_dir,
            experiment_id=self.experiment_id,
        )

    def _choose(
        self, grid: Grid, fraction: float, minimum: int, server_round: int, stream: int
    ) -> list[int]:
        """Return the nodes of a round: all of them, or a seeded sample of client-ids."""
        is_first = not self._met
        nodes = wait_for_nodes(grid, self.num_clients if is_first else minimum, self.node_timeout)
        if fraction == 1:
            return nodes
        if unknown := [node for node in nodes if node not in self._client_ids]:
            self._client_ids |= learn_client_ids(grid, unknown, self.node_timeout)
        known = {node: self._client_ids[node] for node in nodes if node in self._client_ids}
        return sample_nodes(known, fraction, minimum, (self.seed, server_round, stream))

    def _used_rounds_of(self, nodes: Sequence[int], grid: Grid) -> dict[int, int | None]:
        """Return the last round whose update was used, by node: 0 for none, None for not known.

        A client may be back at a node of another id, so a node that is new in the middle of a run
        is asked, once, whose it is.
        """
        new = [node for node in nodes if node not in self._client_ids and node not in self._met]
        self._met.update(nodes)
        if new and self._used_rounds:
            try:
                self._client_ids |= learn_client_ids(grid, new, self.node_timeout)
            except RoundError as error:
                logger.warning("%d new nodes are not known: %s", len(new), error)
            self._strangers.update(new)
        return {
            node: None
            if node in self._strangers and node not in self._client_ids
            else self._used_rounds.get(self._client_ids.get(node, ""), 0)
            for node in nodes
        }

    def _norm_limit(self, roles: TensorRoles) -> NormLimit | None:
        norm = client_clipping_norm(self.inner) or self.max_update_norm
        return None if norm is None else NormLimit(norm, frozenset(roles.trainable), self.reclip)

    def _weights(self, replies: Sequence[TrainReply]) -> list[int]:
        return [reply.num_examples if self.weighting == "examples" else 1 for reply in replies]

    def _check_round(self, server_round: int, num_good: int, failures: Sequence[Failure]) -> None:
        """Log the failures; end the run when too few replies are good."""
        logger.info(
            "aggregate_train: %d good replies, %d failures, R = %d bits",
            num_good,
            len(failures),
            self.R,
        )
        for failure in failures:
            logger.warning("round %d, %s", server_round, failure)
        if num_good < self.min_replies:
            reasons = "; ".join(map(str, failures)) or "no client was asked"
            raise RoundError(
                f"round {server_round} must have at least {self.min_replies} good replies, got "
                f"{num_good}: {reasons}"
            )

    def _step(
        self,
        server_round: int,
        roles: TensorRoles,
        total: UpdateSum,
        updates: list[dict[str, np.ndarray]],
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Return the next model and the metrics of the round."""
        signed_lr = -self.server_lr if self.payload == "gradient" else self.server_lr
        weights = self._weights(total.used)
        if self.inner is None:
            step = np.float32(signed_lr / total.weight)
            metrics = mean_metrics(common_metrics([r.metrics for r in total.used]), weights)
            arrays = next_model(self._arrays, total, step, self._nonnegative)
        else:
            step = np.float32(signed_lr)
            trained, metrics = aggregate_inner(
                self.inner, server_round, self._arrays, roles, total.used, updates, weights, step
            )
            arrays = next_model(self._arrays, total, step, self._nonnegative, trained)
        return arrays, MetricRecord() if metrics is None else metrics


def _compressor(
    config: CodecConfig | Compressor | str,
) -> tuple[str, CodecConfig, Compressor | None]:
    """Return a compressor's name, the codec's settings, and a rival of the codec."""
    if isinstance(config, CodecConfig):
        config = Co3(config=config)
    compressor = config if isinstance(config, Compressor) else make_compressor(config)
    codec = compressor.config if isinstance(compressor, Co3) else CodecConfig()
    return compressor.name, codec, compressor if is_rival(compressor.name) else None
