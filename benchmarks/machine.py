"""What machine and what versions a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "co3-flower",
    "numpy",
    "numba",
    "scipy",
    "flwr",
    "zstandard",
    "constriction",
    "bitarray",
    "ml-dtypes",
    "torch",
)


def environment() -> dict[str, str]:
    """Return what machine and what versions these are."""
    return {
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "libzstd": _zstd_version(),
    }


def cpu_model() -> str:
    """Return the processor's name, as Linux tells it or as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = dict(
        (part.strip() for part in line.split(":", 1)) for line in reversed(lines) if ":" in line
    )
    numbers = ", ".join(f"{k} {fields[k]}" for k in ("cpu family", "model") if k in fields)
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({numbers})" if numbers else name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _zstd_version() -> str:
    try:
        import zstandard
    except ImportError:
        return "-"
    return ".".join(map(str, zstandard.ZSTD_VERSION))
