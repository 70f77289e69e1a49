"""The commands that a checkout adds to `co3`: run, sweep, compare and report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from co3_flower import ConfigError
from sim.compare.plan import read_comparison
from sim.compare.run import compare_dir, run_comparison
from sim.outputs import format_table
from sim.resolve import (
    DEFAULT_NUM_CLIENTS,
    check_gpu_share,
    resolve_remote_settings,
    resolve_settings,
    resumed_settings,
)
from sim.runs import run_experiment, run_on_federation
from sim.settings import parse_overrides
from sim.sweep import resolve_points, run_sweep

SharedOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--run-config",
        metavar='"KEY=VALUE ..."',
        help="Settings that override those all points share; see `co3 run --help`.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Points at a time, each on one CPU core.")]


def register(app: typer.Typer, root: Path) -> None:
    """Add the commands of a checkout.

    Parameters
    ----------
    app : typer.Typer
        The command line they are added to.
    root : Path
        The checkout.
    """

    @app.command("run")
    def run(
        config: Annotated[
            Path | None,
            typer.Argument(
                metavar="[CONFIG.toml]", help="Run-config of an experiment, as in configs/."
            ),
        ] = None,
        override: Annotated[
            list[str] | None,
            typer.Option(
                "-c",
                "--run-config",
                metavar='"KEY=VALUE ..."',
                help="Settings that override CONFIG.toml; strings are quoted: -c \"format='e5m2'\"."
                " May be repeated.",
            ),
        ] = None,
        num_clients: Annotated[
            int | None,
            typer.Option(
                "--num-clients",
                min=1,
                help=f"Clients to simulate (default: num-clients, else {DEFAULT_NUM_CLIENTS});"
                " with --federation, to wait for (else those that are there).",
            ),
        ] = None,
        federation: Annotated[
            str | None,
            typer.Option(
                "--federation",
                metavar="NAME",
                help="Run on the SuperLink of this name in Flower's config.toml, with the"
                " SuperNodes connected to it, and start none; see docs/deploy.md.",
            ),
        ] = None,
        resume: Annotated[
            Path | None,
            typer.Option(
                "--resume",
                metavar="RUN_DIR",
                help="Go on with a run that was ended, killed or failed, with its own settings.",
            ),
        ] = None,
        gpus_per_client: Annotated[
            float | None,
            typer.Option(
                "--gpus-per-client",
                metavar="SHARE",
                help="Share of a GPU for each client that trains, 0.1 for ten at a time on one"
                " (default: one GPU shared by as many as there are CPU cores). None is used where"
                " there is none, or with device='cpu'.",
            ),
        ] = None,
    ) -> None:
        r"""Train a network federatedly, and count the bits.

        Runs on Flower's simulation engine, or with --federation on a deployment: paths are then
        those of the SuperLink's machine (memory-dir: of the clients'), and so is run-dir.

        Every key of \[tool.flwr.app.config] in pyproject.toml is a setting; they are listed and
        explained there. Shows accuracy, R and bits per parameter while it runs, ends with a table,
        and leaves config.json, rounds.jsonl, summary.json, model.npz, TensorBoard events and
        flower.log in run-dir (default: runs/<time>-<id>).

        The exit code is 0 for a completed run, 1 for one that failed, 2 for a wrong setting, 130
        after Ctrl-C.
        """
        if gpus_per_client is not None:
            check_gpu_share(gpus_per_client, federation)
        if resume is not None:
            if config or override or num_clients or federation:
                raise ConfigError(
                    "--resume must stand alone, got other options; a run goes on with its own"
                    " settings (on a federation: the same ones, and -c 'resume=true')"
                )
            summary = run_experiment(root, resumed_settings(resume), Console(), gpus_per_client)
        elif federation is None:
            settings = resolve_settings(config, override or [], num_clients, Path.cwd())
            summary = run_experiment(root, settings, Console(), gpus_per_client)
        else:
            settings = resolve_remote_settings(config, override or [], num_clients)
            summary = run_on_federation(root, settings, federation, Console())
        typer.echo(f"run-dir  {summary['run_dir']}\n{format_table(summary)}")

    @app.command("sweep")
    def sweep(
        config: Annotated[
            Path,
            typer.Argument(
                metavar="FILE.toml",
                help="Settings and grids of values, as in configs/sweep-*.toml.",
            ),
        ],
        override: SharedOverrides = None,
        jobs: Jobs = 1,
    ) -> None:
        r"""Run a grid of experiments, and go on where an earlier call was ended.

        FILE.toml holds the settings that all points share, and tables \[\[grid]] of lists: a grid
        stands for every combination of its values. Points run in worker processes that load
        everything once, without Flower's engine: R and the model are the same as with `co3 run`.

        Each point leaves what `co3 run` leaves in a folder of its own under run-dir (default:
        runs/<name of FILE>); points that are done are not repeated, failed ones are tried again.
        Ends with a table (means over seeds) that is also written to run-dir/table.md.

        The exit code is 0 when every point is done, 1 when some failed, 2 for a wrong setting, 130
        after Ctrl-C.
        """
        sweep_dir, points = resolve_points(config, override or [], Path.cwd())
        table = run_sweep(root, sweep_dir, points, jobs, Console())
        typer.echo(f"run-dir  {sweep_dir}\n\n{table}")

    @app.command("compare")
    def compare(
        config: Annotated[
            Path,
            typer.Argument(
                metavar="FILE.toml",
                help="Settings, compressors and stages, as in configs/compare-*.toml.",
            ),
        ],
        override: SharedOverrides = None,
        jobs: Jobs = 1,
        last_stage: Annotated[
            str, typer.Option("--until", metavar="STAGE", help="Stop behind this stage.")
        ] = "",
    ) -> None:
        r"""Train with every compressor of a file, and go on where an earlier call was ended.

        FILE.toml holds the settings that all points share, a table \[\[entry]] for each compressor
        at each strength, and tables \[\[stage]]: the first one finds each entry's best step size,
        later ones train the best of them longer, on more seeds or in another setting.

        Each finished point is a line of run-dir/results.jsonl (default run-dir: runs/<name of
        FILE>) and not repeated. Ends with a table for each stage, also in run-dir/table.md, and the
        figure accuracy against R as PNG and SVG.

        The exit code is 0 when every point is done, 1 when some failed, 2 for a wrong setting, 130
        after Ctrl-C.
        """
        comparison = read_comparison(config)
        comparison.shared.update(parse_overrides(override or []))
        folder = compare_dir(comparison, config, Path.cwd())
        table = run_comparison(root, folder, comparison, last_stage, jobs, Console())
        typer.echo(f"run-dir  {folder}\n\n{table}")

    @app.command("report")
    def report(
        run_dirs: Annotated[
            list[Path],
            typer.Argument(metavar="RUN_DIR...", help="Folders of runs or of sweeps."),
        ],
        output: Annotated[
            Path | None,
            typer.Option(
                "--output",
                metavar="DIR",
                help="Folder of the report (default: RUN_DIR/report, for several ./report).",
            ),
        ] = None,
    ) -> None:
        """Draw what runs have left: one page that needs no network, and its figures.

        Accuracy and loss against R with their lower envelope, accuracy over rounds, tables of
        networks and runs; where gradients were saved (save-gradients-every), their histograms,
        laws, distances, kurtosis, coded sizes and residuals. Writes DIR/report.html and
        DIR/figures/*.png and *.svg.
        """
        from sim.report.page import write_report  # torch and matplotlib: seconds

        folder = output or (run_dirs[0] if len(run_dirs) == 1 else Path.cwd()) / "report"
        typer.echo(write_report(run_dirs, folder))
