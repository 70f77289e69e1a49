"""The papers' networks against Keras's own: the same logits and running statistics.

Skipped without keras, which is no dependency: ``pip install keras`` and run this file.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")  # before the import
keras = pytest.importorskip("keras", reason="compares with Keras: pip install keras")

from keras.src.applications.nasnet import NASNet  # noqa: E402

from sim.models import FIGURE_LAYERS, build_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("densenet121", "resnet50v2", "nasnetmobile")
NUM_IMAGES = 32  # the last maps are one pixel, so that BatchNorm there sees one value an image
TOLERANCE = 1e-4  # float32, other order of sums

# Parameter or buffer here -> Keras's layer, by rules tried in turn.
RULES = {
    "densenet121": [
        (r"features\.conv0", "conv1_conv"),
        (r"features\.norm0", "conv1_bn"),
        (r"features\.norm5", "bn"),
        (r"classifier", "predictions"),
        (r"features\.transition(\d)\.norm", lambda m: f"pool{int(m[1]) + 1}_bn"),
        (r"features\.transition(\d)\.conv", lambda m: f"pool{int(m[1]) + 1}_conv"),
        (
            r"features\.denseblock(\d)\.denselayer(\d+)\.(norm|conv)(\d)",
            lambda m: (
                f"conv{int(m[1]) + 1}_block{m[2]}_"
                + {"norm1": "0_bn", "conv1": "1_conv", "norm2": "1_bn", "conv2": "2_conv"}[
                    m[3] + m[4]
                ]
            ),
        ),
    ],
    "resnet50v2": [
        (r"blocks\.(\w+)\.preact_bn", r"\1_preact_bn"),
        (r"blocks\.(\w+)\.(conv|bn)_(\d)", r"\1_\3_\2"),
        (r"(conv1_conv|post_bn|predictions)", r"\1"),
    ],
    "nasnetmobile": [
        (r"(stem_conv1|stem_bn1|predictions)", r"\1"),
        (r"cells\.(\d+)\.(conv|bn)", r"normal_\2_1_\1"),
        (r"cells\.(\w+)\.(conv|bn)", r"reduction_\2_1_\1"),
        (r"cells\.(\w+)\.adjust\.bn", r"adjust_bn_\1"),
        (r"cells\.(\w+)\.adjust\.conv_(\d)", r"adjust_conv_\2_\1"),
        (r"cells\.(\w+)\.adjust\.conv", r"adjust_conv_projection_\1"),
        (r"cells\.(\d+)\.(\w+)\.conv(\d)\.\w+wise", r"separable_conv_\3_normal_\2_\1"),
        (r"cells\.(\w+)\.(\w+)\.conv(\d)\.\w+wise", r"separable_conv_\3_reduction_\2_\1"),
        (r"cells\.(\d+)\.(\w+)\.bn(\d)", r"separable_conv_\3_bn_normal_\2_\1"),
        (r"cells\.(\w+)\.(\w+)\.bn(\d)", r"separable_conv_\3_bn_reduction_\2_\1"),
    ],
}


def keras_model(name: str) -> Any:
    keras.utils.set_random_seed(7)
    shape: dict[str, Any] = {"input_shape": (32, 32, 3), "weights": None, "classes": 10}
    shape["classifier_activation"] = None
    if name == "densenet121":
        return keras.applications.DenseNet121(**shape)
    if name == "resnet50v2":
        return keras.applications.ResNet50V2(**shape)
    return NASNet(  # what NASNetMobile calls, which refuses the torch backend
        penultimate_filters=1056,
        num_blocks=4,
        stem_block_filters=32,
        skip_reduction=False,
        filter_multiplier=2,
        default_size=224,
        **shape,
    )


def pairs(name: str, net: torch.nn.Module, model: Any) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Yield each entry of our state with the Keras variable that it must equal."""
    kinds = {"running_mean": "moving_mean", "running_var": "moving_variance", "bias": "beta"}
    for key, tensor in net.state_dict().items():
        module, _, kind = key.rpartition(".")
        rule = next((rule for rule in RULES[name] if re.fullmatch(rule[0], module)), None)
        assert rule is not None, key
        layer = model.get_layer(re.sub(rule[0], rule[1], module))
        if "bn" in layer.name:
            variable = getattr(layer, {**kinds, "weight": "gamma"}[kind])
        elif module.endswith("depthwise"):
            variable = layer.depthwise_kernel
        elif module.endswith("pointwise"):
            variable = layer.pointwise_kernel
        else:
            variable = layer.bias if kind == "bias" else layer.kernel
        yield key, tensor, variable


def in_our_order(key: str, values: np.ndarray) -> np.ndarray:
    """Return a Keras kernel with torch's axes."""
    if values.ndim == 4:
        axes = (2, 3, 0, 1) if key.endswith("depthwise.weight") else (3, 2, 0, 1)
        return values.transpose(axes)
    return values.T


def numpy_of(variable: Any) -> np.ndarray:
    return keras.ops.convert_to_numpy(variable)


def copy_weights(name: str, net: torch.nn.Module, model: Any, rng: np.random.Generator) -> int:
    """Copy every Keras variable, after giving those that start as 0 or 1 other values."""
    copied = set()
    for key, tensor, variable in pairs(name, net, model):
        if variable.ndim == 1:
            low, high = (0.8, 1.2) if numpy_of(variable).any() else (-0.1, 0.1)
            variable.assign(rng.uniform(low, high, variable.shape).astype(np.float32))
        tensor.copy_(torch.from_numpy(in_our_order(key, numpy_of(variable)).copy()))
        copied.add(variable.path)
    assert copied == {variable.path for variable in model.weights if "seed" not in variable.path}
    return len(copied)


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest) -> tuple[str, torch.nn.Module, Any, np.ndarray]:
    """Name, our network and Keras's with the same weights, and images."""
    rng = np.random.default_rng(20211114)
    net, model = build_model(request.param), keras_model(request.param)
    copy_weights(request.param, net, model, rng)
    images = rng.uniform(0, 1, (NUM_IMAGES, 32, 32, 3)).astype(np.float32)
    return request.param, net, model, images


def test_network_has_keras_logits_and_running_statistics(
    both: tuple[str, torch.nn.Module, Any, np.ndarray],
) -> None:
    name, net, model, images = both
    ours = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        net.eval()
        assert_close(net(ours), model(images, training=False))
        net.train()
        assert_close(net(ours), model(images, training=True))
    for key, tensor, variable in pairs(name, net, model):
        np.testing.assert_allclose(
            tensor.numpy(), in_our_order(key, numpy_of(variable)), rtol=1e-4, atol=1e-5, err_msg=key
        )


def test_network_starts_as_keras_does(both: tuple[str, torch.nn.Module, Any, np.ndarray]) -> None:
    name = both[0]
    torch.manual_seed(0)
    net, model = build_model(name), keras_model(name)
    for key, tensor, variable in pairs(name, net, model):
        theirs = numpy_of(variable)
        if variable.ndim == 1:
            np.testing.assert_array_equal(tensor.numpy(), theirs, err_msg=key)
        elif theirs.size > 5_000:
            ours = tensor.numpy()
            assert ours.std() == pytest.approx(theirs.std(), rel=0.03), key
            tails = [np.quantile(np.abs(values), 0.9) for values in (ours, theirs)]
            assert tails[0] == pytest.approx(tails[1], rel=0.03), key  # 7 % tell the laws apart


def test_figures_layers_are_keras_layers_of_that_name(
    both: tuple[str, torch.nn.Module, Any, np.ndarray],
) -> None:
    name, net, model, _ = both
    layers = {key: variable.path for key, _, variable in pairs(name, net, model)}
    for layer, key in FIGURE_LAYERS[name].items():
        assert layers[key].endswith(f"{layer}/kernel")


def assert_close(ours: torch.Tensor, theirs: Any) -> None:
    wanted = numpy_of(theirs)
    assert np.abs(wanted).max() > 0.05
    np.testing.assert_allclose(ours.numpy(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
