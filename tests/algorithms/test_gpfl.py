"""GPFL: its valve and conditions by hand, weight decay, and its limits."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, six_clients
from tiny import HEAD, arrays_of, close, deployed, engine, equal, mlp, play, split_of
from torch import Tensor

from fedbench.algorithms import gpfl
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.gpfl import GPFL
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD


def test_valve_is_that_of_the_modules() -> None:
    """For two clients with their own parameters."""
    modules, named = [], {}
    for client in range(2):
        torch.manual_seed(client)
        modules.append(module := gpfl.valve(5))
        for p in module.parameters():
            p.data = torch.randn_like(p)
    for name, _ in modules[0].named_parameters():
        named[f"valve.{name}"] = torch.stack([m.get_parameter(name).detach() for m in modules])
    z, q = torch.randn(2, 3, 5), torch.randn(2, 5)
    by_hand = [torch.relu(x * (m["gamma"](c) + 1) + m["beta"](c)) for m, x, c in zip(modules, z, q)]
    close(gpfl.conditioned(named, z, q), torch.stack(by_hand))


def test_conditions_by_hand() -> None:
    """q_p is the mean embedding of a client's samples, and permuting classes everywhere changes nothing."""
    e = six_clients()
    a = play(e, GPFL(), rounds=0)
    cohort, M = Cohort(e, np.array([0, 3]), 0), torch.randn(3, 8)
    q_g, q_p = a.conditions(cohort, M)
    y = [e.federation.targets[e.federation.splits["train"][i]] for i in (0, 3)]
    close(q_p, torch.stack([M[labels].mean(0) for labels in y]))
    close(q_g, M.mean(0).expand(2, -1))
    order = [2, 0, 1]
    a.counts = a.counts[:, order]
    for before, after in zip((q_g, q_p), a.conditions(cohort, M[order])):
        close(before, after)


def test_weight_decay_moves_embeddings_and_valve_alone() -> None:
    rows = {}
    for mu in (0.0, 0.3):
        e = six_clients(SGD(lr=0.1), batch_size=100)
        a = play(e, GPFL(mu=mu), 1, [[1]])
        rows[mu] = a.shared.put(e.model.init_row(), a.w)
    decayed = e.model.columns["embeddings"] | e.model.columns["valve"]
    close(decayed.take(rows[0.3] - rows[0.0]), -0.1 * 0.3 * decayed.take(e.model.init_row()), 1e-6)
    equal(decayed.rest(e.model.size).take(rows[0.3]), decayed.rest(e.model.size).take(rows[0.0]))


class ConstantEmbeddings(GPFL):
    """GPFL from class embeddings that all have one value."""

    value = 1.0

    def with_heads(self, cohort: Cohort, w: Tensor) -> Tensor:
        rows = super().with_heads(cohort, w)
        cohort.model.named(rows)["embeddings"].fill_(self.value)
        return rows


def test_gpfl_with_an_open_valve_and_equal_embeddings_is_fedper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal embeddings give equal cosines, whose cross-entropy has no gradient in the features, in the first step."""
    monkeypatch.setattr(gpfl, "conditioned", lambda named, z, q: z)
    e, other = (six_clients(SGD(lr=0.1), batch_size=100) for _ in range(2))
    a, b = play(e, ConstantEmbeddings(lam=0.0, mu=0.0), 3, COHORTS), play(other, FedPer(), 3, COHORTS)
    close(e.model.without("head").take(a.shared.put(e.model.init_row(), a.w))[: len(b.u)], b.u, 1e-6)
    close(a.h.whole(), b.v.whole(), 1e-6)


def test_a_distance_of_zero_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpfl, "conditioned", lambda named, z, q: 0 * z)
    monkeypatch.setattr(ConstantEmbeddings, "value", 0.0)
    assert torch.isfinite(play(six_clients(), ConstantEmbeddings(lam=1.0)).w).all()


def test_deployed_logits_are_those_of_personal_features() -> None:
    e = six_clients()
    a = play(e, GPFL(), 2, COHORTS)
    rows, x = deployed(e, a), torch.linspace(-1, 1, 6 * 4 * 16).view(6, 4, 1, 4, 4)
    named, z = e.model.named(rows["theta"]), e.model.features(rows["theta"], x)
    by_hand = e.model.head(rows["theta"], gpfl.conditioned(named, z, rows["q_p"]))
    equal(a.predict(e.model, rows, x), by_hand)


def test_gpfl_needs_classes() -> None:
    x = np.zeros((4, 16), np.float32)
    e = engine(arrays_of(x, x[:, :3], 3, task="regression"), split_of([2, 2]), mlp(), columns=HEAD)
    with pytest.raises(ConfigError, match="algorithm=gpfl needs one class per sample"):
        GPFL().check(e.federation, e.model, e.optimizer)
