"""FlatModel: layout of rows, columns, added columns, buffers, and batched forward passes of all operations."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import close, equal, mlp, seeded
from torch import Tensor, nn

from fedbench.core.options import ConfigError, MissingColumns
from fedbench.models.fedavg_cnn import FedAvgCNN
from fedbench.models.resnet import ResNet
from fedbench.nn import batched_operators
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.nn.freezing import is_frozen_norm
from fedbench.simulation.status import sentence_of

K = 3


# -- layout ----------------------------------------------------------------------------------------------
class Mixed(nn.Module):
    """A module with a trained and a frozen layer, a norm, a constant float buffer and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)
        self.register_buffer("positions", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.frozen(x))))


def test_buffers_are_last_in_a_row() -> None:
    module = seeded(Mixed)
    model = FlatModel(module)
    assert list(model.spans) == [
        "body.weight",
        "body.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert model.size == 20 + 5 + 5 + 5 + 10 + 2 + 5 + 5
    assert model.trained.slices == [(0, 47)] and model.all.slices == [(0, 57)]
    row = model.init_row()
    assert row.shape == (57,) and not row.requires_grad
    named = model.named(row)
    for name, value in module.state_dict().items():
        if name in named:
            equal(named[name], value)
    equal(model.named(row.expand(4, -1))["head.weight"][2], module.head.weight.detach())


def test_a_row_is_a_state_dict() -> None:
    module, other = seeded(Mixed, 0), seeded(Mixed, 1)
    model = FlatModel(module)
    missing, unexpected = other.load_state_dict(model.state_dict(model.init_row()), strict=False)
    assert not unexpected and not [n for n in missing if n in model.spans]
    other.frozen.load_state_dict(module.frozen.state_dict())
    x = torch.randn(6, 4)
    close(other.eval()(x), model.predict(model.init_row(), x))


def test_columns_take_put_and_set_algebra() -> None:
    columns = Columns([(6, 8), (1, 3), (3, 4)])
    rows = torch.arange(20.0).view(2, 10)
    assert columns.slices == [(1, 4), (6, 8)] and columns.size == len(columns) == 5
    equal(columns.take(rows), rows[:, [1, 2, 3, 6, 7]])
    equal(columns.take(rows[0]), rows[0, [1, 2, 3, 6, 7]])
    put = columns.put(rows, torch.zeros(2, 5))
    assert put[:, [1, 2, 3, 6, 7]].abs().sum() == 0 and rows[0, 1] == 1
    equal(put[:, [0, 4, 5, 8, 9]], rows[:, [0, 4, 5, 8, 9]])
    assert columns.put(rows[0], torch.zeros(3, 5)).shape == (3, 10)  # one row, many values
    assert columns.put(rows, torch.zeros(5)).shape == (2, 10)  # many rows, one value
    assert (columns & Columns([(2, 7)])).slices == [(2, 4), (6, 7)]
    assert (columns | Columns([(4, 6)])).slices == [(1, 8)]
    assert columns.rest(10).slices == [(0, 1), (4, 6), (8, 10)]
    assert Columns([]).rest(10).slices == [(0, 10)] and Columns([(0, 10)]).rest(10).slices == []


def test_an_empty_set_of_columns() -> None:
    none, rows = Columns([]), torch.arange(6.0).view(2, 3)
    assert none.take(rows).shape == (2, 0)
    equal(none.put(rows, none.take(rows)), rows)
    assert (none & Columns([(0, 3)])).size == 0 and (none | Columns([(0, 3)])).size == 3


def test_put_is_the_inverse_of_take() -> None:
    rows = torch.randn(4, 30)
    for slices in ([(0, 30)], [(3, 9)], [(0, 2), (5, 6), (20, 30)], []):
        columns = Columns(slices)
        equal(columns.put(rows, columns.take(rows)), rows)
        swapped = columns.put(torch.zeros(30), columns.take(rows))
        equal(columns.rest(30).put(swapped, columns.rest(30).take(rows)), rows)


def test_groups_by_name_and_by_type() -> None:
    model = FlatModel(
        seeded(Mixed),
        {"base": ["body.*", "norm.*"], "head": ["head.*"], "norms": ["type:BatchNorm*"], "none": ["type:Conv*"]},
    )
    assert model.columns["head"].slices == [(35, 47)]
    assert model.columns["base"].slices == [(0, 35), (47, 57)]  # its buffers too
    assert model.columns["norms"].slices == [(25, 35), (47, 57)]
    assert model.columns["none"].size == 0
    assert model.without("head").slices == [(0, 35), (47, 57)]
    assert model.group("head", "algorithm=x") is model.columns["head"]
    with pytest.raises(ConfigError, match=r"algorithm=x needs the parameter group 'gate'.*base, head"):
        model.group("gate", "algorithm=x")
    for pattern in ("hed", "hed.*"):
        with pytest.raises(ConfigError, match=r"model.columns.head: the pattern 'hed.* matches no parameter"):
            FlatModel(seeded(Mixed), {"head": [pattern]})
    assert FlatModel(mlp(), {"flat": ["body.0.*"]}).columns["flat"].size == 0  # a layer without parameters


def test_added_columns() -> None:
    model = FlatModel(mlp(), {"base": ["body.*"], "head": ["head.*"]})
    size, head = model.size, model.columns["head"].take(model.init_row())
    model.extend(head2="copy:head", gate=torch.tensor([0.5, 0.25]))
    assert model.size == size + len(head) + 2 == model.trained.size
    equal(model.columns["head2"].take(model.init_row()), head)
    equal(model.columns["gate"].take(model.init_row()), torch.tensor([0.5, 0.25]))
    assert list(model.shapes)[-3:] == ["head2.weight", "head2.bias", "gate"]
    x, row = torch.randn(5, 1, 4, 4), model.init_row()
    z = model.features(row, x)
    assert z.shape == (5, 8)
    close(model.head(row, z), model.predict(row, x))
    close(model.head(row, z, "head2"), model.predict(row, x))
    rows = torch.randn(K, model.size)
    many = model.head(rows, model.features(rows, x.expand(K, -1, -1, -1, -1)), "head2")
    weight, bias = model.named(rows)["head2.weight"], model.named(rows)["head2.bias"]
    close(many[1], model.features(rows[1], x) @ weight[1].T + bias[1])
    assert set(model.state_dict(row)) == {"body.1.weight", "body.1.bias", "head.weight", "head.bias"}


def test_added_columns_are_before_the_buffers() -> None:
    model = FlatModel(seeded(Mixed), {"head": ["head.*"]})
    model.extend(head2="copy:head")
    assert model.trained.slices == [(0, 59)] and model.size == 69
    assert model.columns["head2"].slices == [(47, 59)] and list(model.spans)[-1] == "norm.running_var"


@pytest.mark.parametrize(
    "shape, classes, size", [((3, 32, 32), 10, 878_538), ((3, 32, 32), 100, 924_708), ((1, 28, 28), 11, 582_539)]
)
def test_fedavg_cnn_has_the_papers_size(shape: tuple, classes: int, size: int) -> None:
    model = FlatModel(FedAvgCNN(shape, classes), {"base": ["body.*"], "head": ["head.*"]})
    assert model.size == size and model.columns["head"].size == 513 * classes
    assert model.traced_graph is not None


# -- the batched forward pass ----------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.a(x)) + F.gelu(self.b(x)) * 0.5
        return self.head((z - x).sigmoid() if False else torch.relu(z - x))


class Tokens(nn.Module):
    """Linear and LayerNorm on [B, tokens, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.norm(self.a(x)), 1))


class Twice(nn.Module):
    """A module that calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(self.a(x).relu()).flatten(1))


def convolution(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(features, 4))


IMAGE, VECTOR = (2, 8, 8), (6,)


class Attention(nn.Module):
    """A transformer block on the patches of an image, with position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.norm = nn.Conv2d(2, 6, 4, 4), nn.LayerNorm(6)
        self.position = nn.Parameter(torch.randn(4, 6))
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.cut(x).flatten(2).transpose(1, 2) + self.position  # [B, 4, 6]
        q, k, v = self.qkv(self.norm(z)).unflatten(-1, (6, 3)).transpose(1, 2).chunk(3, dim=1)  # [B, 2, 4, 3]
        z = self.position * z + F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        return self.head(z.mean(1) + z[:, 0] + z.softmax(-1).unbind(-2)[1])


class Looked(nn.Module):
    """Embeddings with masked attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 4), nn.Linear(72, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.table(torch.ones_like(x, dtype=torch.int64) * (x > 0))  # [B, 3, 6, 4]
        shown = torch.cat([torch.ones_like(x[:, :, :1]), x[:, :, 1:] != x[:, :, :5].relu()], 2) > 0
        return self.head(F.scaled_dot_product_attention(z, z * z, z, shown[:, :, None]).flatten(1))


class Joined(nn.Module):
    """A U-Net of two levels, with a transposed convolution and an upsampling layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 3, 2, 1), nn.ConvTranspose2d(4, 6, 2, 2, groups=2)
        self.plain, self.copied = nn.ConvTranspose2d(4, 2, 4, 2, 1, bias=False), nn.Upsample(scale_factor=2)
        self.last, self.head = nn.Conv2d(14, 3, 1), nn.Linear(3 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.relu(self.down(x))
        whole = torch.cat([x, self.up(low), torch.cat((self.plain(low), self.copied(low)), dim=-3)], 1)
        return self.head(torch.flatten(self.last(whole), 1))


MODULES = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Identity(), nn.Linear(5, 4)), VECTOR),
    "linear on tokens": (Tokens, (3, 6)),
    "pointwise": (Residual, VECTOR),
    "shared layer": (Twice, VECTOR),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(6, 6),
            nn.GELU(),
            nn.Tanh(),
            nn.SiLU(),
            nn.ELU(),
            nn.Softplus(),
            nn.LeakyReLU(0.2),
            nn.Sigmoid(),
            nn.ReLU(),
            nn.Linear(6, 4),
        ),
        VECTOR,
    ),
    "convolution": (lambda: convolution(nn.ReLU(inplace=True), features=256), IMAGE),
    "strided, grouped, dilated": (
        lambda: convolution(
            nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False),
            nn.Conv2d(8, 6, 3, padding=2, dilation=2),
            features=96,
        ),
        IMAGE,
    ),
    "pools": (
        lambda: convolution(
            nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.AdaptiveAvgPool2d(1), features=4
        ),
        IMAGE,
    ),
    "batch norm": (lambda: convolution(nn.BatchNorm2d(4), nn.ReLU(), features=256), IMAGE),
    "batch norm, its own numbers": (lambda: convolution(nn.BatchNorm2d(4, eps=0.1, momentum=0.4), features=256), IMAGE),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), VECTOR),
    "batch norm, not affine": (lambda: convolution(nn.BatchNorm2d(4, affine=False), features=256), IMAGE),
    "group norm": (lambda: convolution(nn.GroupNorm(2, 4), features=256), IMAGE),
    "group norm, not affine": (lambda: convolution(nn.GroupNorm(2, 4, affine=False), features=256), IMAGE),
    "layer norm": (lambda: convolution(nn.LayerNorm([4, 8, 8]), nn.LayerNorm(8, bias=False), features=256), IMAGE),
    "residual network": (lambda: ResNet((2, 8, 8), 4, [4, 8], "batch"), IMAGE),
    "residual network, groups": (lambda: ResNet((2, 8, 8), 4, [4, 8], "group"), IMAGE),
    "fedavg cnn": (lambda: FedAvgCNN((1, 16, 16), 4, 16), (1, 16, 16)),
    "attention": (Attention, IMAGE),
    "joined": (Joined, IMAGE),
    "a table, and a mask": (Looked, (3, 6)),
}


def spread(model: FlatModel, k: int = K) -> Tensor:
    """Return k random rows near the initialization, with positive running variances."""
    noise = torch.randn(k, model.size, generator=torch.Generator().manual_seed(1))
    rows = model.init_row() + 0.2 * noise
    for name in model.buffer_names:
        a, b = model.spans[name]
        rows[:, a:b] = rows[:, a:b].abs() + 0.1
    return rows


def reference(module: nn.Module, model: FlatModel, row: Tensor, x: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs of the module with a row loaded, and the row after the pass."""
    module.load_state_dict(model.state_dict(row), strict=False)
    with torch.no_grad():
        out = module.train(train)(x)
    module.eval()
    named = dict(module.state_dict())
    return out, torch.cat([named[n].reshape(-1) for n in model.spans])


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_batched_operations_equal_the_module_for_each_client(name: str, train: bool) -> None:
    make, shape = MODULES[name]
    module = seeded(make)
    model = FlatModel(module)
    assert model.traced_graph is not None, "this module must be computed natively"
    rows, x = spread(model), torch.randn(K, 5, *shape, generator=torch.Generator().manual_seed(2))
    many = {n: p.clone() for n, p in model.named(rows).items()}
    held = rows.clone()  # its named views are strided
    with torch.no_grad():
        out = model.apply(many, x, True, ForwardContext(train))
        close(model.apply(model.named(held), x, True, ForwardContext(train)), out, 2e-5)
        for i in range(K):
            expected, after = reference(module, model, rows[i], x[i], train)
            close(out[i], expected, 2e-5)
            close(torch.cat([many[n][i].reshape(-1) for n in model.spans]), after)
            close(held[i], after)
            one = {n: p.clone() for n, p in model.named(rows[i : i + 1]).items()}
            close(model.apply(one, x[i : i + 1], True, ForwardContext(train))[0], expected, 2e-5)
            close(torch.cat([p.reshape(-1) for p in one.values()]), after)
            if not train:
                close(model.predict(rows[i], x[i]), expected, 2e-5)


@pytest.mark.parametrize("name", MODULES)
def test_batched_gradients_equal_those_of_each_client(name: str) -> None:
    make, shape = MODULES[name]
    module = seeded(make)
    model = FlatModel(module)
    rows, x = spread(model), torch.randn(K, 5, *shape, generator=torch.Generator().manual_seed(2))
    learns = model.trained.size

    def gradient(rows: Tensor, x: Tensor) -> Tensor:
        leaf = rows.clone().requires_grad_()
        call = {n: p.detach().clone() if n in model.buffer_names else p for n, p in model.named(leaf).items()}
        loss = model.apply(call, x, True, ForwardContext(True)).square().mean((1, 2)).sum()
        return torch.autograd.grad(loss, leaf)[0][:, :learns]

    many = gradient(rows, x)
    for i in range(K):
        close(many[i], gradient(rows[i : i + 1], x[i : i + 1])[0], 2e-5)


@pytest.mark.parametrize("every", [1, 2, 3], ids=["all but the head", "every second", "two in three"])
@pytest.mark.parametrize("name", MODULES)
def test_frozen_parameters_are_shared_by_all_clients(name: str, every: int) -> None:
    """Some parameters frozen, biases and weights apart: logits and gradients are those of a loop over clients, the
    frozen ones are in no row, and no copy of them is made."""
    make, shape = MODULES[name]
    module = seeded(make)
    for i, (n, p) in enumerate(module.named_parameters()):
        p.requires_grad = n == list(dict(module.named_parameters()))[-1] or (every > 1 and i % every == 0)
    frozen = {n: p.clone() for n, p in module.named_parameters() if not p.requires_grad}
    statistics = {
        f"{owner}.{n}": b.clone()
        for owner, m in module.named_modules()
        for n, b in m.named_buffers(recurse=False)
        if is_frozen_norm(m)
    }
    model = FlatModel(module)
    assert not model.spans.keys() & (frozen.keys() | statistics.keys())
    rows, x = spread(model), torch.randn(K, 5, *shape, generator=torch.Generator().manual_seed(2))

    def gradient(rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.clone().requires_grad_()
        call = {n: p.detach().clone() if n in model.buffer_names else p for n, p in model.named(leaf).items()}
        logits = model.apply(call, x, True, ForwardContext(True))
        return logits, torch.autograd.grad(logits.square().sum(), leaf)[0][:, : model.trained.size]

    logits, many = gradient(rows, x)
    module.get_submodule(next(n for n, m in module.named_modules() if n)).register_forward_hook(lambda *_: None)
    native, model = model, FlatModel(module)
    assert model.uses_vmap and model.spans == native.spans
    by_vmap = gradient(rows, x)
    close(by_vmap[0], logits, 2e-5 * float(logits.detach().abs().max() + 1))
    close(by_vmap[1] / many.abs().max(), many / many.abs().max(), 2e-5)
    model = native
    for i in range(K):
        each, one = gradient(rows[i : i + 1], x[i : i + 1])
        close(logits[i], each[0], 2e-5)
        close(many[i] / one.abs().max(), one[0] / one.abs().max(), 2e-5)
    now = dict(module.state_dict())
    assert all(torch.equal(t, now[n]) for n, t in (frozen | statistics).items())


class Uncertain(nn.Module):
    """[B, 2, 3] -> [B, 4] by operations with arguments that are not supported."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.head = how, nn.ConvTranspose2d(2, 2, 2, 2), nn.Linear(6, 4)
        self.constant = torch.arange(3.0)  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "keyword":
            return self.head(x.transpose(1, dim1=2).flatten(1))
        if self.how == "size":
            return self.head(self.up(x[:, :, None], output_size=[3, 7]).flatten(1)[:, :6])
        if self.how == "whole":
            return self.head((x * 2).flatten(start_dim=1) + x.transpose(0, 0).flatten(1))
        return self.head((x * self.constant).flatten(1))


@pytest.mark.parametrize("how", ["keyword", "size", "whole", "constant"])
def test_unsupported_operations_use_vmap(how: str) -> None:
    module = Uncertain(how)
    model, x = FlatModel(module), torch.randn(K, 5, 2, 3)
    rows = spread(model)
    assert model.traced_graph is None
    found = model.predict(rows, x)
    for i in range(K):
        module.load_state_dict(model.state_dict(rows[i]))
        close(found[i], module(x[i]), 2e-5)


def test_every_operator_is_tested() -> None:
    used = {type(m) for make, _ in MODULES.values() for m in seeded(make).modules()}
    assert set(batched_operators.OPERATORS) - used == {nn.Dropout}


@pytest.mark.parametrize("name", ["fedavg cnn", "residual network"])
def test_features_then_head(name: str) -> None:
    make, shape = MODULES[name]
    module = seeded(make)
    model = FlatModel(module, {"head": ["head.*"]})
    rows, x = spread(model), torch.randn(K, 5, *shape)
    close(model.head(rows, model.features(rows, x)), model.predict(rows, x))
    close(model.head(rows[0], model.features(rows[0], x[0])), model.predict(rows[0], x[0]))


# -- dropout ---------------------------------------------------------------------------------------------
def test_dropout_depends_on_the_client_and_only_in_training() -> None:
    model = FlatModel(seeded(lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.4), nn.Linear(50, 4))))
    rows, x, keys = spread(model), torch.randn(K, 200, 6), torch.tensor([5, 6, 7])
    named = model.named(rows)
    train = model.apply(named, x, True, ForwardContext(True, keys))
    one = model.apply(model.named(rows[1:2]), x[1:2], True, ForwardContext(True, keys[1:2]))
    close(train[1:2], one)
    assert not torch.allclose(train, model.predict(rows, x))
    hidden = nn.Sequential(nn.Dropout(0.4))
    kept = FlatModel(hidden_model(hidden))
    out = kept.apply(
        {n: p.expand(1, *p.shape) for n, p in kept.named(kept.init_row()).items()},
        torch.ones(1, 400, 50),
        True,
        ForwardContext(True, keys[:1]),
    )
    close(out.unique(), torch.tensor([0, 1 / 0.6]))
    assert (out == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)


def test_dropout_layers_have_different_masks() -> None:
    """Two of them keep 0.6 x 0.6 of the units."""
    model = FlatModel(hidden_model(nn.Sequential(nn.Dropout(0.4), nn.Dropout(0.4))))
    out = model.apply(
        model.named(model.init_row()[None]), torch.ones(1, 400, 50), True, ForwardContext(True, torch.tensor([5]))
    )
    close(out.unique(), torch.tensor([0, 1 / 0.36]))
    assert (out == 0).float().mean().item() == pytest.approx(0.64, abs=0.02)


def hidden_model(layer: nn.Module) -> nn.Module:
    """A linear layer of the identity before another layer, so that the module has parameters."""
    linear = nn.Linear(50, 50, bias=False)
    nn.init.eye_(linear.weight)
    return nn.Sequential(linear, *layer)


# -- modules outside the table ---------------------------------------------------------------------------
class Untraceable(nn.Module):
    """A module that cannot be traced: control flow, a parameter used directly, and a norm."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0]))
        self.body = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.body(x * self.scale))
        return self.head(self.dropout(torch.cat([z[:, :2].exp(), z[:, 2:]], dim=1)))


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_a_module_that_cannot_be_traced_uses_vmap(norm: bool, train: bool) -> None:
    module = seeded(lambda: Untraceable(norm))
    model = FlatModel(module)
    assert model.traced_graph is None
    rows, x = spread(model), torch.randn(K, 5, 6)
    many = {n: p.clone() for n, p in model.named(rows).items()}
    with torch.no_grad():
        out = model.apply(many, x, True, ForwardContext(train))
        features = model.features(rows, x)
        close(model.head(rows, features), model.predict(rows, x))
        for i in range(K):
            expected, after = reference(module, model, rows[i], x[i], train)
            close(out[i], expected, 2e-5)
            close(torch.cat([many[n][i].reshape(-1) for n in model.spans]), after)


@pytest.mark.parametrize("part", ["padding_mode", "string padding", "flatten", "view"])
def test_unsupported_options_of_layers_use_vmap(part: str) -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(128, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.view(x.shape[0], -1))

    make = {
        "padding_mode": lambda: convolution(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), features=256),
        "string padding": lambda: convolution(nn.Conv2d(4, 4, 3, padding="same"), features=256),
        "flatten": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(2), nn.Linear(64, 4)),
        "view": View,
    }[part]
    module = seeded(make)
    model = FlatModel(module)
    assert model.traced_graph is None
    rows, x = spread(model), torch.randn(K, 5, *IMAGE)
    with torch.no_grad():
        out = model.predict(rows, x)
        for i in range(K):
            close(out[i], reference(module, model, rows[i], x[i], False)[0])


def test_a_module_that_depends_on_its_mode_is_not_traced() -> None:
    """Both modes are computed correctly, and tracing does not change the module's buffers."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)
            self.register_buffer("calls", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
                return self.head(x * 2)
            return self.head(x)

    module = seeded(Two)
    model = FlatModel(module)
    assert model.traced_graph is None and module.calls == 0 and not module.training
    rows, x = spread(model), torch.randn(K, 5, 6)
    with torch.no_grad():
        for train in (True, False):
            named = {n: p.clone() for n, p in model.named(rows).items()}
            out = model.apply(named, x, True, ForwardContext(train))
            for i in range(K):
                close(out[i], reference(module, model, rows[i], x[i], train)[0])
            close(named["calls"], model.named(rows)["calls"] + train)


def test_frozen_parameters_are_used_and_do_not_change() -> None:
    module = seeded(Mixed)
    model = FlatModel(module)
    assert model.traced_graph is not None
    rows, x = spread(model), torch.randn(K, 5, 4)
    with torch.no_grad():
        for i in range(K):
            close(model.predict(rows, x)[i], reference(module, model, rows[i], x[i], False)[0])


def test_threads_share_a_frozen_backbone() -> None:
    class Backbone(Untraceable):
        def __init__(self) -> None:
            super().__init__()
            self.body.requires_grad_(False)

    model = FlatModel(seeded(Backbone))
    assert model.traced_graph is None
    module = model.forward_pass._vmapped._thread_copy(True)
    assert module.body.weight is model.module.body.weight and module.head.weight is not model.module.head.weight


class Question(nn.Module):
    """A module with two inputs, an image and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words, self.head = nn.Linear(4, 5), nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.head(self.image(inputs["image"]) + self.words(inputs["tokens"]).mean(1))


def test_inputs_may_be_a_dict() -> None:
    module = seeded(Question)
    model = FlatModel(module)
    rows = spread(model)
    x = {"image": torch.randn(K, 5, 4), "tokens": torch.randint(0, 7, (K, 5, 6))}
    with torch.no_grad():
        out, z = model.predict(rows, x), model.features(rows, x)
        close(model.head(rows, z), out)
        for i in range(K):
            one = {n: v[i] for n, v in x.items()}
            module.load_state_dict(model.state_dict(rows[i]))
            close(out[i], module(one))
            close(model.predict(rows[i], one), out[i])


def test_threads_do_not_share_a_module_with_vmap() -> None:
    """Each thread has its own copy, because functional_call changes parameters of the module."""
    model = FlatModel(seeded(Untraceable))
    rows, x = spread(model, 2), torch.randn(2, 50, 6)
    expected, wrong = [model.predict(rows[i], x[i]) for i in range(2)], []

    def work(i: int) -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(200) if not torch.allclose(model.predict(rows[i], x[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_module_of_the_user_is_not_changed() -> None:
    module = seeded(lambda: Untraceable(norm=True))
    before = {n: v.clone() for n, v in module.state_dict().items()}
    model = FlatModel(module)
    model.apply(model.named(spread(model)), torch.randn(K, 5, 6), True, ForwardContext(True))
    equal(dict(module.state_dict()), before)
    assert module.norm.num_batches_tracked is not None


# -- mistakes --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("traceable", [True, False])
def test_features_of_a_model_without_the_module_head(traceable: bool) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x if traceable else x[:, torch.arange(6)]))

    model = FlatModel(seeded(Odd), {"head": ["fc.*"]})
    assert (model.traced_graph is not None) == traceable
    with pytest.raises(ConfigError, match=r"head"):
        model.features(model.init_row(), torch.randn(3, 6))
    with pytest.raises(ConfigError, match=r"head"):
        model.head(model.init_row(), torch.randn(3, 5))


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}])
def test_batch_norms_without_running_statistics_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"track_running_stats=True and a momentum"):
        FlatModel(convolution(nn.BatchNorm2d(4, **options), features=256))


def test_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    module = seeded(Tied)
    model = FlatModel(module)
    assert model.size == 36 + 12
    rows, x = spread(model), torch.randn(K, 5, 6)
    with torch.no_grad():
        out = model.predict(rows, x)
        for i in range(K):
            close(out[i], reference(module, model, rows[i], x[i], False)[0])


def test_constant_buffers_are_not_in_rows() -> None:
    """CLIP's causal mask is a float buffer of -inf, made anew with the module (persistent=False): averaging or
    measuring it would be meaningless."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.register_buffer("mask", torch.tensor([0.0] * 5 + [float("-inf")]), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) + self.mask).softmax(-1)

    model = FlatModel(seeded(Masked))
    assert torch.isfinite(model.init_row()).all() and model.size == 42
    assert (model.predict(spread(model), torch.randn(K, 5, 6))[..., 5] == 0).all()


def test_dropout_with_vmap_depends_on_the_client() -> None:
    """Masks do not depend on the global generator or on other clients."""
    model = FlatModel(seeded(lambda: Untraceable(dropout=0.5)))
    assert model.traced_graph is None
    rows, x, keys = spread(model), torch.randn(K, 5, 6), torch.tensor([5, 6, 7])
    state = torch.random.get_rng_state()
    many = model.apply(model.named(rows), x, True, ForwardContext(True, keys))
    torch.manual_seed(1)
    for i in range(K):
        close(
            model.apply(model.named(rows[i : i + 1]), x[i : i + 1], True, ForwardContext(True, keys[i : i + 1]))[0],
            many[i],
        )
    torch.random.set_rng_state(state)
    assert not torch.allclose(many, model.predict(rows, x))


def test_global_random_state_does_not_change() -> None:
    model = FlatModel(seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5))))
    x, before = torch.randn(K, 5, 6), torch.random.get_rng_state()
    model.apply(model.named(spread(model)), x, True, ForwardContext(True, torch.arange(K)))
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.isfinite(model.init_row().numpy()).all()


def test_a_missing_column_group_names_the_models_that_have_it():
    model = FlatModel(nn.Linear(2, 3))
    with pytest.raises(MissingColumns, match=r"x needs the parameter group 'prompt'") as missing:
        model.group("prompt", "algorithm=x")
    assert "choose a model that has this group: clip_prompt" in sentence_of(missing.value, Path())
    with pytest.raises(ConfigError, match=r"model.columns has no groups. Name another group, or .*nobody.s: "):
        model.group("nobody's", "algorithm=x")
