"""The cache of compiled kernels: an edit of one file renews what was compiled of all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from co3_flower.jit import FOLDER, STAMP, drop_stale_cache


def make_package(folder: Path) -> Path:
    """Kernels in two files and in one of a folder below, which call the first, as a package."""
    package = folder / "kernelpack"
    package.mkdir(parents=True)
    shutil.copy(FOLDER / "jit.py", package / "jit.py")
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(
        "from kernelpack.jit import drop_stale_cache, njit\n\n"
        "drop_stale_cache()\n\n\n"
        "@njit\ndef inner(x):\n    return x + 1\n"
    )
    (package / "kernels_outer.py").write_text(
        "from kernelpack.jit import njit\nfrom kernelpack.kernels import inner\n\n\n"
        "@njit\ndef outer(x):\n    return inner(x) * 10\n"
    )
    below = package / "below"
    below.mkdir()
    (below / "__init__.py").write_text("")
    shutil.copy(package / "kernels_outer.py", below / "kernels_outer.py")
    return package


def call_outer(folder: Path, module: str = "kernelpack.kernels_outer") -> int:
    program = f"from {module} import outer; print(outer(4))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.parametrize("module", ["kernelpack.kernels_outer", "kernelpack.below.kernels_outer"])
def test_change_of_an_inner_kernel_reaches_what_was_compiled_of_outer_ones(
    tmp_path: Path, module: str
) -> None:
    package = make_package(tmp_path)
    assert call_outer(tmp_path, module) == 50
    source = package / "kernels.py"
    source.write_text(source.read_text().replace("x + 1", "x + 2"))
    assert call_outer(tmp_path, module) == 60


def test_cache_stays_where_no_source_has_changed(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    call_outer(tmp_path)
    cache = package / "__pycache__"
    compiled = {path: path.stat().st_mtime_ns for path in cache.glob("*.nb*")}
    assert compiled
    assert (cache / STAMP).is_file()
    call_outer(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.nb*")} == compiled


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    package.chmod(0o500)
    drop_stale_cache(package)
    package.chmod(0o700)
    assert not (package / "__pycache__").exists()
