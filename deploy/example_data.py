"""Write two clients' own images, and a test set for the server, from scikit-learn's digits.

    python deploy/example_data.py DIR

DIR/clinic holds a parquet file, DIR/school one folder of images per class, DIR/server the test
set. The two clients' images are each half of the train split.
"""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main(folder: Path) -> None:
    """Write the three folders."""
    digits = load_digits()
    train, test = train_test_split(
        np.arange(len(digits.target)), test_size=0.2, stratify=digits.target, random_state=0
    )
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # grey, 0 to 16 before
    pngs = [encode_png(image) for image in pixels]
    write_parquet(folder / "server" / "test.parquet", pngs, digits.target, test)
    write_parquet(folder / "clinic" / "images.parquet", pngs, digits.target, train[::2])
    for position in train[1::2]:
        path = folder / "school" / str(digits.target[position]) / f"{position}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pngs[position])


def write_parquet(path: Path, pngs: list[bytes], labels: np.ndarray, positions: np.ndarray) -> None:
    """Write some images with their labels, laid out as on the Hugging Face hub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": pngs[position], "path": f"{position}.png"} for position in positions]
    pq.write_table(pa.table({"image": images, "label": labels[positions]}), path)


def encode_png(pixels: np.ndarray) -> bytes:
    """Return grey pixels as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIR")
    main(Path(sys.argv[1]))
