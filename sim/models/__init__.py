"""The networks of the app, made by name: `build_model`.

densenet121, resnet50v2 and nasnetmobile are the papers', as Keras defines them: layers, padding,
initial weights, and BatchNorm's epsilon, momentum and running statistics. `FIGURE_LAYERS` names the
convolutions that the papers' figures look at.
"""

from collections.abc import Callable, Mapping

from torch import nn

from co3_flower import ConfigError
from co3_flower.analysis_report import choose_groups
from sim.models.cnn import SmallCNN
from sim.models.densenet import make_densenet121
from sim.models.nasnet import NASNetMobile
from sim.models.resnet20 import ResNet20
from sim.models.resnet50v2 import ResNet50V2
from sim.settings import MODELS

_MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "cnn": SmallCNN,
    "resnet20": ResNet20,
    "densenet121": make_densenet121,
    "resnet50v2": ResNet50V2,
    "nasnetmobile": NASNetMobile,
}

# Network -> upper, middle and lower convolution: Keras's name of the layer, the parameter here.
FIGURE_LAYERS = {
    "densenet121": {
        "conv2_block1_1_conv": "features.denseblock1.denselayer1.conv1.weight",
        "conv3_block1_1_conv": "features.denseblock2.denselayer1.conv1.weight",
        "conv5_block1_1_conv": "features.denseblock4.denselayer1.conv1.weight",
    },
    "resnet50v2": {
        "conv2_block1_1_conv": "blocks.conv2_block1.conv_1.weight",
        "conv3_block1_1_conv": "blocks.conv3_block1.conv_1.weight",
        "conv5_block1_1_conv": "blocks.conv5_block1.conv_1.weight",
    },
    "nasnetmobile": {
        "normal_conv_1_0": "cells.0.conv.weight",
        "normal_conv_1_5": "cells.5.conv.weight",
        "normal_conv_1_12": "cells.12.conv.weight",
    },
}

MIN_IMAGE_SIZE = {"densenet121": 29}  # halved five times; the others take any size


def build_model(name: str, num_classes: int = 10) -> nn.Module:
    """Build a network for three-channel images, weights freshly drawn from torch's generator.

    Parameters
    ----------
    name : str
        ``cnn``, ``resnet20``, ``densenet121``, ``resnet50v2`` or ``nasnetmobile``.
    num_classes : int
        Outputs of the last layer.

    Returns
    -------
    torch.nn.Module
        Takes float32 [batch, 3, height, width] in [0, 1], gives logits float32 [batch, classes].

    Raises
    ------
    ConfigError
        An unknown name, or fewer than two classes.

    Examples
    --------
    >>> net = build_model("cnn", num_classes=10)
    >>> sum(weight.numel() for weight in net.parameters())
    94762
    """
    if name not in _MAKERS:
        listed = ", ".join(repr(known) for known in MODELS)
        raise ConfigError(f"model must be one of {listed}, got {name!r}")
    if num_classes < 2:
        raise ConfigError(f"num_classes must be at least 2, got {num_classes}")
    return _MAKERS[name](num_classes)


def check_image_size(name: str, size: tuple[int, ...]) -> None:
    """Raise ConfigError where images of this height and width are too small for a network."""
    smallest = MIN_IMAGE_SIZE.get(name, 1)
    if min(size) < smallest:
        raise ConfigError(
            f"model {name!r} must get images of at least {smallest} pixels a side, got"
            f" {min(size)}; choose another model or dataset"
        )


def figure_layers(model: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the convolutions that the figures show: title -> name of the tensor.

    The papers' upper, middle and lower layer where the network is one of theirs, else the first,
    middle and last convolution.

    Examples
    --------
    >>> figure_layers("cnn", {"a": (8, 3, 3, 3), "b": (8, 8, 3, 3), "c": (10,)})
    {'upper: a': 'a', 'lower: b': 'b'}
    """
    places = ("upper", "middle", "lower")
    if model in FIGURE_LAYERS:
        named = FIGURE_LAYERS[model].items()
        return {f"{place}: {t}": name for place, (t, name) in zip(places, named, strict=True)}
    groups = choose_groups(shapes, [])
    chosen = {title.partition(" ")[0]: names[0] for title, names in groups.items()}
    distinct: dict[str, str] = {}
    for place in ("upper", "lower", "middle"):
        name = chosen.get(place)
        if name is not None and f": {name}" not in "".join(f": {n}" for n in distinct.values()):
            distinct[place] = name
    return {f"{place}: {distinct[place]}": distinct[place] for place in places if place in distinct}
