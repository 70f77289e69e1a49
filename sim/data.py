"""Real images for the app: one train and one test split, shared out among the clients.

In comes a data set's name (handwritten digits, CIFAR-10, or a directory of image files), out go
uint8 images with labels and, for each client, the positions of its own. JPEGs are decoded and
images shared out once per machine; see `sim.images`.
"""

import hashlib
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from co3_flower import ConfigError
from sim.images import (
    MIN_CLIENT_IMAGES,
    Array,
    Images,
    cached,
    check_same_classes,
    decoded,
    read_split,
)
from sim.settings import DATASETS, check_dataset, expand_path

HUB_NAME = "uoft-cs/cifar10"  # CIFAR-10 on the Hugging Face hub
DIGITS_TEST_SHARE = 0.2


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
        ``digits`` (scikit-learn's, no download), ``cifar10``, or a directory that
        `sim.images.read_split` can read. One without train images will do where every client has
        its own.
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
        check_dataset(dataset)
        return _load_directory(Path(expand_path(dataset, "dataset")))
    if not data_dir:
        return _download_cifar10()
    folder = Path(expand_path(data_dir, "data-dir"))
    if not folder.is_dir():
        raise ConfigError(f"data-dir must be a folder with CIFAR-10, got {str(folder)!r}")
    if folder.name == "cifar-10-batches-py":
        folder = folder.parent
    if (folder / "cifar-10-batches-py").is_dir():
        return _load_torchvision_cifar10(folder)
    return _load_directory(folder)


def shared_images(dataset: str, data_dir: str = "") -> Images:
    """Return the train split, which clients without images of their own share.

    Raises
    ------
    ConfigError
        There is none, or as for `load_data`.
    """
    train = load_data(dataset, data_dir).train
    if len(train) == 0:
        raise ConfigError(
            "dataset folder must hold train*.parquet or a folder train, which clients without a"
            f" data-dir share, got {dataset if dataset not in DATASETS else data_dir!r}"
        )
    return train


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
    labels = shared_images(dataset, data_dir).labels
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
    return cached(
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
        return decoded(
            [HUB_NAME, name, str(table._fingerprint)],
            lambda: (np.asarray(image.convert("RGB")) for image in table["img"]),
            np.asarray(table["label"], np.int64),
        )

    return ImageData(train=split("train"), test=split("test"), num_classes=10)


def _load_directory(folder: Path) -> ImageData:
    train, test = (read_split(folder, split) for split in ("train", "test"))
    if test is None:
        raise ConfigError(
            "dataset folder must hold test*.parquet, a folder test or cifar-10-batches-py, got"
            f" {str(folder)!r}"
        )
    check_same_classes([folder / "train", folder / "test"])
    train = train or test.subset(np.arange(0))
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise ConfigError(
            f"images must have one size, got {train.pixels.shape[1:3]} in train"
            f" and {test.pixels.shape[1:3]} in test of {folder}"
        )
    num_classes = int(max(train.labels.max(initial=0), test.labels.max())) + 1
    return ImageData(train, test, max(num_classes, 2))
