"""Checkouts of their own for tests that run the app in Flower's processes."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import REPOSITORY


def checkout(folder: Path, *, client: str = "", server: str = "") -> Path:
    """Make a checkout whose ClientApp or ServerApp is another one."""
    root = folder / "checkout"
    root.mkdir()
    shutil.copytree(REPOSITORY / "sim", root / "sim", ignore=shutil.ignore_patterns("__pycache__"))
    project = (REPOSITORY / "pyproject.toml").read_text()
    for kind, text in (("client", client), ("server", server)):
        if text:
            (root / "sim" / f"probe_{kind}.py").write_text(text)
            project = project.replace(f"sim.{kind}_app:app", f"sim.probe_{kind}:app")
    (root / "pyproject.toml").write_text(project)
    return root
