"""The app's networks: size, shapes, BatchNorm; test_keras_models.py compares with Keras."""

import numpy as np
import pytest
import torch

from co3_flower import ConfigError
from sim.models import FIGURE_LAYERS, build_model, check_image_size
from sim.models.layers import KerasBatchNorm2d
from sim.settings import MODELS


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


@pytest.mark.parametrize(
    ("name", "trainable", "total", "num_convolutions"),
    [  # Keras's own counts; total: running statistics too
        ("densenet121", 6_964_106, 7_047_754, 120),
        ("resnet50v2", 23_539_850, 23_585_290, 53),
        ("nasnetmobile", 4_243_548, 4_280_286, 36 + 2 * 160),  # a SeparableConv2D is two
        ("resnet20", 269_722, 271_098 + 19, 19),  # torch's BatchNorm counts minibatches
    ],
)
def test_network_has_the_papers_number_of_parameters(
    name: str, trainable: int, total: int, num_convolutions: int
) -> None:
    net = build_model(name)
    num_trainable = sum(weight.numel() for weight in net.parameters())
    assert num_trainable == trainable
    assert num_trainable + sum(buffer.numel() for buffer in net.buffers()) == total
    assert sum(isinstance(m, torch.nn.Conv2d) for m in net.modules()) == num_convolutions


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("densenet121", [8_192, 16_384, 65_536]),
        ("resnet50v2", [4_096, 32_768, 524_288]),
        ("nasnetmobile", [3_872, 30_976, 185_856]),
    ],
)
def test_figure_layers_have_the_papers_number_of_weights(name: str, counts: list[int]) -> None:
    net = build_model(name)
    assert [net.get_parameter(key).numel() for key in FIGURE_LAYERS[name].values()] == counts


@pytest.mark.parametrize("name", MODELS)
def test_network_trains_on_two_images(name: str) -> None:
    net = build_model(name, num_classes=3)
    logits = net(torch.rand(2, 3, 32, 32))
    assert logits.shape == (2, 3)
    logits.square().sum().backward()
    for key, weight in net.named_parameters():
        assert weight.grad is not None and torch.isfinite(weight.grad).all(), key


def test_keras_batchnorm_follows_the_biased_variance(rng: np.random.Generator) -> None:
    norm = KerasBatchNorm2d(4, eps=1e-3, momentum=0.25)
    images = rng.normal(3, 2, (3, 4, 2, 2)).astype(np.float32)
    mean, variance = np.zeros(4), np.ones(4)
    for _ in range(2):
        outputs = norm(torch.from_numpy(images))
        mean = 0.75 * mean + 0.25 * images.mean(axis=(0, 2, 3))
        variance = 0.75 * variance + 0.25 * images.var(axis=(0, 2, 3))  # divided by n
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), variance, rtol=1e-6)
    centred = images - images.mean(axis=(0, 2, 3), keepdims=True)
    wanted = centred / np.sqrt(images.var(axis=(0, 2, 3), keepdims=True) + 1e-3)
    np.testing.assert_allclose(outputs.detach().numpy(), wanted, atol=1e-5)
    norm.eval()
    norm(torch.from_numpy(images))
    np.testing.assert_allclose(norm.running_var.numpy(), variance, rtol=1e-6)


def test_networks_of_keras_have_no_state_but_floats() -> None:
    for name in FIGURE_LAYERS:
        assert {t.dtype for t in build_model(name).state_dict().values()} == {torch.float32}


def test_images_too_small_for_a_network_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="model 'densenet121' must get images of at least 29 .* 8"
    ):
        check_image_size("densenet121", (8, 32))
    check_image_size("densenet121", (29, 29))
    build_model("densenet121")(torch.rand(2, 3, 29, 29))
    check_image_size("nasnetmobile", (8, 8))
    build_model("nasnetmobile")(torch.rand(2, 3, 8, 8))


def test_build_model_lists_the_models_when_the_name_is_unknown() -> None:
    with pytest.raises(ConfigError, match="model must be one of 'cnn', 'resnet20', .* got 'vgg'"):
        build_model("vgg")


def test_build_model_refuses_fewer_than_two_classes() -> None:
    with pytest.raises(ConfigError, match="num_classes must be at least 2, got 1"):
        build_model("cnn", num_classes=1)
