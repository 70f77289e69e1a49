"""How the numba loops are compiled: cached on disk, without the interpreter's lock, as written.

Every kernel's machine code holds that of the kernels it calls, but numba renews a file of its cache
only when the kernel's own source file changes. `drop_stale_cache` renews them all then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

FOLDER = Path(__file__).parent
STAMP = "kernels.stamp"
NOT_COMPILED = "kernels_torch.py"


def njit(function: Callable[..., Any]) -> Any:
    """Compile a kernel at its first call: no fastmath, division as NumPy's, no lock held."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def drop_stale_cache(folder: Path = FOLDER) -> None:
    """Forget all compiled kernels in a folder if any kernel's source has changed since they were.

    Folders below it count as well: their kernels may call those above.
    Does nothing where the cache cannot be written: numba then keeps it elsewhere.
    """
    sources = sorted([*folder.rglob("kernels*.py"), *folder.glob("law_table.py")])
    files = [(s.relative_to(folder), s.stat()) for s in sources if s.name != NOT_COMPILED]
    text = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in files)
    cache = folder / "__pycache__"
    with contextlib.suppress(OSError):
        if (cache / STAMP).is_file() and (cache / STAMP).read_text() == text:
            return
        cache.mkdir(exist_ok=True)
        for index in folder.rglob("__pycache__/kernels*.nbi"):
            index.unlink(missing_ok=True)
        temporary = cache / f"{STAMP}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(cache / STAMP)
