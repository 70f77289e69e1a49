"""Architecture: one direction of imports, light imports, public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY

PACKAGE = REPOSITORY / "co3_flower"

# Reading order is data-flow order (DESIGN 2): a module imports only modules above it.
ORDER = (
    "errors",
    "law_table",
    "jit",
    "kernels",
    "kernels_side",
    "kernels_rans",
    "kernels_structure",
    "kernels_rate",
    "kernels_counts",
    "kernels_torch",
    "kernels_analysis",
    "formats",
    "layout",
    "feedback",
    "gennorm",
    "laws",
    "quantize",
    "huffman",
    "rans",
    "structure",
    "bitstream",
    "config",
    "tables",
    "payload",
    "stats",
    "dense_torch",
    "dense",
    "limits",
    "rate",
    "codec",
    "warmup",
    "lz78",
    "goodness",
    "analysis",
    "analysis_report",
    "analysis_tables",
    "figures",
    "files",
    "container",
    "checks",
    "compressors",
    "records",
    "device_array",
    "roles",
    "replies",
    "memory",
    "client",
    "nodes",
    "accounting",
    "aggregation",
    "intake",
    "inner",
    "privacy",
    "evaluation",
    "budget",
    "checkpoint",
    "resume",
    "strategy",
    "cli_tools",
    "cli",
)
ON_DEMAND = ("kernels_torch", "dense_torch")  # where tensors live on a device
FIRST_WITH_FLWR = ORDER.index("records")

PUBLIC = (
    "CO3NumPyClient",
    "CO3Strategy",
    "CodecConfig",
    "ConfigError",
    "FloatFormat",
    "GenNorm",
    "Layout",
    "PayloadError",
    "UpdateStats",
    "accumulate_update",
    "co3_mod",
    "decode_update",
    "encode_update",
    "fit_gennorm",
)


def modules() -> dict[str, Path]:
    """Every module of the package but its __init__, by name below co3_flower."""
    paths = sorted(PACKAGE.rglob("*.py"))
    named = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in paths}
    return {name: path for name, path in named.items() if not name.endswith("__init__")}


def imports_of(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} must import by full name"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def order_of_imports(path: Path) -> list[str]:
    """Siblings that a file imports."""
    found = []
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "co3_flower" and len(parts) > 1 and (PACKAGE / f"{parts[1]}.py").is_file():
            found.append(parts[1])
    return found


@pytest.mark.parametrize("name", [name for name in modules() if name in ORDER])
def test_module_imports_only_modules_above_it(name: str) -> None:
    below = {
        other
        for other in order_of_imports(modules()[name])
        if other in ORDER and ORDER.index(other) >= ORDER.index(name)
    }
    assert below == set()


def test_imports_have_no_cycles() -> None:
    graph = {name: set(order_of_imports(path)) for name, path in modules().items()}
    while ready := {name for name, needed in graph.items() if not needed & graph.keys()}:
        for name in ready:
            del graph[name]
    assert graph == {}


@pytest.mark.parametrize("name", [name for name in modules() if name in ORDER[:FIRST_WITH_FLWR]])
def test_module_before_records_does_not_import_flwr(name: str) -> None:
    roots = {imported.split(".")[0] for imported in imports_of(modules()[name])}
    assert roots.isdisjoint({"flwr", "ray"} if name in ON_DEMAND else {"flwr", "torch", "ray"})


def loaded_by(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after a statement."""
    program = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_no_heavy_module() -> None:
    loaded = loaded_by("import co3_flower")
    assert loaded.isdisjoint({"torch", "ray", "scipy.stats", "flwr", "matplotlib", "pandas"})


def test_encoding_imports_no_heavy_module() -> None:
    loaded = loaded_by(
        "import numpy as np, co3_flower as co3\n"
        "update = {'w': np.ones(2000, np.float32)}\n"
        "payload = co3.encode_update(update, None, co3.CodecConfig()).payload\n"
        "co3.decode_update(payload, update)"
    )
    assert loaded.isdisjoint({"torch", "ray", "scipy.stats", "flwr"})


def test_importing_flowers_parts_imports_neither_torch_nor_ray() -> None:
    loaded = loaded_by("from co3_flower import CO3Strategy, CO3NumPyClient, co3_mod")
    assert loaded.isdisjoint({"torch", "ray", "scipy.stats"})


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_exported(name: str) -> None:
    import co3_flower

    assert getattr(co3_flower, name) is not None
    assert name in co3_flower.__all__


def test_unknown_name_raises_attribute_error() -> None:
    import co3_flower

    with pytest.raises(AttributeError, match="no_such_name"):
        co3_flower.no_such_name  # noqa: B018


def test_version_is_that_of_the_project() -> None:
    import tomllib

    import co3_flower

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert co3_flower.__version__ == project["version"]
