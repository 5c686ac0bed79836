"""Convolutions of many clients, unfolded: forward and gradient equal to grouped ones and to a loop over clients."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tiny import all_clients, close, engine, equal, ragged, seeded
from torch import Tensor, nn

from fedbench.engine.batch import Batch
from fedbench.engine.gradients import chain_gradient
from fedbench.engine.training import LocalTraining
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.resnet import ResNet
from fedbench.nn import chain, rules
from fedbench.nn.flat import FlatModel
from fedbench.nn.rules import layout
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
}
GROUPED = {"groups": {"kernel_size": 3, "groups": 2}, "dilation": {"kernel_size": 3, "dilation": 2}}


def double(module: nn.Module) -> FlatModel:
    return FlatModel(module.double())


def net(bias: bool = True, **how) -> FlatModel:
    """Two convolutions, so that the second one's input needs a gradient, then a linear layer."""
    first, second = nn.Conv2d(2, 6, bias=bias, **how), nn.Conv2d(6, 4, 2, padding=1, bias=bias)
    size = second(first(torch.zeros(1, 2, 9, 7))).numel()
    return double(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(size, 3)))


def problem(model: FlatModel, shape: tuple = (2, 9, 7)) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(K, model.size, generator=generator, dtype=torch.float64) * 0.3
    x = torch.randn(K, B, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (K, B), generator=generator)
    return rows, Batch(x, y, torch.full((K, B), 1 / B, dtype=torch.float64), np.full(K, B))


def by_chain(model: FlatModel, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses [k] and gradient [k, P], written out."""
    out = torch.zeros_like(rows)
    with torch.no_grad():
        losses = chain_gradient(model, Classification(), model.named(rows), batch, model.named(out))
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


@pytest.mark.parametrize("way", [by_chain, by_autograd])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [*LAYERS, *GROUPED])
def test_unfolded_is_grouped_is_a_loop(layer: str, bias: bool, way) -> None:
    model = net(bias, **(LAYERS | GROUPED)[layer])
    rows, batch = problem(model)
    alone, grouped = one_by_one(model, rows, batch), way(model, rows, batch)
    logits = model.predict(rows, batch.x)
    model.convolution = "unfold"
    close(way(model, rows, batch), alone, 1e-12)
    close(way(model, rows, batch), grouped, 1e-12)
    close(model.predict(rows, batch.x), logits, 1e-12)
    equal(one_by_one(model, rows, batch, way)[1], one_by_one(net_like(model), rows, batch, way)[1])


def net_like(model: FlatModel) -> FlatModel:
    """The same module, at its defaults."""
    return FlatModel(model.module)


@pytest.mark.parametrize("layer", [*LAYERS, *GROUPED])
def test_only_plain_layers_are_unfolded(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which path computes is seen by the number of F.conv2d calls of a chain's and of a program's forward pass."""
    model = net(**(LAYERS | GROUPED)[layer])
    rows, batch = problem(model)
    calls, real = [], rules.F.conv2d
    monkeypatch.setattr(rules.F, "conv2d", lambda *args: calls.append(1) or real(*args))
    for convolution, left in (("grouped", 2), ("unfold", 1 if layer in GROUPED else 0), ("grouped", 2)):
        model.convolution = convolution
        for way in (by_chain, by_autograd, lambda model, rows, batch: model.predict(rows, batch.x)):
            calls.clear()
            way(model, rows, batch)
            assert len(calls) == left


def test_one_client_is_computed_as_ever() -> None:
    model = net(**LAYERS["padded"])
    rows, batch = problem(model)
    before = one_by_one(model, rows, batch, by_chain)
    model.convolution = "unfold"
    equal(one_by_one(model, rows, batch, by_chain)[1], before[1])


def test_the_first_layer_alone_learns() -> None:
    """Then the gradient goes on through the second one, and stops at the images."""
    model = net(**LAYERS["stride"])
    rows, batch = problem(model)
    whole = by_chain(model, rows, batch)[1]
    model.convolution, part = "unfold", torch.zeros_like(rows)
    into = {n: t for n, t in model.named(part).items() if n.startswith("0.")}
    with torch.no_grad():
        chain_gradient(model, Classification(), model.named(rows), batch, into)
    size = model.spans["0.bias"][1]
    close(part[:, :size], whole[:, :size], 1e-12)
    assert part[:, size:].abs().max() == 0


@pytest.mark.parametrize("pool", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_pooling_goes_before_relu(pool: dict) -> None:
    """The same bits as in the order written, where maxima are tied and where whole windows are below 0 too."""
    links = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(**pool), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.MaxPool2d(2)
    size = nn.Sequential(*links)(torch.zeros(1, 2, 12, 10)).numel()
    model = FlatModel(nn.Sequential(*links, nn.Flatten(), nn.Linear(size, 3)))
    rows, batch = problem(model, (2, 12, 10))
    rows, batch.x, batch.weight = rows.float().round(decimals=1), batch.x.float().round(), batch.weight.float()
    found, alone = by_chain(model, rows, batch), one_by_one(model, rows, batch, by_chain)
    close(found[1], by_autograd(model, rows, batch)[1], 1e-5)
    for written in model._chains.values():
        if written is not None:
            kinds = [type(link).__name__ for link in written.links]
            assert kinds[:6] == ["Conv2d" if "Conv2d" in kinds else "Unfolded", "MaxPool2d", "ReLU"] * 2
            written.links[1:6] = [written.links[i] for i in (2, 1, 3, 5, 4)]
    equal(by_chain(model, rows, batch)[1], found[1])
    equal(one_by_one(model, rows, batch, by_chain)[1], alone[1])


@pytest.mark.parametrize("bias", [True, False])
def test_large_weights_are_read_the_other_way_round(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal losses and gradients, taken only with as many samples as pay; one result's memory is laid out as the
    other's, which what follows is faster on."""
    x, link = torch.randn(B, 12), chain.Linear("0", nn.Linear(12, 5, bias))
    weights = {"0.weight": torch.randn(5, 12), "0.bias": torch.randn(5)}
    model = double(nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias), nn.ReLU(), nn.Linear(5, 3, bias)))
    rows, batch = problem(model, (3, 4))
    plain, calls, real = link.forward(weights, x, False)[0], [], chain.F.linear
    before = one_by_one(model, rows, batch, by_chain)
    monkeypatch.setattr(chain, "LARGE", 5 * 12)
    monkeypatch.setattr(chain, "NARROW", 5)
    monkeypatch.setattr(chain.F, "linear", lambda *args: calls.append(len(args[0])) or real(*args))
    for few, taken in (([B], []), ([B - 1, B + 1], [B])):
        monkeypatch.setattr(chain, "FEW", few)
        calls.clear()
        found = link.forward(weights, x, False)[0]
        assert calls == taken and found.stride() == plain.stride()
        close(found, plain, 1e-6)
    monkeypatch.setattr(chain, "FEW", [B])
    close(one_by_one(model, rows, batch, by_chain), before, 1e-12)
    assert chain.weight_goes_first(weights["0.weight"], x)
    assert not chain.weight_goes_first(weights["0.weight"].bfloat16(), x.bfloat16())
    monkeypatch.setattr(chain, "NARROW", 6)
    assert not chain.weight_goes_first(weights["0.weight"], x)


def test_networks_that_are_no_chain() -> None:
    """Residual connections and norms: the same layers under autograd, strides and 1x1 shortcuts among them."""
    model = double(seeded(lambda: ResNet((3, 8, 8), 3, [4, 6], "group")))
    assert model.chain is None
    rows, batch = problem(model, (3, 8, 8))
    rows = rows * 0.1 + model.init_row().double()
    grouped = by_autograd(model, rows, batch)
    model.convolution = "unfold"
    close(by_autograd(model, rows, batch), grouped, 1e-10)
    close(by_autograd(model, rows, batch), one_by_one(model, rows, batch), 1e-10)


def test_a_gradient_of_the_input() -> None:
    model = net(**LAYERS["stride"])
    rows, batch = problem(model)
    found = []
    for model.convolution in rules.CONVOLUTIONS:
        x = batch.x.clone().requires_grad_()
        found.append(torch.autograd.grad(model.predict(rows, x).square().sum(), x)[0])
    close(*found, 1e-12)


def test_large_inputs_are_unfolded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient no more windows are held than WINDOWS_BYTES: here two images of four."""
    model = net(**LAYERS["plain"])
    rows, batch = problem(model)
    model.convolution, sizes, real = "unfold", [], rules.cut_windows
    whole = model.predict(rows, batch.x)
    monkeypatch.setattr(rules, "cut_windows", lambda x, m: sizes.append(x.shape[1]) or real(x, m))
    monkeypatch.setattr(rules, "WINDOWS_BYTES", 2 * K * 2 * 9 * 7 * 9 * 8)
    close(model.predict(rows, batch.x), whole, 1e-12)
    assert sizes == [2, 2, 2, 2]  # of either layer
    sizes.clear()
    by_autograd(model, rows, batch)
    assert sizes == [B, B]


def test_threads_share_a_model() -> None:
    model = net(**LAYERS["padded"])
    rows, batch = problem(model)
    model.convolution = "unfold"
    expected, found = by_chain(model, rows, batch)[1], {}
    workers = [
        threading.Thread(target=lambda i=i: found.update({i: by_chain(model, rows, batch)[1]})) for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i in range(4):
        equal(found[i], expected)


@pytest.mark.parametrize("plan", ["vmap", "pairs", "threaded pairs"])
def test_training_gives_the_loops_rows(plan: str) -> None:
    def train(plan: str, convolution: rules.Convolution) -> Tensor:
        e = engine(*ragged(shape=(3, 16, 16)), seeded(lambda: FedAvgCNN((3, 16, 16), 3, width=8)), plan=plan)
        e.model.convolution = convolution
        return all_clients(e).train(e.model.init_row(), how=LocalTraining(epochs=1)).theta

    close(train(plan, "unfold"), train("loop", "grouped"), 1e-5)


def test_strided_pointwise_convolutions_of_few_channels_stay_in_the_ordinary_layout() -> None:
    """On any CPU: without AVX-512 their gradient in channels last writes past its workspace."""
    few, many, wide = torch.zeros(8, 4, 1, 1), torch.zeros(8, 16, 1, 1), torch.zeros(8, 4, 3, 3)
    assert layout(few, (2, 2)) is layout(few, (1, 2)) is torch.contiguous_format
    assert {layout(few, (1, 1)), layout(many, (2, 2)), layout(wide, (2, 2))} == {torch.channels_last}
