"""From the words of a command line to checked settings, before anything is started."""

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from co3_flower import ConfigError
from sim.data import check_shares, shared_images
from sim.outputs import check_is_unused, default_run_dir, read_config
from sim.settings import (
    DATASETS,
    PATH_KEYS,
    Settings,
    Value,
    check_dataset,
    check_together,
    expand_path,
    parse_overrides,
    read_config_file,
)

DEFAULT_NUM_CLIENTS = 4
NEEDED = ("torch", "torchvision", "ray", "flwr_datasets", "sklearn", "tensorboard")


def resolve_settings(
    config: Path | None, overrides: list[str], num_clients: int | None, folder: Path
) -> Settings:
    """Merge CONFIG.toml, the overrides and the options, check them, and make paths absolute.

    Parameters
    ----------
    config : Path or None
        TOML file of run-config keys.
    overrides : list of str
        ``key=value`` texts; they win over the file.
    num_clients : int or None
        Wins over both.
    folder : Path
        What relative paths refer to.

    Raises
    ------
    ConfigError
        A wrong key or value, or a run-dir that holds a run already.
    """
    settings = settle(_merge(config, overrides, num_clients), folder)
    run_dir = settings.run_dir or str(default_run_dir(folder))
    check_is_unused(Path(run_dir))
    memory_dir = settings.memory_dir
    if settings.compressor != "none" and not memory_dir:
        # U residuals need not sit in the driver's memory.
        memory_dir = str(Path(run_dir) / "memory")
    return replace(settings, run_dir=run_dir, memory_dir=memory_dir)


def resumed_settings(run_dir: Path) -> Settings:
    """Return the settings with which a run goes on; its folder may have been moved.

    Parameters
    ----------
    run_dir : Path
        Folder of the run.

    Raises
    ------
    ConfigError
        It holds no run, or a completed one.
    """
    run_dir = run_dir.absolute()
    settings = Settings.from_run_config(read_config(run_dir)["run_config"])
    memory_dir = settings.memory_dir
    if memory_dir and Path(memory_dir).is_relative_to(settings.run_dir):
        memory_dir = str(run_dir / Path(memory_dir).relative_to(settings.run_dir))
    (run_dir / "summary.json").unlink(missing_ok=True)  # of a run that failed; there is a new end
    return replace(settings, run_dir=str(run_dir), memory_dir=memory_dir, resume=True)


def resolve_remote_settings(
    config: Path | None, overrides: list[str], num_clients: int | None
) -> Settings:
    """Merge and check as `resolve_settings`; paths are those of other machines.

    Raises
    ------
    ConfigError
        A wrong key or value, or a relative path.
    """
    settings = Settings.from_run_config(_merge(config, overrides, num_clients))
    paths = {key: str(settings.as_run_config()[key]) for key in PATH_KEYS}
    if settings.dataset not in DATASETS:
        paths["dataset"] = settings.dataset
    for key, path in paths.items():
        # A client takes memory-dir as it is; the SuperLink's machine expands ~ and variables.
        if path and not path.startswith(("/",) if key == "memory-dir" else ("/", "~", "$")):
            raise ConfigError(
                f"{key} must be an absolute path with --federation, where it names a folder of"
                f" another machine, got {path!r}"
            )
    if settings.save_gradients_every:
        raise ConfigError(
            "save-gradients-every must be 0 with --federation, where the run-dir is on another"
            f" machine than the clients, got {settings.save_gradients_every}"
        )
    _check_buffers(settings)
    return settings


def _merge(config: Path | None, overrides: list[str], num_clients: int | None) -> dict[str, Value]:
    values = read_config_file(config) if config else {}
    values.update(parse_overrides(overrides))
    if num_clients is not None:
        values["num-clients"] = num_clients
    return values


def settle(values: Mapping[str, Value], folder: Path) -> Settings:
    """Check settings, make their paths absolute and the number of clients known."""
    settings = Settings.from_run_config(values)
    if settings.resume:
        raise ConfigError("resume must be false here, got true; use `co3 run --resume RUN_DIR`")
    given = settings.as_run_config()
    paths = {key.replace("-", "_"): _absolute(str(given[key]), key, folder) for key in PATH_KEYS}
    if settings.dataset not in DATASETS:
        paths["dataset"] = _absolute(settings.dataset, "dataset", folder)
    clients = settings.num_clients or DEFAULT_NUM_CLIENTS
    settings = replace(settings, **paths, num_clients=clients)
    check_together(settings)
    check_dataset(settings.dataset)
    return settings


def _absolute(path: str, key: str, folder: Path) -> str:
    if not path:
        return ""
    return str((folder / expand_path(path, key)).resolve())


def check_packages() -> None:
    """Raise ConfigError where a package of the extra "sim" is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"co3 run must find the packages of the extra 'sim', got none of {', '.join(missing)};"
            " run `make setup`, or pip install -e '.[sim]'"
        )


def check_machine(settings: Settings) -> None:
    """Find before anything starts what would only fail once Flower runs."""
    if settings.data_dir and not Path(settings.data_dir).is_dir():
        raise ConfigError(f"data-dir must be a folder with CIFAR-10, got {settings.data_dir!r}")
    if settings.device == "cuda" and shutil.which("nvidia-smi") is None:
        raise ConfigError("device must be 'cpu' or 'auto' where there is no GPU, got 'cuda'")
    _check_buffers(settings)
    labels = shared_images(settings.dataset, settings.data_dir).labels
    check_shares(
        labels,
        settings.num_clients,
        settings.partition,
        alpha=settings.dirichlet_alpha,
        seed=settings.seed,
    )


def _check_buffers(settings: Settings) -> None:
    if settings.buffers == "local":
        raise ConfigError(
            "buffers must be 'coded' or 'raw' here, got 'local': the PS evaluates models with"
            " BatchNorm, and would lack their statistics"
        )


def check_gpu_share(gpus_per_client: float, federation: str | None) -> None:
    """Raise ConfigError for a share of a GPU that cannot be, or that nothing here hands out."""
    if not 0.0 < gpus_per_client <= 1.0:
        raise ConfigError(f"--gpus-per-client must be above 0 and at most 1, got {gpus_per_client}")
    if federation is not None:
        raise ConfigError(
            "--gpus-per-client must be left out with --federation, whose SuperNodes have their own"
            f" machines, got {gpus_per_client}"
        )


def gpu_share(device: str, num_processes: int, gpus_per_client: float | None) -> float:
    """Return the share of the GPU for each training process; Ray hides it from those with none."""
    if device == "cpu" or (device == "auto" and shutil.which("nvidia-smi") is None):
        return 0.0
    return gpus_per_client or round(1 / num_processes, 4)
