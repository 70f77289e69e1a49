"""Training and testing one network on one set of images; knows nothing of Flower.

In: weights and images. Out: what a client sends, as a gradient or as new weights (the `update`
that goes on to convert, correct, compress).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import nn

from co3_flower import ConfigError
from sim.augment import augment
from sim.images import Images

EVALUATION_BATCH = 128  # larger ones fall out of the CPU cache

Array = np.ndarray


@dataclass(frozen=True)
class Score:
    """How a network does on a split: mean cross-entropy (nats) and the share it gets right."""

    loss: float
    accuracy: float


def choose_device(name: str) -> torch.device:
    """Return the torch device for ``auto``, ``cpu`` or ``cuda``.

    Raises
    ------
    ConfigError
        ``cuda`` where this process sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be 'cpu' or 'auto' where no GPU is visible, got 'cuda'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def seed_everything(seed: int) -> np.random.Generator:
    """Seed torch's generators and return NumPy's for the choice of images.

    Processes are shared by clients in a simulation, so nothing may depend on what ran before.
    """
    torch.manual_seed(seed % 2**63)
    return np.random.default_rng(seed)


def minibatches(num_images: int, batch_size: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield positions, int64 [image], without end: each pass is a new shuffle in equal parts.

    The parts hold at most `batch_size` images and differ by one at most, so that no minibatch is
    a small remainder (which BatchNorm's statistics would suffer from).
    """
    while True:
        yield from np.array_split(rng.permutation(num_images), num_batches(num_images, batch_size))


def num_batches(num_images: int, batch_size: int) -> int:
    """Return the number of minibatches of one pass."""
    return -(-num_images // batch_size)


def num_local_batches(
    num_images: int, *, batch_size: int, local_steps: int, local_epochs: int
) -> int:
    """Return how many minibatches a client works through in a round."""
    if local_epochs > 0:
        return local_epochs * num_batches(num_images, batch_size)
    return local_steps


def mean_gradient(
    net: nn.Module,
    images: Images,
    *,
    batch_size: int,
    num_local: int,
    rng: np.random.Generator,
    device: torch.device,
    augmented: bool = False,
) -> tuple[dict[str, torch.Tensor], float]:
    """Average the gradient over minibatches, the weights held still.

    The net is in training mode: its BatchNorm statistics move with every minibatch.

    Parameters
    ----------
    net : torch.nn.Module
        On `device`; its weights stay, its buffers change.
    images : Images
    batch_size, num_local : int
        Images in a minibatch, minibatches.
    rng : numpy.random.Generator
    device : torch.device
    augmented : bool
        Whether each image is changed by chance first; see `sim.augment`.

    Returns
    -------
    gradient : dict of float32 tensors, on `device`, keyed as the net's parameters
    loss : float
        Mean over the minibatches.
    """
    net.train()
    net.zero_grad(set_to_none=True)
    total = 0.0
    for positions in islice(minibatches(len(images), batch_size, rng), num_local):
        loss = _loss(net, images, positions, device, rng if augmented else None) / num_local
        loss.backward()  # .grad sums over the minibatches
        total += loss.item()
    gradient = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in net.named_parameters()
    }
    return gradient, total


def local_sgd(
    net: nn.Module,
    images: Images,
    *,
    batch_size: int,
    num_local: int,
    lr: float,
    rng: np.random.Generator,
    device: torch.device,
    augmented: bool = False,
) -> float:
    """Train with plain SGD, one step per minibatch, and return the mean loss; the net changes."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for positions in islice(minibatches(len(images), batch_size, rng), num_local):
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(net, images, positions, device, rng if augmented else None)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / num_local


@torch.no_grad()
def evaluate(net: nn.Module, images: Images, device: torch.device) -> Score:
    """Test a network in evaluation mode on a whole split."""
    net.eval()
    loss, correct = 0.0, 0
    for start in range(0, len(images), EVALUATION_BATCH):
        inputs, labels = images.batch(np.arange(start, min(start + EVALUATION_BATCH, len(images))))
        inputs, labels = inputs.to(device), labels.to(device)
        logits = net(inputs)
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        correct += int((logits.argmax(dim=1) == labels).sum())
    return Score(loss / len(images), correct / len(images))


def _loss(
    net: nn.Module,
    images: Images,
    positions: Array,
    device: torch.device,
    augmentation: np.random.Generator | None,
) -> torch.Tensor:
    inputs, labels = images.batch(positions)
    inputs = inputs.to(device)
    if augmentation is not None:
        inputs = augment(inputs, augmentation)
    return nn.functional.cross_entropy(net(inputs), labels.to(device))
