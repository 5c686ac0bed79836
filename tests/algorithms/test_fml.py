"""FML: its limits, and the divergence of predictions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import COHORTS, LR, again, points, six_clients
from tiny import arrays_of, close, deployed, engine, equal, play, split_of
from torch import nn

from fedbench.algorithms._distillation import kl, log_probabilities
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fml import FML
from fedbench.algorithms.local import Local
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD


@pytest.mark.parametrize("targets", ["fixed", "live"])
def test_fml_without_divergences_is_local_beside_uniform_fedavg(targets: str) -> None:
    e, f, g = six_clients(), six_clients(client_weights="uniform"), six_clients()
    a = play(e, FML(1.0, 1.0, targets), 3, COHORTS)  # type: ignore[arg-type]
    close(a.w, play(f, FedAvg(), 3, COHORTS).w, 1e-6)
    close(deployed(e, a), deployed(g, play(g, Local(), 3, COHORTS)), 1e-6)


@pytest.mark.parametrize("targets", ["fixed", "live"])
def test_equal_models_have_no_divergence(targets: str) -> None:
    """The first step is one on alpha or beta times the cross-entropy."""
    e, f, g = (six_clients(SGD(lr=lr), batch_size=100) for lr in (LR, 0.3 * LR, 0.8 * LR))
    a = play(e, FML(0.3, 0.8, targets))  # type: ignore[arg-type]
    close(deployed(e, a), deployed(f, play(f, Local())), 1e-6)
    close(a.w, deployed(g, play(g, Local())).mean(0), 1e-6)


def test_personal_models_move_in_their_rounds_only() -> None:
    e = six_clients()
    a = play(e, FML(), 1, COHORTS)
    before = a.theta[np.arange(6)]
    again(e, a, 1, [1, 2])
    moved = (a.theta[np.arange(6)] != before).any(1)
    assert moved.tolist() == [False, True, True, False, False, False]


def test_fml_of_masks_is_fml_of_their_pixels() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 2, 3, 4, generator=g), torch.randint(3, (4, 3, 4), generator=g)
    linear, conv = nn.Linear(2, 3), nn.Conv2d(2, 3, 1)
    conv.load_state_dict({"weight": linear.weight[..., None, None], "bias": linear.bias})
    masks = engine(arrays_of(x.numpy(), y.numpy(), 3, task="segmentation"), split_of([4]), conv, SGD(lr=0.5))
    flat = arrays_of(x.movedim(1, -1).reshape(-1, 2).numpy(), y.flatten().numpy(), 3)
    pixels = engine(flat, split_of([48]), linear, SGD(lr=0.5), batch_size=48)
    method = FML(0.3, 0.8, "live")
    close(play(masks, method, 3).w, play(pixels, FML(0.3, 0.8, "live"), 3).w, 1e-6)


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.8, 0.2]]])
    want = 0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2)
    close(kl(p.log(), q.log(), "sum"), torch.tensor([[want]]).float())
    close(kl(p.log(), q.log(), "mean"), torch.tensor([[want / 2]]).float())


def test_divergence_leaves_out_classes_that_a_client_does_not_have() -> None:
    batch = SimpleNamespace(class_mask=torch.tensor([[True, False, True]]))
    a, b = (log_probabilities(torch.tensor([[[*pair]]]), batch) for pair in ((1.0, 9.0, 2.0), (3.0, -7.0, 0.0)))  # type: ignore[arg-type]
    close(a[..., [0, 2]].exp().sum(2), torch.ones(1, 1))
    equal(kl(a, b, "sum"), kl(a[..., [0, 2]], b[..., [0, 2]], "sum"))


def test_fml_refuses_targets_that_are_no_classes() -> None:
    with pytest.raises(ConfigError, match="algorithm=fml needs one class per sample or pixel"):
        play(points([[1.0]]), FML())


@pytest.mark.parametrize("targets", ["fixed", "live"])
def test_fml_by_hand(targets: str) -> None:
    """Two full-batch steps by autograd, from different models, with alpha 0.3 and beta 0.8."""
    e = six_clients(SGD(lr=0.5), batch_size=100, epochs=2)
    a = play(e, FML(0.3, 0.8, targets), rounds=0)  # type: ignore[arg-type]
    ids, other = np.arange(6), a.w.roll(1)
    a.theta[ids] = other.expand(6, -1)
    rows = []
    for i in range(6):
        x, y = e.federation.gather(torch.from_numpy(e.federation.splits["train"][i]))
        theta, g = other, a.w
        for _ in range(2):
            pair = [row.clone().requires_grad_() for row in (theta, g)]
            p, q = (e.model.predict(row, x).log_softmax(1) for row in pair)
            ce, ce_g = (nn.functional.nll_loss(log_p, y) for log_p in (p, q))

            def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
                return (log_p.exp() * (log_p - log_q)).sum(1).mean()

            if targets == "live":
                total = 0.3 * ce + 0.7 * divergence(q, p) + 0.8 * ce_g + 0.2 * divergence(p, q)
                slopes = torch.autograd.grad(total, pair)
            else:
                L = 0.3 * ce + 0.7 * divergence(q.detach(), p)
                L_g = 0.8 * ce_g + 0.2 * divergence(p.detach(), q)
                slopes = torch.autograd.grad(L, pair[0]) + torch.autograd.grad(L_g, pair[1])
            theta, g = theta - 0.5 * slopes[0], g - 0.5 * slopes[1]
        rows.append((theta, g))
    again(e, a, 0)
    close(a.theta[ids], torch.stack([theta for theta, _ in rows]), 1e-5)
    close(a.w, torch.stack([g for _, g in rows]).mean(0), 1e-5)
