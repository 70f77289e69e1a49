"""Local training: what the gradient is the mean of, what moves and what does not."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from co3_flower import ConfigError
from sim.data import Images, load_data
from sim.models import build_model
from sim.task import (
    choose_device,
    evaluate,
    local_sgd,
    mean_gradient,
    minibatches,
    num_local_batches,
    seed_everything,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Train on one thread, as a simulated client does: many for so small a net only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def images() -> Images:
    digits = load_data("digits").train
    return digits.subset(np.arange(50))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return build_model("cnn")


def test_minibatches_take_every_image_once_a_pass(rng: np.random.Generator) -> None:
    batches = minibatches(50, 16, rng)
    first = np.concatenate([next(batches) for _ in range(4)])
    second = np.concatenate([next(batches) for _ in range(4)])
    np.testing.assert_array_equal(np.sort(first), np.arange(50))
    np.testing.assert_array_equal(np.sort(second), np.arange(50))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(
    ("num_images", "batch_size", "sizes"),
    [(50, 16, [13, 13, 12, 12]), (33, 32, [17, 16]), (32, 32, [32]), (5, 32, [5])],
)
def test_minibatches_leave_no_small_remainder(
    num_images: int, batch_size: int, sizes: list[int], rng: np.random.Generator
) -> None:
    batches = minibatches(num_images, batch_size, rng)
    assert [len(next(batches)) for _ in sizes] == sizes


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"),
    [(3, 0, 3), (3, 1, 4), (3, 2, 8)],  # 50 images in batches of 16 are 4 minibatches
)
def test_local_epochs_take_the_place_of_local_steps(steps: int, epochs: int, expected: int) -> None:
    count = num_local_batches(50, batch_size=16, local_steps=steps, local_epochs=epochs)
    assert count == expected


def test_mean_gradient_is_the_mean_over_minibatches_at_the_received_weights(
    net: nn.Module, images: Images
) -> None:
    gradient, loss = mean_gradient(
        copy.deepcopy(net),
        images,
        batch_size=16,
        num_local=3,
        rng=np.random.default_rng(1),
        device=CPU,
    )
    batches = minibatches(50, 16, np.random.default_rng(1))
    single, losses = [], []
    for _ in range(3):
        fresh = copy.deepcopy(net).train()
        inputs, labels = images.batch(next(batches))
        value = nn.functional.cross_entropy(fresh(inputs), labels)
        value.backward()
        single.append({name: weight.grad for name, weight in fresh.named_parameters()})
        losses.append(value.item())
    assert list(gradient) == [name for name, _ in net.named_parameters()]
    for name, mean in gradient.items():
        expected = sum(one[name] for one in single) / 3
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-6)  # float32 sums, reordered
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_mean_gradient_moves_the_statistics_and_not_the_weights(
    net: nn.Module, images: Images, rng: np.random.Generator
) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    mean_gradient(net, images, batch_size=16, num_local=3, rng=rng, device=CPU)
    weights = {name for name, _ in net.named_parameters()}
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name in weights), name
    assert net.state_dict()["features.1.num_batches_tracked"] == 3


def test_mean_gradient_does_not_depend_on_what_ran_before(net: nn.Module, images: Images) -> None:
    def once() -> dict[str, torch.Tensor]:
        rng = seed_everything(7)
        return mean_gradient(
            copy.deepcopy(net), images, batch_size=16, num_local=2, rng=rng, device=CPU
        )[0]

    first = once()
    torch.rand(10)
    second = once()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_local_sgd_takes_one_plain_step_a_minibatch(net: nn.Module, images: Images) -> None:
    stepped = copy.deepcopy(net)
    local_sgd(
        stepped,
        images,
        batch_size=16,
        num_local=1,
        lr=0.5,
        rng=np.random.default_rng(2),
        device=CPU,
    )
    gradient, _ = mean_gradient(
        copy.deepcopy(net),
        images,
        batch_size=16,
        num_local=1,
        rng=np.random.default_rng(2),
        device=CPU,
    )
    before, after = dict(net.named_parameters()), dict(stepped.named_parameters())
    for name, slope in gradient.items():
        torch.testing.assert_close(after[name], before[name] - 0.5 * slope)


def test_local_sgd_learns(net: nn.Module, images: Images, rng: np.random.Generator) -> None:
    start = evaluate(net, images, CPU)
    local_sgd(net, images, batch_size=25, num_local=30, lr=0.2, rng=rng, device=CPU)
    end = evaluate(net, images, CPU)
    assert end.accuracy > 0.9 > start.accuracy
    assert end.loss < start.loss


def test_evaluate_scores_the_whole_split_in_evaluation_mode() -> None:
    class Constant(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return torch.tensor([[0.0, np.log(3.0)]]).repeat(len(inputs), 1)

    labels = np.array([1] * 150 + [0] * 50)  # more than one batch
    score = evaluate(Constant(), Images(np.zeros((200, 4, 4, 3), np.uint8), labels), CPU)
    assert score.accuracy == 0.75
    assert score.loss == pytest.approx(0.75 * np.log(4 / 3) + 0.25 * np.log(4), rel=1e-6)


def test_choose_device_refuses_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="device must be 'cpu' or 'auto' where no GPU is visible"):
        choose_device("cuda")
