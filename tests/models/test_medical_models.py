"""U-Net, D-Net and TabNet: their sizes, their parts, and that many clients at once are each one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import close, compose
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.models._norms import norm_layer
from fedbench.models.dnet import DNet
from fedbench.models.tabnet import GhostNorm, TabNet, sparsemax
from fedbench.models.unet import UNet
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel


def groups(name: str) -> dict[str, list[str]]:
    return {group: list(patterns) for group, patterns in compose([f"model={name}"]).model.columns.items()}


def trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# -- sizes, as pFedNet's code has them -------------------------------------------------------------------
@pytest.mark.parametrize("width, size, head", [(8, 486_562, 191_018), (4, 122_098, 47_910)])
def test_unets_size_and_parts(width: int, size: int, head: int) -> None:
    module = UNet((3, 64, 64), 2, width=width)
    model = FlatModel(module, groups("unet"))
    assert trained(module) == size == model.trained.size
    assert (model.columns["head"] & model.trained).size == head
    assert (model.columns["base"] & model.trained).size == size - head
    convolutions = [m for n, m in module.named_modules() if "decoder" in n and isinstance(m, nn.Conv2d)]
    assert model.columns["head_weight"].size == sum(m.weight.numel() for m in convolutions) + 2 * width + 2
    assert model.columns["head_compress"].size == 2 * width
    assert module(torch.randn(2, 3, 64, 64)).shape == (2, 2, 64, 64)


def test_dnets_size_and_parts() -> None:
    module = DNet((3, 32, 32), 2)
    model = FlatModel(module, groups("dnet"))
    kinds = {
        kind: sum(trained(m) for m in module.modules() if isinstance(m, kind)) for kind in (nn.Conv2d, nn.BatchNorm2d)
    }
    assert kinds == {nn.Conv2d: 185_598, nn.BatchNorm2d: 11_994}
    assert trained(module) == 197_936 and model.columns["head"].size == 344
    assert not module.head.bias.any()
    deviations = [
        float(m.weight.detach().std() * (m.weight[:, 0].numel() / 2) ** 0.5)
        for m in module.modules()
        if isinstance(m, nn.Conv2d)
    ]
    assert all(0.8 < d < 1.2 for d in deviations)  # N(0, 2 / (out k k))


def test_tabnets_size() -> None:
    """58 features: norms 2 n each; two shared layers 58 and 16 -> 32; four transformers with two own 16 -> 32 and four
    norms of 32; three queries 8 -> 58 with a norm of 58; 8 -> 2."""
    module = TabNet((58,), 2)
    transformer = 2 * 16 * 32 + 4 * 2 * 32
    assert trained(module) == 2 * 58 + (58 + 16) * 32 + 4 * transformer + 3 * (8 * 58 + 2 * 58) + 8 * 2 + 2


# -- many clients ----------------------------------------------------------------------------------------
MODULES: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "unet": (lambda: UNet((2, 16, 16), 3, width=2), (2, 16, 16), True),
    "unet group": (lambda: UNet((2, 16, 16), 3, width=2, norm="group"), (2, 16, 16), True),
    "unet none": (lambda: UNet((2, 16, 16), 3, width=2, norm="none"), (2, 16, 16), True),
    "dnet": (lambda: DNet((3, 8, 8), 3, growth=2, layers=2, norm="instance"), (3, 8, 8), True),
    "tabnet": (lambda: TabNet((7,), 3), (7,), False),
}


@pytest.mark.parametrize("name", MODULES)
def test_three_clients_at_once_are_each_one(name: str) -> None:
    """Logits and gradients, the extra loss among them, in evaluation mode; a program where there can be one."""
    make, shape, is_program = MODULES[name]
    torch.manual_seed(0)
    module = make()
    model = FlatModel(module, {})
    assert (model.traced_graph is not None) == is_program
    rows = model.init_row() + 0.05 * torch.randn(3, model.size)
    for n in model.buffer_names:  # variances stay positive
        a, b = model.spans[n]
        rows[:, a:b] = rows[:, a:b].abs()
    x = torch.randn(3, 4, *shape)

    def run(rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        named, context, lead = model.named(rows), ForwardContext(), rows.shape[:-1]
        leaves = {n: t.clone().requires_grad_() for n, t in named.items() if n not in model.buffer_names}
        logits = model.apply({**named, **leaves}, x, rows.dim() == 2, context)
        loss = logits.square().sum() + sum(extra.sum() for extra in context.extra_losses)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return logits, torch.cat([g.reshape(*lead, -1) for g in gradients], -1)

    together = run(rows, x)
    for i in range(3):
        for a, b in zip(together, run(rows[i], x[i])):
            close(a[i], b, 5e-5 * float(b.detach().abs().max()))
        module.load_state_dict(model.state_dict(rows[i]), strict=False)
        out = module.eval()(x[i])
        close(together[0][i], out[0] if isinstance(out, tuple) else out, 1e-4)


# -- TabNet's parts --------------------------------------------------------------------------------------
def test_sparsemax_is_the_projection_on_the_simplex() -> None:
    """By hand: (2, 1.5, 0) -> (0.75, 0.25, 0); and against bisection of tau."""
    close(sparsemax(torch.tensor([2.0, 1.5, 0.0])), torch.tensor([0.75, 0.25, 0.0]))
    z = 3 * torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    low, high = z.min(1, keepdim=True).values - 1, z.max(1, keepdim=True).values
    for _ in range(60):
        tau = (low + high) / 2
        above = (z - tau).clamp_min(0).sum(1, keepdim=True) > 1
        low, high = torch.where(above, tau, low), torch.where(above, high, tau)
    close(sparsemax(z), (z - low).clamp_min(0), 1e-5)
    close(sparsemax(z).sum(1), torch.ones(50), 1e-5)


def test_sparsemaxs_gradient_is_that_of_its_support() -> None:
    """v less its mean over the support, 0 elsewhere."""
    z = torch.tensor([2.0, 1.5, 0.0], requires_grad=True)
    v = torch.tensor([1.0, 4.0, 7.0])
    close(torch.autograd.grad(sparsemax(z) @ v, z)[0], torch.tensor([-1.5, 1.5, 0.0]))


@pytest.mark.parametrize("samples, parts", [(3, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_virtual_batches_have_no_fewer_samples_than_asked(samples: int, parts: int) -> None:
    norm, x = GhostNorm(5, 4, 0.1).train(), torch.randn(samples, 5)
    y = norm(x)
    expected = [F.batch_norm(part, None, None, training=True) for part in x.chunk(parts)]
    close(y, torch.cat(expected), 1e-5)


def test_tabnets_steps_by_hand() -> None:
    """One step in evaluation mode, whose units are single: the mask, the prior and the entropy as in the paper."""
    torch.manual_seed(0)
    m = TabNet((5,), 2, decision=3, attention=2, steps=2, relaxation=1.5, shared=1, own=0, sparsity=0.1).eval()
    for norm in (n for n in m.modules() if isinstance(n, nn.BatchNorm1d)):
        nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    x = torch.randn(4, 5)

    def normed(norm: Any, z: Tensor) -> Tensor:
        n = norm if isinstance(norm, nn.BatchNorm1d) else norm.norm
        return (z - n.running_mean) / (n.running_var + n.eps).sqrt()

    def transformed(i: int, z: Tensor) -> Tensor:
        y = normed(m.transformers[i].units[0].norm, z @ m.shared[0].weight.T)  # type: ignore
        return y[:, :5] * torch.sigmoid(y[:, 5:])

    f = normed(m.norm, x)
    a, prior, total, entropy = transformed(0, f)[:, 3:], torch.ones(4, 5), torch.zeros(4, 3), torch.zeros(4)
    for i in range(2):
        M = sparsemax(prior * normed(m.norms[i], a @ m.queries[i].weight.T))  # type: ignore
        prior = prior * (1.5 - M)
        y = transformed(i + 1, M * f)
        total, a = total + y[:, :3].relu(), y[:, 3:]
        entropy = entropy - (M * (M + 1e-15).log()).sum(1) / 2
    logits, extra = m(x)
    close(logits, total @ m.head.weight.T + m.head.bias, 1e-5)
    close(extra, 0.1 * entropy, 1e-5)


def test_units_after_the_first_are_residual() -> None:
    m = TabNet((5,), 2, decision=2, attention=2, shared=2, own=0).eval()
    t: Any = m.transformers[1]
    x = torch.randn(3, 5)
    y = t.units[0](m.shared[0](x))
    close(t(x, m.shared), 0.5**0.5 * (y + t.units[1](m.shared[1](y))), 1e-6)


# -- norms, and what is refused --------------------------------------------------------------------------
def test_norms_by_their_words() -> None:
    assert isinstance(norm_layer("batch", 6), nn.BatchNorm2d) and isinstance(norm_layer("none", 6), nn.Identity)
    layers: list[Any] = [norm_layer("group", 16), norm_layer("group", 12), norm_layer("instance", 6)]
    assert [layer.num_groups for layer in layers] == [8, 4, 6]
    close(layers[2](x := torch.randn(2, 6, 3, 3)), F.instance_norm(x), 1e-5)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: UNet((1, 20, 16), 2), r"sides divisible by 16, but the data set gives \(1, 20, 16\)"),
        (lambda: DNet((3, 30, 32), 2), r"sides divisible by 4"),
        (lambda: TabNet((1, 4, 4), 2), r"model=tabnet needs tables"),
        (lambda: TabNet((4,), 2, shared=0, own=0), r"model\.shared and model\.own are both 0"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
