"""The app's data: what each source gives, how images are shared out, what the cache keeps."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from co3_flower import ConfigError
from sim import images
from sim.data import client_positions, load_data, share_out
from sim.images import Images, read_own


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep every test's decoded images apart, on disk and in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_data.cache_clear()
    yield tmp_path / "cache" / "co3-flower"
    load_data.cache_clear()


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()


def write_parquet(
    path: Path,
    images: list[np.ndarray],
    labels: list[int],
    columns: tuple[str, str] = ("img", "label"),
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = [{"bytes": png(image), "path": "x.png"} for image in images]
    pq.write_table(pa.table({columns[0]: stored, columns[1]: labels}), path)


@pytest.fixture
def colours(rng: np.random.Generator) -> list[np.ndarray]:
    return list(rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path, colours: list[np.ndarray]) -> Path:
    path = tmp_path / "pictures"
    write_parquet(path / "train-00000-of-00002.parquet", colours[:2], [0, 1])
    write_parquet(path / "train-00001-of-00002.parquet", colours[2:4], [2, 1])
    write_parquet(path / "test-00000-of-00001.parquet", colours[4:], [0, 2])
    return path


def test_digits_are_the_1797_real_ones_in_three_equal_channels() -> None:
    digits = load_data("digits")
    assert (len(digits.train), len(digits.test), digits.num_classes) == (1437, 360, 10)
    assert digits.train.pixels.shape == (1437, 8, 8, 3)
    np.testing.assert_array_equal(digits.train.pixels[..., 0], digits.train.pixels[..., 2])


def test_digits_reach_from_0_to_1() -> None:
    inputs, labels = load_data("digits").train.batch(np.arange(200))
    assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)
    assert tuple(inputs.shape) == (200, 3, 8, 8)
    assert set(labels.tolist()) == set(range(10))


def test_digits_test_set_holds_every_class_in_proportion() -> None:
    counts = np.bincount(load_data("digits").test.labels)
    assert counts.min() >= 34 and counts.max() <= 38


def test_batch_turns_pixels_channel_first_and_divides_by_white() -> None:
    pixels = np.arange(2 * 2 * 3 * 3, dtype=np.uint8).reshape(2, 2, 3, 3)
    inputs, labels = Images(pixels, np.array([4, 5]), white=10).batch(np.array([1]))
    np.testing.assert_array_equal(
        inputs[0, 2].numpy(), pixels[1, :, :, 2].astype(np.float32) / np.float32(10)
    )
    assert labels.tolist() == [5]


def test_parquet_folder_gives_the_images_of_all_its_files_in_order(
    folder: Path, colours: list[np.ndarray]
) -> None:
    loaded = load_data(str(folder))
    np.testing.assert_array_equal(loaded.train.pixels, np.stack(colours[:4]))
    np.testing.assert_array_equal(loaded.test.pixels, np.stack(colours[4:]))
    assert loaded.train.labels.tolist() == [0, 1, 2, 1]
    assert loaded.num_classes == 3


def test_parquet_folder_takes_grey_images_and_other_column_names(tmp_path: Path) -> None:
    grey = [np.full((8, 8), level, np.uint8) for level in (0, 255)]
    for split in ("train", "test"):
        write_parquet(
            tmp_path / "d" / "data" / f"{split}-0.parquet", grey, [0, 1], ("image", "labels")
        )
    loaded = load_data(str(tmp_path / "d"))
    assert loaded.train.pixels.shape == (2, 8, 8, 3)
    assert loaded.train.pixels[1].min() == 255


def test_cifar10_is_found_in_data_dir(folder: Path) -> None:
    assert len(load_data("cifar10", str(folder)).train) == 4


def test_decoded_images_are_read_from_the_cache_the_second_time(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_data(str(folder)).train.pixels.copy()
    assert len(list(own_cache.glob("images-*.npy"))) == 2
    load_data.cache_clear()
    monkeypatch.setattr(images, "_decode", None)  # would fail if called
    np.testing.assert_array_equal(load_data(str(folder)).train.pixels, first)


def test_cache_is_not_used_when_a_file_has_changed(folder: Path, colours: list[np.ndarray]) -> None:
    load_data(str(folder))
    load_data.cache_clear()
    write_parquet(folder / "test-00000-of-00001.parquet", colours[:3], [1, 1, 1])
    np.testing.assert_array_equal(load_data(str(folder)).test.pixels, np.stack(colours[:3]))


def test_cache_file_cut_short_is_made_anew(folder: Path, own_cache: Path) -> None:
    first = load_data(str(folder)).train.pixels.copy()
    load_data.cache_clear()
    for file in own_cache.glob("images-*.npy"):
        file.write_bytes(file.read_bytes()[:150])
    np.testing.assert_array_equal(load_data(str(folder)).train.pixels, first)


def test_a_cache_that_cannot_be_written_only_warns(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="nothing was cached"):
        assert len(load_data(str(folder)).train) == 4


def test_folder_without_parquet_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold test\*\.parquet, a folder test or cifar-10"):
        load_data("cifar10", str(tmp_path))


def test_missing_data_dir_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data-dir must be a folder with CIFAR-10, got .*nowhere"):
        load_data("cifar10", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train-0": ([(4, 4), (5, 4)], [0, 1])}, "images must have one size, got .* image 1"),
        ({"train-0": ([(4, 4)], [0]), "test-0": ([(8, 8)], [0])}, "got .4, 4. in train and .8, 8."),
        ({"train-0": ([(4, 4)], [-1])}, "labels must be 0, 1, 2, ..."),
        ({"train-0": ([], [])}, "for at least one image"),
    ],
)
def test_unfit_images_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, (sizes, labels) in files.items():
        write_parquet(
            tmp_path / "d" / f"{name}.parquet", [np.zeros((*s, 3), np.uint8) for s in sizes], labels
        )
    with pytest.raises(ConfigError, match=message.replace("image 1", r"\(image 1\)")):
        load_data(str(tmp_path / "d"))


def test_bytes_that_are_no_image_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    table = pa.table({"img": [{"bytes": b"no picture", "path": ""}], "label": [0]})
    pq.write_table(table, tmp_path / "d" / "train-0.parquet")
    with pytest.raises(ConfigError, match="images must be JPEG or PNG files"):
        load_data(str(tmp_path / "d"))


def test_columns_of_other_names_are_listed(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "d" / "train-0.parquet", [np.zeros((4, 4, 3), np.uint8)], [0], ("a", "b")
    )
    with pytest.raises(ConfigError, match="columns must include img or image, got a, b in"):
        load_data(str(tmp_path / "d"))


def test_torchvision_folder_is_recognized_and_checked(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ConfigError, match="data-dir must hold torchvision's CIFAR-10"):
        load_data("cifar10", str(tmp_path))


def test_torchvision_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stored:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            assert root == str(tmp_path) and not download
            self.data = np.full((3 if train else 2, 32, 32, 3), 7, np.uint8)
            self.targets = [1] * len(self.data)

    monkeypatch.setattr("torchvision.datasets.CIFAR10", Stored)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for named in (tmp_path, tmp_path / "cifar-10-batches-py"):
        load_data.cache_clear()
        loaded = load_data("cifar10", str(named))
        assert (len(loaded.train), len(loaded.test)) == (3, 2)


def test_cifar10_without_data_dir_comes_through_flwr_datasets(
    monkeypatch: pytest.MonkeyPatch, colours: list[np.ndarray]
) -> None:
    class Table(dict[str, Any]):
        _fingerprint = "abc"

    class Source:
        def __init__(self, dataset: str, partitioners: dict[str, Any]) -> None:
            assert dataset == "uoft-cs/cifar10"

        def load_split(self, split: str) -> Table:
            images = [Image.fromarray(image) for image in colours]
            return Table(img=images, label=[0, 1, 2, 3, 4, 5])

    monkeypatch.setattr("flwr_datasets.FederatedDataset", Source)
    loaded = load_data("cifar10")
    np.testing.assert_array_equal(loaded.train.pixels, np.stack(colours))


def test_cifar10_that_cannot_be_downloaded_asks_for_data_dir(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Source:
        def __init__(self, **settings: Any) -> None:
            pass

        def load_split(self, split: str) -> None:
            raise ConnectionError("no route\nlong story")

    monkeypatch.setattr("flwr_datasets.FederatedDataset", Source)
    with pytest.raises(ConfigError, match=r"data-dir must name .* got '' \(no route\)$"):
        load_data("cifar10")


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("num_clients", [1, 4, 10])
def test_shares_are_disjoint_and_leave_nothing_over(partition: str, num_clients: int) -> None:
    labels = load_data("digits").train.labels
    shares = [
        client_positions(
            client,
            num_clients,
            dataset="digits",
            data_dir="",
            partition=partition,
            alpha=1.0,
            seed=0,
        )
        for client in range(num_clients)
    ]
    assert min(len(share) for share in shares) >= 2
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))


def test_iid_shares_differ_by_one_image_at_most() -> None:
    labels = load_data("digits").train.labels
    sizes = np.bincount(share_out(labels, 10, "iid", alpha=1.0, seed=0))
    assert sizes.max() - sizes.min() <= 1


def test_smaller_alpha_makes_clients_less_alike() -> None:
    labels = load_data("digits").train.labels

    def largest_class_share(alpha: float) -> float:
        owners = share_out(labels, 5, "dirichlet", alpha=alpha, seed=1)
        counts = [np.bincount(labels[owners == client]) for client in range(5)]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert largest_class_share(0.1) > 2 * largest_class_share(100.0)


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_shares_depend_on_the_seed_alone(partition: str, own_cache: Path) -> None:
    labels = load_data("digits").train.labels

    def owners(seed: int) -> list[int]:
        shutil.rmtree(own_cache, ignore_errors=True)
        return share_out(labels, 4, partition, alpha=1.0, seed=seed).tolist()

    assert owners(5) == owners(5)
    assert owners(5) != owners(6)


def test_shares_of_another_rule_are_not_taken_from_the_cache() -> None:
    labels = load_data("digits").train.labels
    rules = [
        (4, "iid", 1.0, 0),
        (5, "iid", 1.0, 0),
        (4, "dirichlet", 1.0, 0),
        (4, "dirichlet", 2.0, 0),
    ]
    shares = {share_out(labels, n, p, alpha=a, seed=s).tobytes() for n, p, a, s in rules}
    assert len(shares) == len(rules)


def test_too_few_images_for_the_clients_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="num-clients must be at most 5 for 10 images .2 each., got 6"
    ):
        share_out(np.zeros(10, np.int64), 6, "iid", alpha=1.0, seed=0)


def test_alpha_too_small_for_the_clients_is_refused() -> None:
    labels = load_data("digits").train.labels
    with pytest.raises(
        ConfigError, match="dirichlet-alpha must leave every client 2 images, got 0.001"
    ):
        share_out(labels, 40, "dirichlet", alpha=1e-3, seed=0)


def test_client_positions_refuse_a_partition_id_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"partition-id must be in \[0, 4\), got 4"):
        client_positions(4, 4, dataset="digits", data_dir="", partition="iid", alpha=1.0, seed=0)


def test_real_cifar10_has_its_published_shape(co3_data: Path) -> None:
    folder = co3_data / "cifar10"
    if not folder.is_dir():
        pytest.skip(f"CIFAR-10 is not at {folder}; set CO3_DATA to the folder that holds cifar10/")
    test = images.read_split(folder, "test")
    assert test is not None
    assert test.pixels.shape == (10_000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(test.labels), np.full(10, 1_000))


def write_image_folder(path: Path, classes: dict[str, list[np.ndarray]]) -> Path:
    for name, images_of_class in classes.items():
        (path / name).mkdir(parents=True)
        for position, image in enumerate(images_of_class):
            (path / name / f"{position}.png").write_bytes(png(image))
    return path


def test_image_folder_with_numbers_for_names_holds_those_labels(
    tmp_path: Path, colours: list[np.ndarray]
) -> None:
    folder = write_image_folder(tmp_path / "own", {"7": colours[:2], "10": colours[2:3]})
    own = read_own(folder, num_classes=11)
    assert own.labels.tolist() == [10, 7, 7]
    np.testing.assert_array_equal(own.pixels, np.stack([colours[2], colours[0], colours[1]]))


def test_image_folder_with_other_names_counts_them_in_alphabetical_order(
    tmp_path: Path, colours: list[np.ndarray]
) -> None:
    folder = write_image_folder(tmp_path / "own", {"dog": colours[:2], "cat": [], "eel": []})
    assert read_own(folder, num_classes=3).labels.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="for each of the model's 4 classes, got 3 in"):
        read_own(folder, num_classes=4)


@pytest.mark.parametrize("name", ["train-0.parquet", "mine.parquet"])
def test_own_images_are_read_from_parquet_files(
    tmp_path: Path, colours: list[np.ndarray], name: str
) -> None:
    write_parquet(tmp_path / "own" / name, colours[:3], [4, 0, 4])
    own = read_own(tmp_path / "own", num_classes=5)
    assert own.labels.tolist() == [4, 0, 4]
    np.testing.assert_array_equal(own.pixels, np.stack(colours[:3]))


def test_own_images_that_cannot_be_used_are_refused(
    tmp_path: Path, colours: list[np.ndarray]
) -> None:
    write_parquet(tmp_path / "own" / "a.parquet", colours[:3], [4, 0, 4])
    write_parquet(tmp_path / "few" / "a.parquet", colours[:1], [0])
    (tmp_path / "nothing").mkdir()
    for folder, message in (
        ("own", "labels must be below the model's 4 classes, got 4 in"),
        ("few", "must hold at least 2 images, got 1 in"),
        ("nothing", "must hold parquet files or a folder of images per class"),
        ("nowhere", "data-dir in node-config must be a folder, got .*nowhere"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_own(tmp_path / folder, num_classes=4)


def test_data_set_of_image_folders_may_lack_its_train_split(
    tmp_path: Path, colours: list[np.ndarray]
) -> None:
    write_image_folder(tmp_path / "d" / "test", {"a": colours[:2], "b": colours[2:3]})
    loaded = load_data(str(tmp_path / "d"))
    assert (len(loaded.train), loaded.test.labels.tolist()) == (0, [0, 0, 1])


def test_image_folders_of_a_data_set_must_agree_on_the_classes(
    tmp_path: Path, colours: list[np.ndarray]
) -> None:
    write_image_folder(tmp_path / "d" / "test", {"a": colours[:2], "c": colours[2:3]})
    write_image_folder(tmp_path / "d" / "train", {"a": colours[:2], "b": colours[2:3]})
    with pytest.raises(ConfigError, match="must hold the same classes, got b, c in one of"):
        load_data(str(tmp_path / "d"))
