"""Random rotations, shifts and mirror images of training images."""

import numpy as np
import pytest
import torch

from sim import augment as module
from sim.augment import augment
from sim.data import Images
from sim.models import build_model
from sim.task import mean_gradient


class Fixed:
    """A generator that gives set angles (degrees), shifts and mirrors."""

    def __init__(self, angle: float, shift: tuple[float, float], mirror: float) -> None:
        self.draws = [np.full(1, angle), np.array([shift])]
        self.mirror = mirror

    def uniform(self, low: float, high: float, size: object) -> np.ndarray:
        return self.draws.pop(0)

    def choice(self, values: list[float], size: int) -> np.ndarray:
        return np.full(size, self.mirror)


def changed(image: np.ndarray, angle: float, shift: tuple[float, float], mirror: float) -> object:
    batch = torch.from_numpy(image.astype(np.float32))[None, None]
    return augment(batch, Fixed(angle, shift, mirror))[0, 0].numpy()  # type: ignore[arg-type]


@pytest.fixture
def image(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0, 1, (10, 10))


def test_nothing_drawn_is_nothing_changed(image: np.ndarray) -> None:
    np.testing.assert_allclose(changed(image, 0, (0, 0), 1), image, atol=1e-6)


def test_mirror_is_left_to_right(image: np.ndarray) -> None:
    np.testing.assert_allclose(changed(image, 0, (0, 0), -1), image[:, ::-1], atol=1e-5)


def test_shift_repeats_the_edge(image: np.ndarray) -> None:
    wanted = np.concatenate([image[:, 2:], image[:, [-1, -1]]], axis=1)
    np.testing.assert_allclose(changed(image, 0, (0.2, 0), 1), wanted, atol=1e-5)
    wanted = np.concatenate([image[[0]], image[:-1]], axis=0)
    np.testing.assert_allclose(changed(image, 0, (0, -0.1), 1), wanted, atol=1e-5)


def test_quarter_turn_turns_by_a_quarter(image: np.ndarray) -> None:
    np.testing.assert_allclose(changed(image, 90, (0, 0), 1), np.rot90(image), atol=1e-5)


def test_turn_keeps_angles_where_height_and_width_differ() -> None:
    image = np.zeros((8, 16))
    image[4, 12] = 1  # 4.5 right of the centre, 0.5 below
    turned = changed(image, 45, (0, 0), 1)
    (y, x), centre = np.unravel_index(np.argmax(turned), turned.shape), (3.5, 7.5)
    assert np.hypot(y - centre[0], x - centre[1]) == pytest.approx(np.hypot(0.5, 4.5), abs=0.8)


def test_draws_stay_in_the_papers_ranges(rng: np.random.Generator) -> None:
    drawn: list[tuple[float, float]] = []

    class Recorder:
        def uniform(self, low: float, high: float, size: object) -> np.ndarray:
            drawn.append((low, high))
            return rng.uniform(low, high, size)  # type: ignore[arg-type]

        choice = rng.choice

    augment(torch.zeros(2, 3, 8, 8), Recorder())  # type: ignore[arg-type]
    assert drawn == [(-10, 10), (-0.2, 0.2)]
    assert (module.MAX_DEGREES, module.MAX_SHIFT) == (10, 0.2)


def test_every_image_is_changed_by_a_draw_of_its_own(rng: np.random.Generator) -> None:
    images = torch.from_numpy(rng.uniform(0, 1, (1, 3, 8, 8)).astype(np.float32)).repeat(5, 1, 1, 1)
    before = images.clone()
    result = augment(images, rng)
    assert result.shape == images.shape and result.dtype == torch.float32
    assert result.min() >= 0 and result.max() <= 1
    assert len(torch.unique(result.flatten(1), dim=0)) == 5
    assert torch.equal(images, before)


def test_training_follows_the_setting(rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    images = Images(pixels, np.arange(8) % 2)
    net = build_model("cnn", 2).eval()

    def gradient(**more: bool) -> torch.Tensor:
        work = {"batch_size": 8, "num_local": 1, "device": torch.device("cpu"), **more}
        return mean_gradient(net, images, rng=np.random.default_rng(1), **work)[0][
            "classifier.weight"
        ]

    assert torch.equal(gradient(augmented=True), gradient(augmented=True))
    assert not torch.allclose(gradient(augmented=True), gradient(augmented=False))
