"""Any module, any executor: recurrent networks, attention, integers, networks of torchvision and timm.

What a module draws is the client's own, whatever computes it; what a plan cannot do is left out, and what none can do
is a sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import CPU, PLANS, close, deployed, engine, equal, play, ragged, seeded
from torch import Tensor, nn

from fedbench.algorithms.apple import APPLE
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.scaffold import Scaffold
from fedbench.core.options import ConfigError
from fedbench.engine import full_batch
from fedbench.engine.engine import Engine
from fedbench.engine.executor import Plan, candidate_plans
from fedbench.engine.optim import SGD
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.client_random import ClientRandom
from fedbench.nn.flat import FlatModel
from fedbench.simulation import autotune, build

METHODS: dict[str, Callable[[], Algorithm]] = {
    "fedavg": FedAvg,
    "pgfed": PGFed,
    "scaffold": Scaffold,
    "apple": APPLE,
    "per_fedavg_hf": lambda: PerFedAvg(mode="hf"),
}


class Recurrent(nn.Module):
    """[B, T, 6] -> [B, 3] by the last output of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 1, dropout: float = 0.0, **more: Any) -> None:
        super().__init__()
        self.body = kind(6, 5, layers, batch_first=True, dropout=dropout, **more)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Ways(Recurrent):
    """Two bidirectional layers."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM, 2, 0.3, bidirectional=True)
        self.head = nn.Linear(10, 3)


class Packed(Recurrent):
    """The same on packed sequences."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % 4 + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.body(packed)[1][0][-1])


class Attention(nn.Module):
    """[B, T, 6] -> [B, 3] by one layer of attention."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(6, 2, dropout, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    """[B, T, 6] -> [B, 3] by a Transformer with dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


class Words(nn.Module):
    """[B, T] int64 -> [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(11, 5, padding_idx=0), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


class Noisy(nn.Module):
    """Stochastic depth, noise, channel dropout and functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(6, 6), nn.Dropout1d(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            kept = x.new_empty(len(x), 1, 1).bernoulli_(0.7)
            x = x + kept * self.body(x) + 0.1 * torch.randn_like(x) * torch.rand(6)
        return self.head(F.dropout(self.drop(x), 0.2, self.training).mean(1))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "deep lstm": lambda: Recurrent(nn.LSTM, 2, 0.4),
    "gru": lambda: Recurrent(nn.GRU),
    "deep gru": lambda: Recurrent(nn.GRU, 2, 0.4),
    "both ways": Ways,
    "packed": lambda: Packed(nn.LSTM),
    "attention": Attention,
    "transformer": Encoder,
    "embedding": Words,
    "noise": Noisy,
}
DRAWING = ["deep lstm", "deep gru", "both ways", "attention", "transformer", "noise"]
ALONE = ["packed"]  # what is computed for one client at a time


@functools.cache
def data(name: str) -> tuple:
    arrays, split = ragged((7, 4, 9), shape=(4, 6))
    if name == "embedding":
        arrays.inputs = np.random.default_rng(0).integers(0, 11, (len(arrays.targets), 4))
    return arrays, split


def make(name: str, plan: str | Plan = "loop", **options: Any) -> Engine:
    return engine(*data(name), drawn(MODULES[name]), SGD(lr=0.1), plan=plan, **options)


def drawn(network: Callable[[], nn.Module]) -> Any:
    """Return a model with an initialization for each client, which APPLE needs."""
    return FlatModel(seeded(network), new_module=lambda number=0: seeded(network, number))


def auto(e: Engine) -> Engine:
    return build.choose_executor(e, candidate_plans("auto", None, 2, CPU, 3))


def results(e: Engine, method: str, rounds: int = 2) -> dict[str, Any]:
    algorithm = play(e, METHODS[method](), rounds)
    row = algorithm.global_row()
    return {"deployed": deployed(e, algorithm, rounds - 1), **({} if row is None else {"global": row})}


# -- results do not depend on the executor ---------------------------------------------------------------------
PAIRS = [  # of module and method: every third by default
    pytest.param(name, method, marks=pytest.mark.slow if (i + j) % 3 else ())
    for i, name in enumerate(MODULES)
    for j, method in enumerate(METHODS)
]


@pytest.mark.parametrize("name, method", PAIRS)
def test_modules_with_each_kind_of_method(name: str, method: str) -> None:
    """The loop and the executor that auto selects have the same rows."""
    e = make(name)
    loop = results(e, method)
    close(results(auto(make(name)), method), loop, 1e-3 if method == "per_fedavg_hf" else 1e-5)
    assert (loop["deployed"] - e.model.init_row()).abs().max() > 1e-3


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODULES)
def test_plans_have_the_same_rows(name: str, plan: str) -> None:
    if name in ALONE and PLANS[plan].chunk != 1:
        with pytest.raises(ConfigError, match=r"the model \(Packed\) cannot be computed for several clients"):
            autotune.usable_plans(make(name), [PLANS[plan]])
        return
    assert autotune.usable_plans(make(name), [PLANS[plan]]) == [PLANS[plan]]
    close(results(make(name, plan), "fedavg", 1), results(make(name), "fedavg", 1))


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_depend_on_the_client(name: str) -> None:
    """They do not depend on the global generator, on other clients or on earlier passes."""
    model = FlatModel(seeded(MODULES[name]))
    rows, x = model.init_row().repeat(3, 1), torch.randn(1, 5, 4, 6).expand(3, -1, -1, -1)
    keys, before = torch.tensor([5, 6, 5]), torch.random.get_rng_state()

    def outputs(which: list[int], train: bool = True) -> Tensor:
        call = ForwardContext(train, keys[which] if train else None)
        return model.apply(model.named(rows[which]), x[which], True, call).detach()

    one = torch.cat([outputs([i]) for i in range(3)])
    torch.manual_seed(3)
    equal(torch.cat([outputs([i]) for i in (2, 1, 0)]), one)
    if name not in ALONE:
        close(outputs([0, 1, 2]), one)
    assert torch.equal(one[0], one[2]) and not torch.allclose(one[0], one[1])
    still = outputs([0], train=False)
    assert torch.equal(still, outputs([1], train=False)) and not torch.allclose(still, one[:1])
    torch.random.set_rng_state(before)


def test_random_calls_of_a_pass_differ() -> None:
    """Two layers of a module have different masks."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout2d(x[..., None], 0.5)[..., 0]])

    model = FlatModel(Two())
    a, b, channels = model.apply(
        model.named(model.init_row()[None]), torch.ones(1, 4, 30, 30), True, ForwardContext(True, torch.tensor([1]))
    )[0]
    assert not torch.equal(a, b) and a.unique().tolist() == [0, 2]
    equal(channels, channels[:, :, :1].expand_as(channels))
    assert channels.unique().tolist() == [0, 2]


# -- written-out forms -----------------------------------------------------------------------------------------
MASKS: dict[str, dict] = {
    "plain": {},
    "causal": {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1)},
    "added": {"attn_mask": torch.linspace(-1, 1, 16).view(4, 4)},
    "each head": {"attn_mask": torch.linspace(-1, 1, 160).view(10, 4, 4)},
    "padding": {"key_padding_mask": torch.arange(4)[None] >= torch.tensor([4, 3, 2, 1, 4])[:, None]},
    "both": {
        "attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(4)[None] >= torch.tensor([4, 3, 2, 1, 4])[:, None],
    },
    "every head's weights": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", [{}, {"bias": False}, {"kdim": 3, "vdim": 5}], ids=str)
def test_attention_equals_torch(masks: str, kind: dict) -> None:
    layer = seeded(lambda: nn.MultiheadAttention(6, 2, batch_first=True, **kind))
    x = torch.randn(5, 4, 6)
    k, v = (torch.randn(5, 4, kind.get(n, 6)) for n in ("kdim", "vdim"))
    with ClientRandom(None, True):
        found = layer(x, k, v, **MASKS[masks])
    expected = layer(x, k, v, **MASKS[masks])
    close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        close(found[1], expected[1])


def test_attention_without_a_batch_axis_equals_torch() -> None:
    layer, x = seeded(lambda: nn.MultiheadAttention(6, 2)), torch.randn(4, 6)
    padding = torch.tensor([False, False, True, False])
    with ClientRandom(None, True):
        found = layer(x, x, x, key_padding_mask=padding)
    for a, b in zip(found, layer(x, x, x, key_padding_mask=padding)):
        close(a, b)


def test_dropout_of_attention_weights() -> None:
    layer = seeded(lambda: nn.MultiheadAttention(6, 2, dropout=0.25, batch_first=True))
    x = torch.randn(40, 8, 6)
    with ClientRandom(torch.tensor(3), False):
        weights = layer(x, x, x, average_attn_weights=False)[1]  # [B, H, L, S]
    whole = layer.eval()(x, x, x, average_attn_weights=False)[1]
    kept = weights != 0
    close(weights[kept], whole[kept] / 0.75)
    assert 1 - float(kept.float().mean()) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril()},
        {"attn_mask": torch.linspace(-1, 1, 16).view(4, 4)},
    ],
    ids=str,
)
def test_scaled_dot_product_attention_equals_torch(how: dict) -> None:
    q, k, v = torch.randn(3, 5, 2, 4, 3)
    with ClientRandom(None, True):
        found = F.scaled_dot_product_attention(q, k, v, **how)
    expected = F.scaled_dot_product_attention(q, k, v, **how)
    close(found, expected)
    with ClientRandom(torch.tensor(1), False):
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **how)
        close(F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, **how), expected)
    assert not torch.allclose(dropped, expected)


def test_dropout_of_grouped_heads_is_drawn_from_the_clients_key() -> None:
    """Four heads of queries share two heads of keys."""
    q, (k, v) = torch.randn(5, 4, 4, 3), torch.randn(2, 5, 2, 4, 3)

    def attend(p: float) -> Tensor:
        with ClientRandom(torch.tensor(1), False):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True)

    close(attend(1e-9), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert torch.equal(attend(0.5), attend(0.5)) and not torch.equal(attend(0.5), attend(1e-9))


@pytest.mark.parametrize("more", [{}, {"bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_with_dropout_equal_torch(kind: type[nn.RNNBase], more: dict) -> None:
    """With probability near 0, nothing is dropped.  With 1, only biases reach the last layer."""
    net = seeded(lambda: kind(6, 5, 3, dropout=1e-9, batch_first=True, **more))
    x = torch.randn(4, 7, 6)
    with ClientRandom(torch.tensor(3), False):
        found = net(x)
        net.dropout = 1.0
        none, other = net(x)[0], net(torch.randn(4, 7, 6))[0]
    net.dropout = 0.0
    expected = net(x)
    close(found[0], expected[0])
    for a, b in zip(found[1] if kind is nn.LSTM else found[1:], expected[1] if kind is nn.LSTM else expected[1:]):
        close(a, b)
    equal(none, other)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bidirectional": True},
        {"bias": False},
        {"batch_first": False},
        {"num_layers": 2},
        {"proj_size": 3, "bidirectional": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, functools.partial(nn.RNN, nonlinearity="relu")])
@pytest.mark.parametrize("batch", [True, False])
def test_unrolled_recurrent_layers_equal_torch(kind: Callable[..., nn.RNNBase], more: dict, batch: bool) -> None:
    """Outputs, last states and gradients, from a random first state."""
    if "proj_size" in more and kind is not nn.LSTM:
        pytest.skip("an LSTM's alone")
    net = seeded(lambda: kind(6, 5, **{"batch_first": True, **more}))
    x = torch.randn(4, 7, 6) if batch else torch.randn(7, 6)
    first = 4 if more.get("batch_first", True) else 7
    sizes = [more.get("proj_size", 5), 5] if kind is nn.LSTM else [5]
    lead = (net.num_layers * (1 + net.bidirectional), *([first] if batch else []))
    states = tuple(torch.randn(*lead, size) for size in sizes)

    def run() -> list[Tensor]:
        out, last = net(x, states if kind is nn.LSTM else states[0])
        lasts = list(last) if kind is nn.LSTM else [last]
        loss = sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in (out, *lasts))
        return [out, *lasts, *torch.autograd.grad(loss, list(net.parameters()))]

    with ClientRandom(None, True):
        found = run()
    for a, b in zip(found, run()):
        close(a, b)


# -- what cannot be done ---------------------------------------------------------------------------------------
def test_auto_excludes_vmap_with_one_message(caplog) -> None:
    caplog.set_level("INFO", "fedbench")
    e = auto(make("packed"))
    assert e.executor.plan.name == "threads"
    assert caplog.text.count("is not used") == 1
    assert "executor vmap is not used: the model (Packed) cannot be computed for several clients" in caplog.text
    caplog.clear()
    auto(make("transformer"))
    assert "is not used" not in caplog.text


class Wrong(nn.Module):
    """[B, 4, 6] -> [B, 3] with a layer that may fail."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), layer), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([self.body(x)]).sum(0))


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "layer, said",
    [
        (nn.Linear(23, 24), r"^the model's layer body.1 \(Linear\) cannot be trained: .*mat1 and mat2 shapes"),
        (nn.AlphaDropout(0.5), r"^the model's layer body.1 \(AlphaDropout\) cannot be trained: it draws from torch's"),
    ],
)
def test_layers_that_no_executor_supports_are_refused(
    layer: nn.Module, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised before plans are timed."""
    monkeypatch.setattr(autotune, "Trial", None)
    for candidates in (candidate_plans("auto", None, 2, CPU, 3), [PLANS["loop"]], [PLANS["vmap"]]):
        with pytest.raises(ConfigError, match=said):
            build.choose_executor(engine(*data("x"), Wrong(layer)), candidates)


def test_control_flow_on_data_excludes_vmap() -> None:
    e = auto(engine(*data("x"), Wrong(Branch())))
    assert e.executor.plan.name == "threads"
    with pytest.raises(ConfigError, match=r"^hardware.executor=vmap: the model's layer body.1 \(Branch\) cannot"):
        build.choose_executor(engine(*data("x"), Wrong(Branch())), [PLANS["vmap"]])
    with pytest.raises(ConfigError, match=r"^hardware.executor=threads hardware.chunk=2: the model's layer body.1"):
        build.choose_executor(engine(*data("x"), Wrong(Branch())), [PLANS["threaded pairs"]])


def test_a_wrong_gradient_of_vmap_excludes_it(caplog) -> None:
    """torch.vmap may give wrong results without an error."""

    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
            return x.detach().clone(), in_dims[0]

    class Odd(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            return Forgetful.apply(super().forward(x)) + self.head(x[:, 0])

    caplog.set_level("INFO", "fedbench")
    assert auto(engine(*data("x"), seeded(Odd))).executor.plan.name == "threads"
    assert "executor vmap is not used: the model cannot" in caplog.text and "its gradients then differ" in caplog.text


def test_dropout_in_attention_with_added_keys_is_refused() -> None:
    class Added(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.MultiheadAttention(6, 2, 0.1, batch_first=True, add_bias_kv=True)

    with pytest.raises(
        ConfigError,
        match=r"body \(MultiheadAttention\) cannot be trained: .*: construct it without them",
    ):
        auto(engine(*data("x"), Added()))


def test_a_trial_does_not_change_states() -> None:
    e = make("transformer")
    start = e.model.init_row()
    assert autotune.try_training(e, True)[0] is None and autotune.try_training(e, False)[0] is None
    equal(e.model.init_row(), start)
    assert e.federation.num_clients == 3 and not e.rows.all


def test_an_error_of_fedbench_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_batch, "gradient", lambda engine: None)
    with pytest.raises(TypeError, match="positional"):
        autotune.try_training(make("transformer"), True)


# -- networks of torchvision and timm --------------------------------------------------------------------------
class Three(nn.Module):
    """Adapts a network for three channels to one channel."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.expand(-1, 3, -1, -1))


def vision() -> nn.Module:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    return Three(models.resnet18(num_classes=3))


def image() -> nn.Module:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=64,
        patch_size=16,
        in_chans=1,
        num_classes=3,
        embed_dim=24,
        depth=2,
        num_heads=2,
        drop_rate=0.1,
        attn_drop_rate=0.1,
        drop_path_rate=0.2,
    )


def compare(network: Callable[[], nn.Module], method: str) -> None:
    arrays, split = ragged((6, 12, 12), shape=(1, 64, 64))  # few numbers a channel, and norms amplify rounding

    def run(prepare: Callable[[Engine], Engine]) -> dict[str, Any]:
        return results(prepare(engine(arrays, split, drawn(network), SGD(lr=0.001), plan="loop", batch_size=6)), method)

    loop, chosen = run(lambda e: e), run(auto)
    away = (loop["deployed"] - chosen["deployed"]).norm() / loop["deployed"].norm()
    assert torch.isfinite(loop["deployed"]).all() and away < 1e-3


@pytest.mark.slow
def test_a_network_of_timm() -> None:
    compare(image, "pgfed")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", [vision, image])
def test_networks_of_torchvision_and_timm(network: Callable[[], nn.Module], method: str) -> None:
    compare(network, method)
