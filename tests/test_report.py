"""`co3 report`: what is read from run-dirs, the figures' data, and the page in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from co3_flower import ConfigError
from co3_flower.cli import make_app
from conftest import REPOSITORY
from sim.models import figure_layers
from sim.report.page import PAGE_NAME, write_report
from sim.report.runs import Run, Setting, group_by_setting, load_runs, lower_envelope
from sim.report.saved import SavedGradients, count_layers, moments
from sim.settings import DEFAULTS, Settings
from sim.worker import run_point

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = {"desk": 1200, "phone": 390}

# Run in the page: what a reader would see of it.
PROBE = """
<script>
addEventListener("load", () => {
  const images = [...document.images];
  const fetched = performance.getEntriesByType("resource").filter(r => !r.name.startsWith("data:"));
  const seen = images.filter(i => i.complete && i.naturalWidth > 100 && i.clientWidth > 100);
  document.body.dataset.probe = JSON.stringify({
    images: images.length, seen: seen.length, width: innerWidth,
    page: document.documentElement.scrollWidth, height: document.body.scrollHeight,
    requests: fetched.length
  });
});
</script>
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder: two seeds of two settings and of float32, the first with gradients."""
    folder = tmp_path_factory.mktemp("sweep")
    shared = {"num-server-rounds": 4, "num-clients": 2, "eval-every": 2, "local-steps": 1}
    for seed in (0, 1):
        for name, values in {
            "a": {"gamma": 0.5, "save-gradients-every": 2 if seed == 0 else 0},
            "b": {"gamma": 1.0},
            "none": {"compressor": "none"},
        }.items():
            run_dir = str(folder / f"{name}{seed}")
            values = {**shared, **values, "seed": seed, "run-dir": run_dir}
            assert run_point(Settings.from_run_config(values))["status"] == "completed"
    return folder


@pytest.fixture(scope="module")
def page(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([sweep], tmp_path_factory.mktemp("report"))


def made_up(**config: Any) -> Run:
    config = {key.replace("_", "-"): value for key, value in config.items()}
    summary = {"accuracy": 0.5, "loss": config.pop("loss", 1.0), "R": config.pop("R", 8)}
    rows = [
        {"server_round": number, "accuracy": score, "R": 10 * number}
        for number, score in enumerate(config.pop("scores", [0.1, None, 0.3]))
    ]
    return Run(Path("x"), {**DEFAULTS, **config}, rows, summary)


# Runs


def test_runs_that_differ_in_the_seed_are_one_setting() -> None:
    runs = [made_up(gamma=g, seed=s, run_dir=f"{g}{s}") for g in (0.0, 0.5) for s in (0, 1)]
    runs += [made_up(compressor="none", gamma=g) for g in (0.0, 0.5)]  # gamma means nothing there
    settings = group_by_setting(runs)
    assert [(s.label, len(s.runs)) for s in settings] == [
        ("gamma 0", 2),
        ("gamma 0.5", 2),
        ("float32", 2),
    ]


def test_labels_name_the_format_where_it_differs() -> None:
    runs = [made_up(format=f, gamma=g) for f in ("e2m1", "e5m2") for g in (0.5, 1.0)]
    labels = [setting.label for setting in group_by_setting(runs)]
    assert labels == ["e2m1, gamma 0.5", "e2m1, gamma 1", "e5m2, gamma 0.5", "e5m2, gamma 1"]
    assert [s.label for s in group_by_setting([made_up()])] == ["e2m1"]


def test_labels_name_other_compressors_with_their_settings() -> None:
    runs = [made_up(compressor="topk", compressor_settings=f"ratio={r}", gamma=g)
            for r in (0.01, 0.1) for g in (0.0, 0.5)]  # fmt: skip
    settings = group_by_setting([made_up(), *runs, made_up(compressor="fp16")])
    assert [(s.label, len(s.runs), s.family) for s in settings] == [
        ("e2m1", 1, "e2m1"),
        ("topk ratio=0.01", 2, "other compressors"),
        ("topk ratio=0.1", 2, "other compressors"),
        ("fp16", 1, "other compressors"),
    ]


def test_labels_leave_out_what_is_off_and_what_only_float32_differs_in() -> None:
    runs = [made_up(coder="rans", target_bits_per_parameter=t) for t in (0.0, 0.3)]
    labels = [s.label for s in group_by_setting([made_up(compressor="none"), *runs])]
    assert labels == ["float32", "e2m1", "target-bits-per-parameter 0.3"]


def test_setting_gives_mean_and_spread_over_its_seeds() -> None:
    setting = Setting("x", (made_up(loss=1.0), made_up(loss=2.0), made_up(loss=4.5)))
    assert setting.mean("loss") == pytest.approx(2.5)
    assert setting.spread("loss") == pytest.approx(np.std([1, 2, 4.5], ddof=1))
    assert Setting("x", (made_up(),)).spread("loss") is None


def test_curve_is_the_mean_over_the_rounds_that_all_runs_evaluated() -> None:
    runs = (made_up(scores=[0.1, None, 0.3, 0.5]), made_up(scores=[0.3, 0.9, 0.7]))
    assert Setting("x", runs).curve("R", "accuracy") == ([0, 20], pytest.approx([0.2, 0.5]))


@pytest.mark.parametrize(
    ("points", "envelope"),
    [
        ([], []),
        ([(2, 1.0)], [(2, 1.0)]),
        ([(1, 3.0), (2, 2.0), (3, 2.5), (4, 1.0)], [(1, 3.0), (2, 2.0), (4, 1.0)]),
        ([(5, 0.1), (5, 0.2), (1, 0.2)], [(1, 0.2), (5, 0.1)]),  # equal loss at more bits: nothing
    ],
)
def test_lower_envelope_is_the_least_loss_within_r(points: Any, envelope: Any) -> None:
    assert lower_envelope(points) == envelope


def test_a_folder_without_a_completed_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN_DIR must hold a completed run"):
        load_runs([tmp_path])
    (tmp_path / "summary.json").write_text('{"status": "failed"}')
    (tmp_path / "config.json").write_text('{"run_config": {}}')
    with pytest.raises(ConfigError, match="RUN_DIR must hold a completed run"):
        load_runs([tmp_path])


def test_a_sweeps_folder_stands_for_its_points(sweep: Path) -> None:
    assert [run.folder.name for run in load_runs([sweep])] == [
        "a0", "a1", "b0", "b1", "none0", "none1",
    ]  # fmt: skip
    assert len(load_runs([sweep / "a0", sweep / "b1"])) == 2


# Saved gradients


def test_moments_have_intervals_that_hold_the_truth(rng: np.random.Generator) -> None:
    inside = np.zeros(2)
    for _ in range(400):
        m = moments(rng.laplace(2.0, 1.0, 500).astype(np.float32))  # variance 2
        inside += [abs(m.mean - 2) <= m.mean_half, abs(m.variance - 2) <= m.variance_half]
    assert (inside / 400 > 0.90).all() and (inside / 400 < 0.98).all()


def test_figure_layers_are_the_papers_or_three_convolutions() -> None:
    layers = figure_layers("densenet121", {})
    assert list(layers) == [
        "upper: conv2_block1_1_conv",
        "middle: conv3_block1_1_conv",
        "lower: conv5_block1_1_conv",
    ]
    shapes = {f"c{i}": (4, 4, 3, 3) for i in range(5)} | {"b": (4,)}
    assert list(figure_layers("cnn", shapes).values()) == ["c0", "c2", "c4"]


def test_saved_gradients_are_measured_layer_by_layer(sweep: Path) -> None:
    (run,) = load_runs([sweep / "a0"])
    saved = SavedGradients(run)
    assert saved.rounds == saved.shown_rounds == [2, 4]
    assert len(saved.layers) == 3
    assert len(saved.entries) == len(saved.fits) == 2 * 2 * 3
    assert set(saved.sizes) == {(r, layer) for r in (2, 4) for layer in saved.layers}
    gradient, residual = saved.load(4, "gradient"), saved.load(4, "residual")
    wanted = (
        np.abs(residual["classifier.weight"]).sum() / np.abs(gradient["classifier.weight"]).sum()
    )
    index = list(gradient).index("classifier.weight")
    assert saved.residual_ratios[4][index] == pytest.approx(wanted, rel=1e-5)


def test_layers_and_parameters_are_counted_from_the_model(sweep: Path) -> None:
    table = count_layers(sweep / "a0" / "model.npz")
    assert (table.num_convolutions, table.num_linear, table.num_tensors) == (3, 1, 11)
    assert (table.num_parameters, table.num_trainable) == (94_762 + 448, 94_762)


# The page


def test_page_holds_everything_and_asks_for_nothing(page: Path) -> None:
    text = page.read_text()
    figures = {path.stem for path in (page.parent / "figures").glob("*.svg")}
    assert figures == {path.stem for path in (page.parent / "figures").glob("*.png")}
    assert {"tradeoff", "accuracy", "gradients1-w2", "gradients1-histograms3"} <= figures
    assert {"gradients1-kurtosis", "gradients1-kurtosis-layers", "gradients1-sizes"} <= figures
    assert "gradients1-residual" in figures
    assert set(re.findall(r'<figure id="([^"]+)"', text)) == figures
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "url(" not in text and "@import" not in text and "<script" not in text
    for part in ("gamma 0.5", "gamma 1", "float32", "95,210", "94,762", "± "):
        assert part in text
    assert len(text) < 2_000_000


def test_same_runs_give_the_same_page(page: Path, sweep: Path, tmp_path: Path) -> None:
    assert write_report([sweep], tmp_path).read_bytes() == page.read_bytes()


def test_command_writes_the_report_beside_the_run(sweep: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(sweep / "b0", run_dir)
    result = CliRunner().invoke(make_app(REPOSITORY), ["report", str(run_dir)])
    assert result.exit_code == 0, result.output
    page = run_dir / "report" / PAGE_NAME
    assert result.output.strip() == str(page)
    assert "No run here has saved gradients" in page.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("device", WIDTHS)
def test_browser_shows_every_figure_without_an_error(
    device: str, page: Path, tmp_path: Path
) -> None:
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    shot = tmp_path / "page.png"
    options = [f"--window-size={WIDTHS[device]},1500", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    dumped = subprocess.run(
        [str(CHROMIUM), *options, "--dump-dom", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in dumped.stderr
    found = re.search(r'data-probe="([^"]+)"', dumped.stdout)
    assert found is not None
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["images"] == seen["seen"] == page.read_text().count("<img ") > 8
    assert seen["page"] <= seen["width"]  # nothing sticks out to the side
    assert seen["requests"] == 0
    subprocess.run(
        [str(CHROMIUM), *options, f"--screenshot={shot}", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert shot.stat().st_size > 20_000
