"""ResNet20 for CIFAR-10: about 270 k parameters."""

import torch
from torch import nn
from torch.nn import functional

WIDTHS = (16, 32, 64)
NUM_BLOCKS = 3  # per width


class ResNet20(nn.Module):
    """The 20-layer network of arXiv 1512.03385, section 4.2.

    Three stages of three blocks of two 3x3 convolutions; shortcuts without parameters: where the
    width doubles, every other pixel, and zeros for the new channels.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv = _conv3x3(3, WIDTHS[0])
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        blocks = []
        channels = WIDTHS[0]
        for width in WIDTHS:
            for _ in range(NUM_BLOCKS):
                blocks.append(_Block(channels, width))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map float32 [batch, 3, height, width] to logits [batch, classes]."""
        x = functional.relu(self.norm(self.conv(images)))
        return self.classifier(self.blocks(x).mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.stride = 1 if channels_in == channels_out else 2
        self.new_channels = channels_out - channels_in
        self.conv1 = _conv3x3(channels_in, channels_out, self.stride)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv3x3(channels_out, channels_out)
        self.norm2 = nn.BatchNorm2d(channels_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the shortcut what the two convolutions make of it."""
        out = functional.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, before, self.new_channels - before))
        return functional.relu(out + shortcut)


def _conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    # No bias: BatchNorm's shift takes its place.
    conv = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
