"""Logistic regression: the l1 term of pFedNet's released linear model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny import HEAD, close, engine, play, ragged, seeded

from fedbench.algorithms.local import Local
from fedbench.engine.optim import SGD
from fedbench.models.logistic import Logistic


@pytest.mark.parametrize("plan", ["vmap", "threads", "loop"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_with_the_sum_of_magnitudes(plan: str, bias: bool) -> None:
    module = seeded(lambda: Logistic((1, 4, 4), 3, bias=bias, l1=0.3), 0)
    e = engine(*ragged(), module, SGD(lr=0.1), plan=plan, columns=HEAD, batch_size=100)
    a = play(e, Local(), 1)
    federation = e.federation
    for i in range(federation.num_clients):
        x, y = federation.gather(torch.from_numpy(federation.splits["train"][i]))
        W, b = module.head.weight.detach().clone().requires_grad_(), module.head.bias
        loss = F.cross_entropy(F.linear(x.flatten(1), W, b), y.long()) + 0.3 * W.abs().sum()
        expected = W - 0.1 * torch.autograd.grad(loss, W)[0]
        close(e.model.named(a.theta[[i]])["head.weight"][0], expected.detach(), 1e-5)


def test_without_it_logits_come_alone() -> None:
    assert Logistic((4,), 2)(torch.ones(3, 4)).shape == (3, 2)
    logits, extra = Logistic((4,), 2, l1=1.0)(torch.ones(3, 4))
    assert logits.shape == (3, 2) and extra.shape == (3,)
