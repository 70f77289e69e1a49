"""Real images for the app: one train and one test split, shared out among the clients.

In comes a data set's name (handwritten digits, CIFAR-10, or a directory of parquet files), out go
uint8 images with labels and, for each client, the positions of its own. JPEGs are decoded and
images shared out once per machine: the arrays lie in a cache folder outside the project, from where
every process maps them.
"""

import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from co3_flower import ConfigError
from sim.settings import expand_path

if TYPE_CHECKING:
    import torch

HUB_NAME = "uoft-cs/cifar10"  # CIFAR-10 on the Hugging Face hub
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels")
MIN_CLIENT_IMAGES = 2  # BatchNorm in training mode needs two values a channel
DIGITS_TEST_SHARE = 0.2

Array = np.ndarray


@dataclass(frozen=True)
class Images:
    """Images and labels of one split.

    Attributes
    ----------
    pixels : uint8 [image, height, width, channel], three channels
    labels : int64 [image]
    white : int
        The pixel value that stands for 1.0.
    """

    pixels: Array
    labels: Array
    white: int = 255

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, positions: Array) -> "Images":
        """Return some of the images, copied out of the cache file."""
        return Images(self.pixels[positions], self.labels[positions], self.white)

    def batch(self, positions: Array) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return float32 [image, channel, height, width] in [0, 1] and int64 [image].

        The memory format is channels last, which convolutions on a CPU run faster on.
        """
        import torch  # seconds; a check of the files does without

        pixels = torch.from_numpy(self.pixels[positions]).permute(0, 3, 1, 2)
        return pixels.float().div_(self.white), torch.from_numpy(self.labels[positions])


@dataclass(frozen=True)
class ImageData:
    """A data set: what the clients train on, what the PS tests on."""

    train: Images
    test: Images
    num_classes: int


@lru_cache(maxsize=2)
def load_data(dataset: str, data_dir: str = "") -> ImageData:
    """Load a data set, once per process.

    Parameters
    ----------
    dataset : str
        ``digits`` (scikit-learn's, no download), ``cifar10``, or a directory of parquet files.
    data_dir : str
        Where CIFAR-10 lies, as parquet files of the Hugging Face hub or in torchvision's folder;
        empty: download it through flwr-datasets.

    Returns
    -------
    ImageData

    Raises
    ------
    ConfigError
        The files are not there, or not images with labels.
    """
    if dataset == "digits":
        return _load_digits()
    if dataset != "cifar10":
        return _load_parquet(Path(expand_path(dataset, "dataset")))
    if not data_dir:
        return _download_cifar10()
    folder = Path(expand_path(data_dir, "data-dir"))
    if not folder.is_dir():
        raise ConfigError(f"data-dir must be a folder with CIFAR-10, got {str(folder)!r}")
    if folder.name == "cifar-10-batches-py":
        folder = folder.parent
    if (folder / "cifar-10-batches-py").is_dir():
        return _load_torchvision_cifar10(folder)
    return _load_parquet(folder)


def client_positions(
    partition_id: int,
    num_clients: int,
    *,
    dataset: str,
    data_dir: str,
    partition: str,
    alpha: float,
    seed: int,
) -> Array:
    """Return the positions in the train split of one client's images; see `share_out`."""
    if not 0 <= partition_id < num_clients:
        raise ConfigError(f"partition-id must be in [0, {num_clients}), got {partition_id}")
    labels = load_data(dataset, data_dir).train.labels
    return np.flatnonzero(
        share_out(labels, num_clients, partition, alpha=alpha, seed=seed) == partition_id
    )


def share_out(labels: Array, num_clients: int, partition: str, *, alpha: float, seed: int) -> Array:
    """Share images out among clients with flwr-datasets' partitioners.

    Parameters
    ----------
    labels : int64 [image]
    num_clients : int
    partition : str
        ``iid`` (shuffled, equal shares) or ``dirichlet`` (class shares drawn per client).
    alpha : float
        Of the Dirichlet distribution; smaller = less alike clients.
    seed : int
        The same seed gives the same shares on every machine.

    Returns
    -------
    int32 [image]
        The client whose image it is.

    Raises
    ------
    ConfigError
        A client would get fewer than two images.
    """
    check_num_clients(len(labels), num_clients)
    rule = [partition, str(num_clients), str(seed)] + [repr(alpha)] * (partition != "iid")
    digest = hashlib.blake2b(labels.tobytes(), digest_size=16).hexdigest()
    return _cached(
        "owners", [digest, *rule], lambda: _owners(labels, num_clients, partition, alpha, seed)
    )


def check_shares(
    labels: Array, num_clients: int, partition: str, *, alpha: float, seed: int
) -> None:
    """Raise ConfigError where a client would get too few images; as `share_out`, but at once.

    Equal shares need only be counted.
    """
    check_num_clients(len(labels), num_clients)
    if partition != "iid":
        share_out(labels, num_clients, partition, alpha=alpha, seed=seed)


def _owners(labels: Array, num_clients: int, partition: str, alpha: float, seed: int) -> Array:
    from datasets import Dataset  # three seconds to import
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

    order = np.random.default_rng([seed, 0x5348]).permutation(len(labels))
    table = Dataset.from_dict({"position": order, "label": labels[order]})
    if partition == "iid":
        partitioner = IidPartitioner(num_partitions=num_clients)
    else:
        partitioner = DirichletPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            alpha=float(alpha),
            min_partition_size=MIN_CLIENT_IMAGES,
            seed=seed,
        )
    partitioner.dataset = table
    try:
        with warnings.catch_warnings():  # it warns of every draw that left a client too few
            warnings.simplefilter("ignore", UserWarning)
            shares = [partitioner.load_partition(client) for client in range(num_clients)]
    except ValueError:
        raise ConfigError(
            f"dirichlet-alpha must leave every client {MIN_CLIENT_IMAGES} images, got {alpha}"
            f" for {num_clients} clients and {len(labels)} images; raise it or have fewer clients"
        ) from None
    owners = np.empty(len(labels), np.int32)
    for client, share in enumerate(shares):
        owners[np.asarray(share["position"])] = client
    return owners


def check_num_clients(num_images: int, num_clients: int) -> None:
    """Raise ConfigError where there are too few images for so many clients."""
    if num_images < MIN_CLIENT_IMAGES * num_clients:
        raise ConfigError(
            f"num-clients must be at most {num_images // MIN_CLIENT_IMAGES} for {num_images} images"
            f" ({MIN_CLIENT_IMAGES} each), got {num_clients}"
        )


def _load_digits() -> ImageData:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.repeat(digits.images.astype(np.uint8)[..., None], 3, axis=3)  # grey, 0 to 16
    labels = digits.target.astype(np.int64)
    # One split for good: the test set must not depend on the run's seed.
    train, test = train_test_split(
        np.arange(len(labels)), test_size=DIGITS_TEST_SHARE, stratify=labels, random_state=0
    )
    return ImageData(
        train=Images(pixels[train], labels[train], white=16),
        test=Images(pixels[test], labels[test], white=16),
        num_classes=10,
    )


def _load_torchvision_cifar10(folder: Path) -> ImageData:
    from torchvision.datasets import CIFAR10

    def split(train: bool) -> Images:
        try:
            stored = CIFAR10(root=str(folder), train=train, download=False)
        except RuntimeError as error:
            raise ConfigError(
                f"data-dir must hold torchvision's CIFAR-10, got {str(folder)!r} ({error})"
            ) from None
        return Images(stored.data, np.asarray(stored.targets, np.int64))

    return ImageData(train=split(True), test=split(False), num_classes=10)


def _download_cifar10() -> ImageData:
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import IidPartitioner

    source = FederatedDataset(dataset=HUB_NAME, partitioners={"train": IidPartitioner(1)})

    def split(name: str) -> Images:
        try:
            table = source.load_split(name)
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ConfigError(
                "data-dir must name a folder with CIFAR-10 where it cannot be downloaded,"
                f" got '' ({reason})"
            ) from error
        # The hub's fingerprint changes with the data, so it can name the decoded copy.
        return _decoded(
            [HUB_NAME, name, str(table._fingerprint)],
            lambda: (np.asarray(image.convert("RGB")) for image in table["img"]),
            np.asarray(table["label"], np.int64),
        )

    return ImageData(train=split("train"), test=split("test"), num_classes=10)


def _load_parquet(folder: Path) -> ImageData:
    train, test = (_load_parquet_split(folder, split) for split in ("train", "test"))
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise ConfigError(
            f"images must have one size, got {train.pixels.shape[1:3]} in train"
            f" and {test.pixels.shape[1:3]} in test of {folder}"
        )
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    return ImageData(train, test, max(num_classes, 2))


def _load_parquet_split(folder: Path, split: str) -> Images:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Hub layouts: train-00000-of-00001.parquet, data/train-..., plain_text/train-...
    files = sorted(folder.glob(f"{split}*.parquet")) or sorted(folder.glob(f"*/{split}*.parquet"))
    if not files:
        raise ConfigError(
            f"dataset folder must hold {split}*.parquet or cifar-10-batches-py, got {str(folder)!r}"
        )
    try:
        table = pa.concat_tables([pq.read_table(file) for file in files])
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"parquet files must be readable, got {reason} in {folder}") from None
    image_column = _column(table.column_names, IMAGE_COLUMNS, files[0])
    labels = np.asarray(table[_column(table.column_names, LABEL_COLUMNS, files[0])], np.int64)
    if len(labels) == 0 or labels.min() < 0:
        raise ConfigError(f"labels must be 0, 1, 2, ... for at least one image, got {files[0]}")

    def images() -> Iterable[Array]:
        for chunk in table[image_column].chunks:
            for image in chunk:
                stored = image["bytes"].as_py()
                yield _decode(stored, files[0])

    stamps = [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return _decoded(stamps, images, labels)


def _column(present: Sequence[str], wanted: Sequence[str], file: Path) -> str:
    for name in wanted:
        if name in present:
            return name
    raise ConfigError(
        f"parquet columns must include {' or '.join(wanted)}, got {', '.join(present)} in {file}"
    )


def _decode(stored: bytes, file: Path) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        return np.asarray(Image.open(io.BytesIO(stored)).convert("RGB"))
    except (UnidentifiedImageError, OSError, TypeError) as error:
        raise ConfigError(f"images must be JPEG or PNG files, got {error} in {file}") from None


def cache_folder() -> Path:
    """Return the folder of the cache: ``$XDG_CACHE_HOME/co3-flower``, else in ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "co3-flower"


def _decoded(identity: list[str], images: Callable[[], Iterable[Array]], labels: Array) -> Images:
    """Return a split whose images are decoded only where the cache does not have them."""
    return Images(_cached("images", identity, lambda: _stack(images(), len(labels))), labels)


def _cached(kind: str, identity: list[str], make: Callable[[], Array]) -> Array:
    """Map an array from the cache, making and storing it if need be."""
    key = hashlib.blake2b("\n".join(identity).encode(), digest_size=12).hexdigest()
    path = cache_folder() / f"{kind}-{key}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError):  # not there, or cut short
        made = make()
        _store(path, made)
        return made


def _stack(images: Iterable[Array], num_images: int) -> Array:
    stacked: Array | None = None
    for position, image in enumerate(images):
        if stacked is None:
            stacked = np.empty((num_images, *image.shape), np.uint8)
        if image.shape != stacked.shape[1:]:
            raise ConfigError(
                f"images must have one size, got {stacked.shape[1:3]} and {image.shape[:2]}"
                f" (image {position})"
            )
        stacked[position] = image
    assert stacked is not None
    return stacked


def _store(path: Path, array: Array) -> None:
    """Write the cache file atomically; a full or read-only disk only costs the next start time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.save(file, array)
        Path(file.name).replace(path)
    except OSError as error:
        warnings.warn(f"nothing was cached in {path.parent}: {error}", stacklevel=2)
