"""Image files into arrays: parquet files and folders of images, decoded once per machine.

In come files, out go uint8 images with integer labels. What was decoded lies in a cache folder
outside the project, from where every process maps it.
"""

import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from co3_flower import ConfigError

if TYPE_CHECKING:
    import torch

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels")
MIN_CLIENT_IMAGES = 2  # BatchNorm in training mode needs two values a channel

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


def read_split(folder: Path, split: str) -> Images | None:
    """Read one split of a data set, None where the folder holds nothing of it.

    Parameters
    ----------
    folder : Path
        With files ``train*.parquet``, here or in a subfolder, or else a folder ``train`` that holds
        one folder of images per class, as torchvision's ImageFolder reads it.
    split : str
        ``train`` or ``test``.

    Raises
    ------
    ConfigError
        The files are not images with labels.
    """
    # Hub layouts: train-00000-of-00001.parquet, data/train-..., plain_text/train-...
    files = sorted(folder.glob(f"{split}*.parquet")) or sorted(folder.glob(f"*/{split}*.parquet"))
    if files:
        return read_parquet(files)
    return read_image_folder(folder / split) if (folder / split).is_dir() else None


def read_own(folder: Path, num_classes: int) -> Images:
    """Read the images of a client that has its own.

    Parameters
    ----------
    folder : Path
        A split ``train`` as `read_split` reads it, or else any parquet files, or else one folder of
        images per class.
    num_classes : int
        Classes of the model.

    Raises
    ------
    ConfigError
        There are no images, too few, or labels that the model does not know.
    """
    if not folder.is_dir():
        raise ConfigError(f"data-dir in node-config must be a folder, got {str(folder)!r}")
    images = read_split(folder, "train")
    if images is None:
        files = sorted(folder.glob("*.parquet"))
        images = read_parquet(files) if files else read_image_folder(folder, num_classes)
    if len(images) < MIN_CLIENT_IMAGES:
        raise ConfigError(
            f"data-dir in node-config must hold at least {MIN_CLIENT_IMAGES} images, got"
            f" {len(images)} in {folder}"
        )
    if images.labels.max() >= num_classes:
        raise ConfigError(
            f"labels must be below the model's {num_classes} classes, got {images.labels.max()}"
            f" in {folder}"
        )
    return images


def read_parquet(files: Sequence[Path]) -> Images:
    """Read parquet files with a column of JPEG or PNG files and one of labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.concat_tables([pq.read_table(file) for file in files])
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"parquet files must be readable, got {reason} in {files[0].parent}"
        ) from None
    image_column = _column(table.column_names, IMAGE_COLUMNS, files[0])
    labels = np.asarray(table[_column(table.column_names, LABEL_COLUMNS, files[0])], np.int64)
    if len(labels) == 0 or labels.min() < 0:
        raise ConfigError(f"labels must be 0, 1, 2, ... for at least one image, got {files[0]}")

    def images() -> Iterable[Array]:
        for chunk in table[image_column].chunks:
            for image in chunk:
                yield _decode(image["bytes"].as_py(), files[0])

    return decoded([_stamp(file) for file in files], images, labels)


def read_image_folder(folder: Path, num_classes: int | None = None) -> Images:
    """Read one folder of images per class.

    Where every folder's name is a number, it is the label, so that a client need not have images
    of every class. Other names count in alphabetical order, and a client must have all of the
    model's classes, if only as empty folders: the order would mean other labels elsewhere.
    """
    from torchvision.datasets import ImageFolder

    classes = class_names(folder)
    if not classes:
        raise ConfigError(
            f"image folder must hold parquet files or a folder of images per class, got"
            f" {str(folder)!r}"
        )
    is_numbered = _are_labels(classes)
    if not is_numbered and num_classes is not None and len(classes) != num_classes:
        raise ConfigError(
            f"image folder must hold a folder for each of the model's {num_classes} classes, got"
            f" {len(classes)} in {folder}; make empty ones, or let their names be the labels"
        )
    samples = ImageFolder(str(folder), allow_empty=True).samples
    if not samples:
        raise ConfigError(f"image folder must hold images in its folders, got none in {folder}")
    labels = [int(classes[index]) if is_numbered else index for _, index in samples]
    files = [Path(name) for name, _ in samples]
    return decoded(
        [_stamp(file) for file in files],
        lambda: (_decode(file.read_bytes(), file) for file in files),
        np.asarray(labels, np.int64),
    )


def check_same_classes(folders: Sequence[Path]) -> None:
    """Raise ConfigError where image folders give different labels to images of one class."""
    names = [class_names(folder) for folder in folders if folder.is_dir()]
    for other in names[1:]:
        if other != names[0] and not (_are_labels(names[0]) and _are_labels(other)):
            differing = ", ".join(sorted(set(other) ^ set(names[0])))
            raise ConfigError(
                f"image folders must hold the same classes, got {differing} in one of"
                f" {' and '.join(map(str, folders))} only"
            )


def class_names(folder: Path) -> list[str]:
    """Return the names of an image folder's classes, in the order of their labels."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def _are_labels(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _stamp(file: Path) -> str:
    """Name a file in the state that it is in."""
    status = file.stat()
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"


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


def decoded(identity: list[str], images: Callable[[], Iterable[Array]], labels: Array) -> Images:
    """Return a split whose images are decoded only where the cache does not have them."""
    return Images(cached("images", identity, lambda: _stack(images(), len(labels))), labels)


def cached(kind: str, identity: list[str], make: Callable[[], Array]) -> Array:
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
