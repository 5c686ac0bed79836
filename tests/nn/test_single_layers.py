"""Hooks, activations, additional losses and frozen layers give the same in each way of computing a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import CPU, all_clients, close, engine, equal, mlp, ragged, seeded
from torch import Tensor, nn

from fedbench.adapters.bottleneck import Bottleneck
from fedbench.adapters.lora import LoRA
from fedbench.core.options import ConfigError
from fedbench.engine.federation import Federation
from fedbench.engine.gradients import training_pass
from fedbench.engine.optim import SGD
from fedbench.engine.step import Step
from fedbench.nn.batched_layers import BatchedLayers
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.nn.forward import BatchedModule
from fedbench.simulation.output_checks import check_outputs

K, B = 3, 5
ADAPTERS: dict[str, Any] = {
    "none": None,
    "lora": lambda: LoRA(["stem", "block.0"], rank=2),
    "houlsby": lambda: Bottleneck(["block"], width=3),
}


class Net(nn.Module):
    """[B, 6] -> [B, 3]: a layer, a residual block of two, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        return self.head(self.norm(h + self.block(h)))


class BatchedNet(Net):
    """The same network with its own batched forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = (BatchedLayers(self),)  # in a tuple: no submodule

    def run(
        self, params: dict[str, Tensor], inputs: tuple, batched: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        def layer(name: str, x: Tensor) -> Tensor:
            return self.layers[0].apply(name, x, params, batched, context)

        h = layer("stem", inputs[0]).relu()
        features = layer("norm", h + layer("block", h))
        return features if until == "head" else layer("head", features)


def flat(way: str, adapter: str = "none") -> FlatModel:
    """Return the network with an adapter, computed in one of the ways."""
    module = seeded(BatchedNet if way == "batched" else Net, 0)
    if ADAPTERS[adapter] is not None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            ADAPTERS[adapter]().insert(module)
    if way == "mapped":  # a layer with a hook is in no program
        module.norm.register_forward_hook(lambda *_: None)
    model = FlatModel(module, {"head": ["head.*"]})
    assert {"program": model.traced_graph, "batched": isinstance(module, BatchedModule), "mapped": model.uses_vmap}[way]
    return model


def rows_of(model: FlatModel) -> Tensor:
    """Return rows [K, P] whose values depend on parameter names, not on their order."""
    rows = model.init_row().repeat(K, 1)
    for number, name in enumerate(sorted(model.spans)):
        a, b = model.spans[name]
        rows[:, a:b] += 0.3 * torch.randn(K, b - a, generator=torch.Generator().manual_seed(number))
    return rows


def gate(y: Tensor, row: dict[str, Tensor]) -> Tensor:
    """A hook that scales the output of a layer by a parameter of the client."""
    return y * row["gate"]


def seen(way: str, adapter: str, tapped: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, gradients and activations of three clients."""
    model = flat(way, adapter)
    model.extend(gate=torch.ones(8))
    if tapped:
        model.add_hook("block", gate)
    rows, x = rows_of(model), torch.randn(K, B, 6, generator=torch.Generator().manual_seed(9))
    leaf = rows.clone().requires_grad_()
    logits, captured = model.capture(leaf, x, ["stem", "block*"])
    (gradient,) = torch.autograd.grad(logits.square().sum() + captured["block"].sum(), leaf)
    for i in range(K):  # alone
        alone, one = model.capture(rows[i], x[i], ["stem", "block*"])
        close(logits[i], alone, 1e-5)
        again, of_one = model.capture(rows[i : i + 1], x[i : i + 1], ["block"])  # one client, as a cohort
        close(again[0], alone, 1e-5)
        close(of_one["block"][0], one["block"], 1e-5)
        for name in one:
            close(captured[name][i], one[name], 1e-5)
    named = model.named(gradient)
    return logits, torch.cat([named[name].flatten() for name in sorted(named)]), captured


@pytest.mark.parametrize("tapped", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_traced_graph_batched_module_and_vmap_agree(adapter: str, tapped: bool) -> None:
    expected = seen("program", adapter, tapped)
    assert {"stem", "block"} <= expected[2].keys()
    for way in ("batched", "mapped"):
        found = seen(way, adapter, tapped)
        close(found[0], expected[0], 1e-5)
        close(found[1], expected[1], 1e-4)
        for name in found[2].keys() & expected[2].keys():
            close(found[2][name], expected[2][name], 1e-5)
        if way == "mapped":
            assert found[2].keys() == expected[2].keys()


def test_a_hook_disables_the_manual_backward_pass() -> None:
    """Without hooks, its gradient is that of autograd."""
    model = FlatModel(mlp(), {})
    rows = model.init_row() + 0.3 * torch.randn(K, model.size, generator=torch.Generator().manual_seed(0))
    x = torch.randn(K, B, 16)
    assert model.manual_backward is not None
    by_chain = model.predict(rows, x)
    logits, captured = model.capture(rows, x, ["body"])
    close(by_chain, logits, 1e-5)
    close(model.head(rows, captured["body"]), logits, 1e-5)
    model.add_hook("body", lambda y, row: 0 * y)
    assert model.manual_backward is None and model.has_hooks
    close(model.predict(rows, x), model.named(rows)["head.bias"][:, None].expand(-1, B, -1), 1e-6)


def test_a_hook_by_hand() -> None:
    """A gate of 2 gives head(norm(h + 2 block(h)))."""
    model, x = flat("program"), torch.randn(B, 6)
    model.extend(gate=torch.full((8,), 2.0))
    model.add_hook("block", gate)
    net: Any = model.module
    h = net.stem(x).relu()
    close(model.forward(model.init_row(), x), net.head(net.norm(h + 2 * net.block(h))), 1e-6)


def test_features_include_hooks() -> None:
    for way in ("program", "batched", "mapped"):
        model, x = flat(way), torch.randn(K, B, 6)
        model.add_hook("norm", lambda y, row: y + 1)
        rows = rows_of(model)
        close(model.head(rows, model.features(rows, x)), model.forward(rows, x), 1e-5)


class PassesOn(nn.Module):
    """A layer that returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Around(Net):
    """A residual block whose layer returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = PassesOn()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.nothing(h))


def test_a_hook_on_an_identity_layer_changes_only_its_output() -> None:
    model = FlatModel(seeded(Around, 0), {})
    assert model.traced_graph is not None
    x = torch.randn(K, B, 6)
    rows = model.init_row().repeat(K, 1)
    net: Any = model.module
    model.add_hook("nothing", lambda y, row: 2 * y)
    close(model.forward(rows, x), net.head(3 * net.stem(x)), 1e-5)
    assert model.capture(rows, x, ["nothing"])[1]["nothing"].shape == (K, B, 8)


def test_unknown_layers_are_refused() -> None:
    model = flat("program")
    with pytest.raises(
        ConfigError,
        match="no layer named 'blok' and none that matches it as a pattern: name one of its layers, stem, block,",
    ):
        model.capture(model.init_row(), torch.randn(B, 6), ["blok"])
    with pytest.raises(ConfigError, match="no layer named 'x'"):
        model.add_hook("x", gate)


# -- an extra loss ---------------------------------------------------------------------------------------
class Sparse(Net):
    """The network with the mean square of its features as an additional loss."""

    def forward(self, x: Tensor) -> Any:
        features = self.norm(self.stem(x))
        return self.head(features), features.square().mean(-1)


@pytest.mark.parametrize("hooked", [False, True])
def test_additional_losses_of_a_training_pass(hooked: bool) -> None:
    module = seeded(Sparse, 0)
    if hooked:
        module.block.register_forward_hook(lambda *_: None)
    model = FlatModel(module, {"head": ["head.*"]})
    assert model.uses_vmap == hooked and model.manual_backward is None
    rows, x = rows_of(model), torch.randn(K, B, 6)
    for k in (1, K):
        logits, _, extra = training_pass(model, model.named(rows[:k]), x[:k], None)
        assert logits.shape == (k, B, 3) and [e.shape for e in extra] == [(k, B)]
        for i in range(k):
            alone, other = torch.func.functional_call(module, model.named(rows[i]), (x[i],))
            close(logits[i], alone, 1e-5)
            close(extra[0][i], other, 1e-5)
    assert model.predict(rows, x).shape == (K, B, 3)


@pytest.mark.parametrize("custom", ["", "per sample", "per client"])
@pytest.mark.parametrize("plan", ["vmap", "loop"])
def test_training_minimizes_the_additional_loss(plan: str, custom: str) -> None:
    """One step of three clients on all samples, with the loss of the task or of a method, by hand."""
    module, (arrays, split) = seeded(FlatSparse, 0), ragged(sizes=(4, 4, 4))
    e = engine(arrays, split, module, SGD(lr=0.5), plan=plan, batch_size=4, epochs=1)

    def doubled(s: Step, rows: Tensor, batch: Any) -> Tensor:
        losses = 2 * s.task_loss(s.forward(rows, batch), batch)  # [k, B]
        return losses if custom == "per sample" else (losses * batch.weight).sum(1)

    def step(s: Step, batch: Any) -> None:
        s.descend(s.grad(batch, loss=doubled if custom else None))

    start = e.model.init_row()
    found = all_clients(e).train(start, step=step).theta
    whole, _ = all_clients(e).gradient(start)
    for i in range(3):
        x, y = e.federation.gather(torch.from_numpy(split.train.select(np.array([i])).indices))
        logits, extra = module(x)
        loss = F.cross_entropy(logits, y) * (2 if custom else 1) + extra.mean()
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()), allow_unused=False)]
        )
        close(found[i], start - 0.5 * gradient, 1e-5)
        if not custom:
            close(whole[i], gradient, 1e-5)


class FlatSparse(Sparse):
    """On images of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 8)
        del self.block

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.flatten(1))


class WrongExtra(Sparse):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        logits, extra = super().forward(x.flatten(1))
        return logits, extra.mean()


def test_an_additional_loss_of_another_shape_is_refused() -> None:
    federation = Federation.build(*ragged(), CPU)
    with pytest.raises(ConfigError, match=r"an extra loss \[\] of float32: the extra loss must be one float32"):
        check_outputs(FlatModel(WrongExtra(), {}), federation, "it")


# -- freezing --------------------------------------------------------------------------------------------
class Normed(nn.Module):
    """[B, 6] -> [B, 3], with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("hooked", [False, True])
def test_frozen_layers_stay_in_evaluation_mode(hooked: bool) -> None:
    """Their parameters and statistics are not in rows and do not change, and they have no dropout."""
    module = seeded(Normed, 0)
    if hooked:
        module.head.register_forward_hook(lambda *_: None)
    model = FlatModel(module, {"head": ["head.*"]}, freeze=["body.*"])
    assert list(model.spans) == ["head.1.weight", "head.1.bias"] and not model.batch_statistics
    statistics = {n: t.clone() for n, t in module.state_dict().items()}
    rows, x = rows_of(model), torch.randn(K, B, 6)
    keys = torch.arange(K)
    context = ForwardContext(True, keys)
    features = model.apply(model.named(rows), x, True, context, until="head.1")
    bare = module.eval().body(x.flatten(0, 1)).unflatten(0, (K, B))
    dropped = features == 0
    assert 0.2 < dropped.float().mean() < 0.8  # by the head's dropout, which learns on
    close(features[~dropped], 2 * bare[~dropped], 1e-5)
    for name, t in module.state_dict().items():
        equal(t, statistics[name])


def test_patterns_that_freeze_nothing_or_everything_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.freeze=\['x'\]: the pattern 'x' matches none"):
        FlatModel(mlp(), {}, freeze=["x"])
    with pytest.raises(ConfigError, match=r"model\.freeze=\['\*'\] freezes all parameters"):
        FlatModel(mlp(), {}, freeze=["*"])
