"""Saved gradients: what the first client sends, averaged over rounds, in files for `co3 analyze`.

With ``save-gradients-every = N`` run-dir/gradients holds, for every N rounds, four .npz files with
one float32 member per trainable tensor, named as the tensor: means over those rounds of

    round-00010.gradient.npz     g, the local gradient (for payload "update" the weight difference)
    round-00010.compensated.npz  v = g + gamma * m, decoded plus residual: what was converted
    round-00010.residual.npz     the new residual, v minus decoded
    round-00010.decoded.npz      y, what the PS sees

and round-00010.json with the rounds in the mean: where fraction-train is below 1, those that the
client took part in. The number is that of the last round. Nothing of it goes up.
"""

import json
import math
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from co3_flower import ConfigError, decode_update
from co3_flower.client import SentUpdate
from co3_flower.dense import bring_to_host
from co3_flower.files import read_tensors, write_tensors
from co3_flower.layout import as_arrays
from co3_flower.records import client_id
from sim.models import figure_layers
from sim.settings import Settings

FOLDER = "gradients"
KINDS = ("gradient", "compensated", "residual", "decoded")
SUMS = ".sums.npy"
CLIENT = 0  # whose updates are saved


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
    if sent.server_round in _rounds_in(base):
        return  # a resumed run repeats it
    base.parent.mkdir(parents=True, exist_ok=True)
    if not base.with_suffix(SUMS).exists():
        finish_means(Path(settings.run_dir))  # of rounds whose last one this client was not in
    _add(base, sent)
    if sent.server_round == last:
        _finish(base)


def finish_means(run_dir: Path) -> None:
    """Write the files of every mean that is still a sum."""
    for path in sorted((run_dir / FOLDER).glob(f"*{SUMS}")):
        _finish(path.with_name(path.name.removesuffix(SUMS)))


def saved_rounds(run_dir: Path) -> dict[int, Path]:
    """Return where a run's means lie: number of the last round -> path without kind.

    ``path.with_name(f"{path.name}.{kind}.npz")`` is one of the files.
    """
    found = sorted((run_dir / FOLDER).glob(f"round-*.{KINDS[0]}.npz"))
    bases = [path.with_name(path.name.partition(".")[0]) for path in found]
    return {int(base.name.removeprefix("round-")): base for base in bases}


def read_layers(base: Path, model: str) -> dict[str, NDArray[np.float32]]:
    """Return the layers that figures show out of one mean: "gradient/upper: ..." -> entries.

    Parameters
    ----------
    base : Path
        As `saved_rounds` gives it.
    model : str
        The network's name.
    """
    found = {}
    for kind in KINDS:
        tensors = read_tensors(base.with_name(f"{base.name}.{kind}.npz"))
        layers = figure_layers(model, {name: x.shape for name, x in tensors.items()})
        found |= {f"{kind}/{title}": tensors[name] for title, name in layers.items()}
    return found


def _rounds_in(base: Path) -> list[int]:
    """Return the rounds in a mean so far."""
    try:
        note = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    rounds: list[int] = note["rounds"]
    return rounds


def _add(base: Path, sent: SentUpdate) -> None:
    """Add one update to the sums, float32 [kind, entry], which are made if need be."""
    parts = _summed_parts(sent)
    sums_path, note_path = base.with_suffix(SUMS), base.with_suffix(".json")
    if sums_path.exists():
        sums = np.lib.format.open_memmap(sums_path, mode="r+")
        note = json.loads(note_path.read_text(encoding="utf-8"))
    else:
        shapes = [[name, list(sent.update[name].shape)] for name in sent.trainable]
        note = {"client": CLIENT, "rounds": [], "tensors": shapes}
        size = sum(math.prod(shape) for _, shape in shapes)
        sums = np.lib.format.open_memmap(sums_path, "w+", np.float32, (len(parts), size))
    for row, tensors in zip(sums, parts, strict=True):
        start = 0
        for value in tensors:
            row[start : start + value.size] += value.ravel()
            start += value.size
    note["rounds"].append(sent.server_round)
    note_path.write_text(json.dumps(note) + "\n", encoding="utf-8")


def _finish(base: Path) -> None:
    """Turn sums into the files of the means."""
    note = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
    sums = np.load(base.with_suffix(SUMS), mmap_mode="r")
    gradient, residual, decoded = sums / np.float32(len(note["rounds"]))
    means = (gradient, decoded + residual, residual, decoded)
    for kind, flat in zip(KINDS, means, strict=True):
        tensors, start = {}, 0
        for name, shape in note["tensors"]:
            tensors[name] = flat[start : start + math.prod(shape)].reshape(shape)
            start += tensors[name].size
        write_tensors(base.with_name(f"{base.name}.{kind}.npz"), tensors)
    base.with_suffix(SUMS).unlink()


def _summed_parts(sent: SentUpdate) -> tuple[list[NDArray[np.float32]], ...]:
    """Return gradient, residual and decoded update, each a list of the trainable tensors."""
    update = as_arrays(sent.update)
    decoded = decode_update(sent.encoded.payload, like=update)
    residual = bring_to_host(sent.encoded.residual)  # not of tensors that travel raw
    zero = np.zeros(1, np.float32)
    return (
        [update[name] for name in sent.trainable],
        [
            residual[name] if name in residual else np.broadcast_to(zero, update[name].shape)
            for name in sent.trainable
        ],
        [decoded[name] for name in sent.trainable],
    )
