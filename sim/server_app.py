"""The ServerApp: the parameter server (PS) of the app, with the evaluation and the run's files."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from co3_flower import CO3Strategy
from co3_flower.nodes import RoundError
from sim.capture import finish_means, read_layers, saved_rounds
from sim.client_app import NUM_CLASSES
from sim.data import ImageData, check_shares, load_data
from sim.models import build_model, check_image_size
from sim.outputs import RunFolder, default_run_dir, format_table, round_row
from sim.settings import Settings, expand_path
from sim.task import Score, choose_device, evaluate

app = ServerApp()

MAX_REASONS = 3  # different ones, in the message of a failed run
SERVER_MOMENTUM = 0.9  # of fedavgm; with Flower's default of 0 it would be fedavg


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as the run-config says and leave the results in run-dir."""
    settings = Settings.from_run_config(context.run_config)
    path = _run_dir(settings)
    folder = RunFolder.reopen(path, settings) if settings.resume else RunFolder(path, settings)
    try:
        _run(grid, settings, folder)
    finally:
        folder.close()


def _run(grid: Grid, settings: Settings, folder: RunFolder) -> None:
    strategy: CO3Strategy | None = None
    try:
        strategy = make_strategy(settings, folder.experiment_id, folder.checkpoint_path)
        data = load_data(settings.dataset, settings.data_dir)
        check_image_size(settings.model, data.test.pixels.shape[1:3])
        _check_shares(settings, data)
        arrays = train(grid, strategy, data, settings, folder)
    except Exception as error:
        _record_failed_round(folder, strategy)
        num_parameters = None if strategy is None else strategy.num_parameters
        folder.fail(failure_reason(error, strategy), num_parameters)
        raise
    finish_means(folder.path)  # where client 0 was not in the last round
    summary = folder.finish(
        {name: tensor.numpy() for name, tensor in arrays.to_torch_state_dict().items()},
        strategy.num_parameters,
    )
    print(f"\nrun-dir  {folder.path}\n{format_table(summary)}")


def make_inner(settings: Settings) -> Strategy | None:
    """Build the aggregating strategy, None for "".

    Krum, MultiKrum and Bulyan are told as many malicious clients as they can bear: with n clients
    in a round they need 2 f + 3, 2 f + 3 and 4 f + 3.
    """
    num_clients = max(1, int(settings.num_clients * settings.fraction_train + 1e-9))
    num_krum, num_bulyan = max(0, (num_clients - 3) // 2), max(0, (num_clients - 3) // 4)
    local_lr = settings.lr if settings.payload == "update" else settings.ps_step
    strategies: dict[str, Callable[[], Strategy]] = {
        "fedavg": FedAvg,
        "fedavgm": lambda: FedAvgM(server_momentum=SERVER_MOMENTUM),
        "fedadam": FedAdam,
        "fedadagrad": FedAdagrad,
        "fedyogi": FedYogi,
        "qfedavg": lambda: QFedAvg(client_learning_rate=local_lr, train_loss_key="train-loss"),
        "fedmedian": FedMedian,
        "fedtrimmedavg": FedTrimmedAvg,
        "krum": lambda: Krum(num_malicious_nodes=num_krum),
        "multikrum": lambda: MultiKrum(
            num_malicious_nodes=num_krum, num_nodes_to_select=num_clients - num_krum
        ),
        "bulyan": lambda: Bulyan(num_malicious_nodes=num_bulyan),
    }
    return strategies[settings.strategy]() if settings.strategy else None


def make_strategy(
    settings: Settings, experiment_id: str, checkpoint_path: Path | None = None
) -> CO3Strategy:
    """Build the strategy from the run-config."""
    return CO3Strategy(
        settings.update_compressor(),
        make_inner(settings),
        payload=settings.payload,
        server_lr=settings.ps_step,
        weighting=settings.weighting,
        buffers=settings.buffers,
        num_clients=settings.num_clients,
        fraction_train=settings.fraction_train,
        fraction_evaluate=0.0,  # the PS evaluates, on the full test set
        min_replies=settings.min_replies,
        node_timeout=settings.node_timeout,
        seed=settings.seed,
        max_examples=settings.max_examples,
        max_update_norm=settings.max_update_norm or None,
        reclip=settings.reclip,
        uplink_budget_bytes=settings.uplink_budget_bytes,
        memory_dir=settings.memory_dir or None,
        experiment_id=experiment_id,
        checkpoint_path=checkpoint_path,
    )


def train(
    grid: Grid, strategy: CO3Strategy, data: ImageData, settings: Settings, folder: RunFolder
) -> ArrayRecord:
    """Make the initial model, run every round, and return the last model."""
    device = choose_device(settings.device)
    torch.manual_seed(settings.seed)
    net = build_model(settings.model, data.num_classes)
    initial = ArrayRecord(net.state_dict())
    net.to(device)

    shown: set[int] = set()  # saved gradients in the TensorBoard events

    def finish_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        score: Score | None = None
        if is_evaluated(server_round, settings.num_server_rounds, settings.eval_every):
            net.load_state_dict(arrays.to_torch_state_dict(), strict=True)
            score = evaluate(net, data.test, device)
        record = strategy.history[-1] if server_round > 0 else None
        folder.add_round(round_row(server_round, record, score))
        for number, base in saved_rounds(folder.path).items():
            if number not in shown:
                folder.add_histograms(number, read_layers(base, settings.model))
                shown.add(number)
        if score is None:
            return None
        return MetricRecord({"accuracy": score.accuracy, "loss": score.loss})

    result = strategy.start(
        grid,
        initial,
        num_rounds=settings.num_server_rounds,
        timeout=settings.reply_timeout,
        train_config=ConfigRecord({NUM_CLASSES: data.num_classes}),
        evaluate_fn=finish_round,
        resume=folder.can_resume,
    )
    return result.arrays


def is_evaluated(server_round: int, num_server_rounds: int, eval_every: int) -> bool:
    """Tell whether a round ends with an evaluation: 0, every so many, and the last."""
    return server_round % eval_every == 0 or server_round == num_server_rounds


def failure_reason(error: BaseException, strategy: CO3Strategy | None = None) -> str:
    """Return in one line why a run failed; what many clients say in the same words, once.

    Examples
    --------
    >>> failure_reason(ValueError("too   many blanks"))
    'ValueError: too many blanks'
    """
    failures = [] if strategy is None else strategy.failures
    last = [failure for failure in failures if failure.server_round == failures[-1].server_round]
    if strategy is not None and isinstance(error, RoundError) and last:
        said = Counter(failure.reason for failure in last).most_common(MAX_REASONS)
        reasons = "; ".join(f"{reason} ({count} clients)" for reason, count in said)
        return (
            f"round {last[-1].server_round} must have at least {strategy.min_replies} good"
            f" replies, {len(last)} clients failed: {' '.join(reasons.split())}"
        )
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_shares(settings: Settings, data: ImageData) -> None:
    """Fail before any training where the images do not go round."""
    if settings.num_clients == 0 or len(data.train) == 0:
        return  # unknown until they are connected, or theirs; a client says so then
    check_shares(
        data.train.labels,
        settings.num_clients,
        settings.partition,
        alpha=settings.dirichlet_alpha,
        seed=settings.seed,
    )


def _record_failed_round(folder: RunFolder, strategy: CO3Strategy | None) -> None:
    """Write the round that failed, whose record the strategy made before it gave up."""
    if strategy is None or not strategy.history:
        return
    record = strategy.history[-1]
    if not folder.rows or record["server_round"] > folder.rows[-1]["server_round"]:
        folder.add_round(round_row(record["server_round"], record, None))


def _run_dir(settings: Settings) -> Path:
    if settings.run_dir:
        return Path(expand_path(settings.run_dir, "run-dir")).absolute()
    return default_run_dir(Path.cwd())
