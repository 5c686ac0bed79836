"""FedDAT: distillation, a batch by hand, and stored, uploaded and deployed adapters."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import CPU, all_clients, close, compose, deployed, engine_on, equal, play, ragged
from torch import Tensor

from fedbench.algorithms.feddat import FedDAT, distillation_loss
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.simulation import build_model as build

SMALL = ["model=vit_tiny", "model.patch=2", "model.width=8", "model.heads=2", "model.depth=2"]
ADAPTERS = ("houlsby", "pfeiffer", "parallel", "compacter")


@functools.cache
def federation(sizes: tuple[int, ...] = (7, 21, 12)) -> Federation:
    return Federation.build(*ragged(sizes=sizes), CPU)


def engine(adapter: str = "houlsby", sizes: tuple[int, ...] = (7, 21, 12), **options: Any) -> Engine:
    of = federation(sizes)
    more = ["adapter.n=2"] if adapter == "compacter" else []
    overrides = ["algorithm=feddat", *SMALL, f"adapter={adapter}", "adapter.width=4", "adapter.twin=true", *more]
    model = build.model(compose(overrides), of)
    return engine_on(of, model, SGD(lr=0.5), **{"batch_size": 100, "epochs": 1, **options})


def begun(e: Engine, **options: Any) -> FedDAT:
    """Its adapters drawn, so that they do something."""
    a, g = play(e, FedDAT(**options), 0), torch.Generator().manual_seed(1)
    n, size = e.federation.num_clients, a.first.size
    a.A1 = 0.3 * torch.randn(size, generator=g)
    a.A0[np.arange(n)] = 0.3 * torch.randn(n, size, generator=g)
    a.A2[np.arange(n)] = a.A1.expand(n, -1)
    return a


# -- the distance ----------------------------------------------------------------------------------------
def test_distillation_loss_is_torchs_and_zero_of_itself() -> None:
    g = torch.Generator().manual_seed(0)
    t, s = torch.randn(2, 3, 5, generator=g), torch.randn(2, 3, 5, generator=g)
    wanted = 9 * F.kl_div((s / 3).log_softmax(-1), (t / 3).softmax(-1), reduction="none").sum(-1)
    close(distillation_loss(t, s, 3.0), wanted, 1e-5)
    assert (distillation_loss(t, s, 3.0) > 0).all() and distillation_loss(t, t, 3.0).abs().max() < 1e-6
    pixels = distillation_loss(
        t[..., None, None].expand(-1, -1, -1, 2, 2), s[..., None, None].expand(-1, -1, -1, 2, 2), 3.0
    )
    close(pixels, wanted, 1e-5)


def test_masked_classes_count_for_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    t, s = torch.randn(2, 3, 5, generator=g), torch.randn(2, 3, 5, generator=g).requires_grad_()
    mask = torch.tensor([[True, True, True, False, False]] * 2)
    masked = distillation_loss(t, s, 3.0, mask)
    close(masked, distillation_loss(t[..., :3], s[..., :3], 3.0), 1e-5)
    (gradient,) = torch.autograd.grad(masked.sum(), s)
    assert torch.isfinite(gradient).all() and not gradient[..., 3:].any()


def test_a_client_is_taught_in_its_own_classes_at_tau() -> None:
    """1/2 [ loss + tau^2 KL ], with other clients' classes left out; the student's logits are kept as they are."""
    g = torch.Generator().manual_seed(0)
    t, z = torch.randn(1, 3, 5, generator=g), torch.randn(1, 3, 5, generator=g)
    s = SimpleNamespace(forward=lambda rows, batch: z, task_loss=lambda z, batch: torch.tensor([[1.0, 2.0, 3.0]]))
    batch = SimpleNamespace(class_mask=torch.tensor([[True, True, True, False, False]]))
    kept: dict[str, Tensor] = {}
    found = FedDAT(tau=2.0).distillation(t, kept)(s, z, batch)  # type: ignore[arg-type]
    p, q = (t[..., :3] / 2).softmax(2), (z[..., :3] / 2).softmax(2)
    close(found, 0.5 * (torch.tensor([[1.0, 2.0, 3.0]]) + 4 * (p * (p / q).log()).sum(2)), 1e-5)
    equal(kept["student"], z)


# -- a round ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_batch_by_hand(adapter: str) -> None:
    """One full batch of one client under plain SGD: A1 and the head by L_1, then A0 and the head by L_0."""
    e = engine(adapter, sizes=(8,))
    a, model = begun(e), e.model
    x, y = e.federation.gather(torch.from_numpy(e.federation.splits["train"][0]))
    y = y.long()
    first, second, head = a.first, a.second, a.rest

    def row(one: Tensor, two: Tensor, h: Tensor) -> Tensor:
        return second.put(first.put(head.put(torch.zeros(model.size), h), one), two)

    def taught(z: Tensor, teacher: Tensor) -> Tensor:
        return 0.5 * (
            F.cross_entropy(z, y)
            + 9 * F.kl_div((z / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean")
        )

    A2, A0, h = a.A1.clone(), a.A0[np.arange(1)][0], a.head[np.arange(1)][0]
    A1, h1 = A2.clone().requires_grad_(), h.clone().requires_grad_()
    with torch.no_grad():
        z_T = model.forward(row(A0, A2, h), x)
    z_1 = model.forward(row(A1, A1, h1), x)
    g1, gh = torch.autograd.grad(taught(z_1, z_T), (A1, h1))
    h, own = (h - 0.5 * gh).requires_grad_(), A0.clone().requires_grad_()
    z_D = model.forward(row(own, A2, h), x)
    g0, gh = torch.autograd.grad(taught(z_D, z_1.detach()), (own, h))
    a.round(Cohort(e, np.arange(1), 0))
    close(a.A1, A2 - 0.5 * g1, 1e-5)
    close(a.A0[np.arange(1)][0], A0 - 0.5 * g0, 1e-5)
    close(a.head[np.arange(1)][0], (h - 0.5 * gh).detach(), 1e-5)
    equal(a.A2[np.arange(1)][0], A2)
    assert (g0 != 0).any() and (g1 != 0).any()


def test_the_server_takes_the_mean_of_what_travels() -> None:
    e = engine(batch_size=5)
    a = begun(e)
    received, own = a.A1.clone(), a.A0[np.arange(3)].clone()
    a.round(all_clients(e))
    assert (received != a.A1).any() and (a.A0[np.arange(3)] != own).any()
    equal(a.A2[np.arange(3)], received.expand(3, -1))
    alone = engine(sizes=(8,), batch_size=5)
    b = begun(alone)
    seen: list[Tensor] = []
    cohort = Cohort(alone, np.arange(1), 0)
    upload = cohort.upload
    cohort.upload = lambda **given: seen.append(given["A1"]) or upload(**given)  # type: ignore[method-assign]
    b.round(cohort)
    equal(b.A1, seen[0][0])


def test_with_equal_adapters_all_passes_are_one() -> None:
    e = engine(batch_size=5)
    a = play(e, FedDAT(), 0)
    everybody = np.arange(3)
    a.A0[everybody] = a.A1.expand(3, -1)
    x = torch.randn(3, 4, 1, 4, 4)
    cohort = all_clients(e)
    shared, mixed = a.rows(cohort, a.A1, a.A1), a.rows(cohort, a.A0[everybody], a.A2[everybody])
    equal(e.model.forward(shared, x), e.model.forward(mixed, x))


def test_what_is_deployed() -> None:
    e, everybody = engine(batch_size=5), np.arange(3)
    a = begun(e)
    a.round(all_clients(e))
    rows = deployed(e, a)
    equal(a.first.take(rows), a.A0[everybody])
    equal(a.second.take(rows), a.A2[everybody])
    equal(a.rest.take(rows), a.head[everybody])


def test_who_never_took_part_and_newcomers_deploy_the_servers_adapter() -> None:
    e = engine(batch_size=5)
    a = play(e, FedDAT(), 2, [[0, 1], [0, 1]])
    assert (a.first.take(a.initial) != a.A1).any()
    for row in (deployed(e, a)[2], a.initial_row_for_new_clients([])):
        equal(a.first.take(row), a.A1)
        equal(a.second.take(row), a.A1)
        equal(a.rest.take(row), a.rest.take(a.initial))


def test_a_single_bottleneck_is_refused() -> None:
    of = federation()
    model = build.model(compose(["algorithm=feddat", *SMALL, "adapter=houlsby"]), of)
    with pytest.raises(ConfigError, match=r"with adapter\.twin=true"):
        play(engine_on(of, model, SGD(lr=0.1)), FedDAT())
