"""ResNet50V2 as Keras defines it: bottlenecks with BatchNorm and ReLU before each convolution."""

import torch
from torch import nn
from torch.nn import functional

from sim.models.layers import GlorotConv2d, GlorotLinear, KerasBatchNorm2d

# Keras name of the stack, width of its bottlenecks, blocks, stride of the last block.
STACKS = (("conv2", 64, 3, 2), ("conv3", 128, 4, 2), ("conv4", 256, 6, 2), ("conv5", 512, 3, 1))
EXPANSION = 4  # output channels over width


class ResNet50V2(nn.Module):
    """The 50-layer residual network of arXiv 1603.05027 in Keras's arrangement.

    Keras strides in the 3x3 convolution of a stack's last block. A convolution that no BatchNorm
    follows has a bias. Keras's ``conv2_block1_1_conv`` is ``blocks.conv2_block1.conv_1`` here.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1_conv = GlorotConv2d(3, 64, kernel_size=7, stride=2, padding=3)
        self.blocks = nn.ModuleDict()
        channels = 64
        for stack, width, num_blocks, last_stride in STACKS:
            for number in range(1, num_blocks + 1):
                self.blocks[f"{stack}_block{number}"] = _Block(
                    channels,
                    width,
                    stride=last_stride if number == num_blocks else 1,
                    projects=number == 1,
                )
                channels = EXPANSION * width
        self.post_bn = KerasBatchNorm2d(channels)
        self.predictions = GlorotLinear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map float32 [batch, 3, height, width] to logits [batch, classes]."""
        x = self.conv1_conv(images)
        # Padded with zeros by hand: there are negative values, and torch would pad with -inf.
        x = functional.max_pool2d(functional.pad(x, (1, 1, 1, 1)), kernel_size=3, stride=2)
        for block in self.blocks.values():
            x = block(x)
        x = functional.relu(self.post_bn(x))
        return self.predictions(x.mean(dim=(2, 3)))


class _Block(nn.Module):
    """A bottleneck: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, *, stride: int, projects: bool) -> None:
        super().__init__()
        self.stride = stride
        self.preact_bn = KerasBatchNorm2d(channels)
        self.conv_0 = GlorotConv2d(channels, EXPANSION * width, 1, stride) if projects else None
        self.conv_1 = GlorotConv2d(channels, width, 1, bias=False)
        self.bn_1 = KerasBatchNorm2d(width)
        self.conv_2 = GlorotConv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn_2 = KerasBatchNorm2d(width)
        self.conv_3 = GlorotConv2d(width, EXPANSION * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 [batch, channel, height, width] to four times the width in channels."""
        active = functional.relu(self.preact_bn(x))
        if self.conv_0 is not None:
            shortcut = self.conv_0(active)
        else:
            shortcut = x[:, :, :: self.stride, :: self.stride]
        out = functional.relu(self.bn_1(self.conv_1(active)))
        out = functional.relu(self.bn_2(self.conv_2(out)))
        return shortcut + self.conv_3(out)
