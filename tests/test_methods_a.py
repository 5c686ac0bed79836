"""FedDyn, APFL, FedRep, LG-FedAvg, FedBABU, Per-FedAvg, FedRoD, pFedMe, exact PGFed: limits, invariants, steps by hand.

By hand means: Squares, f_i(theta) = 0.5 mean (theta - c_i)^2, of gradient theta - c_i; or a product u h of a base and
a head of one number each, f_i = 0.5 (h u - c_i)^2, of gradients (h u - c_i) h and (h u - c_i) u.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from tiny import (
    HEAD,
    Point,
    arrays_of,
    close,
    deployed,
    engine,
    engine_on,
    equal,
    everyone,
    mlp,
    play,
    ragged,
    seeded,
    split_of,
    targets_federation,
)
from torch import Tensor, nn

from fedbench.algorithms.apfl import APFL
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedbabu import FedBABU
from fedbench.algorithms.feddyn import FedDyn
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.fedrep import FedRep
from fedbench.algorithms.fedrod import FedRoD
from fedbench.algorithms.lg_fedavg import LGFedAvg
from fedbench.algorithms.local import Local
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.algorithms.pfedme import PFedMe
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_exact import PGFedExact
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort, Engine
from fedbench.engine.optim import SGD, Adam
from fedbench.partition.base import Ragged, Split

COHORTS = ([0, 2, 3], [1, 2], [0, 4, 5])
METHODS: dict[str, Callable[[], Algorithm]] = {
    "feddyn": FedDyn, "apfl": APFL, "apfl_adaptive": partial(APFL, adaptive=True), "fedrep": FedRep,
    "lg_fedavg": LGFedAvg, "lg_fedavg_joint": partial(LGFedAvg, update="joint"), "fedbabu": FedBABU,
    "per_fedavg": PerFedAvg, "per_fedavg_hf": partial(PerFedAvg, mode="hf"), "fedrod": FedRoD, "pfedme": PFedMe,
    "pgfed_exact": PGFedExact}


def nets(optimizer: SGD | Adam | None = None, columns: dict | None = None, **options: object) -> Engine:
    """Six ragged clients, a network of two layers."""
    return engine(*ragged(), mlp(), optimizer or SGD(lr=0.1), columns=columns or HEAD, **options)


def points(targets: Sequence[Sequence[float]], lr: float, start: float = 0.0, batch_size: int = 100, **options: object
           ) -> Engine:
    """Squares in one number: client i's samples are targets[i]."""
    return engine_on(targets_federation([np.array(t)[:, None] for t in targets]), Point([start]), SGD(lr=lr),
                     batch_size=batch_size, **options)


class Product(nn.Module):
    """x -> h u x."""

    def __init__(self, u: float, h: float):
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.body.weight.data.fill_(u)
        self.head.weight.data.fill_(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def products(targets: Sequence[float], optimizer: SGD, u: float = 1.0, h: float = 2.0, **options: object) -> Engine:
    """Two-number rows [u, h]; client i has one sample, targets[i]."""
    return engine_on(targets_federation([np.array([[t]]) for t in targets]), Product(u, h), optimizer, columns=HEAD,
                     **options)


def row(*values: float) -> Tensor:
    return torch.tensor(values)


# -- every method ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_nothing_moves_at_learning_rate_zero(name: str) -> None:
    e = nets(SGD(lr=0.0))
    method = partial(PFedMe, inner_lr=0.0) if name == "pfedme" else METHODS[name]
    a = play(e, method(), rounds=0)
    before = {n: t.clone() for n, t in a.state_dict().items()}
    play(e, a, 2, COHORTS, begin=1)
    close(a.state_dict(), before, 1e-6)                       # a weighted mean of equal rows rounds
    for store in e.rows.all.values():
        close(store[np.arange(6)], store.default.expand(6, *store.default.shape), 1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_only_the_cohort_changes_its_rows(name: str) -> None:
    e = nets(SGD(lr=0.1, momentum=0.9, reset="never"))
    a = play(e, METHODS[name](), 1, [[1, 3]])
    assert all(set(store.touched()) <= {1, 3} for store in e.rows.all.values())
    deployed(e, a)                                            # nor does evaluation, which may train, leave traces
    assert all(set(store.touched()) <= {1, 3} for store in e.rows.all.values())


@pytest.mark.parametrize("name", METHODS)
def test_renumbering_clients_permutes_rows(name: str) -> None:
    """Full batches, since batches are keyed by client; Per-FedAvg cuts them, so there all samples are one sample."""
    order = np.array([3, 0, 5, 1, 4, 2])
    arrays, split = ragged()
    if name.startswith("per_fedavg"):
        arrays.inputs = np.repeat(arrays.inputs[split.train.offsets[:-1]], np.diff(split.train.offsets), 0)
        arrays.targets = np.repeat(arrays.targets[split.train.offsets[:-1]], np.diff(split.train.offsets))
        arrays.split, split = np.zeros(len(arrays.targets), np.int8), Split(split.train, split.val, split.train)
    other = Split(*(Ragged.from_lists([part[i] for i in order]) if part.sizes.any() else part
                    for part in (split.train, split.val, split.test)))
    runs = []
    for s in (split, other):
        e = engine(arrays, s, mlp(), SGD(lr=0.1, momentum=0.5), columns=HEAD, batch_size=100, epochs=2)
        a = play(e, METHODS[name](), 2)
        runs.append((deployed(e, a, 1), a.global_row()))
    close(runs[1][0], runs[0][0][torch.from_numpy(order)], 2e-4)
    if runs[0][1] is not None:
        close(runs[1][1], runs[0][1], 2e-4)


@pytest.mark.parametrize("name, units", {
    "feddyn": "all", "apfl": "all", "apfl_adaptive": "all", "fedrep": "base", "lg_fedavg": "head",
    "lg_fedavg_joint": "head", "fedbabu": "base", "per_fedavg": "all", "per_fedavg_hf": "all", "fedrod": "all",
    "pfedme": "all", "pgfed_exact": "all"}.items())
def test_bytes_of_a_round(name: str, units: str) -> None:
    """Per client and direction: the model (17 x 8 + 9 x 3 numbers), its base or its head."""
    numbers = {"all": 163, "base": 136, "head": 27}[units]
    e = nets()
    a = play(e, METHODS[name](), rounds=0)
    cohort = Cohort(e, np.array([1, 4]), 0)
    a.round(cohort)
    assert (cohort.ledger.bytes_down, cohort.ledger.bytes_up) == (2 * 4 * numbers, 2 * 4 * numbers)


@pytest.mark.parametrize("method", [FedRep, LGFedAvg, FedBABU, FedRoD])
def test_a_model_without_head_is_refused(method: type[Algorithm]) -> None:
    with pytest.raises(ConfigError, match="needs the column group 'head'"):
        play(engine(*ragged(), mlp()), method())


# -- FedDyn ----------------------------------------------------------------------------------------------
def test_feddyn_by_hand() -> None:
    """c = (1, 3), lr 0.5, alpha 0.2, two steps a round.

    Round 1, both, w = 0:  theta_0: 0.5, then 0.5 - 0.5 (-0.5 + 0.2 x 0.5) = 0.7;  theta_1 = 3 x 0.7 = 2.1.
    g = -0.2 theta = (-0.14, -0.42);  h = -0.2 (0.7 + 2.1) / 2 = -0.28;  w = 1.4 + 0.28 / 0.2 = 2.8.
    Round 2, client 0 alone:  gradient 1.8 + 0.14 = 1.94, theta = 1.83;  then 0.83 + 0.14 + 0.2 (1.83 - 2.8) = 0.776,
    theta = 1.442.  g_0 = -0.14 - 0.2 (1.442 - 2.8) = 0.1316;  h = -0.28 + 0.2 x 1.358 / 2 = -0.1442 (over all N);
    w = 1.442 + 0.1442 / 0.2 = 2.163.
    """
    e = points([[1], [3]], lr=0.5, epochs=2)
    a = play(e, FedDyn(alpha=0.2))
    close(a.g[np.arange(2)][:, 0], row(-0.14, -0.42))
    close(torch.cat([a.h, a.w]), row(-0.28, 2.8))
    play(e, a, 1, [[0]], begin=1)
    close(a.g[np.arange(2)][:, 0], row(0.1316, -0.42))
    close(torch.cat([a.h, a.w]), row(-0.1442, 2.163))


def test_feddyn_begins_as_fedprox_with_a_doubled_step() -> None:
    e, alpha = nets(epochs=2), 0.3
    w = e.model.init_row()
    theta = everyone(e).train(w, extra_grad=lambda s: alpha * (s.theta - w)).theta          # FedProx(mu = alpha)
    a = play(e, FedDyn(alpha))
    close(a.g[np.arange(6)], -alpha * (theta - w))
    close(a.w, w + 2 * (theta - w).mean(0))


def test_feddyn_memories_sum_to_the_servers() -> None:
    e = nets()
    a = play(e, FedDyn(), 3, COHORTS)
    close(a.g[np.arange(6)].sum(0), 6 * a.h)


def test_feddyn_stays_at_the_optimum() -> None:
    """c = (1, 3): at w = 2, the minimum of f_0 + f_1, with g_i = grad f_i(2) = (1, -1) and h = 0, nothing moves."""
    e = points([[1], [3]], lr=0.4, epochs=3)
    a = play(e, FedDyn(), rounds=0)
    a.w, a.g[np.arange(2)] = row(2.0), torch.tensor([[1.0], [-1.0]])
    play(e, a, 3, begin=1)
    close(torch.cat([a.w, a.h, a.g[np.arange(2)][:, 0]]), row(2.0, 0.0, 1.0, -1.0))


# -- APFL ------------------------------------------------------------------------------------------------
def mixture_by_hand(c: float, v: float, a: float, lr: float, steps: int, adaptive: bool) -> tuple[float, float, float]:
    """w, v, a after the steps of a round from w = 0."""
    w = 0.0
    for t in range(steps):
        g = a * v + (1 - a) * w - c
        slope = (v - w) * g
        w, v = w - lr * (w - c), v - lr * a * g
        if adaptive and t == 0:
            a = min(max(a - lr * slope, 0), 1)
    return w, v, a


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_by_hand(adaptive: bool) -> None:
    """c = (1, 3), v = (2, -1), a = 0.25, lr 0.5.  First step:  vbar = (0.5, -0.25), grad = (-0.5, -3.25),
    v = (2.0625, -0.59375), w = (0.5, 1.5);  adaptive: slope (-1, 3.25), a = (0.75, -1.375 cut to 0).
    Two steps as in mixture_by_hand; a moves at the first one only.
    """
    assert mixture_by_hand(1, 2, 0.25, 0.5, 1, True) == (0.5, 2.0625, 0.75)
    assert mixture_by_hand(3, -1, 0.25, 0.5, 1, True) == (1.5, -0.59375, 0)
    for epochs in (1, 2):
        e = points([[1], [3]], lr=0.5, epochs=epochs)
        m = play(e, APFL(0.25, adaptive), rounds=0)
        m.v[np.arange(2)] = torch.tensor([[2.0], [-1.0]])
        play(e, m, begin=1)
        w, v, a = torch.tensor([mixture_by_hand(c, v, 0.25, 0.5, epochs, adaptive) for c, v in ((1, 2), (3, -1))]).T
        close(m.v[np.arange(2)][:, 0], v)
        close(m.a[np.arange(2)][:, 0], a)
        close(m.w, w.mean(0, keepdim=True))
        close(deployed(e, m)[:, 0], a * v + (1 - a) * w.mean())          # with the aggregated w


def test_apfls_share_ends_at_one() -> None:
    """w = 0, a = 0.5, lr 0.5.  c = 1, v = 1.5: vbar = 0.75, slope 1.5 (-0.25), a = 0.6875.  c = 9, v = 5: vbar = 2.5,
    slope 5 (-6.5), a = 16.75 cut to 1."""
    e = points([[1], [9]], lr=0.5)
    m = play(e, APFL(0.5, adaptive=True), rounds=0)
    m.v[np.arange(2)] = torch.tensor([[1.5], [5.0]])
    play(e, m, begin=1)
    close(m.a[np.arange(2)][:, 0], row(0.6875, 1.0))


def test_apfl_without_personal_share_is_fedavg() -> None:
    e, other = nets(epochs=2), nets(epochs=2)
    a, b = play(e, APFL(alpha=0.0), 3, COHORTS), play(other, FedAvg(), 3, COHORTS)
    equal(a.w, b.w)
    equal(deployed(e, a), deployed(other, b))
    equal(a.v[np.arange(6)], e.model.init_row().expand(6, -1))


class Normed(nn.Module):
    """With BatchNorm, whose statistics travel in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("momentum, normed", [(0.0, False), (0.9, False), (0.9, True)])
def test_apfl_all_personal_is_local_beside_fedavg(momentum: float, normed: bool) -> None:
    """Kept momentum of both rows, and BatchNorm statistics, included."""
    def fresh() -> Engine:
        return engine(*ragged(), seeded(Normed) if normed else mlp(),
                      SGD(lr=0.1, momentum=momentum, reset="never"), columns=HEAD, drop_last=True)
    e, f, g = fresh(), fresh(), fresh()
    a, b, c = (play(x, m, 3, COHORTS) for x, m in ((e, APFL(alpha=1.0)), (f, Local()), (g, FedAvg())))
    close(deployed(e, a), deployed(f, b), 1e-6)
    equal(a.w, c.w)


def test_feddyn_averages_statistics_as_they_are() -> None:
    """Running means and variances have no gradient: neither alpha nor h moves them."""
    def fresh() -> Engine:
        return engine(*ragged((10,) * 6), seeded(Normed), SGD(lr=0.1), columns=HEAD)        # FedDyn weighs all alike
    e, f = fresh(), fresh()
    a, b = play(e, FedDyn(alpha=0.5), 1), play(f, FedProx(mu=0.5), 1)          # a client's first round is FedProx's
    statistics = e.model.trained.rest(e.model.size)
    close(statistics.take(a.w), statistics.take(b.w), 1e-6)
    assert not torch.equal(statistics.take(a.w), statistics.take(e.model.init_row()))


# -- FedRep ----------------------------------------------------------------------------------------------
def test_fedrep_by_hand() -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5).  Head: h = 2 + 0.1 (1, 3) = (2.1, 2.3).  Base, at the new head:
    u = 1 + 0.1 (0.9 x 2.1, 2.7 x 2.3) = (1.189, 1.621), of mean 1.405."""
    e = products([3, 5], SGD(lr=0.1))
    close(deployed(e, play(e, FedRep())), torch.tensor([[1.405, 2.1], [1.405, 2.3]]))


def test_fedrep_keeps_counters_of_head_and_base_apart() -> None:
    """Adam's corrections of the base are by the steps of the base, round after round."""
    e = nets(Adam(lr=0.01, reset="never"))
    play(e, FedRep(head_epochs=3), 2)
    steps = everyone(e).train(e.model.init_row()).steps[:, None]             # of an epoch
    close(e.memories["optimizer/head/count"].whole(), 6 * steps)
    close(e.memories["optimizer/theta/count"].whole(), 3 * steps)             # with the training above


def test_fedrep_counts_both_kinds_of_epochs() -> None:
    e = nets(epochs=2)
    a = play(e, FedRep(head_epochs=3, body_epochs=1), rounds=0)
    cohort = everyone(e)
    a.round(cohort)
    assert cohort.ledger.samples == (3 + 1) * sum(e.federation.num_samples)


def test_fedrep_without_head_epochs_is_fedbabu() -> None:
    e, other = nets(SGD(lr=0.1, momentum=0.9), epochs=2), nets(SGD(lr=0.1, momentum=0.9), epochs=2)
    a, b = play(e, FedRep(head_epochs=0), 3, COHORTS), play(other, FedBABU(), 3, COHORTS)
    equal(a.u, b.base.take(b.w))
    equal(deployed(e, a, final=False), deployed(other, b, final=False))


def test_fedrep_phases_leave_the_other_part_alone() -> None:
    e = nets()
    head, base = e.model.columns["head"], e.model.without("head")
    first = everyone(e).train(e.model.init_row(), columns=head, key="head").theta
    equal(base.take(first), base.take(e.model.init_row()).expand(6, -1))
    a = play(e, FedRep())
    equal(a.v[np.arange(6)], head.take(first))
    equal(a.u, everyone(e).weights @ base.take(everyone(e).train(first, columns=base).theta))


# -- LG-FedAvg -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("update, h", [("alternate", (2.072 + 2.288) / 2), ("joint", 2.2)])
def test_lg_fedavg_by_hand(update: str, h: float) -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5): u = 1 + 0.1 (1, 3) 2 = (1.2, 1.6).  alternate, at the new base:
    h = 2 + 0.1 (0.6 x 1.2, 1.8 x 1.6) = (2.072, 2.288);  joint, at the old one: 2 + 0.1 (1, 3) = (2.1, 2.3)."""
    e = products([3, 5], SGD(lr=0.1))
    close(deployed(e, play(e, LGFedAvg(update))), torch.tensor([[1.2, h], [1.6, h]]))


@pytest.mark.parametrize("drift", [False, True])
def test_lg_fedavg_momentum_of_the_part_that_waits(drift: bool) -> None:
    """Momentum 0.9, two batches, c = 3: per part v <- 0.9 v + g, theta <- theta - lr v.  With the drift, the part
    that waits takes the same step with g = 0."""
    at, v, lr = [1.0, 2.0], [0.0, 0.0], 0.05
    for _ in range(2):
        for part in (0, 1):
            g = (at[0] * at[1] - 3) * at[1 - part]
            for i in (0, 1):
                if i == part or drift:
                    v[i] = 0.9 * v[i] + (g if i == part else 0)
                    at[i] -= lr * v[i]
    e = products([3], SGD(lr=lr, momentum=0.9), epochs=2)
    close(deployed(e, play(e, LGFedAvg(frozen_momentum_drift=drift)))[0], torch.tensor(at))


@pytest.mark.parametrize("update", ["alternate", "joint"])
@pytest.mark.parametrize("shared", ["head", "base"])
def test_lg_fedavg_limits(update: str, shared: str) -> None:
    """All columns global: FedAvg.  None global: Local.  A part without columns takes no step."""
    columns = {"head": ["body.*", "head.*"] if shared == "head" else []}
    e, other = nets(columns=columns, epochs=2), nets(epochs=2)
    a = play(e, LGFedAvg(update), 3, COHORTS)
    b = play(other, FedAvg() if shared == "head" else Local(), 3, COHORTS)
    equal(deployed(e, a), deployed(other, b))


def test_lg_fedavg_adam_counts_one_step_a_batch() -> None:
    """Base and head each follow Adam with a count of their own: batch t is its step t."""
    at, m, v, lr = [1.0, 2.0], [0.0, 0.0], [0.0, 0.0], 0.1
    for t in (1, 2, 3):
        for part in (0, 1):
            g = (at[0] * at[1] - 3) * at[1 - part]
            m[part], v[part] = 0.9 * m[part] + 0.1 * g, 0.999 * v[part] + 0.001 * g * g
            at[part] -= lr * (m[part] / (1 - 0.9 ** t)) / ((v[part] / (1 - 0.999 ** t)) ** 0.5 + 1e-8)
    e = products([3], Adam(lr=lr), epochs=3)
    close(deployed(e, play(e, LGFedAvg()))[0], torch.tensor(at))


# -- FedBABU ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part, head, want", [
    ("all", "frozen", (1.42, 2.014)), ("head", "frozen", (1.4, 2.014)), ("base", "frozen", (1.42, 2.0)),
    ("all", "zero", (1.4, 0.21))])
def test_fedbabu_by_hand(part: str, head: str, want: tuple[float, float]) -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5):  u = 1 + 0.1 (1, 3) 2 = (1.2, 1.6), of mean 1.4; h stays.  Fine-tuning of
    client 0 with lr 0.05: error 2.8 - 3 = -0.2, u = 1.4 + 0.05 x 0.2 x 2, h = 2 + 0.05 x 0.2 x 1.4.  From h = 0:
    error -3, the gradient of u is 0, h = 0.05 x 3 x 1.4 = 0.21."""
    e = products([3, 5], SGD(lr=0.1))
    a = play(e, FedBABU(finetune_lr=0.05, finetune_part=part, finetune_head=head))
    close(deployed(e, a, final=False), torch.tensor([[1.4, 2.0]] * 2))
    close(deployed(e, a, final=True)[0], row(*want))
    close(a.global_row(), row(1.4, 2.0))                       # and fine-tuning left the server alone


def test_fedbabu_never_trains_the_head() -> None:
    e = nets(SGD(lr=0.1, momentum=0.9, weight_decay=0.1), epochs=2)
    init, head = e.model.init_row(), e.model.columns["head"]
    a = play(e, FedBABU(finetune_epochs=0), 3, COHORTS)
    rows = deployed(e, a, final=True)
    equal(head.take(rows), head.take(init).expand(6, -1))
    assert (a.base.take(rows) != a.base.take(init)).all()
    equal(rows, a.global_row().expand(6, -1))                  # E_ft = 0: [u, h_init]


def test_fedbabu_zero_head_gives_the_base_no_first_gradient() -> None:
    e = nets(batch_size=100)                                   # so that fine-tuning is one step
    a = play(e, FedBABU(finetune_head="zero", finetune_lr=0.1))
    rows = deployed(e, a)
    equal(a.base.take(rows), a.base.take(a.w).expand(6, -1))
    assert (a.head.take(rows) != 0).any(1).all()


# -- Per-FedAvg ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode, want", [("fo", 2.875), ("hf", 3.15625)])
def test_per_fedavg_by_hand(mode: str, want: float) -> None:
    """w = 4, c = 1, a = 0.25, b = 0.5:  adapted 4 - 0.25 x 3 = 3.25, g = 2.25.  FO: 4 - 0.5 x 2.25 = 2.875.
    HF, Hessian 1: 4 - 0.5 (2.25 - 0.25 x 2.25) = 3.15625."""
    e = points([[1, 1, 1]], lr=0.5, start=4.0)
    close(play(e, PerFedAvg(mode, alpha=0.25)).w, row(want), 1e-4)


def test_per_fedavg_adapts_and_steps_on_different_samples() -> None:
    """Samples 1 and 2, batches of one, w = 4, a = 0.25, b = 0.5.  Adapted on 1: 3.25, g = 3.25 - 2, w = 3.375;
    adapted on 2: 3.5, g = 3.5 - 1, w = 2.75."""
    found = {round(float(play(points([[1, 2]], 0.5, 4.0, batch_size=1, seed=seed), PerFedAvg(alpha=0.25)).w), 4)
             for seed in range(8)}
    assert found == {3.375, 2.75}


@pytest.mark.parametrize("delta", [1e-3, 0.1, 10.0])
def test_per_fedavg_hf_is_exact_on_quadratics(delta: float) -> None:
    """f = 0.5 (x . theta)^2, H = x x^T: the gradient of f(theta - a H theta) is (I - a H) H (I - a H) theta."""
    x, a, b = torch.tensor([1.0, -2.0, 0.5]), 0.3, 0.1
    theta, h = torch.tensor([0.7, 0.2, -1.0]), torch.outer(x, x)
    federation = targets_federation([np.zeros((3, 1))])
    federation.inputs = x.expand(3, 3).clone()
    line = nn.Sequential(nn.Linear(3, 1, bias=False))
    line[0].weight.data = theta[None].clone()
    e = engine_on(federation, line, SGD(lr=b))
    shrink = torch.eye(3) - a * h
    close(play(e, PerFedAvg("hf", alpha=a, delta=delta)).w, theta - b * shrink @ h @ shrink @ theta, 2e-4)


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_per_fedavg_without_inner_step_is_sgd_on_the_second_part(mode: str) -> None:
    e, other, parts = nets(epochs=2), nets(epochs=2), {"fo": 2, "hf": 3}[mode]
    a = play(e, PerFedAvg(mode, alpha=0.0))
    theta = everyone(other).train(other.model.init_row(), batch_size=5 * parts, drop_last=True,
                                  step=lambda s, batch: s.descend(s.grad(batch.split(parts)[1]))).theta
    close(a.w, everyone(other).weights @ theta, 1e-6)
    equal(deployed(e, a), a.w.expand(6, -1))                   # nothing to adapt: FedAvg's evaluation
    uniform = play(nets(epochs=2), PerFedAvg(mode, alpha=0.0, weights="uniform"))
    close(uniform.w, theta.mean(0), 1e-6)


def test_per_fedavg_takes_a_step_per_double_batch() -> None:
    """Sizes 7, 21, 12, 4, 18, 9 and B = 5: floor(n / 10) outer steps, one where a client has fewer than 10."""
    e = nets()
    a = play(e, PerFedAvg(), rounds=0)
    cohort = everyone(e)
    a.round(cohort)
    assert cohort.ledger.steps == 1 + 2 + 1 + 1 + 1 + 1


def test_per_fedavg_deploys_one_keyed_step() -> None:
    """A step of size alpha (null: the optimizer's rate) on one batch of B samples, keyed by round and client."""
    samples = [[float(i) for i in range(20)], [100.0 + i for i in range(20)]]
    e = points(samples, lr=0.5, start=3.0, batch_size=1)
    a = play(e, PerFedAvg(alpha=0.25), rounds=0)
    rows = [deployed(e, a, r)[:, 0] for r in range(6)]
    drawn = torch.stack([(r - 3) / 0.25 + 3 for r in rows])                              # [6, 2]
    close(drawn, drawn.round(), 1e-4)
    assert ((drawn[:, 0] < 20) & (drawn[:, 1] >= 100)).all() and len(set(drawn[:, 0].tolist())) > 2
    equal(rows[0], deployed(e, a, 0)[:, 0])
    equal(a.personalized(Cohort(e, np.array([1]), 2, "evaluation"), False)[0], rows[2][1:])
    by_rate = deployed(e, play(e, PerFedAvg(), rounds=0))[:, 0]
    close(by_rate, 3 - 0.5 * (3 - drawn[0]), 1e-4)


def test_per_fedavg_refuses_clients_it_cannot_split() -> None:
    with pytest.raises(ConfigError, match=r"only 1 training sample$"):
        play(points([[1], [1, 2]], 0.1), PerFedAvg())


# -- FedRoD ----------------------------------------------------------------------------------------------
class Linear(nn.Module):
    """x -> W x, all of it the head."""

    def __init__(self, inputs: int, classes: int):
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(inputs, classes, bias=False)
        self.head.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def rod_by_hand(x: np.ndarray, y: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Generic and personal head [2] after full-batch steps of size 1 from 0, for two classes and inputs [n]."""
    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)
    hot = np.eye(2)[y]
    h, g = np.zeros(2), np.zeros(2)
    for _ in range(steps):
        generic = softmax(x[:, None] * h + np.log(hot.mean(0))) - hot
        own = softmax(x[:, None] * h + x[:, None] * g) - hot
        h, g = h - (generic * x[:, None]).mean(0), g - (own * x[:, None]).mean(0)
    return h, g


@pytest.mark.parametrize("steps", [1, 3])
def test_fedrod_by_hand(steps: int) -> None:
    """Client 0: x = 1 thrice in class 0, x = 2 once in class 1.  From zero heads the generic softmax is pi =
    (3/4, 1/4), so W_0 loses mean(x) 3/4 - 3/4 = 0.1875; the personal one is (1/2, 1/2): g_0 loses 0.625 - 0.75.
    Client 1: x = 1 once, x = 2 thrice.  The server's W is the mean; a client deploys W x + g x."""
    data = [(np.array([1, 1, 1, 2.0]), np.array([0, 0, 0, 1])), (np.array([1, 2, 2, 2.0]), np.array([0, 1, 1, 1]))]
    h, g = (np.stack(v) for v in zip(*(rod_by_hand(x, y, steps) for x, y in data)))
    if steps == 1:
        np.testing.assert_allclose(h[0], [-0.1875, 0.1875])
        np.testing.assert_allclose(g[0], [0.125, -0.125])
    x, y = (np.concatenate([d[i] for d in data]) for i in (0, 1))
    split = split_of([4, 4])
    arrays = arrays_of(x.astype(np.float32)[:, None], y, 2)
    e = engine(arrays, Split(split.train, split.val, split.train), Linear(1, 2), SGD(lr=1.0), columns=HEAD,
               batch_size=4, epochs=steps)
    a = play(e, FedRoD())
    close(a.shared.take(a.global_row()), torch.from_numpy(h.mean(0)).float())
    close(a.g[np.arange(2)], torch.from_numpy(g).float())
    logits = a.predict(e.model, deployed(e, a), torch.tensor([[[2.0]], [[2.0]]]))
    close(logits[:, 0], torch.from_numpy(2 * (h.mean(0) + g)).float())


def balanced() -> tuple:
    arrays, _ = ragged()
    arrays.targets = np.arange(len(arrays.targets)) % 3
    return arrays, split_of([9, 21, 12, 3, 18, 6])


def test_fedrod_is_fedavg_where_classes_are_equally_frequent() -> None:
    e, other = (engine(*balanced(), mlp(), SGD(lr=0.1), columns=HEAD, epochs=2) for _ in range(2))
    a, b = play(e, FedRoD(), 3, COHORTS), play(other, FedAvg(), 3, COHORTS)
    close(a.shared.take(a.w), b.w, 1e-6)


def test_fedrod_personal_heads_touch_nothing_shared() -> None:
    """Other personal heads, the same u and h; and with one of zeros a client deploys the generic model."""
    e, other = nets(epochs=2), nets(epochs=2)
    a, b = play(e, FedRoD(), rounds=0), play(other, FedRoD(), rounds=0)
    b.g[np.arange(6)] = torch.linspace(-1, 1, 6 * b.personal.size).view(6, -1)
    play(e, a, 2, begin=1), play(other, b, 2, begin=1)
    equal(a.w, b.w)
    assert (a.g[np.arange(6)] != b.g[np.arange(6)]).all()
    a.g[np.arange(6)] = torch.zeros(6, a.personal.size)
    x = torch.linspace(-1, 1, 6 * 4 * 16).view(6, 4, 1, 4, 4)
    equal(a.predict(e.model, deployed(e, a), x), e.model.predict(a.w.expand(6, -1).clone(), x))


def test_fedrod_absent_classes_leave_the_generic_head_alone() -> None:
    """Client 0 has classes 0 and 1 only: its generic softmax is over these, its personal one over all three."""
    arrays, split = ragged()
    own = split.train[0]
    arrays.targets[own] = np.arange(len(own)) % 2
    e = engine(arrays, split, mlp(), SGD(lr=0.1), columns=HEAD)
    a = play(e, FedRoD(), 1, [[0]])
    init, now = (e.model.named(r) for r in (e.model.init_row(), a.w))
    equal(now["head.weight"][2], init["head.weight"][2])
    assert (now["head.weight"][:2] != init["head.weight"][:2]).any()
    mine = e.model.named(a.personal.put(a.w, a.g[np.array([0])]))["head2.weight"][0]
    assert torch.isfinite(a.w).all() and (mine[2] != init["head.weight"][2]).any()


def test_fedrod_refuses_what_has_no_class_counts_or_linear_head() -> None:
    with pytest.raises(ConfigError, match="needs a classification data set, not squares"):
        play(products([1, 2], SGD(lr=0.1)), FedRoD())
    deep = mlp()
    deep.head = nn.Sequential(nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="named head is a linear layer"):
        play(engine(*ragged(), deep, columns=HEAD), FedRoD())


# -- pFedMe ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("deploy, want", [("theta", 0.2822), ("w", 0.1836)])
def test_pfedme_by_hand(deploy: str, want: float) -> None:
    """w = 0, c = 1, lam 2, lr 0.25, inner lr 0.1, two inner steps, two batches, beta 0.5.
    Batch 1: theta 0.1, then 0.1 - 0.1 (-0.9 + 2 x 0.1) = 0.17; w_i = 0.5 x 0.17 = 0.085.
    Batch 2: 0.17 - 0.1 (-0.83 + 2 x 0.085) = 0.236, then 0.236 - 0.1 (-0.764 + 2 x 0.151) = 0.2822;
    w_i = 0.085 + 0.5 (0.2822 - 0.085) = 0.1836.  Server: 0.5 x 0.1836."""
    e = points([[1, 1]], lr=0.25, batch_size=1)
    a = play(e, PFedMe(lam=2, inner_lr=0.1, inner_steps=2, beta=0.5, deploy=deploy))
    close(deployed(e, a)[0], row(want))
    close(a.w, row(0.0918))


@pytest.mark.parametrize("options", [{"lam": 0.0}, {"beta": 0.0}])
def test_pfedme_server_stands_still(options: dict) -> None:
    e = nets()
    a = play(e, PFedMe(**options), 2)
    close(a.w, e.model.init_row(), 1e-6)
    assert (deployed(e, a) != e.model.init_row()).any(1).all()


def test_pfedme_envelope_of_a_full_step() -> None:
    """lam lr = 1: w_i = theta_i after every batch; both are deployed alike, and averaged."""
    e, other = nets(epochs=2), nets(epochs=2)
    a, b = (play(x, PFedMe(lam=10, deploy=d), 2) for x, d in ((e, "theta"), (other, "w")))
    close(deployed(e, a), deployed(other, b), 1e-6)
    close(a.w, everyone(e).weights @ deployed(e, a), 1e-6)


def test_pfedme_finds_the_proximal_point() -> None:
    """argmin 0.5 (theta - c)^2 + (lam/2) (theta - w)^2 = (c + lam w) / (1 + lam)."""
    e = points([[3.0]], lr=0.1, start=-1.0)
    a = play(e, PFedMe(lam=4, inner_lr=0.1, inner_steps=60))
    close(deployed(e, a)[0], row((3 + 4 * -1.0) / 5))


def test_pfedme_takes_statistics_from_theta_and_extrapolates_none() -> None:
    e = engine(*ragged(), seeded(Normed), SGD(lr=0.1), columns=HEAD, drop_last=True)
    a = play(e, PFedMe(lam=1))
    statistics = e.model.trained.rest(e.model.size)
    close(statistics.take(a.w), everyone(e).weights @ statistics.take(deployed(e, a)), 1e-6)
    with pytest.raises(ConfigError, match="must be <= 1"):
        play(e, PFedMe(beta=2.0))
    play(nets(), PFedMe(beta=2.0))


# -- exact PGFed -----------------------------------------------------------------------------------------
def test_pgfed_exact_by_hand() -> None:
    """Means of targets (1, 3, 8), w = 2, mu 0.4, lr 0.1: client 0's gradient is 1 + 0.4 ((2 - 3) + (2 - 8)) / 2
    = -0.4, client 1's -1 + 0.2 (1 - 6) = -2, client 2's -6 + 0.2 (1 - 1) = -6."""
    e = points([[1], [2, 4], [8, 7, 9]], lr=0.1, start=2.0)
    a = play(e, PGFedExact(mu=0.4))
    close(deployed(e, a)[:, 0], row(2.04, 2.2, 2.6))
    close(a.w, row((2.04 + 2 * 2.2 + 3 * 2.6) / 6))
    e = points([[1], [2, 4], [8, 7, 9]], lr=0.1, start=2.0)    # the risks of those not sampled count as well
    close(deployed(e, play(e, PGFedExact(mu=0.4), 1, [[0, 2]]))[:, 0], row(2.04, 2.0, 2.6))


def test_pgfed_exact_without_weight_is_fedavg_local() -> None:
    e, other = nets(), nets()
    a, b = play(e, PGFedExact(mu=0.0), 3, COHORTS), play(other, FedAvg("local"), 3, COHORTS)
    equal(deployed(e, a), deployed(other, b))
    equal(a.w, b.w)


def test_pgfed_estimates_the_exact_step() -> None:
    """PGFed knows f_j to first order around theta_j.  With a_ij = 1 / (N - 1), a_ii = 0, one step from w differs from
    the exact one by lr mu mean(g_j(theta_j) - g_j(w)): nothing at theta_j = w, and in proportion to the distance."""
    mu, n = 0.5, 6
    def fresh() -> Engine:                                     # smooth: no ReLU between w and theta_j
        return engine(*ragged(), Linear(16, 3), SGD(lr=0.1), batch_size=100)
    e = fresh()
    w = e.model.init_row()
    exact = play(e, PGFedExact(mu)).theta[np.arange(n)]
    noise = torch.linspace(-1, 1, n * len(w)).view(n, -1).sin()
    gaps = []
    for size in (0.0, 0.01, 0.1):
        other = fresh()
        a = play(other, PGFed(mu=mu, eta2=0.0), rounds=0)
        a.G, _ = everyone(other).gradient(w + size * noise)
        a.c, a.gbar, a.prev = torch.zeros(n), torch.zeros_like(w), torch.arange(n)
        a.A[np.arange(n)] = (1 - torch.eye(n)) / (n - 1)
        play(other, a, begin=1)
        gaps.append(float((a.theta[np.arange(n)] - exact).norm()))
    assert gaps[0] < 1e-6 and 9 < gaps[2] / gaps[1] < 11


def test_pgfed_exact_is_for_small_federations() -> None:
    e = nets()
    e.federation.num_samples = e.federation.num_samples * 1000
    with pytest.raises(ConfigError, match="for small federations"):
        play(e, PGFedExact())
