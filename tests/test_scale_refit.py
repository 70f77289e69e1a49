"""Scales that are given to the codec, and kept by a client for some rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from localgrid import LocalGrid
from tinyapp import initial_model, record_of

from co3_flower import CO3Strategy, CodecConfig, ConfigError, co3_mod, encode_update
from co3_flower.client import SentUpdate
from conftest import draw_gennorm

CONFIG = CodecConfig(format="e2m1")


@pytest.fixture
def update(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "w": draw_gennorm(rng, 4_000, beta=0.8, alpha=1e-3).reshape(40, 100),
        "b": draw_gennorm(rng, 100, beta=1.0, alpha=1e-2),
        "running_mean": draw_gennorm(rng, 100, beta=2.0),
        "steps": np.array(3),
    }


def scales_of(encoded: Any) -> dict[str, float]:
    return {row.name: row.scale for row in encoded.stats.tensors}


def test_given_scales_are_used_and_the_others_chosen(update: dict[str, np.ndarray]) -> None:
    config = CodecConfig(format="e2m1", buffers=("running_mean",))
    chosen = scales_of(encode_update(update, None, config))
    given = float(np.float32(700.1))
    used = scales_of(encode_update(update, None, config, scales={"w": given}))
    assert used == {**chosen, "w": given}


def test_scales_that_were_chosen_give_the_same_bytes(update: dict[str, np.ndarray]) -> None:
    for threads in (1, 3):
        config = CodecConfig(format="e2m1", buffers=("running_mean",), num_threads=threads)
        first = encode_update(update, None, config)
        given = {name: value for name, value in scales_of(first).items() if name in ("w", "b")}
        assert encode_update(update, None, config, scales=given).payload == first.payload


@pytest.mark.parametrize(
    ("scales", "config", "message"),
    [
        ({"x": 1.0}, {}, "scales must be of coded tensors, got one of 'x'"),
        ({"steps": 1.0}, {}, "scales must be of coded tensors, got one of 'steps'"),
        ({"w": 0.0}, {}, "scale must be in .* got 0.0 of 'w'"),
        ({"w": float("nan")}, {}, "scale must be in .* got nan of 'w'"),
        ({"w": 1.0}, {"target_bits_per_parameter": 2.0}, "scales must be None with a target"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    scales: dict[str, float], config: dict[str, Any], message: str, update: dict[str, np.ndarray]
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_update(update, None, CodecConfig(format="e2m1", **config), scales=scales)


def test_refit_and_target_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="scale_refit_every must be 1 with a target"):
        CodecConfig(target_bits_per_parameter=2.0, scale_refit_every=2)


@pytest.mark.parametrize("where", ["context", "files"])
@pytest.mark.parametrize(("every", "fits"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (9, [1])])
def test_client_keeps_its_scales_for_so_many_rounds(
    every: int, fits: list[int], where: str, tmp_path: Path
) -> None:
    rounds: dict[int, list[dict[str, float]]] = {}

    def observe(context: Context, sent: SentUpdate) -> None:
        rounds.setdefault(sent.server_round, []).append(scales_of(sent.encoded))

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        return co3_mod(message, context, call_next, observe=observe)

    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(message.content["config"]["server-round"])
        seed = [number, int(context.node_config["partition-id"])]
        rng = np.random.default_rng(seed)
        gradient = {
            name: (number * rng.normal(size=value.shape)).astype(np.float32)
            for name, value in initial_model().items()
        }
        content = {"gradient": record_of(gradient), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict({**content, "arrays": ArrayRecord()}), reply_to=message)

    config = CodecConfig(format="e2m1", scale_refit_every=every)
    strategy = CO3Strategy(
        config,
        payload="gradient",
        server_lr=0.1,
        num_clients=2,
        fraction_evaluate=0.0,
        memory_dir=str(tmp_path) if where == "files" else None,
    )
    strategy.start(LocalGrid(app, 2), record_of(initial_model()), num_rounds=5)
    for client in range(2):
        scales = [rounds[number][client] for number in range(1, 6)]
        changed = [1] + [n for n in range(2, 6) if scales[n - 1] != scales[n - 2]]
        assert changed == fits
