"""Saved gradients: what the first client sends, averaged over rounds, in files for `co3 analyze`.

With ``save-gradients-every = N`` run-dir/gradients holds, for every N rounds, four .npz files with
one float32 member per trainable tensor, named as the tensor: means over those rounds of

    round-00010.gradient.npz     g, the local gradient (for payload "update" the weight difference)
    round-00010.compensated.npz  v = g + gamma * m, decoded plus residual: what was converted
    round-00010.residual.npz     the new residual, v minus decoded
    round-00010.decoded.npz      y, what the PS sees

and round-00010.json with the rounds in the mean. The number is that of the last round (of the
rounds that the client took part in, where fraction-train is below 1). Nothing of it goes up.
"""

import json
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from co3_flower import ConfigError, decode_update
from co3_flower.client import SentUpdate
from co3_flower.files import read_tensors, write_tensors
from co3_flower.records import client_id
from sim.settings import Settings

FOLDER = "gradients"
KINDS = ("gradient", "compensated", "residual", "decoded")
CLIENT = 0  # whose updates are saved

Tensors = dict[str, NDArray[np.float32]]


def save_update(context: Context, sent: SentUpdate) -> None:
    """Add one update of the first client to the files of its rounds; others are passed over.

    Parameters
    ----------
    context : Context
        Of the client.
    sent : SentUpdate
        As `co3_mod` gives it to its observer.

    Raises
    ------
    ConfigError
        The run-config names no run-dir.
    """
    settings = Settings.from_run_config(context.run_config)
    every = settings.save_gradients_every
    if every == 0 or client_id(context) != CLIENT:
        return
    if not settings.run_dir:
        raise ConfigError(
            "run-dir must be set where save-gradients-every is, got ''; `co3 run` does that"
        )
    last = min(-(-sent.server_round // every) * every, settings.num_server_rounds)
    base = Path(settings.run_dir) / FOLDER / f"round-{last:05d}"
    base.parent.mkdir(parents=True, exist_ok=True)
    rounds = _rounds_in(base)
    for kind, tensors in _parts(sent).items():
        path = base.with_name(f"{base.name}.{kind}.npz")
        if rounds:
            before = read_tensors(path)
            share = np.float32(1 / (len(rounds) + 1))
            tensors = {name: m + share * (tensors[name] - m) for name, m in before.items()}
        write_tensors(path, tensors)
    text = json.dumps({"client": CLIENT, "rounds": [*rounds, sent.server_round]})
    base.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def saved_rounds(run_dir: Path) -> dict[int, Path]:
    """Return where a run's saved gradients lie: last round of each mean -> path without kind.

    ``path.with_name(f"{path.name}.{kind}.npz")`` is one of the files.
    """
    found = sorted((run_dir / FOLDER).glob("round-*.json"))
    return {int(path.stem.removeprefix("round-")): path.with_suffix("") for path in found}


def _parts(sent: SentUpdate) -> dict[str, Tensors]:
    """Return the trainable tensors of each kind."""
    every_decoded = decode_update(sent.encoded.payload, like=sent.update)
    update = {name: sent.update[name].astype(np.float32) for name in sent.trainable}
    decoded = {name: every_decoded[name].astype(np.float32) for name in sent.trainable}
    residual = {  # tensors that travel raw have none
        name: sent.encoded.residual.get(name, np.zeros_like(value))
        for name, value in update.items()
    }
    compensated = {name: value + residual[name] for name, value in decoded.items()}
    parts = (update, compensated, residual, decoded)
    return dict(zip(KINDS, parts, strict=True))


def _rounds_in(base: Path) -> list[int]:
    try:
        text = base.with_suffix(".json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    rounds: list[int] = json.loads(text)["rounds"]
    return rounds
