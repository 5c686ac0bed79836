"""The trajectories of the authors' released code, followed by our classes: every round of 109 runs, to rounding.

tests/golden/official.npz holds what the released classes computed on the problem of tests/golden/problem.py, driven
from outside (data, cohorts, first weights and orders of samples given, nothing else changed), float32 on a CPU.

    ljaiverson/pgfed b1d70f7        Local, FedAvg, PGFed, PGFedMo, FedPer, FedRep, LG-FedAvg, FedBABU, FedRoD, APFL,
                                    pFedMe, Per-FedAvg, FedFomo, FedDyn
    TsingZ0/PFLlib d832e76          FedProx, Ditto, SCAFFOLD, FedAMP (repaired: its penalty has no gradient as released)
    ljaiverson/pFL-APPLE 8078196    APPLE

By case: `rows` [rounds, 6, columns], what each client deploys, and `glob` [rounds, columns], the server's (every 34th
number of a row; APPLE's: every 4,001st), `acc` [rounds, 6], and, by method, `A`, `P` and `d` [rounds, 6, 6].  `_full`:
all six clients in 4 rounds, `_part`: three of them in 5; `_10`: batches of 10, the last short one dropped; `_1000`: one
batch of all.  Where the header of a method says that it departs, `differs` says so here, and another case has the
option with which it does not.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import HEAD, all_clients, engine, seeded
from torch import Tensor

from fedbench.algorithms.apfl import APFL
from fedbench.algorithms.apple import APPLE
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedamp import FedAMP
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedbabu import FedBABU
from fedbench.algorithms.feddyn import FedDyn
from fedbench.algorithms.fedfomo import FedFomo
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.fedrep import FedRep
from fedbench.algorithms.fedrod import FedRoD
from fedbench.algorithms.lg_fedavg import LGFedAvg
from fedbench.algorithms.local import Local
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.algorithms.pfedme import PFedMe
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.scaffold import Scaffold
from fedbench.core import rng
from fedbench.core.split import Ragged
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.models.applenet import AppleNet
from fedbench.models.mlp import MLP
from fedbench.nn.flat import FlatModel
from fedbench.simulation import evaluate

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
import problem  # noqa: E402

ARRAYS, IMAGES = problem.digits(), problem.digits(images=True)
SPLIT = problem.clients(ARRAYS.targets)
EVERYBODY = np.array(problem.EVERYBODY)
ROWS, MATRICES = 3e-6, 2e-5  # largest differences seen: 9e-7 in rows (pFedMe at lam 15), 6e-6 in FedFomo's P
FOUND = dict[str, Tensor | np.ndarray]


@dataclass(frozen=True)
class Case:
    """One method with its options, on some schedules and batch sizes.

    kept: momentum goes on from round to round.  first: the number of the first pass over the samples, by the key of a
    training.  prepare(algorithm, engine): what else is given from outside.  numbers: of which case (default: its own).
    differs: what departs from the released code, as the method's header says.
    """

    make: Callable[[], Algorithm]
    lr: float = 0.1
    momentum: float = 0.0
    kept: bool = False
    weight_decay: float = 0.0
    runs: tuple[str, ...] = ("full_10", "part_10", "full_1000", "part_1000")
    first: int = 0
    tail: bool = False
    prepare: Callable[[Algorithm, Engine], None] | None = None
    numbers: str | None = None
    differs: tuple[str, ...] = ()


def preferences(algorithm: Algorithm, e: Engine) -> None:
    """FedFomo with two downloads: who is liked best is no tie at the start."""
    algorithm.pref[EVERYBODY] = torch.from_numpy(np.random.default_rng(5).random((6, 6)) * 1e-3).float()


def labels_in_full_batches(algorithm: Algorithm, e: Engine) -> None:
    """FedRoD's released code counts labels on one pass that drops the last short batch.  What it then finds absent has
    probability 0, and the loss of such a sample is infinite, but its gradient is that of a probability of 1e-25."""
    counts = np.full((6, 10), 1e-25)
    for i, own in enumerate(SPLIT.train[i] for i in EVERYBODY):
        batch = min(e.batch_size, len(own))
        seen = own[problem.order(i, 0, 0, len(own))][: len(own) // batch * batch]
        np.add.at(counts[i], ARRAYS.targets[seen], 1)
    algorithm.counts = counts


KEPT = {"lr": 0.05, "momentum": 0.9, "kept": True}
FRESH = {"lr": 0.05, "momentum": 0.9}
PFEDME = partial(PFedMe, lam=1.0, inner_lr=0.05, beta=0.8)


class PFLlibFedAMP(FedAMP):
    """Mix the models of the last cohort only, as PFLlib does."""

    prev: np.ndarray | None = None

    def peers(self) -> np.ndarray:
        return super().peers() if self.prev is None else self.prev

    def round(self, cohort: Cohort) -> None:
        super().round(cohort)
        self.prev = cohort.ids


class PGFedPerFedAvg(PerFedAvg):
    """Adapt by a step of the outer rate, whatever alpha is, as PGFed's code does."""

    def adaptation_rate(self, cohort: Cohort) -> Tensor:
        return cohort.rate()


BABU = partial(FedBABU, finetune_epochs=2, finetune_lr=0.02)
TENS = ("full_10", "part_10")
CASES = {
    "local": Case(Local, **KEPT),
    "fedavg": Case(FedAvg, **KEPT),
    "pgfed": Case(partial(PGFed, mu=0.5, eta2=0.02, drop_last=True), **KEPT),
    "pgfed0": Case(partial(PGFed, mu=0.1, eta2=0.01, drop_last=True), **(KEPT | {"lr": 0.005})),
    "pgfedclamp": Case(partial(PGFed, mu=0.5, eta2=0.5, drop_last=True), **KEPT),
    "pgfedmo": Case(partial(PGFed, mu=0.5, eta2=0.02, beta=0.5, drop_last=True), **KEPT),
    "fedper": Case(FedPer, **KEPT),
    "fedrep": Case(partial(FedRep, head_epochs=3), first=3),
    "lg": Case(LGFedAvg, **FRESH),
    "lgdrift": Case(partial(LGFedAvg, frozen_momentum_drift=True), **FRESH),
    "babu": Case(partial(BABU, finetune_head="zero"), **FRESH),
    "babufrozen": Case(BABU, **FRESH, numbers="babu", differs=("tuned",)),
    "fedrod": Case(FedRoD, prepare=labels_in_full_batches),
    "fedrodshares": Case(FedRoD, runs=TENS, numbers="fedrod", differs=("rows", "glob", "acc")),
    "fedrodall": Case(FedRoD, runs=TENS),
    "apfl": Case(partial(APFL, alpha=0.3)),
    "pfedme": Case(partial(PFEDME, deploy="w"), weight_decay=1e-3),
    "pfedmetheta": Case(PFEDME, weight_decay=1e-3, numbers="pfedme", differs=("rows", "acc")),
    "pfedme15": Case(partial(PFedMe, lam=15.0, inner_lr=0.02, beta=1.0, deploy="w"), lr=0.05, weight_decay=1e-3),
    "peravg": Case(PerFedAvg, runs=TENS),
    "peravgab": Case(partial(PGFedPerFedAvg, alpha=0.2), runs=TENS),
    "peravgalpha": Case(partial(PerFedAvg, alpha=0.2), runs=TENS, numbers="peravgab", differs=("rows", "acc")),
    "fomo": Case(partial(FedFomo, models=8), tail=True),
    "fomom2": Case(partial(FedFomo, models=2), tail=True, prepare=preferences, runs=(*TENS, "part_1000")),
    "dyn": Case(partial(FedDyn, alpha=0.1), **KEPT),
    "prox": Case(partial(FedProx, mu=0.5)),
    "ditto": Case(partial(Ditto, lam=0.7, personal_epochs=1)),
    "scaffold": Case(Scaffold),
    "ampsq": Case(partial(PFLlibFedAMP, alpha_k=0.15, sigma=2.0, lam=0.5)),
}


@pytest.fixture(scope="module")
def numbers() -> Iterator[dict[str, np.ndarray]]:
    with np.load(GOLDEN / "official.npz") as file:
        yield dict(file)


def orders(monkeypatch: pytest.MonkeyPatch, first: int = 0) -> None:
    """Clients take their samples in the problem's order, whatever the keyed draw says.

    A model is fine-tuned in "round" 500 and adapted in "round" 1000 + r; FedRep's base is trained after its head, whose
    passes come before its own.
    """
    begins = {
        rng.key(0, "batches", key, r): (at + (r if follows else 0), epoch)
        for r in range(5)
        for key, at, follows, epoch in (
            ("local", 0, True, first),
            ("head", 0, True, 0),
            ("finetune", 500, False, 0),
            ("adapt", 1000, True, 0),
        )
    }

    def given(base: int, ids: np.ndarray, sizes: np.ndarray, longest: int, epoch: int) -> np.ndarray:
        round, passes = begins[base]
        out = np.zeros((len(ids), longest), np.int64)
        for row, client, size in zip(out, ids.tolist(), sizes.tolist()):
            row[:size] = problem.order(client, round, passes + epoch, size)
        return out

    monkeypatch.setattr(rng, "_permutations", given)


def tails(e: Engine) -> None:
    """FedFomo holds out the last fifth of a client's samples, and only the others count."""

    def hold_out(share: float) -> None:
        whole = [SPLIT.train[i] for i in EVERYBODY]
        kept = [len(own) - int(share * len(own)) for own in whole]
        e.federation.splits |= {
            "remaining": Ragged.from_lists([own[:n] for own, n in zip(whole, kept)]),
            "held_out": Ragged.from_lists([own[n:] for own, n in zip(whole, kept)]),
        }
        e.federation.num_samples = np.array(kept)

    e.federation.hold_out = hold_out


def setting(case: Case, run: str) -> tuple[Engine, tuple[tuple[int, ...], ...]]:
    """The engine of a case, and its cohorts."""
    schedule, size = run.split("_")
    cohorts = problem.COHORTS[schedule]
    module = MLP((64,), 10, [32])
    torch.nn.utils.vector_to_parameters(torch.from_numpy(problem.first_row()), module.parameters())
    optimizer = SGD(case.lr, case.momentum, case.weight_decay, reset="never" if case.kept else "round")
    return engine(
        ARRAYS,
        SPLIT,
        module,
        optimizer,
        columns=HEAD,
        cohort_size=len(cohorts[0]),
        batch_size=int(size),
        epochs=2,
        drop_last=True,
        rounds=len(cohorts),
    ), cohorts


def state(algorithm: Algorithm) -> FOUND:
    """The small matrices of the methods that have such."""
    found: FOUND = {}
    if isinstance(algorithm, PGFed):
        found["A"] = algorithm.A.whole()
    if isinstance(algorithm, FedFomo):
        found["P"] = algorithm.pref.whole() + torch.eye(6)
    return found


def deployed(algorithm: Algorithm, e: Engine, round: int, final: bool) -> FOUND:
    """What every client deploys, the server's row, and what each client scores."""
    rows = algorithm.personalized(all_clients(e, round, "evaluation"), final).expand(6, -1)[:, ::34]
    found: FOUND = {"rows": rows, "acc": evaluate.personal(algorithm, e, EVERYBODY, round, final)["accuracy"]}
    if (server := algorithm.global_row()) is not None:
        found["glob"] = server[::34]
    return found


@torch.no_grad()
def follow(case: Case, run: str) -> Iterator[FOUND]:
    """Everything that can be compared after each round; FedBABU once more, fine-tuned."""
    e, cohorts = setting(case, run)
    if case.tail:
        tails(e)
    algorithm = case.make()
    algorithm.check(e.federation, e.model, e.optimizer)
    algorithm.setup(e.federation, e.model, e.rows)
    if case.prepare is not None:
        case.prepare(algorithm, e)
    for round, ids in enumerate(cohorts):
        algorithm.round(Cohort(e, np.array(ids), round))
        yield deployed(algorithm, e, round, False) | state(algorithm)
    if isinstance(algorithm, FedBABU):
        yield deployed(algorithm, e, len(cohorts) - 1, True)


def apart(found: Tensor | np.ndarray, known: np.ndarray) -> float:
    """The largest difference, in the columns that both have (FedRoD's own heads are not the server's)."""
    return float(np.abs(np.asarray(found)[..., : known.shape[-1]] - known).max())


def agree(found: FOUND, known: dict[str, np.ndarray], differs: tuple[str, ...] = ()) -> None:
    """Equal to rounding, and in accuracy exactly, but for what is said to differ."""
    assert known.keys() <= found.keys()
    for name, value in known.items():
        if name not in differs:
            most = ROWS if name in ("rows", "glob", "cores", "acc") else MATRICES
            assert apart(found[name], value) <= most, name


@pytest.mark.parametrize("run, name", [(run, name) for name, case in CASES.items() for run in case.runs])
def test_every_round_is_the_released_codes(
    run: str, name: str, numbers: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    orders(monkeypatch, case.first)
    prefix = f"{case.numbers or name}_{run}/"
    known = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
    assert known
    rounds = len(problem.COHORTS[run.split("_")[0]])
    for at, found in enumerate(follow(case, run)):
        tuned = ("rows", "acc", "glob") if at == rounds and "tuned" in case.differs else ()
        agree(found, {k: v[at] for k, v in known.items() if at < len(v)}, case.differs + tuned)
    assert at + 1 == max(map(len, known.values()))
    if case.differs:  # a departure that can no longer be seen is no longer one
        assert apart(found["rows"], known["rows"][-1]) > 1e-3


APPLES = {
    # rounds: those that are compared, as a convolutional network soon drifts from itself if it is moved by 1e-7
    "apple1": (partial(APPLE, mu=0.5, eta2=0.02, fraction=0.75), {"lr": 0.05}, 1000, 2, 4, False),
    "apple2": (partial(APPLE, mu=0.5, eta2=0.02, fraction=0.75, scheduler="cosine"), {"lr": 0.05}, 20, 1, 4, True),
    "apple3": (partial(APPLE, mu=0.1, eta2=0.001, fraction=0.1), {"lr": 0.01}, 1000, 2, 3, True),
    "apple4": (
        partial(APPLE, mu=0.5, eta2=0.02, fraction=0.75, scheduler="cosine"),
        {"lr": 0.05, "schedule": {"name": "exponential", "gamma": 0.9}},
        20,
        1,
        3,
        False,
    ),
}


@pytest.mark.parametrize("name", APPLES)
@torch.no_grad()
def test_every_round_of_apple_is_the_released_codes(
    name: str, numbers: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network starts as PyTorch draws it after manual_seed(1000 + i) for client i, or as that of client 0."""
    make, optimizer, batch, epochs, rounds, independent = APPLES[name]
    orders(monkeypatch)
    networks = [seeded(partial(AppleNet, (1, 28, 28), 10), 1000 + (i if independent else 0)) for i in EVERYBODY]
    first = torch.stack([FlatModel(network).init_row() for network in networks])  # [6, P]
    assert np.array_equal(first[:, ::4001], numbers[f"{name}/start"]), "PyTorch draws other weights than it did"
    e = engine(
        IMAGES,
        SPLIT,
        FlatModel(networks[0], HEAD, new_module=networks.__getitem__),
        SGD(momentum=0.9, **optimizer),
        batch_size=batch,
        epochs=epochs,
        rounds=rounds,
    )
    algorithm = make()
    algorithm.check(e.federation, e.model, e.optimizer)
    algorithm.setup(e.federation, e.model, e.rows)
    assert torch.equal(algorithm.exchange.cores, first)
    for round in range(len(numbers[f"{name}/d"])):
        algorithm.round(Cohort(e, EVERYBODY, round))
        found: FOUND = {
            "cores": algorithm.exchange.cores[:, ::4001],
            "rows": algorithm.theta.whole()[:, ::4001],
            "d": algorithm.d.whole(),
            "acc": evaluate.personal(algorithm, e, EVERYBODY, round, False)["accuracy"],
        }
        agree(found, {k: numbers[f"{name}/{k}"][round] for k in found})
