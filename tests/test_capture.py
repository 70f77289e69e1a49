"""Saved gradients: means over rounds of what the first client sent, for `co3 analyze`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from co3_flower import CodecConfig, ConfigError, encode_update
from co3_flower.cli import make_app
from co3_flower.client import SentUpdate
from co3_flower.codec import encode_raw_update
from co3_flower.files import read_tensors
from sim.capture import KINDS, finish_means, save_update, saved_rounds
from sim.outputs import read_summary
from sim.settings import Settings
from sim.worker import run_point

CONFIG = CodecConfig(format="e2m1", gamma=0.5, buffers=("norm.running_mean",), raw=("count",))
NAMES = ("weight", "bias")
LAYERS = ("upper: features.0.weight", "middle: features.4.weight", "lower: features.8.weight")


def context(run_dir: Path | str, client: int = 0, **run_config: Any) -> Context:
    values = {"run-dir": str(run_dir), "save-gradients-every": 2, "num-server-rounds": 5}
    return Context(1, 7, {"partition-id": client}, RecordDict(), {**values, **run_config})


def updates(rng: np.random.Generator, num_rounds: int) -> list[dict[str, np.ndarray]]:
    return [
        {
            "weight": rng.normal(size=(40, 50)).astype(np.float32),
            "bias": rng.normal(size=40).astype(np.float32),
            "norm.running_mean": rng.normal(size=40).astype(np.float32),
            "count": np.array(3),
        }
        for _ in range(num_rounds)
    ]


def load(run_dir: Path, last: int) -> dict[str, dict[str, np.ndarray]]:
    base = saved_rounds(run_dir)[last]
    return {kind: read_tensors(base.with_name(f"{base.name}.{kind}.npz")) for kind in KINDS}


def test_files_hold_the_means_over_their_rounds(tmp_path: Path, rng: np.random.Generator) -> None:
    residual, gradients, residuals = None, updates(rng, 5), []
    for server_round, update in enumerate(gradients, start=1):
        encoded = encode_update(update, residual, CONFIG)
        residual = encoded.residual
        residuals.append(residual)
        save_update(context(tmp_path), SentUpdate(server_round, update, NAMES, encoded))
    assert list(saved_rounds(tmp_path)) == [2, 4, 5]  # the run has five rounds
    note = json.loads((tmp_path / "gradients" / "round-00004.json").read_text())
    assert (note["client"], note["rounds"]) == (0, [3, 4])
    assert len(list((tmp_path / "gradients").iterdir())) == 3 * 5
    parts = load(tmp_path, 4)
    assert [tuple(parts[kind]) for kind in KINDS] == [NAMES] * 4
    for name in NAMES:
        gradient = (gradients[2][name] + gradients[3][name]) / 2
        memory = (residuals[1][name] + residuals[2][name]) / 2
        kept = (residuals[2][name] + residuals[3][name]) / 2
        close = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(parts["gradient"][name], gradient, **close)
        np.testing.assert_allclose(parts["residual"][name], kept, **close)
        np.testing.assert_allclose(parts["compensated"][name], gradient + 0.5 * memory, **close)
        difference = parts["compensated"][name] - parts["residual"][name]
        np.testing.assert_allclose(parts["decoded"][name], difference, **close)


def test_uncompressed_updates_have_no_residual(tmp_path: Path, rng: np.random.Generator) -> None:
    (update,) = updates(rng, 1)
    save_update(context(tmp_path), SentUpdate(1, update, NAMES, encode_raw_update(update)))
    finish_means(tmp_path)
    parts = load(tmp_path, 2)
    for name in NAMES:
        assert not parts["residual"][name].any()
        for kind in ("gradient", "compensated", "decoded"):
            np.testing.assert_array_equal(parts[kind][name], update[name])


def test_rounds_that_the_client_missed_are_no_part_of_the_mean(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    gradients = updates(rng, 3)
    for server_round, update in zip((1, 3, 5), gradients, strict=True):
        encoded = encode_update(update, None, CONFIG)
        every_four = context(tmp_path, **{"save-gradients-every": 4, "num-server-rounds": 8})
        save_update(every_four, SentUpdate(server_round, update, NAMES, encoded))
    assert list(saved_rounds(tmp_path)) == [4]  # written when round 5 came without a round 4
    mean = (gradients[0]["weight"] + gradients[1]["weight"]) / 2
    np.testing.assert_allclose(load(tmp_path, 4)["gradient"]["weight"], mean, rtol=1e-6)
    finish_means(tmp_path)
    assert list(saved_rounds(tmp_path)) == [4, 8]
    np.testing.assert_array_equal(load(tmp_path, 8)["gradient"]["bias"], gradients[2]["bias"])


@pytest.mark.parametrize("changed", [{"client": 1}, {"save-gradients-every": 0}])
def test_nothing_is_saved_of_other_clients_or_unasked(
    changed: dict[str, int], tmp_path: Path, rng: np.random.Generator
) -> None:
    (update,) = updates(rng, 1)
    encoded = encode_update(update, None, CONFIG)
    save_update(context(tmp_path, **changed), SentUpdate(1, update, NAMES, encoded))
    assert list(tmp_path.iterdir()) == []


def test_saving_without_a_run_dir_is_an_error(rng: np.random.Generator) -> None:
    (update,) = updates(rng, 1)
    sent = SentUpdate(1, update, NAMES, encode_update(update, None, CONFIG))
    with pytest.raises(ConfigError, match="run-dir must be set where save-gradients-every is"):
        save_update(context(""), sent)


def test_saved_gradients_of_a_run_cost_no_bits_and_are_analyzed(tmp_path: Path) -> None:
    shared = {"num-server-rounds": 3, "num-clients": 2, "local-steps": 1}
    for name, every in (("with", 2), ("without", 0)):
        more = {"run-dir": str(tmp_path / name), "save-gradients-every": every}
        assert run_point(Settings.from_run_config({**shared, **more}))["status"] == "completed"
    ours, other = read_summary(tmp_path / "with"), read_summary(tmp_path / "without")
    assert ours is not None and other is not None
    for key in ("R", "overhead_bits", "accuracy"):
        assert ours[key] == other[key]
    assert list(saved_rounds(tmp_path / "with")) == [2, 3]
    assert not (tmp_path / "without" / "gradients").exists()

    events = EventAccumulator(str(tmp_path / "with"), size_guidance={"histograms": 0})
    events.Reload()
    tags = set(events.Tags()["histograms"])
    assert tags == {f"{kind}/{layer}" for kind in KINDS for layer in LAYERS}
    shown = events.Histograms("decoded/lower: features.8.weight")
    assert [entry.step for entry in shown] == [2, 3]
    assert shown[0].histogram_value.num == 64 * 128 * 9

    path = tmp_path / "with" / "gradients" / "round-00002.compensated.npz"
    result = CliRunner().invoke(make_app(None), ["analyze", str(path), "--json"])
    assert result.exit_code == 0, result.output
    names = {row["name"] for row in json.loads(result.stdout)["fits"]}
    assert {"features.0.weight", "classifier.bias"} <= names
    assert not any("running" in name for name in names)
