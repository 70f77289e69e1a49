"""DenseNet121 as Keras defines it, on torchvision's network."""

from typing import TYPE_CHECKING

from torch import nn

from sim.models.layers import KerasBatchNorm2d, draw_glorot

if TYPE_CHECKING:
    from torchvision.models import DenseNet


def make_densenet121(num_classes: int = 10) -> "DenseNet":
    """Build DenseNet121: torchvision's layers, Keras's BatchNorm and initial weights.

    The layers and their order are the same in both. (Keras pads the first max-pool with zeros,
    torchvision with minus infinity: behind a ReLU that is the same.)

    Parameters
    ----------
    num_classes : int
        Outputs of the last layer.
    """
    from torchvision.models import densenet121  # takes as long as torch itself

    net = densenet121(weights=None, num_classes=num_classes)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, KerasBatchNorm2d(child.num_features))
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            draw_glorot(module)
    return net
