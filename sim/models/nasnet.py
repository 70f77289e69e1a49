"""NASNet-A Mobile as Keras defines it: cells found by search, of separable convolutions."""

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from sim.models.layers import GlorotConv2d, GlorotLinear, HeConv2d, KerasBatchNorm2d

STEM_CHANNELS = 32
CELL_CHANNELS = 44  # of each branch of the first normal cells; doubled with every reduction
NUM_CELLS = 4  # normal cells between two reductions
EPSILON = 1e-3
MOMENTUM = 3e-4  # Keras's 0.9997


class NASNetMobile(nn.Module):
    """NASNet-A (4 @ 1056) of arXiv 1707.07012 in Keras's arrangement.

    Two reduction cells as a stem, then three rows of four normal cells with a reduction cell
    between them. Every cell takes the outputs of the two cells before it. Keras's
    ``normal_conv_1_5`` is ``cells.5.conv`` here, ``separable_conv_1_reduction_left1_stem_1`` is
    ``cells.stem_1.left1.conv1``.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem_conv1 = HeConv2d(3, STEM_CHANNELS, kernel_size=3, stride=2, bias=False)
        self.stem_bn1 = _batch_norm(STEM_CHANNELS)
        self.cells = nn.ModuleDict()
        before, channels, is_halved = STEM_CHANNELS, STEM_CHANNELS, False
        for name, kind, width in _plan():
            if name == "stem_1":  # both of its inputs are the stem's output
                adjust: nn.Module = nn.Identity()
                adjusted = before
            else:
                adjust = (_Halving if is_halved else _Projection)(before, width)
                adjusted = width
            self.cells[name] = kind(adjust, channels, adjusted, width)
            before, channels = channels, kind.num_branches * width
            is_halved = kind is _ReductionCell
        self.predictions = GlorotLinear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map float32 [batch, 3, height, width] to logits [batch, classes]."""
        x = self.stem_bn1(self.stem_conv1(images))
        previous = x
        for cell in self.cells.values():
            x, previous = cell(x, previous), x
        return self.predictions(functional.relu(x).mean(dim=(2, 3)))


class _Projection(nn.Module):
    """Give the output of the cell before the last one the channels of this cell."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = HeConv2d(channels, width, 1, bias=False)
        self.bn = _batch_norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map channels, not the size."""
        return self.bn(self.conv(functional.relu(x)))


class _Halving(nn.Module):
    """The same where a reduction cell lies between: one half of the channels for each grid."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv_1 = HeConv2d(channels, width // 2, 1, bias=False)
        self.conv_2 = HeConv2d(channels, width // 2, 1, bias=False)
        self.bn = _batch_norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take every other pixel, once from the first and once from the second on, zeros beyond."""
        x = functional.relu(x)
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        halves = [self.conv_1(x[:, :, ::2, ::2]), self.conv_2(shifted[:, :, ::2, ::2])]
        return self.bn(torch.cat(halves, dim=1))


class _NormalCell(nn.Module):
    """Keep the size; five sums and the adjusted input, side by side."""

    num_branches = 6

    def __init__(self, adjust: nn.Module, channels: int, adjusted: int, width: int) -> None:
        super().__init__()
        self.adjust = adjust
        self.conv = HeConv2d(channels, width, 1, bias=False)
        self.bn = _batch_norm(width)
        self.left1 = _SeparableBlock(width, width, kernel=5)
        self.right1 = _SeparableBlock(adjusted, width, kernel=3)
        self.left2 = _SeparableBlock(adjusted, width, kernel=5)
        self.right2 = _SeparableBlock(adjusted, width, kernel=3)
        self.left5 = _SeparableBlock(width, width, kernel=3)

    def forward(self, x: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Combine the outputs of the last cell and of the one before it."""
        p = self.adjust(previous)
        h = self.bn(self.conv(functional.relu(x)))
        pooled = _mean3x3(p)
        branches = [
            p,
            self.left1(h) + self.right1(p),
            self.left2(p) + self.right2(p),
            _mean3x3(h) + p,
            pooled + pooled,
            self.left5(h) + h,
        ]
        return torch.cat(branches, dim=1)


class _ReductionCell(nn.Module):
    """Halve the size; four sums side by side."""

    num_branches = 4

    def __init__(self, adjust: nn.Module, channels: int, adjusted: int, width: int) -> None:
        super().__init__()
        self.adjust = adjust
        self.conv = HeConv2d(channels, width, 1, bias=False)
        self.bn = _batch_norm(width)
        self.left1 = _SeparableBlock(width, width, kernel=5, stride=2)
        self.right1 = _SeparableBlock(adjusted, width, kernel=7, stride=2)
        self.right2 = _SeparableBlock(adjusted, width, kernel=7, stride=2)
        self.right3 = _SeparableBlock(adjusted, width, kernel=5, stride=2)
        self.left4 = _SeparableBlock(width, width, kernel=3)

    def forward(self, x: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Combine the outputs of the last cell and of the one before it."""
        p = self.adjust(previous)
        h = self.bn(self.conv(functional.relu(x)))
        padded = _pad_for_stride_2(h, kernel=3)  # with zeros, which count in maximum and mean
        largest = functional.max_pool2d(padded, kernel_size=3, stride=2)
        first = self.left1(h) + self.right1(p)
        second = largest + self.right2(p)
        third = functional.avg_pool2d(padded, kernel_size=3, stride=2) + self.right3(p)
        branches = [second, third, second + _mean3x3(first), self.left4(first) + largest]
        return torch.cat(branches, dim=1)


class _SeparableBlock(nn.Module):
    """Twice ReLU, a convolution per channel, a 1x1 convolution over channels, BatchNorm."""

    def __init__(self, channels: int, width: int, *, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.kernel = kernel
        self.stride = stride
        self.conv1 = _separable(channels, width, kernel, stride)
        self.bn1 = _batch_norm(width)
        self.conv2 = _separable(width, width, kernel)
        self.bn2 = _batch_norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map channels to width, and divide the size by the stride."""
        x = functional.relu(x)
        if self.stride == 2:
            x = _pad_for_stride_2(x, self.kernel)
        x = self.bn1(self.conv1(x))
        return self.bn2(self.conv2(functional.relu(x)))


def _plan() -> Iterator[tuple[str, type[_NormalCell] | type[_ReductionCell], int]]:
    """Yield each cell's name, kind and width (channels of a branch)."""
    yield "stem_1", _ReductionCell, CELL_CHANNELS // 4
    yield "stem_2", _ReductionCell, CELL_CHANNELS // 2
    for row in range(3):
        width = CELL_CHANNELS * 2**row
        if row > 0:
            yield f"reduce_{row * NUM_CELLS}", _ReductionCell, width
        for number in range(NUM_CELLS):
            yield str(row * NUM_CELLS + number + (row > 0)), _NormalCell, width


def _separable(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Make a depthwise and a pointwise convolution; with stride 2 the input is padded already."""
    padding = kernel // 2 if stride == 1 else 0
    return nn.Sequential(
        OrderedDict(
            depthwise=GlorotConv2d(
                channels, channels, kernel, stride, padding, groups=channels, bias=False
            ),
            pointwise=GlorotConv2d(channels, width, 1, bias=False),
        )
    )


def _batch_norm(channels: int) -> KerasBatchNorm2d:
    return KerasBatchNorm2d(channels, EPSILON, MOMENTUM)


def _mean3x3(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each pixel's neighbourhood, of fewer pixels at the edges."""
    return functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def _pad_for_stride_2(x: torch.Tensor, kernel: int) -> torch.Tensor:
    """Pad with zeros so that an odd kernel with stride 2 gives half the size, rounded up."""
    height, width = x.shape[-2:]
    after = kernel // 2
    left, top = after - (width + 1) % 2, after - (height + 1) % 2
    return functional.pad(x, (left, after, top, after))
