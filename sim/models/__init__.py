"""The networks of the app, made by name: `build_model`."""

from torch import nn

from co3_flower import ConfigError
from sim.models.cnn import SmallCNN

_AVAILABLE = {"cnn": SmallCNN}
_LATER = ("resnet20", "densenet121", "resnet50v2", "nasnetmobile")


def build_model(name: str, num_classes: int = 10) -> nn.Module:
    """Build a network for three-channel images, weights freshly drawn from torch's generator.

    Parameters
    ----------
    name : str
        ``cnn``; ``resnet20``, ``densenet121``, ``resnet50v2`` and ``nasnetmobile`` come later.
    num_classes : int
        Outputs of the last layer.

    Returns
    -------
    torch.nn.Module
        Takes float32 [batch, 3, height, width] in [0, 1], gives logits float32 [batch, classes].

    Raises
    ------
    ConfigError
        An unknown name, or one that is not available yet.

    Examples
    --------
    >>> net = build_model("cnn", num_classes=10)
    >>> sum(weight.numel() for weight in net.parameters())
    94762
    """
    if name in _LATER:
        raise ConfigError(f"model must be 'cnn', got {name!r}: not available yet")
    if name not in _AVAILABLE:
        listed = ", ".join(repr(known) for known in (*_AVAILABLE, *_LATER))
        raise ConfigError(f"model must be one of {listed}, got {name!r}")
    if num_classes < 2:
        raise ConfigError(f"num_classes must be at least 2, got {num_classes}")
    return _AVAILABLE[name](num_classes)
