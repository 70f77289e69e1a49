"""A small convolutional network with BatchNorm: about 100 k parameters."""

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with BatchNorm and ReLU, a global mean, one linear layer.

    Two 2x2 max-pools stand between them, so the smallest image is 4x4; the global mean makes
    every larger size fit the same weights.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(3, 32),
            nn.MaxPool2d(2),
            *_block(32, 64),
            nn.MaxPool2d(2),
            *_block(64, 128),
        )
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map float32 [batch, 3, height, width] to logits [batch, classes]."""
        return self.classifier(self.features(images).mean(dim=(2, 3)))


def _block(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    # No bias: BatchNorm's shift takes its place.
    return (
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
