"""Trajectories of released code of further baselines, followed by our classes, in every round, to rounding.

tests/golden/baselines.npz has what the released classes computed on the problem of tests/golden/problem.py in float32
on a CPU, with data, cohorts, initial weights and batch orders given from outside.  Sources: TsingZ0/PFLlib d832e76,
Flower 1.42.0, KarhouTam/FL-bench 06e658b, JYWa/FedNova 47b4e09, makgyver/fluke a0bd26a.
Cases are named method_schedule_batch, as in test_official.py.  Long rows have every 34th column.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import HEAD, all_clients, engine
from torch import Tensor, nn

from fedbench.algorithms._features import ClassStatistics, class_statistics, features_of_samples
from fedbench.algorithms.base import Algorithm, Federation, FlatModel, Inputs, RowStore, Step
from fedbench.algorithms.fedadagrad import FedAdagrad
from fedbench.algorithms.fedadam import FedAdam
from fedbench.algorithms.fedala import FedALA
from fedbench.algorithms.fedas import FedAS
from fedbench.algorithms.fedavgm import FedAvgM
from fedbench.algorithms.fedbn import FedBN
from fedbench.algorithms.fedcac import FedCAC
from fedbench.algorithms.fedcp import FedCP
from fedbench.algorithms.feddbe import FedDBE
from fedbench.algorithms.fedexp import FedExP
from fedbench.algorithms.fedgh import FedGH
from fedbench.algorithms.fedkd import FedKD
from fedbench.algorithms.fedlc import FedLC
from fedbench.algorithms.fednova import FedNova
from fedbench.algorithms.fedntd import FedNTD
from fedbench.algorithms.fedpac import FedPAC
from fedbench.algorithms.fedphp import FedPHP
from fedbench.algorithms.fedproto import FedProto
from fedbench.algorithms.fedsam import FedSAM
from fedbench.algorithms.fedyogi import FedYogi
from fedbench.algorithms.fml import FML
from fedbench.algorithms.gpfl import GPFL
from fedbench.algorithms.knn_per import KNNPer
from fedbench.algorithms.moon import Moon
from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.core.split import Ragged
from fedbench.engine import full_batch
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.models.mlp import MLP
from fedbench.simulation import evaluate

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
import problem  # noqa: E402

ARRAYS = problem.digits()
SPLIT = problem.clients(ARRAYS.targets)
EVERYBODY = np.array(problem.EVERYBODY)

Found = dict[str, Tensor | np.ndarray]
ALL = ("full_10", "part_10", "full_1000", "part_1000")
FULL = ("full_10", "full_1000")
TOLERANCE = 3e-6


class NormMLP(nn.Module):
    """The network 64-32-10 with batch norm before the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


def mlp() -> nn.Module:
    module = MLP((64,), 10, [32])
    torch.nn.utils.vector_to_parameters(torch.from_numpy(problem.first_row()), module.parameters())
    return module


def norm_mlp() -> nn.Module:
    module, plain = NormMLP(), mlp().state_dict()
    draw = np.random.default_rng(200)
    gamma, beta = 1 + 0.1 * draw.standard_normal(32), 0.1 * draw.standard_normal(32)
    weights = dict(zip(["body.0.weight", "body.0.bias", "head.weight", "head.bias"], plain.values()))
    norm = {"body.1.weight": torch.from_numpy(gamma).float(), "body.1.bias": torch.from_numpy(beta).float()}
    module.load_state_dict(module.state_dict() | weights | norm)
    return module


# -- what is compared ------------------------------------------------------------------------------------
def global_model(algorithm: Algorithm, e: Engine, round: int) -> Found:
    return {"glob": algorithm.global_row()[::34]}


def deployed(algorithm: Algorithm, e: Engine, round: int) -> Found:
    rows = algorithm.personalized(all_clients(e, round, "evaluation"), False)
    rows = rows["theta"] if isinstance(rows, dict) else rows
    accuracy = evaluate.personal(algorithm, e, EVERYBODY, round, False)["accuracy"]
    return {"rows": rows.expand(6, -1)[:, : e.model.spans["head.bias"][1] : 34], "acc": accuracy}


def norm_layers(algorithm: Algorithm, e: Engine, round: int) -> Found:
    rows = algorithm.personalized(all_clients(e, round, "evaluation"), False)
    return deployed(algorithm, e, round) | {"stats": rows[:, e.model.trained.size :]}


def prototypes(algorithm: Algorithm, e: Engine, round: int) -> Found:
    G = torch.where(algorithm.has_prototype[:, None] > 0, algorithm.G, torch.nan)
    return deployed(algorithm, e, round) | {"protos": G}


def mixing(algorithm: Algorithm, e: Engine, round: int) -> Found:
    A = torch.where(algorithm.A.has(EVERYBODY)[:, None], algorithm.A.whole(), torch.nan)
    return global_model(algorithm, e, round) | {"weights": A[:, ::34]}


def initialized(algorithm: Algorithm, e: Engine, round: int) -> Found:
    rows = algorithm.personalized(all_clients(e, round, "evaluation"), False)
    return {"sent": rows[:, ::34]}


def shifts(algorithm: Algorithm, e: Engine, round: int) -> Found:
    found = {"glob": algorithm.shared.take(algorithm.w)[::34], "means": algorithm.c.whole()}
    return deployed(algorithm, e, round) | found | ({} if round else {"global_mean": algorithm.g})


def heads(algorithm: Algorithm, e: Engine, round: int) -> Found:
    found = {"base": algorithm.u[::34], "A": algorithm.a, "V": algorithm.V}
    return prototypes(algorithm, e, round) | found


def valves(algorithm: Algorithm, e: Engine, round: int) -> Found:
    named = {name: e.model.columns[name] for name in ("embeddings", "valve")}
    row = algorithm.shared.put(e.model.init_row(), algorithm.w)
    found = {"base": row[:2080:34], "conditions": algorithm.q}
    return (
        deployed(algorithm, e, round)
        | found
        | {released: named[ours].take(row)[::34] for released, ours in (("embeddings", "embeddings"), ("cov", "valve"))}
    )


def policies(algorithm: Algorithm, e: Engine, round: int) -> Found:
    rows = algorithm.personalized(all_clients(e, round, "evaluation"), False)["theta"]
    gate, head_g = (e.model.columns[name].take(rows)[:, ::34] for name in ("policy", "head_g"))
    found = {"base": rows[0, :2080:34], "gate": gate, "head_g": head_g, "context": algorithm.v}
    return deployed(algorithm, e, round) | found


def server_head(algorithm: Algorithm, e: Engine, round: int) -> Found:
    """An unsampled client has the head that was sent in this round."""
    rows = algorithm.head.put(algorithm.theta.whole(), algorithm.sent)
    rows[algorithm.sampled] = algorithm.theta[algorithm.sampled]
    return {"rows": rows[:, ::34], "head": algorithm.h[::34]}


def both_models(algorithm: Algorithm, e: Engine, round: int) -> Found:
    return deployed(algorithm, e, round) | global_model(algorithm, e, round)


def traces(algorithm: Algorithm, e: Engine, round: int) -> Found:
    t = algorithm.trace(all_clients(e, round, "evaluation"), algorithm.theta[EVERYBODY])
    return both_models(algorithm, e, round) | {"trace": t}


def teachers(algorithm: Algorithm, e: Engine, round: int) -> Found:
    """Ranks are those of the matrices that the server sends, and -1 for vectors."""
    sent = e.model.named(algorithm.g).values()
    ranks = torch.stack([torch.linalg.matrix_rank(t, rtol=1e-4) if t.dim() > 1 else torch.tensor(-1) for t in sent])
    return both_models(algorithm, e, round) | {"W_h": algorithm.W[EVERYBODY][:, ::34], "ranks": ranks}


# -- what is given from outside --------------------------------------------------------------------------
def orders(monkeypatch: pytest.MonkeyPatch, order: Callable[[str, int, int, int, int], np.ndarray]) -> None:
    """Let clients take their samples in a given order.

    order(key, round, client, epoch, size) returns the order for a training with LocalTraining(key=key).
    """
    keys = {
        rng.key(0, "batches", key, r): (key, r)
        for r in range(6)
        for key in ("local", "means", "head", "align", "trace", *(f"ala/{n}" for n in range(60)))
    }

    def given(base: int, ids: np.ndarray, sizes: np.ndarray, longest: int, epoch: int) -> np.ndarray:
        key, round = keys[base]
        out = np.zeros((len(ids), longest), np.int64)
        for row, client, size in zip(out, ids.tolist(), sizes.tolist()):
            row[:size] = order(key, round, client, epoch, size)
        return out

    monkeypatch.setattr(rng, "_permutations", given)


def local_order(key: str, round: int, client: int, epoch: int, size: int) -> np.ndarray:
    """Return the problem's order in local training, and the samples' own order elsewhere."""
    return problem.order(client, round, epoch, size) if key == "local" else np.arange(size)


def dbe_order(key: str, round: int, client: int, epoch: int, size: int) -> np.ndarray:
    """Return the order of round 90 in the training before the first round."""
    return problem.order(client, 90 if key == "means" else round, epoch, size)


def pac_order(key: str, round: int, client: int, epoch: int, size: int) -> np.ndarray:
    """Return pass 0 for the heads, and those after it for the bases."""
    return problem.order(client, round, epoch + (key == "local"), size)


def as_order(key: str, round: int, client: int, epoch: int, size: int) -> np.ndarray:
    """Return pass 0 in local training and for the traces, and pass 1 in the alignment."""
    return problem.order(client, round, epoch + (key == "align"), size)


def ala_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FedALA learn from the contiguous samples that the released run used."""

    def window(e: Engine, context: RoundContext, split: str, fraction: float, key: str) -> Ragged:
        whole, parts = e.federation.splits[split], [np.empty(0, np.int64)] * 6
        for client in context.ids.tolist():
            n = len(whole[client])
            m = int(fraction * n)
            start = int(np.random.default_rng([313, client, context.round]).integers(0, n - m + 1))
            parts[client] = whole[client][start : start + m]
        return Ragged.from_lists(parts)

    monkeypatch.setattr(full_batch, "fraction_of", window)


def full_batches(client: int, round: int, epoch: int, batch_size: int) -> np.ndarray:
    """Return which samples of a client are in the full batches of a pass."""
    n = problem.TRAIN[client]
    size = min(batch_size, n)
    return problem.order(client, round, epoch, n)[: n // size * size]


class ReleasedPAC(FedPAC):
    """FedPAC as PFLlib: statistics of full batches, from different passes, and weights that are not normalized."""

    num_calls = 0

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        z, y = features_of_samples(cohort, theta)
        passes = (0, 0) if self.num_calls % 2 else (1, 2)  # of features, and of label shares: the second call is last
        self.num_calls += 1
        features, labels = (
            [full_batches(i, cohort.round, p, cohort.engine.batch_size) for i in cohort.ids.tolist()] for p in passes
        )
        found = class_statistics([a[i] for a, i in zip(z, features)], [a[i] for a, i in zip(y, features)], 10)
        counts = class_statistics([a[i] for a, i in zip(z, labels)], [a[i] for a, i in zip(y, labels)], 10).counts
        return replace(found, counts=counts)

    def head_weights(self, V: Tensor, H: Tensor) -> Tensor:
        self.V, self.a = V, super().head_weights(V, H)
        return self.a

    def normalized(self, a: np.ndarray) -> np.ndarray:
        return a


class ReleasedGH(FedGH):
    """FedGH with class means of full batches, in the order of the released run."""

    def round(self, cohort: Cohort) -> None:
        self.sent, self.sampled = self.h, cohort.ids
        super().round(cohort)

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        chosen = [full_batches(i, cohort.round, 0, cohort.engine.batch_size) for i in cohort.ids.tolist()]
        z, y = ([a[i] for a, i in zip(values, chosen)] for values in features_of_samples(cohort, theta))
        return class_statistics(z, y, 10)

    def train_head(self, cohort: Cohort, means: Tensor, classes: Tensor) -> Tensor:
        order = np.random.default_rng([314, cohort.round]).permutation(len(means))
        return super().train_head(cohort, means[order], classes[order])

    def order(self, cohort: Cohort) -> Tensor:
        return torch.arange(10.0 * len(cohort)).view(-1, 10)


def drawn_linear(key: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Return the initial weight and bias of a further layer with 32 inputs."""
    draw = np.random.default_rng([300, key])
    weight, bias = draw.standard_normal((outputs, 32)) / np.sqrt(32), 0.1 * draw.standard_normal(outputs)
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()


class ReleasedGPFL(GPFL):
    """GPFL as its released codes: conditions are those of the class embeddings that a client had before."""

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        super().setup(federation, model, rows)
        row = self.shared.put(model.init_row(), self.w)
        named = model.named(row)
        named["embeddings"].copy_(torch.from_numpy(np.random.default_rng(310).standard_normal((10, 32))))
        for key, part in ((1, "gamma"), (2, "beta")):
            for name, t in zip(("weight", "bias"), drawn_linear(key, 32)):
                named[f"valve.{part}.0.{name}"].copy_(t)
        self.w, self.q = self.shared.take(row).clone(), torch.zeros(6, 2, 32)

    def round(self, cohort: Cohort) -> None:
        before = self.w
        super().round(cohort)
        trained = dict(zip(cohort.ids.tolist(), self.trained))
        for i in range(6):
            row = trained.get(i, self.shared.put(self.trained[0], before))
            M = cohort.model.named(row)["embeddings"]
            y = cohort.federation.targets[cohort.federation.splits["train"][i]]
            labels = y[full_batches(i, 0, 0, cohort.engine.batch_size)]
            counts = torch.bincount(labels, minlength=10).float()
            self.q[i] = torch.stack([M.mean(0), counts / counts.sum() @ M])

    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        self.trained = super().train(cohort, w)
        return self.trained

    def conditions(self, cohort: Cohort, M: Tensor) -> tuple[Tensor, Tensor]:
        return self.q[cohort.index, 0], self.q[cohort.index, 1]


class ReleasedCP(FedCP):
    """FedCP as PFLlib: contexts are random before a client's first round; only the cohort gets the new head and policy.

    The policy, the contexts and the noise are those of the released run.
    """

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        super().setup(federation, model, rows)
        row = self.shared.put(model.init_row(), self.w)
        for name, t in zip(("weight", "bias"), drawn_linear(3, 64)):
            model.named(row)[f"policy.0.{name}"].copy_(t)
        self.w = self.shared.take(row).clone()
        draws = [np.random.default_rng([311, i]).random(32) for i in range(6)]
        self.v = torch.from_numpy(np.stack(draws)).float()
        self.received = row.repeat(6, 1)

    def round(self, cohort: Cohort) -> None:
        self.now = cohort.round
        super().round(cohort)
        rows = super().rows_of(cohort, self.w, self.g)
        self.received[cohort.index] = rows
        self.v[cohort.index] = cohort.model.named(rows)["head.weight"].sum(1)

    def rows_of(self, cohort: Cohort, w: Tensor, g: Tensor) -> Tensor:
        old = self.head_g | cohort.model.columns["policy"]
        return old.put(super().rows_of(cohort, w, g), old.take(self.received[cohort.index]))

    def contexts(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return nn.functional.normalize(self.v[cohort.index], dim=1)

    def noise(self, s: Step, z: Tensor) -> Tensor:
        out = torch.zeros(*z.shape[:2], 2, z.shape[2])
        for noise, client in zip(out, s._chunk.ids.tolist()):
            n, size = problem.TRAIN[client], min(s.engine.batch_size, problem.TRAIN[client])
            draw = np.random.default_rng([312, client, self.now, *divmod(s.t, n // size)]).random((size, 2, 32))
            noise[:size] = torch.from_numpy(-np.log(-np.log(draw)))
        return out

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        theta = super().personalized(cohort, final)
        return {"theta": theta, "v": self.contexts(cohort, theta)}

    def predict(self, model: FlatModel, rows: dict[str, Tensor], inputs: Inputs) -> Tensor:
        return self.logits(model, rows["theta"], model.features(rows["theta"], inputs), rows["v"], 0.0)


class ReleasedLC(FedLC):
    """FedLC as PFLlib: counts are those of all clients together, in full batches."""

    def round(self, cohort: Cohort) -> None:
        y, train = cohort.federation.targets, cohort.federation.splits["train"]
        own = [train[i][full_batches(i, 0, 0, cohort.engine.batch_size)] for i in range(6)]
        counts = torch.bincount(y[torch.from_numpy(np.concatenate(own))], minlength=10)
        self.n = counts.expand(6, -1).numpy()
        super().round(cohort)


class ReleasedAS(FedAS):
    """FedAS as PFLlib: class means of full batches of 16."""

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        z, y = features_of_samples(cohort, theta)
        full = [full_batches(i, cohort.round, 0, 16) for i in cohort.ids.tolist()]
        return class_statistics([a[i] for a, i in zip(z, full)], [a[i] for a, i in zip(y, full)], 10)


class ReleasedKD(FedKD):
    """FedKD from given maps W."""

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        super().setup(federation, model, rows)
        W = np.random.default_rng([300, 4]).standard_normal((32, 32)) / np.sqrt(32)
        self.W = rows("given", default=torch.from_numpy(W).float().flatten())


@dataclass(frozen=True)
class Case:
    """A method with its options.

    Attributes:
        make: Returns the method.
        compare: Returns what is compared after each round.
        before: Returns what is compared before each round.
        runs: Schedules and batch sizes.
        momentum: Local momentum.
        module: Returns the model.
        patch: Fixes more draws.
        tolerance: Largest difference.
        weights: How the server averages.
    """

    make: Callable[[], Algorithm]
    compare: Callable[[Algorithm, Engine, int], Found] = global_model
    before: Callable[[Algorithm, Engine, int], Found] | None = None
    runs: tuple[str, ...] = ALL
    momentum: float = 0.0
    module: Callable[[], nn.Module] = mlp
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    tolerance: float = TOLERANCE
    weights: str = "samples"
    order: Callable[[str, int, int, int, int], np.ndarray] = field(default=local_order)


ADAPTIVE = {"weights": "samples", "initial_v": 0.0}
CASES = {
    "bn": Case(FedBN, norm_layers, module=norm_mlp),
    "avgm": Case(FedAvgM),
    "avgmlr": Case(partial(FedAvgM, server_lr=0.5)),
    "avgmnest": Case(partial(FedAvgM, nesterov=True)),
    "adam": Case(partial(FedAdam, 0.03, **ADAPTIVE)),
    "adamflwr": Case(partial(FedAdam, 0.03, bias_correction="flower", **ADAPTIVE)),
    "yogi": Case(partial(FedYogi, 0.03, **ADAPTIVE)),
    "yogiflwr": Case(partial(FedYogi, 0.03, **ADAPTIVE)),
    "adagrad": Case(partial(FedAdagrad, **ADAPTIVE), tolerance=2e-5),
    "adagradflwr": Case(partial(FedAdagrad, **ADAPTIVE), tolerance=2e-5),
    "nova": Case(FedNova),
    "novamom": Case(FedNova, momentum=0.9),
    "novaprox": Case(partial(FedNova, mu=0.1)),
    "novagmf": Case(partial(FedNova, server_momentum=0.5), runs=FULL),
    "moon": Case(Moon),
    "moon0": Case(partial(Moon, mu=0.0)),
    "proto": Case(partial(FedProto, weights="uniform"), prototypes),
    "ala": Case(partial(FedALA, who="all"), mixing, before=initialized, patch=ala_windows),
    "dbe": Case(partial(FedDBE, kappa=5.0, m=0.3), shifts, order=dbe_order),
    "paccopy": Case(partial(ReleasedPAC, weights="uniform"), heads, order=pac_order),
    "gpfl": Case(partial(ReleasedGPFL, lam=0.1, mu=0.01), valves),
    "cp": Case(ReleasedCP, policies, tolerance=2e-4),
    "ghsep": Case(ReleasedGH, server_head),
    "cacfirst": Case(partial(FedCAC, beta=5), both_models),
    "exp": Case(partial(FedExP, eps=1e-4, deploy="last")),
    "ntd": Case(partial(FedNTD, tau=2.0), weights="uniform"),
    "lcown": Case(FedLC),
    "lc": Case(ReleasedLC),
    "sam": Case(FedSAM),
    "fedas": Case(ReleasedAS, traces, order=as_order),
    "php": Case(FedPHP, both_models),
    "fml": Case(partial(FML, targets="live", kl="mean"), both_models),
    "kd": Case(ReleasedKD, teachers),
}


@pytest.fixture(scope="module")
def released() -> Iterator[dict[str, np.ndarray]]:
    with np.load(GOLDEN / "baselines.npz") as file:
        yield dict(file)


def compare(found: Found, released: dict[str, np.ndarray], round: int, tolerance: float) -> None:
    for name, values in found.items():
        if name in released and round < len(released[name]):
            torch.testing.assert_close(
                torch.as_tensor(values).double(),
                torch.as_tensor(released[name][round]).double(),
                rtol=TOLERANCE if name == "trace" else 0,
                atol=tolerance,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}, round {round}: {text}",
            )


@pytest.mark.parametrize("run, name", [(run, name) for name, case in CASES.items() for run in case.runs])
@torch.no_grad()
def test_every_round_equals_released_code(
    run: str, name: str, released: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, (schedule, size) = CASES[name], run.split("_")
    orders(monkeypatch, case.order)
    if case.patch is not None:
        case.patch(monkeypatch)
    expected = {key.split("/")[1]: a for key, a in released.items() if key.startswith(f"{name}_{run}/")}
    cohorts = problem.COHORTS[schedule]
    e = engine(
        ARRAYS,
        SPLIT,
        case.module(),
        SGD(0.1, case.momentum),
        columns=HEAD,
        cohort_size=len(cohorts[0]),
        batch_size=int(size),
        epochs=2,
        drop_last=True,
        rounds=len(cohorts),
        client_weights=case.weights,
    )
    algorithm = case.make()
    algorithm.check(e.federation, e.model, e.optimizer)
    algorithm.setup(e.federation, e.model, e.rows)
    compared = set()
    for round, ids in enumerate(cohorts):
        if case.before is not None:
            found = case.before(algorithm, e, round)
            compare(found, expected, round, case.tolerance)
            compared |= found.keys()
        algorithm.round(Cohort(e, np.array(ids), round))
        found = case.compare(algorithm, e, round)
        compare(found, expected, round, case.tolerance)
        compared |= found.keys()
    assert compared & expected.keys(), f"nothing was compared: {sorted(expected)}"


@pytest.mark.parametrize("scale", [1.0, 0.1])
@torch.no_grad()
def test_neighbours_are_those_of_released_code(scale: float, released: dict[str, np.ndarray]) -> None:
    """p_knn of all test samples, and the accuracy for lam = 0, 1/4, ..., 1 (omarfoq/knn-per ee17520)."""
    e = engine(ARRAYS, SPLIT, mlp(), SGD(0.1), columns=HEAD)
    everybody = all_clients(e, 0, "evaluation")
    for column, lam in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        algorithm = KNNPer(scale=scale, lam=lam)
        algorithm.setup(e.federation, e.model, e.rows)
        algorithm.w = torch.from_numpy(released["knnper/base"])
        accuracy = evaluate.personal(algorithm, e, EVERYBODY, 0, False)["accuracy"]
        np.testing.assert_allclose(accuracy, released[f"knnper/accs@{scale}"][:, column], atol=1e-6)
    p = everybody.forward(algorithm.personalized(everybody, False), lambda *of: algorithm.probabilities(*of)[0])
    for own, expected in zip(p, released[f"knnper/knn@{scale}"], strict=True):
        np.testing.assert_allclose(own, expected[: len(own)], rtol=0, atol=TOLERANCE)
        assert np.isnan(expected[len(own) :]).all()
