"""AppleNet has the layers of APPLE's released code."""

import pytest
import torch
from tiny import (
    HEAD,
)

from fedbench.core.options import ConfigError
from fedbench.models.applenet import AppleNet
from fedbench.nn.flat import FlatModel


@pytest.mark.parametrize(
    "channels, classes, total", [(1, 10, 431_080), (3, 10, 432_080), (1, 11, 431_581), (3, 9, 431_579)]
)
def test_applenet_parameters(channels: int, classes: int, total: int) -> None:
    """MNIST, CIFAR-10, OrganMNIST, PathMNIST, all at 28x28 (APPLE's released code)."""
    model = FlatModel(AppleNet((channels, 28, 28), classes), HEAD)
    assert (model.size, model.columns["head"].size) == (total, 501 * classes)
    assert model.forward(model.init_row(), torch.zeros(2, channels, 28, 28)).shape == (2, classes)


def test_applenet_refuses_small_images() -> None:
    with pytest.raises(ConfigError, match="at least 16x16"):
        AppleNet((1, 8, 8), 10)


def test_gray_images_need_an_axis_of_channels() -> None:
    """(28, 28) is large enough: what is missing is the first axis."""
    with pytest.raises(ConfigError, match=r"sample of the data set is \(28, 28\): store .* \[samples, 1, height"):
        AppleNet((28, 28), 3)
