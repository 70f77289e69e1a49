"""The app's networks: size, shapes, and the names that come later."""

import numpy as np
import pytest
import torch

from co3_flower import ConfigError
from sim.models import build_model


def test_cnn_has_about_100_thousand_parameters() -> None:
    # 3*32*9 + 32*64*9 + 64*128*9 convolutions, 2 * (32 + 64 + 128) BatchNorm, 128*10 + 10 linear
    assert sum(weight.numel() for weight in build_model("cnn").parameters()) == 94_762


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("num_classes", [2, 10])
def test_cnn_gives_logits_for_every_image_size(size: int, num_classes: int) -> None:
    logits = build_model("cnn", num_classes=num_classes)(torch.zeros(3, 3, size, size))
    assert logits.shape == (3, num_classes)


def test_cnn_carries_batchnorm_statistics() -> None:
    buffers = {name.rpartition(".")[2] for name, _ in build_model("cnn").named_buffers()}
    assert buffers == {"running_mean", "running_var", "num_batches_tracked"}


def test_build_model_draws_the_same_weights_for_the_same_seed() -> None:
    torch.manual_seed(3)
    first = build_model("cnn").state_dict()
    torch.manual_seed(3)
    second = build_model("cnn").state_dict()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor.numpy(), second[name].numpy(), err_msg=name)


@pytest.mark.parametrize("name", ["resnet20", "densenet121", "resnet50v2", "nasnetmobile"])
def test_build_model_refuses_a_model_that_comes_later(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model must be 'cnn', got '{name}': not available yet"):
        build_model(name)


def test_build_model_lists_the_models_when_the_name_is_unknown() -> None:
    with pytest.raises(ConfigError, match="model must be one of 'cnn', 'resnet20', .* got 'vgg'"):
        build_model("vgg")


def test_build_model_refuses_fewer_than_two_classes() -> None:
    with pytest.raises(ConfigError, match="num_classes must be at least 2, got 1"):
        build_model("cnn", num_classes=1)
