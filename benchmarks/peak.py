"""Peak resident memory of a piece of work, as the operating system counts it.

Linux's peak counter of this process is set back before the work, so that what came before does not
hide it. Memory that was freed but is still held by the allocator is given back first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

MIB = 2**20
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what proc(5) says to write


class Peak:
    """Context manager; afterwards `entry_bytes`, `peak_bytes` and `exit_bytes` are known."""

    entry_bytes = peak_bytes = exit_bytes = 0

    def __enter__(self) -> Peak:
        release_freed_memory()
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        self.entry_bytes = status_bytes("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.peak_bytes = status_bytes("VmHWM")
        self.exit_bytes = status_bytes("VmRSS")

    @property
    def above_entry(self) -> int:
        """Bytes of the peak above what there was at entry."""
        return self.peak_bytes - self.entry_bytes


def is_available() -> bool:
    """Tell whether this system lets a process set its peak back (Linux does)."""
    return os.access(CLEAR_REFS, os.W_OK)


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, in bytes."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status must have a line {field}")


def release_freed_memory() -> None:
    """Collect garbage and, with glibc, give freed memory back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Return the memory that is free or can be freed."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo must have a line MemAvailable")


def run_child(module: str, arguments: Sequence[str], timeout: float = 600.0) -> dict[str, Any]:
    """Run ``python -m module arguments`` in a fresh process; its last line is JSON.

    Raises
    ------
    RuntimeError
        When it fails; the message ends with what it said.
    """
    child = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if child.returncode != 0:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed: {child.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return result
