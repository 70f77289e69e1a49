"""The command `co3`: what the library offers on the command line.

Experiments (`co3 run`) belong to the app in sim/, which is part of a checkout and not of the
wheel; the command finds it by looking upward from the current folder.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from co3_flower import __version__
from co3_flower.cli_tools import register
from co3_flower.errors import Co3Error, ConfigError

PROJECT_NAME = "co3-flower"
EXIT_FAILED = 1
EXIT_USAGE = 2


def find_checkout(start: Path) -> Path | None:
    """Return the closest folder at or above `start` that is a checkout of this project, or None.

    Parameters
    ----------
    start : Path
        Where to begin, usually the current folder.

    Examples
    --------
    >>> find_checkout(Path("/")) is None
    True
    """
    start = start.resolve()
    return next((folder for folder in (start, *start.parents) if _is_checkout(folder)), None)


def make_app(root: Path | None) -> typer.Typer:
    """Build the command line, with the experiments where there is a checkout.

    Parameters
    ----------
    root : Path or None
        The checkout, whose sim/ adds its commands.
    """
    app = typer.Typer(
        name="co3",
        help="Communication-efficient federated learning for Flower: convert, correct, compress.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    register(app)
    if root is None:
        app.command(
            "run",
            help="Run an experiment (needs a checkout of the project).",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_run_without_checkout)
    else:
        # First on the path: an editable install of another checkout must not answer for this one.
        sys.path.insert(0, str(root))
        import_module("sim.cli").register(app, root)
    return app


def main() -> None:
    """Run the command; every error of ours is one line on stderr and a non-zero exit code."""
    try:
        make_app(find_checkout(Path.cwd()))()
    except Co3Error as error:
        _complain(str(error))
        default = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        sys.exit(getattr(error, "exit_code", default))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"co3 {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Take the options of `co3` itself."""


def _run_without_checkout() -> None:
    raise ConfigError(
        "co3 run must be started inside a checkout of co3-flower (its pyproject.toml and sim/),"
        f" got {str(Path.cwd())!r}; clone the project and run it there"
    )


def _is_checkout(folder: Path) -> bool:
    if not (folder / "sim" / "cli.py").is_file():
        return False
    try:
        with (folder / "pyproject.toml").open("rb") as file:
            return bool(tomllib.load(file)["project"]["name"] == PROJECT_NAME)
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError):
        return False


def _complain(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"error: {message}", markup=False, style="red"
    )
