"""Batched convolutions: forward pass and gradient equal those of a loop over the clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import close, equal, seeded
from torch import Tensor, nn

from fedbench.engine.batch import Batch
from fedbench.engine.gradients import manual_gradient
from fedbench.models.resnet import ResNet
from fedbench.nn import manual_backward
from fedbench.nn.batched_operators import conv_memory_format
from fedbench.nn.flat import FlatModel
from fedbench.tasks.classification import Classification

K, B = 3, 4
LAYERS = {  # each on 2 channels of 9 x 7 pixels
    "plain": {"kernel_size": 3},
    "padded": {"kernel_size": 3, "padding": 1},
    "5x5": {"kernel_size": 5, "padding": 2},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "left over": {"kernel_size": 2, "stride": 3},
    "oblong": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1)},
    "1x1": {"kernel_size": 1},
    "1x1 stride": {"kernel_size": 1, "stride": 2},
    "groups": {"kernel_size": 3, "groups": 2},
    "dilation": {"kernel_size": 3, "dilation": 2},
}


def double(module: nn.Module) -> FlatModel:
    return FlatModel(module.double())


def net(bias: bool = True, **how) -> FlatModel:
    """Return a network of two convolutions and a linear layer.  The input of the second one needs a gradient."""
    first, second = nn.Conv2d(2, 6, bias=bias, **how), nn.Conv2d(6, 4, 2, padding=1, bias=bias)
    size = second(first(torch.zeros(1, 2, 9, 7))).numel()
    return double(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(size, 3)))


def problem(model: FlatModel, shape: tuple = (2, 9, 7)) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(K, model.size, generator=generator, dtype=torch.float64) * 0.3
    x = torch.randn(K, B, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (K, B), generator=generator)
    return rows, Batch(x, y, torch.full((K, B), 1 / B, dtype=torch.float64), np.full(K, B))


def by_hand(model: FlatModel, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return losses [k] and gradient [k, P] of the manual backward pass."""
    out = torch.zeros_like(rows)
    with torch.no_grad():
        losses = manual_gradient(model, Classification(), model.named(rows), batch, model.named(out))
    return losses, out


def by_autograd(model: FlatModel, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    leaf = rows.clone().requires_grad_()
    losses = (Classification().loss(model.predict(leaf, batch.x), batch.y) * batch.weight).sum(1)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def one_by_one(model: FlatModel, rows: Tensor, batch: Batch, way=by_autograd) -> tuple[Tensor, Tensor]:
    found = [
        way(
            model,
            rows[i : i + 1],
            Batch(batch.x[i : i + 1], batch.y[i : i + 1], batch.weight[i : i + 1], batch.counts[i : i + 1]),
        )
        for i in range(K)
    ]
    return torch.cat([loss for loss, _ in found]), torch.cat([grad for _, grad in found])


@pytest.mark.parametrize("way", [by_hand, by_autograd])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_several_clients_equal_a_loop(layer: str, bias: bool, way) -> None:
    model = net(bias, **LAYERS[layer])
    rows, batch = problem(model)
    close(way(model, rows, batch), one_by_one(model, rows, batch), 1e-12)
    close(model.predict(rows, batch.x), torch.stack([model.forward(r, x) for r, x in zip(rows, batch.x)]), 1e-12)


def test_only_the_first_layer_learns() -> None:
    """The gradient passes through the second layer, and is not computed for the images."""
    model = net(**LAYERS["stride"])
    rows, batch = problem(model)
    whole = by_hand(model, rows, batch)[1]
    part = torch.zeros_like(rows)
    into = {n: t for n, t in model.named(part).items() if n.startswith("0.")}
    with torch.no_grad():
        manual_gradient(model, Classification(), model.named(rows), batch, into)
    size = model.spans["0.bias"][1]
    close(part[:, :size], whole[:, :size], 1e-12)
    assert part[:, size:].abs().max() == 0


@pytest.mark.parametrize("pool", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_pooling_goes_before_relu(pool: dict) -> None:
    """Results equal those of the original order bit for bit, also for equal maxima and negative windows."""
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(**pool), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.MaxPool2d(2)
    size = nn.Sequential(*layers)(torch.zeros(1, 2, 12, 10)).numel()
    model = FlatModel(nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 3)))
    rows, batch = problem(model, (2, 12, 10))
    rows, batch.x, batch.weight = rows.float().round(decimals=1), batch.x.float().round(), batch.weight.float()
    found, single = by_hand(model, rows, batch), one_by_one(model, rows, batch, by_hand)
    close(found[1], by_autograd(model, rows, batch)[1], 1e-5)
    assert model.manual_backward is not None
    written = model.manual_backward.layers
    assert [type(layer).__name__ for layer in written[:6]] == ["Conv2d", "MaxPool2d", "ReLU"] * 2
    written[1:6] = [written[i] for i in (2, 1, 3, 5, 4)]
    equal(by_hand(model, rows, batch)[1], found[1])
    equal(one_by_one(model, rows, batch, by_hand)[1], single[1])


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_with_a_large_weight_is_transposed(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used for few samples only.  Losses, gradients and memory layout are the same."""
    x, layer = torch.randn(B, 12), manual_backward.Linear("0", nn.Linear(12, 5, bias))
    weights = {"0.weight": torch.randn(5, 12), "0.bias": torch.randn(5)}
    model = double(nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias), nn.ReLU(), nn.Linear(5, 3, bias)))
    rows, batch = problem(model, (3, 4))
    plain, calls, real = layer.forward(weights, x, False)[0], [], manual_backward.F.linear
    before = one_by_one(model, rows, batch, by_hand)
    monkeypatch.setattr(manual_backward, "LARGE_WEIGHT", 5 * 12)
    monkeypatch.setattr(manual_backward, "MIN_WEIGHT_SIDE", 5)
    monkeypatch.setattr(manual_backward.F, "linear", lambda *args: calls.append(len(args[0])) or real(*args))
    for few, taken in (([B], []), ([B - 1, B + 1], [B])):
        monkeypatch.setattr(manual_backward, "FEW_SAMPLES", few)
        calls.clear()
        found = layer.forward(weights, x, False)[0]
        assert calls == taken and found.stride() == plain.stride()
        close(found, plain, 1e-6)
    monkeypatch.setattr(manual_backward, "FEW_SAMPLES", [B])
    close(one_by_one(model, rows, batch, by_hand), before, 1e-12)
    assert manual_backward.weight_goes_first(weights["0.weight"], x)
    assert not manual_backward.weight_goes_first(weights["0.weight"].bfloat16(), x.bfloat16())
    monkeypatch.setattr(manual_backward, "MIN_WEIGHT_SIDE", 6)
    assert not manual_backward.weight_goes_first(weights["0.weight"], x)


def test_networks_that_need_autograd() -> None:
    """They have residual connections, norms, strides and 1x1 shortcuts."""
    model = double(seeded(lambda: ResNet((3, 8, 8), 3, [4, 6], "group")))
    assert model.manual_backward is None
    rows, batch = problem(model, (3, 8, 8))
    rows = rows * 0.1 + model.init_row().double()
    close(by_autograd(model, rows, batch), one_by_one(model, rows, batch), 1e-10)


def test_strided_pointwise_convolutions_of_few_channels_are_contiguous() -> None:
    """Their gradient in channels last writes outside of its memory on a CPU without AVX-512."""
    few_channels = torch.zeros(8, 4, 1, 1)
    many_channels = torch.zeros(8, 16, 1, 1)
    large_kernel = torch.zeros(8, 4, 3, 3)
    assert conv_memory_format(few_channels, (2, 2)) is torch.contiguous_format
    assert conv_memory_format(few_channels, (1, 2)) is torch.contiguous_format
    assert conv_memory_format(few_channels, (1, 1)) is torch.channels_last
    assert conv_memory_format(many_channels, (2, 2)) is torch.channels_last
    assert conv_memory_format(large_kernel, (2, 2)) is torch.channels_last
